"""Events: which are reported, their messages, and how often they are sent."""

import re
from collections import Counter, defaultdict
from itertools import pairwise
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.actions.subscription import parse_subscription
from stoker.errors import BadInputError
from stoker.notifications.events import CAUSE_WITHIN, MAX_AGE, Event, EventDetector, EventKind, QueueState
from stoker.notifications.senders import _TITLES, MAX_LENGTH, compose, plain
from stoker.notifications.throttle import Throttle, release
from stoker.queue.groups import Group
from stoker.queue.model import HEARD_WITHIN, AttemptDetails, NotifyUrl
from stoker.rules.rule import RuleWarning
from stoker.settings import EVENTS, USUAL_EVENTS
from tests.support.deep import examples
from tests.support.notification_parts import NOW, MemoryNotes, attempt, event, gpu, job, worker


def a_look(at: float = 0.0, **what: Any) -> QueueState:
    return QueueState(now=NOW + at, **what)


def said(events: list[Event]) -> list[str]:
    return [event.message for event in events]


def watching(unknown_after: float = 600.0, kinds: tuple[str, ...] = USUAL_EVENTS) -> EventDetector:
    return EventDetector(kinds, unknown_after)


# What a job asks for by --notify


def url_of_page(*events: str, url: str = "json://page", added: float = NOW - 99) -> NotifyUrl:
    return NotifyUrl(id="1", url=url, name="", events=events, added=added)


def kinds_and_urls(events: list[Event]) -> list[tuple[str, str]]:
    return [(event.kind, event.to) for event in events]


BY_RULE = {"attempt-of-train": AttemptDetails(cause="idle", rule="idle")}
BY_ITSELF = {"attempt-of-train": AttemptDetails(cause="exited")}


@pytest.mark.parametrize(
    ("notify", "state", "by_rule", "sent"),
    [
        ("end", "succeeded", False, "succeeded"),
        ("end", "failed", False, "failed"),
        ("end", "failed", True, "stopped"),
        ("end", "cancelled", False, "cancelled"),
        ("failed", "failed", False, "failed"),
        ("failed", "failed", True, "stopped"),
        ("failed", "succeeded", False, None),
        ("failed", "cancelled", False, None),
        ("succeeded", "succeeded", False, "succeeded"),
        ("succeeded", "failed", False, None),
        ("stopped", "failed", True, "stopped"),
        ("stopped", "failed", False, None),
        ("warned", "failed", True, None),
        ("done", "failed", False, None),
    ],
)
def test_job_with_notify_is_reported_to_its_url_alone(notify: str, state: str, by_rule: bool, sent: str | None) -> None:
    marked = job(state=state, notify=(f"{notify}:json://mine",))
    look = a_look(ended=[marked], causes=BY_RULE if by_rule else BY_ITSELF)
    found = EventDetector((), 600.0).detect(look)
    assert kinds_and_urls(found) == ([] if sent is None else [(sent, "json://mine")])


def test_event_is_sent_once_to_a_url_named_several_times() -> None:
    marked = job(notify=("end:json://mine", "failed:json://mine", "end", "failed:json://file"))
    look = a_look(ended=[marked], causes=BY_ITSELF, urls=[url_of_page("failed")])
    detector = EventDetector(("failed",), 600.0, ["json://file"])
    found = detector.detect(look)
    assert kinds_and_urls(found) == [("failed", ""), ("failed", "json://page"), ("failed", "json://mine")]
    assert len({event.key for event in found}) == 3
    assert detector.detect(look) == []


def test_when_alone_reaches_settings_and_page_although_they_do_not_list_it() -> None:
    look = a_look(ended=[job(state="succeeded", notify=("end",))], urls=[url_of_page("failed")])
    found = EventDetector(("failed",), 600.0, ["json://file"]).detect(look)
    assert kinds_and_urls(found) == [("succeeded", ""), ("succeeded", "json://page")]
    assert kinds_and_urls(EventDetector((), 600.0).detect(look)) == [("succeeded", "json://page")]


def test_url_of_the_page_gets_nothing_from_before_it_was_added() -> None:
    look = a_look(ended=[job(ended=NOW - 10)], causes=BY_ITSELF, urls=[url_of_page("failed", added=NOW - 5)])
    assert EventDetector((), 600.0).detect(look) == []


