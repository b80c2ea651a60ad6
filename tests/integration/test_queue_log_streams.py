"""Log streams: requested by readers, written in chunks, deleted without readers; on both databases."""

from collections.abc import Callable, Iterator

import pytest

from stoker.logs.reader import LogChunk
from stoker.queue import Store, open_queue
from stoker.queue.driver import Changes, CollisionError, Parameters, Row
from stoker.queue.model import LogRequest
from tests.support.either_queue import queue, url
from tests.support.queue_jobs import LONG, start, submit
from tests.support.waiting import wait_for

__all__ = ["queue", "url"]

NO_TEXT = b"a\xff\0b\x80 'it\\x' %s :name \xf0\x9f\x94\xa5\r\n\0\n"


@pytest.fixture
def other(queue: Store, url: str) -> Iterator[Store]:
    """Another one's connection."""
    with open_queue(url) as opened:
        yield opened


@pytest.fixture
def attempt(queue: Store) -> str:
    return start(queue, *submit(queue, "x"))


@pytest.fixture
def wanted(queue: Store, attempt: str) -> str:
    """An attempt whose log is requested."""
    assert queue.logs.request_stream(attempt, LONG)
    return attempt


def part(
    begin: int, finished: bytes = b"", unfinished: bytes = b"", edition: str = "aa", *, ended: bool = False
) -> LogChunk:
    return LogChunk(edition=edition, start=begin, finished=finished, unfinished=unfinished, is_complete=ended)


def lend(queue: Store, attempt: str, *pieces: bytes, edition: str = "aa") -> None:
    place = 0
    for piece in pieces:
        assert queue.logs.write_chunk(attempt, part(place, piece, edition=edition))
        place += len(piece)


def look(queue: Store, attempt: str, edition: str = "", begin: int = 0) -> LogChunk:
    found = queue.logs.read_chunk(attempt, edition, begin)
    assert found is not None
    return found


def let_pass(queue: Store, seconds: float) -> None:
    """Moves the last request that far into the past."""
    queue._driver.fetch_text(f"UPDATE stoker_log_streams SET until = until - {seconds}", {})


def rows(queue: Store, table: str) -> int:
    return int(queue._driver.fetch_text(f"SELECT count(*) FROM stoker_{table}", {})[0][0])


