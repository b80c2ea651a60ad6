"""Events for pages: whatever a job's text has in it, it stays the data of one event."""

from stoker.web.sse.section_cache import event


def test_line_ends_do_not_start_another_event_field() -> None:
    told = event("running", "one\revent: forged\r\n\rdata: two\n")
    assert told == "event: running\ndata: one\ndata: event: forged\ndata: \ndata: data: two\ndata: \n\n"