def test_stop_that_is_retried_is_reported_to_who_wants_stops_and_not_as_an_end() -> None:
    retried = job(state="queued", ended=None, notify=("end:json://end", "stopped:json://stop"))
    found = EventDetector((), 600.0).detect(a_look(retried={"attempt-of-train": retried}, causes=BY_RULE))
    assert kinds_and_urls(found) == [("stopped", "json://stop")]


def test_lasting_condition_begins_and_ends_for_each_url() -> None:
    detector, notes, throttle = EventDetector((), 600.0), MemoryNotes(), Throttle()
    urls = [url_of_page("gpu-quarantined", url=f"json://{name}") for name in "ab"]
    sent = []
    for at, quarantine in ((0.0, "xid 79"), (100.0, "")):
        look = a_look(at, workers=[worker(seen=NOW + at, gpus=(gpu(quarantine=quarantine),))], urls=urls)
        throttle.add(detector.detect(look))
        sent += [(batch.to, batch.events[0].turn) for batch in throttle.due(NOW + at, notes)]
    assert sorted(sent) == [("json://a", "began"), ("json://a", "over"), ("json://b", "began"), ("json://b", "over")]


def test_urls_do_not_slow_each_other_down() -> None:
    throttle = Throttle()
    throttle.add([msgspec.structs.replace(event(f"{to}{n}"), to=to) for to in ("", "x", "y") for n in (1, 2)])
    batches = list(throttle.due(NOW, MemoryNotes()))
    assert sorted((batch.to, len(batch.events)) for batch in batches) == [("", 2), ("x", 2), ("y", 2)]
    throttle.add([msgspec.structs.replace(event("x3"), to="x"), msgspec.structs.replace(event("z1"), to="z")])
    assert [batch.to for batch in throttle.due(NOW + 5, MemoryNotes())] == ["z"]


def test_event_shows_no_url() -> None:
    shown = repr(msgspec.structs.replace(event("a"), to="json://s3cret", wanted=("end:json://s3cret",)))
    assert "s3cret" not in shown + repr(url_of_page(url="json://s3cret"))


# What an event means, in apprise's words. A group means what became of its jobs, as above.
TONES: dict[tuple[str, str], str] = {
    ("failed", "happened"): "failure",
    ("stopped", "happened"): "warning",
    ("warned", "happened"): "warning",
    ("succeeded", "happened"): "success",
    ("cancelled", "happened"): "warning",
    ("queue-empty", "happened"): "info",
    ("gpu-unknown", "began"): "warning",
    ("gpu-unknown", "over"): "success",
    ("gpu-quarantined", "began"): "warning",
    ("gpu-quarantined", "over"): "success",
    ("worker-gone", "began"): "failure",
    ("worker-gone", "over"): "success",
}


def test_every_kind_of_event_has_the_type_that_fits() -> None:
    found = {
        (kind, turn): compose(kind, [msgspec.structs.replace(event("a", kind), turn=turn)], "").tone
        for kind, turn in _TITLES
        if kind != "group-done"
    }
    assert found == TONES
    assert {kind for kind, _turn in _TITLES} == set(get_args(EventKind)) == {*EVENTS, "cancelled"}


@pytest.mark.parametrize(
    ("text", "when", "url"),
    [
        ("end", "end", ""),
        (" failed ", "failed", ""),
        ("ntfy://host/topic", "end", "ntfy://host/topic"),
        ("done:mailto://user:pass@host?to=a,b", "done", "mailto://user:pass@host?to=a,b"),
    ],
)
def test_entry_of_notify_is_read(text: str, when: str, url: str) -> None:
    found = parse_subscription(text)
    assert found == (when, url)
    assert parse_subscription(str(found)) == found


@pytest.mark.parametrize("text", ["", " ", "ended", "end:", "end:secret", "end:://x", "end:ntfy://a b", "x" * 3000])
def test_invalid_entry_of_notify_is_refused(text: str) -> None:
    with pytest.raises(BadInputError):
        parse_subscription(text)


# Jobs