def rings_of(queue: Store, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One item for every notification from now on."""
    rings: list[None] = []
    notify = queue._driver.notify

    def counted(changes: Changes, *, limited: bool = False) -> bool:
        rings.append(None)
        return notify(changes, limited=limited)

    monkeypatch.setattr(queue._driver, "notify", counted)
    return rings


# Asking


def test_worker_sees_log_stream_requests(queue: Store, other: Store, attempt: str) -> None:
    changes = queue.listen()
    wait_for(
        lambda: changes.fileno() >= 0 or (changes.poll() and changes.fileno() >= 0), named="the changes that listens"
    )
    changes.poll()
    assert other.logs.request_stream(attempt, LONG)
    wait_for(changes.poll, named="the ring")
    changes.close()


def test_new_and_renewed_stream_requests_wake_the_worker(
    queue: Store, attempt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings = rings_of(queue, monkeypatch)
    assert queue.logs.request_stream(attempt, LONG)
    assert len(rings) == 1
    for _ in range(3):
        assert queue.logs.request_stream(attempt, LONG)
    assert len(rings) == 1
    let_pass(queue, LONG)
    assert queue.logs.stream_requests() == []
    assert queue.logs.request_stream(attempt, LONG)
    assert len(rings) == 2
    assert [one.attempt for one in queue.logs.stream_requests()] == [attempt]


def test_renewed_request_expires_at_its_new_time(queue: Store, wanted: str) -> None:
    let_pass(queue, LONG - 60.0)
    assert queue.logs.request_stream(wanted, LONG)
    let_pass(queue, LONG - 60.0)
    assert [one.attempt for one in queue.logs.stream_requests()] == [wanted]


def test_log_of_an_unknown_attempt_cannot_be_requested(
    queue: Store, attempt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings = rings_of(queue, monkeypatch)
    assert not queue.logs.request_stream(f"{attempt}x", LONG)
    assert (queue.logs.stream_requests(), rings) == ([], [])
    assert queue.logs.read_chunk(f"{attempt}x") is None


def test_request_has_everything_needed_to_find_the_log(queue: Store) -> None:
    jobs = submit(queue, "here", "there", "unwanted", retries=1)
    first, second, _third = (start(queue, job, f"worker of {job}") for job in jobs)
    queue.attempts.finish(second, "failed", 1)
    queue.jobs.retry([jobs[1]])
    again = start(queue, jobs[1], "another")
    for name in (first, second, again):
        assert queue.logs.request_stream(name, LONG)
    assert queue.logs.write_chunk(first, LogChunk(edition="1", start=0))
    assert sorted(queue.logs.stream_requests()) == sorted(
        [
            LogRequest(first, jobs[0], 1, f"worker of {jobs[0]}", "1"),
            LogRequest(second, jobs[1], 1, f"worker of {jobs[1]}", ""),
            LogRequest(again, jobs[1], 2, "another", ""),
        ]
    )


# Lending


def test_log_stream_is_empty_before_the_first_chunk(queue: Store, wanted: str) -> None:
    assert queue.logs.read_chunk(wanted) is None
    assert queue.logs.write_chunk(wanted, part(0))
    assert queue.logs.read_chunk(wanted) == part(0)


def test_log_stream_is_read_from_the_end_of_any_chunk(queue: Store, wanted: str) -> None:
    pieces = [b"one\n", b"two\nthree\n", NO_TEXT, b"\n", b"end\n"]
    lend(queue, wanted, *pieces)
    whole = b"".join(pieces)
    places = [sum(map(len, pieces[:count])) for count in range(len(pieces) + 1)]
    for place in places:
        assert look(queue, wanted, "aa", place) == part(place, whole[place:])
    assert look(queue, wanted) == part(0, whole)


def test_long_log_is_read_in_several_chunks(queue: Store, wanted: str) -> None:
    pieces = [b"%d\n" % number * number for number in range(1, 22)]
    lend(queue, wanted, *pieces)
    queue.logs.write_chunk(wanted, part(len(b"".join(pieces)), unfinished=b" 10%", ended=True))
    result, looks = look(queue, wanted), 1
    found = result.finished
    while result.is_behind:
        assert (result.unfinished, result.is_complete) == (b"", False)
        result = look(queue, wanted, "aa", result.size)
        assert result.finished
        found, looks = found + result.finished, looks + 1
    assert found == b"".join(pieces)
    assert (result.unfinished, result.is_complete) == (b" 10%", True)
    assert 1 < looks < len(pieces)


def test_invalid_utf8_is_preserved(queue: Store, wanted: str) -> None:
    every = bytes(range(256)) + b"\n"
    lend(queue, wanted, NO_TEXT, every)
    assert queue.logs.write_chunk(wanted, part(len(NO_TEXT + every), unfinished=b"\0\xff\0"))
    assert look(queue, wanted) == part(0, NO_TEXT + every, b"\0\xff\0")


def test_line_of_any_length_can_be_streamed(queue: Store, wanted: str) -> None:
    """All of it in one step, and read in as many looks as it takes."""
    line = b"".join(b"%07d " % number for number in range(2**18)) * 5 + b"\n"
    assert queue.logs.write_chunk(wanted, part(0, line, b"next"))
    assert queue.logs.write_chunk(wanted, part(len(line), b"next\n", ended=True))
    result = look(queue, wanted)
    found = result.finished
    while result.is_behind and result.finished:
        result = look(queue, wanted, "aa", result.size)
        found += result.finished
    assert (found == line + b"next\n", result.is_complete) == (True, True)


def test_unfinished_line_is_replaced_by_its_final_text(queue: Store, wanted: str) -> None:
    for unfinished in (b" 10% of it", b" 20%", b""):
        assert queue.logs.write_chunk(wanted, part(0, unfinished=unfinished))
        assert look(queue, wanted, "aa") == part(0, unfinished=unfinished)
    assert queue.logs.write_chunk(wanted, part(0, b"100%\n", b"next"))
    assert look(queue, wanted, "aa") == part(0, b"100%\n", b"next")
    assert look(queue, wanted, "aa", 5) == part(5, b"", b"next")


def test_reader_sees_that_the_sender_has_more(queue: Store, wanted: str) -> None:
    more = LogChunk(edition="aa", start=0, finished=b"1\n", is_behind=True)
    assert queue.logs.write_chunk(wanted, more)
    assert look(queue, wanted) == more
    assert queue.logs.write_chunk(wanted, part(2, b"2\n"))
    assert not look(queue, wanted, "aa", 2).is_behind


def interrupted_look(queue: Store, attempt: str, between: Callable[[], bool]) -> LogChunk:
    """What a reader sees when this happens between its query of the state and its query of the lines."""
    fetch = queue._driver.fetch

    def interrupted(statement: str, parameters: Parameters) -> list[Row]:
        found = fetch(statement, parameters)
        if statement == "log stream":
            assert between()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue._driver, "fetch", interrupted)
        return look(queue, attempt)


def test_line_written_during_a_read_comes_with_what_follows_it(queue: Store, other: Store, wanted: str) -> None:
    """The unfinished line was asked for first, and is finished when the lines are."""
    assert queue.logs.write_chunk(wanted, part(0, b"1\n", b"2"))
    result = interrupted_look(queue, wanted, lambda: other.logs.write_chunk(wanted, part(2, b"2\n", b"3", ended=True)))
    assert (result.finished, result.unfinished, result.is_behind, result.is_complete) == (b"1\n2\n", b"", True, False)
    assert look(queue, wanted, "aa", result.size) == part(4, b"", b"3", ended=True)


def test_edition_that_changes_between_two_queries_of_one_read_is_not_mixed(
    queue: Store, other: Store, wanted: str
) -> None:
    lend(queue, wanted, b"1\n", b"2\n")
    result = interrupted_look(queue, wanted, lambda: other.logs.write_chunk(wanted, part(0, b"other\n", edition="bb")))
    assert (result.edition, result.finished, result.is_behind) == ("aa", b"", True)
    assert look(queue, wanted, "aa", result.size) == part(0, b"other\n", edition="bb")


def test_new_edition_replaces_the_old_one_and_is_read_from_the_start(queue: Store, wanted: str) -> None:
    lend(queue, wanted, b"old 1\n", b"old 2\n")
    lend(queue, wanted, b"1\n", edition="bb")
    assert look(queue, wanted, "aa", 12) == look(queue, wanted, "aa", 6) == part(0, b"1\n", edition="bb")
    assert rows(queue, "log_chunks") == 1
    assert queue.logs.write_chunk(wanted, part(2, b"2\n", edition="bb"))
    assert look(queue, wanted, "bb", 2) == part(2, b"2\n", edition="bb")


def test_replaced_edition_cannot_be_continued(queue: Store, wanted: str) -> None:
    lend(queue, wanted, b"old\n")
    lend(queue, wanted, b"new\n", edition="bb")
    assert not queue.logs.write_chunk(wanted, part(4, b"of the old one\n"))
    assert look(queue, wanted) == part(0, b"new\n", edition="bb")
    assert rows(queue, "log_chunks") == 1


def test_chunk_without_the_chunks_before_it_is_refused(queue: Store, wanted: str) -> None:
    """Its worker was disconnected for minutes, and another reader requests the log now."""
    lend(queue, wanted, b"1\n", b"2\n")
    let_pass(queue, 2 * LONG)
    queue.logs.expire_streams()
    assert queue.logs.request_stream(wanted, LONG)
    assert not queue.logs.write_chunk(wanted, part(4, b"3\n"))
    assert queue.logs.read_chunk(wanted) is None
    lend(queue, wanted, b"1\n2\n3\n", edition="bb")
    assert look(queue, wanted) == part(0, b"1\n2\n3\n", edition="bb")


def test_chunk_written_twice_changes_nothing(queue: Store, wanted: str) -> None:
    lend(queue, wanted, b"1\n", b"2\n")
    before = look(queue, wanted)
    for again in (part(2, b"another\n", b"3", ended=True), part(0, b"another\n", b"3")):
        with pytest.raises(CollisionError):
            queue.logs.write_chunk(wanted, again)
        assert look(queue, wanted) == before


def test_log_streams_of_attempts_are_independent(queue: Store, wanted: str) -> None:
    second = start(queue, *submit(queue, "y"))
    assert queue.logs.request_stream(second, LONG)
    lend(queue, wanted, b"one\n")
    lend(queue, second, b"another\n")
    lend(queue, second, b"another one\n", edition="bb")
    assert look(queue, wanted) == part(0, b"one\n")
    queue.logs.drop_stream(second)
    assert look(queue, wanted) == part(0, b"one\n")


# Ending


def test_chunk_without_a_request_is_refused(queue: Store, attempt: str) -> None:
    assert not queue.logs.write_chunk(attempt, part(0, b"one\n"))
    assert queue.logs.request_stream(attempt, LONG)
    lend(queue, attempt, b"one\n")
    let_pass(queue, LONG)
    assert not queue.logs.write_chunk(attempt, part(4, b"two\n", b"three"))
    assert queue.logs.read_chunk(attempt) == part(0, b"one\n")


def test_dropped_stream_cannot_be_read_and_can_start_again(queue: Store, wanted: str) -> None:
    lend(queue, wanted, b"one\n")
    queue.logs.write_chunk(wanted, part(4, b"", b"two", ended=True))
    queue.logs.drop_stream(wanted)
    assert queue.logs.read_chunk(wanted) is queue.logs.read_chunk(wanted, "aa", 4) is None
    assert rows(queue, "log_chunks") == 0
    assert [one.attempt for one in queue.logs.stream_requests()] == [wanted]
    lend(queue, wanted, b"1\n", edition="bb")
    assert look(queue, wanted, "aa", 4) == part(0, b"1\n", edition="bb")


def test_stream_without_requests_for_a_minute_is_deleted(queue: Store) -> None:
    late, soon = (start(queue, job) for job in submit(queue, "late", "soon"))
    for name in (late, soon):
        assert queue.logs.request_stream(name, LONG)
        lend(queue, name, b"1\n", b"2\n")
    let_pass(queue, LONG)
    queue._driver.fetch_text(f"UPDATE stoker_log_streams SET until = until - 61 WHERE attempt_id = '{late}'", {})
    queue.logs.expire_streams()
    assert queue.logs.read_chunk(late) is None
    assert look(queue, soon) == part(0, b"1\n2\n")
    assert rows(queue, "log_chunks") == 2


@pytest.mark.parametrize("ended", [True, False])
def test_returning_reader_finds_a_complete_stream_but_no_stale_one(queue: Store, wanted: str, ended: bool) -> None:
    whole = part(0, b"1\n", b"2", ended=ended)
    assert queue.logs.write_chunk(wanted, whole)
    let_pass(queue, LONG)
    queue.logs.expire_streams()
    assert queue.logs.request_stream(wanted, LONG)
    assert queue.logs.read_chunk(wanted) == (whole if ended else None)
    lend(queue, wanted, b"1\n2\n", edition="bb")
    assert look(queue, wanted, "aa", 2) == part(0, b"1\n2\n", edition="bb")


def test_cleaning_deletes_log_streams(queue: Store, wanted: str) -> None:
    kept = start(queue, *submit(queue, "kept"))
    assert queue.logs.request_stream(kept, LONG)
    for name in (wanted, kept):
        lend(queue, name, b"1\n", b"2\n")
    queue.attempts.finish(wanted, "succeeded", 0)
    assert queue.jobs.clean(-1.0) == 1
    assert queue.logs.read_chunk(wanted) is None
    assert [one.attempt for one in queue.logs.stream_requests()] == [kept]
    assert (rows(queue, "log_streams"), rows(queue, "log_chunks")) == (1, 2)
    assert not queue.logs.write_chunk(wanted, part(4, b"3\n"))
    assert not queue.logs.request_stream(wanted, LONG)
    assert queue.check() == []
