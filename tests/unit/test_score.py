"""When a stop counts as right, wrong or missing."""

import pytest

from stoker.rules.idle import IdlePolicy
from stoker.rules.scope import DeviceScope
from stoker.rules.score import Label, Score, TraceOutcome, class_in_words, first_stop, hours_after, score
from tests.support.looks import a_look


def outcome(
    label: Label, stopped: float | None, right_from: float | None = None, *, warned: bool = False
) -> TraceOutcome:
    return TraceOutcome("", "a", "class", label, "", stopped, right_from, warned)


@pytest.mark.parametrize(
    ("found", "is_false_kill", "is_missed"),
    [
        (outcome("healthy", None), False, False),
        (outcome("healthy", 2.0), True, False),
        (outcome("idle", 2.0, 1.5), False, False),
        (outcome("idle", 1.0, 1.5), True, True),
        (outcome("stalled", None, 1.5), False, True),
    ],
)
def test_stop_is_right_from_its_moment_on(found: TraceOutcome, is_false_kill: bool, is_missed: bool) -> None:
    assert (found.is_false_kill, found.is_missed) == (is_false_kill, is_missed)


def test_score_counts_by_label() -> None:
    found = score(
        [
            outcome("healthy", 1.0),
            outcome("healthy", None),
            outcome("unknown", 1.0),
            outcome("idle", 1.0, 2.0),
            outcome("stalled", None, 2.0),
            outcome("stalled", 3.0, 2.0),
        ]
    )
    assert found == Score(2, 1, 1, 1, 1, 1, 2, 1, 1)


def test_class_is_described() -> None:
    missed = [outcome("idle", None, 1.0, warned=True), outcome("idle", 2.0, 1.0)]
    assert class_in_words(missed) == "2 traces, 0 killed wrongly, 1 missed (1 of them warned of)"
    assert class_in_words([outcome("healthy", 1.0)]) == "1 traces, 1 killed wrongly"
    assert class_in_words([]) == "0 traces, 0 killed wrongly"


def test_first_stop_is_found() -> None:
    policy = IdlePolicy(window=60.0, after=0.0, every=10.0, unused_for=0.0)
    looks = [a_look(0.0, at=float(at), span=10.0) for at in range(0, 300, 10)]
    stop = first_stop(looks, [policy], DeviceScope(), 0.0)
    assert stop.at is not None
    assert (60 <= stop.at <= 110, stop.warned, stop.rule) == (True, True, "idle")
    busy = [a_look(0.9, at=float(at), span=10.0) for at in range(0, 300, 10)]
    assert first_stop(busy, [policy], DeviceScope(), 0.0) == (None, False, "")


def test_hours_are_counted_from_the_start() -> None:
    assert hours_after(3600.0, 9000.0) == 1.5
    assert hours_after(3600.0, None) is None