def test_failed_job_is_reported_once_with_its_reason() -> None:
    detector = watching()
    failed = job("train", exit_code=3, reason="it ended with code 3: CUDA out of memory.")
    look = a_look(ended=[failed], causes={"attempt-of-train": AttemptDetails(cause="exited")})
    assert said(detector.detect(look)) == [
        "Job train failed with exit code 3: it ended with code 3: CUDA out of memory."
    ]
    assert detector.detect(look) == []


@pytest.mark.parametrize("state", ["succeeded", "cancelled"])
def test_succeeded_or_cancelled_job_is_not_reported(state: str) -> None:
    assert watching().detect(a_look(ended=[job(state=state)])) == []


def test_success_is_reported_to_those_who_ask_for_it() -> None:
    (event,) = watching(kinds=EVENTS).detect(a_look(ended=[job(state="succeeded")], unfinished=True))
    assert (event.kind, event.message) == ("succeeded", "Job train succeeded.")
    assert compose("succeeded", [event], "").tone == "success"


@pytest.mark.parametrize(
    ("counts", "told", "tone"),
    [
        ({"succeeded": 3}, "All 3 jobs of night have ended: 3 succeeded.", "success"),
        ({"succeeded": 2, "failed": 1}, "All 3 jobs of night have ended: 2 succeeded, 1 failed.", "failure"),
        ({"succeeded": 1, "cancelled": 1}, "All 2 jobs of night have ended: 1 succeeded, 1 cancelled.", "warning"),
    ],
)
def test_group_that_is_done_is_reported_once_each_time(counts: Any, told: str, tone: str) -> None:
    detector, group = watching(), Group(name="night", counts=counts)
    (event,) = detector.detect(a_look(done=[(group, NOW)]))
    assert (event.message, compose("group-done", [event], "").tone) == (told, tone)
    assert detector.detect(a_look(1, done=[(group, NOW)])) == []
    assert len(detector.detect(a_look(9, done=[(group, NOW + 8)]))) == 1


def test_job_that_fails_again_after_a_retry_is_reported_again() -> None:
    detector = watching()
    assert len(detector.detect(a_look(ended=[job()]))) == 1
    assert len(detector.detect(a_look(5, ended=[job(attempt="another")]))) == 1


def test_event_of_a_failure_waits_for_its_cause() -> None:
    detector = watching()
    failed = job(ended=NOW)
    assert detector.detect(a_look(CAUSE_WITHIN / 2, ended=[failed])) == []
    reported = detector.detect(
        a_look(CAUSE_WITHIN, ended=[failed], causes={"attempt-of-train": AttemptDetails(cause="idle", rule="idle")})
    )
    assert [event.kind for event in reported] == ["stopped"]


def test_idle_stop_is_reported_once_as_a_stop() -> None:
    look = a_look(
        ended=[job(reason="GPU 0 stayed below 1% for 30m")],
        causes={"attempt-of-train": AttemptDetails(cause="idle", rule="idle")},
    )
    (event,) = watching().detect(look)
    assert event.kind == "stopped"
    assert event.message == "Job train was stopped: GPU 0 stayed below 1% for 30m."
    (event,) = watching(kinds=("failed",)).detect(look)
    assert event.kind == "failed"


def test_late_cause_does_not_repeat_a_reported_failure() -> None:
    late = {"ended": [job(ended=NOW)], "causes": {"attempt-of-train": AttemptDetails(cause="idle", rule="idle")}}
    detector, notes, throttle = watching(), MemoryNotes(), Throttle()
    throttle.add(detector.detect(a_look(CAUSE_WITHIN, ended=[job(ended=NOW)])))
    throttle.add(detector.detect(a_look(CAUSE_WITHIN + 3, **late)))
    # Nor by another process, which sees it later.
    throttle.add(watching().detect(a_look(CAUSE_WITHIN + 3, **late)))
    reported = [event.kind for at in (3, 100) for batch in throttle.due(NOW + at, notes) for event in batch.events]
    assert len(reported) == 1


def test_idle_stop_of_a_retried_job_is_reported() -> None:
    look = a_look(retried={"a1": job(state="queued")}, causes={"a1": AttemptDetails(cause="idle", rule="idle")})
    assert said(watching().detect(look))[0].endswith(" was stopped. It will be tried again.")
    assert (
        watching().detect(a_look(retried={"a1": job(state="queued")}, causes={"a1": AttemptDetails(cause="exited")}))
        == []
    )


def test_events_older_than_an_hour_are_not_reported() -> None:
    old = job(ended=NOW - MAX_AGE - 1)
    assert watching().detect(a_look(ended=[old], unfinished=False)) == []


def warned(at: float = NOW, **changes: Any) -> dict[str, Any]:
    """A job that runs and is warned of."""
    found: dict[str, Any] = {"rule": "stalled", "word": "may hang", "reason": "GPU 0 makes no progress"}
    found["acts_at"] = NOW + 1500
    train = job(state="running", ended=None)
    running = attempt(train, "w1")
    there = worker("w1", seen=at, warnings={running.id: RuleWarning(at=at, **found | changes)})
    return {"workers": [there], "running": [(running, train)]}


def test_warning_is_reported_once_and_again_when_it_comes_back() -> None:
    detector = watching(kinds=("warned",))
    assert said(detector.detect(a_look(**warned()))) == [
        "Job train may hang: GPU 0 makes no progress. It is stopped in 25 min, unless it works or is snoozed."
    ]
    assert detector.detect(a_look(5, **warned())) == []
    assert len(detector.detect(a_look(120, **warned(at=NOW + 120)))) == 1


def test_warning_of_a_rule_that_never_acts_is_reported_once_per_attempt() -> None:
    detector = watching(kinds=("warned",))
    assert said(detector.detect(a_look(**warned(acts_at=None)))) == ["Job train may hang: GPU 0 makes no progress."]
    assert detector.detect(a_look(3000, **warned(at=NOW + 3000, acts_at=None))) == []


def test_warning_of_a_worker_that_is_gone_is_not_reported() -> None:
    assert watching(kinds=("warned",)).detect(a_look(HEARD_WITHIN + 60, **warned())) == []


# The queue


def test_empty_queue_is_reported_once() -> None:
    detector = watching(kinds=("queue-empty",))
    first, second = job(state="succeeded", ended=NOW - 9), job("eval", state="cancelled", ended=NOW + 5)
    assert detector.detect(a_look(ended=[first], unfinished=True)) == []
    assert said(detector.detect(a_look(1, ended=[first], unfinished=False))) == [
        "The queue is empty: the last job to end was train, which succeeded."
    ]
    assert detector.detect(a_look(2, ended=[first], unfinished=False)) == []
    assert detector.detect(a_look(6, ended=[second, first], unfinished=True)) == []
    assert len(detector.detect(a_look(7, ended=[second, first], unfinished=False))) == 1


def test_cleaned_queue_is_not_reported_as_empty_again() -> None:
    detector = watching(kinds=("queue-empty",))
    older, newer = job(state="succeeded", ended=NOW - 99), job("b", state="succeeded", ended=NOW - 9)
    assert len(detector.detect(a_look(ended=[newer, older], unfinished=False))) == 1
    assert detector.detect(a_look(1, ended=[older], unfinished=False)) == []
    assert detector.detect(a_look(2, ended=[], unfinished=False)) == []


# GPUs


def test_unknown_gpu_is_reported_once_and_when_it_is_back() -> None:
    detector, notes, reported = watching(), MemoryNotes(), list[str]()

    def look(at: float, **of_gpu: Any) -> None:
        throttle = Throttle()
        throttle.add(detector.detect(a_look(at, workers=[worker(seen=NOW + at, gpus=(gpu(3, **of_gpu),))])))
        reported.extend(
            event.message for batch in throttle.due(NOW + at, NotesWithoutSlots(notes)) for event in batch.events
        )

    look(0)
    look(10, state="unknown", since=NOW + 10, note="the driver does not answer")
    look(609, state="unknown", since=NOW + 10)
    assert reported == []
    look(611, state="unknown", since=NOW + 10, note="the driver does not answer")
    # The restarted worker reports the outage only since its start.
    look(1300, state="unknown", since=NOW + 1290)
    look(2000, state="unknown", since=NOW + 1290)
    assert reported == ["GPU 3 of node7 could not be read for 10 min: the driver does not answer."]
    look(2010, state="job", since=NOW + 2005)
    look(2020, state="free", since=NOW + 2015)
    assert reported[1:] == ["GPU 3 of node7 can be read again."]


class NotesWithoutSlots:
    """Records events without the throttle's slots."""

    def __init__(self, notes: MemoryNotes) -> None:
        self._notes = notes

    def note_once(self, key: str) -> bool:
        return key.startswith("pace:") or self._notes.note_once(key)

    def forget_note(self, key: str) -> bool:
        return self._notes.forget_note(key)


def test_short_outage_is_not_reported() -> None:
    detector, notes, throttle = watching(), MemoryNotes(), Throttle()
    for at, doing in ((0, "free"), (10, "unknown"), (300, "unknown"), (310, "free")):
        throttle.add(detector.detect(a_look(at, workers=[worker(seen=NOW + at, gpus=(gpu(state=doing),))])))
        assert list(throttle.due(NOW + at, notes)) == []


def test_machine_that_cannot_list_its_gpus_is_reported() -> None:
    detector = watching(unknown_after=60.0)
    reported: list[Event] = []
    for at in (0, 20, 40, 60):
        reported += detector.detect(a_look(at, workers=[worker(seen=NOW + at, problem="NVML: driver not loaded")]))
    assert said([one for one in reported if one.turn == "began"]) == [
        "All GPUs of node7 could not be read for 60 s: NVML: driver not loaded."
    ]


def test_machine_without_gpus_is_not_reported() -> None:
    detector, reported = watching(unknown_after=60.0), list[Event]()
    for at in range(0, 90, 10):
        reported += detector.detect(a_look(at, workers=[worker(seen=NOW + at, problem="no driver", absent=True)]))
    assert [one for one in reported if one.kind == "gpu-unknown"] == []


@pytest.mark.parametrize(
    "of_gpu", [{"state": "unknown", "since": NOW - 900}, {"state": "job", "unread_since": NOW - 900}]
)
def test_time_of_an_unknown_gpu_is_measured_by_the_database_clock(of_gpu: dict[str, Any]) -> None:
    detector = watching(unknown_after=60.0, kinds=("gpu-unknown",))
    looks = {
        at: said(detector.detect(a_look(at, workers=[worker(seen=NOW + at, gpus=(gpu(3, **of_gpu),))])))
        for at in (0, 30, 60)
    }
    assert [any("GPU 3" in sentence for sentence in looks[at]) for at in (0, 30, 60)] == [False, False, True]
    assert looks[60] == ["GPU 3 of node7 could not be read for 60 s."]


def test_gpu_out_of_rotation_is_reported_once_and_not_as_unreadable() -> None:
    detector, reported = watching(unknown_after=60.0), list[Event]()
    for at in range(0, 200, 10):
        bad = {"state": "unknown", "unread_since": NOW + 20, "quarantine": "XID 79: x"} if 20 <= at < 150 else {}
        events = detector.detect(a_look(at, workers=[worker(seen=NOW + at, gpus=(gpu(3, **bad),))]))
        reported += events if at else []
    assert said(reported) == ["GPU 3 of node7 is out of rotation: XID 79: x.", "GPU 3 of node7 is in rotation again."]
    assert {one.key for one in reported} == {f"gpu-quarantined:node7:{gpu(3).uuid}"}


# Workers


def look_at_gone(detector: EventDetector, *workers: Any, **more: Any) -> list[Event]:
    """Looks from the first heartbeat until the worker counts as lost."""
    found = []
    for at in range(0, 80, 5):
        found += detector.detect(a_look(at, workers=workers, **more))
    return [event for event in found if event.turn == "began"]


def test_lost_worker_is_reported_with_its_jobs() -> None:
    jobs = [job(name, state="running", attempt=name) for name in ("a", "b", "c")]
    running = [(attempt(one, "w1"), one) for one in jobs] + [(attempt(job("x"), "w2"), job("x"))]
    (event,) = look_at_gone(watching(), worker(), running=running)
    assert event.message == "The worker on node7 has not been seen for 65 s. It had 3 jobs: a, b and c."


def test_stopped_worker_is_not_reported() -> None:
    assert look_at_gone(watching(), worker(seen=NOW - HEARD_WITHIN - 1, left=True)) == []


def test_restarted_worker_is_not_reported() -> None:
    heir = worker("a-2", seen=NOW + 90, started=NOW + 20)
    assert look_at_gone(watching(), worker("a-1"), heir) == []
    assert look_at_gone(watching(), worker("b-1"), heir) != []
    assert look_at_gone(watching(), worker("a-1", "node8"), heir) != []


def test_no_worker_counts_as_lost_right_after_a_gap() -> None:
    detector = watching()
    detector.detect(a_look(0, workers=[worker()]))
    assert detector.detect(a_look(300, workers=[worker()])) == []
    assert (
        detector.detect(a_look(305, workers=[worker(seen=NOW + 304)])) != []
    )  # It is back, after its loss was reported.


def test_return_of_a_worker_is_reported_only_after_its_loss() -> None:
    for was_reported, expected in ((True, ["The worker on node7 is back."]), (False, [])):
        notes, throttle = MemoryNotes(), Throttle()
        if was_reported:
            notes.note_once("worker-gone:w1")
        throttle.add(watching().detect(a_look(workers=[worker()])))
        assert [said(list(batch.events)) for batch in throttle.due(NOW, notes)] == ([expected] if expected else [])


# Throttle


@settings(max_examples=examples(60), deadline=None)
@given(
    bursts=st.lists(
        st.tuples(st.floats(0.0, 40.0), st.sampled_from(EVENTS), st.integers(1, 5), st.integers(0, 1)), max_size=40
    )
)
def test_messages_are_limited_to_one_a_minute_per_kind_without_losing_events(
    bursts: list[tuple[float, EventKind, int, int]],
) -> None:
    """Two processes that see the same, one sometimes first."""
    notes, pacers = MemoryNotes(), [Throttle(), Throttle()]
    sent: dict[tuple[int, str], list[float]] = defaultdict(list)
    reported: Counter[str] = Counter()
    expected: list[str] = []
    now = NOW

    def step() -> None:
        for process, throttle in enumerate(pacers):
            for batch in throttle.due(now, notes):
                sent[process, batch.kind].append(now)
                reported.update(event.key for event in batch.events)

    for pause, kind, count, first in bursts:
        now += pause
        fresh = [event(f"{len(expected) + number}", kind) for number in range(count)]
        expected += [one.key for one in fresh]
        for throttle in (pacers[first], pacers[1 - first]):
            throttle.add(fresh)
        step()
    for _ in range(60):
        now += 5
        step()
    assert reported == Counter(expected)
    for times in sent.values():
        assert all(later - earlier >= 60 for earlier, later in pairwise(times))


def test_first_event_is_sent_at_once_and_the_rest_of_the_minute_together() -> None:
    notes, throttle = MemoryNotes(), Throttle()
    throttle.add([event("first")])
    (at_once,) = throttle.due(NOW, notes)
    assert [one.name for one in at_once.events] == ["first"]
    throttle.add(event(name) for name in "abc")
    assert list(throttle.due(NOW + 1, notes)) == []
    throttle.add(event(f"{number}") for number in range(9))
    later = [batch for at in range(2, 95) for batch in throttle.due(NOW + at, notes)]
    (summary,) = later
    message = compose(summary.kind, summary.events, "https://gpu-box:7865/", prefix=summary.prefix)
    assert message.title == "Stoker: 12 more jobs failed"
    assert message.body == "12 more jobs failed: a, b, c and 9 others.\nhttps://gpu-box:7865/jobs?state=failed"


def test_held_back_event_is_sent_by_the_next_process() -> None:
    notes = MemoryNotes()
    gone, heir = Throttle(), Throttle()
    gone.add([event("a")])
    assert len(list(gone.due(NOW, notes))) == 1
    gone.add([event("b")])
    assert list(gone.due(NOW + 1, notes)) == []
    release(gone.unsent(), notes)
    heir.add([event("a"), event("b")])
    (batch,) = heir.due(NOW + 100, notes)
    assert [one.name for one in batch.events] == ["b"]


def held_back(notes: MemoryNotes) -> tuple[Throttle, Event]:
    """A process that has just sent one outage and holds another back."""
    throttle = Throttle()
    first, second = (msgspec.structs.replace(event(name, "gpu-unknown"), turn="began") for name in "ab")
    throttle.add([first])
    assert len(list(throttle.due(NOW, notes))) == 1
    throttle.add([second])
    assert list(throttle.due(NOW + 1, notes)) == []
    return throttle, second


def test_held_back_outage_of_a_killed_process_is_sent_by_the_next_one() -> None:
    notes, heir = MemoryNotes(), Throttle()
    _killed, outage = held_back(notes)
    heir.add([outage])
    (batch,) = heir.due(NOW + 100, notes)
    assert batch.events == (outage,)


def test_outage_that_ended_before_it_was_sent_is_dropped() -> None:
    notes = MemoryNotes()
    throttle, outage = held_back(notes)
    throttle.add([msgspec.structs.replace(outage, turn="over")])
    assert [batch for at in range(2, 200) for batch in throttle.due(NOW + at, notes)] == []


def test_end_of_an_outage_that_another_process_sent_is_sent() -> None:
    notes, other = MemoryNotes(), Throttle()
    throttle, outage = held_back(notes)
    other.add([outage])
    assert len(list(other.due(NOW + 100, notes))) == 1
    throttle.add([msgspec.structs.replace(outage, turn="over")])
    (batch,) = (batch for at in range(101, 300) for batch in throttle.due(NOW + at, notes))
    assert [one.turn for one in batch.events] == ["over"]


# Messages


def test_message_has_the_reason_and_the_link_to_the_job() -> None:
    (event,) = watching().detect(a_look(ended=[job("train", reason="no space left")]))
    message = compose("failed", [event], "https://gpu-box:7865")
    assert message.title == "Stoker: job failed: train"
    assert message.body == "Job train failed with exit code 1: no space left.\nhttps://gpu-box:7865/jobs/0000beef"
    assert compose("failed", [event], "").body.endswith("\nstoker show 0000beef says more.")


def test_name_with_spaces_is_quoted_in_a_body_and_not_in_a_title() -> None:
    (event,) = watching().detect(a_look(ended=[job("wants eight GPUs")]))
    message = compose("failed", [event], "")
    assert message.title == "Stoker: job failed: wants eight GPUs"
    assert message.body.startswith("Job “wants eight GPUs” failed with exit code 1.")


def test_job_text_cannot_format_mention_or_break_a_message() -> None:
    nasty = job(
        "*bold* <b>x</b> @everyone [a](http://b) `c`\x1b[31m\nSubject: x", reason="__init__.py \u202e\x00~~no~~"
    )
    (event,) = watching().detect(a_look(ended=[nasty]))
    message = compose("failed", [event], "https://gpu-box")
    text = message.title + message.body.replace("\n", "", 1)
    assert not re.search(r"[*<>@`~\[\]]|(?<!\w)_|_(?!\w)", text)
    assert all(letter.isprintable() for letter in text)
    assert (
        plain("train_model_7 100% a-b (c) https://x.y/z?a=b&c#d") == "train_model_7 100% a-b (c) https://x.y/z?a=b&c#d"
    )


def test_message_has_at_most_a_thousand_characters_and_its_link() -> None:
    long = msgspec.structs.replace(event("x" * 900), message="y" * 5000)
    message = compose("failed", [long], "https://gpu-box")
    assert len(message.body) <= MAX_LENGTH
    assert message.body.endswith("…\nhttps://gpu-box/")
    assert len(compose("failed", [long] * 5, "https://" + "g" * 500).body) <= MAX_LENGTH


def test_begun_and_ended_outages_are_separate_in_a_message() -> None:
    one = msgspec.structs.replace(event("GPU 0 of a", "gpu-unknown"), turn="began", message="GPU 0 of a is away.")
    back = [msgspec.structs.replace(event(f"GPU {n} of a", "gpu-unknown"), turn="over") for n in (1, 2)]
    message = compose("gpu-unknown", [*back, one], "")
    assert (message.tone, compose("gpu-unknown", back, "").tone) == ("warning", "success")
    assert message.body.startswith("GPU 0 of a is away.\n2 GPUs can be read again: GPU 1 of a and GPU 2 of a.")
