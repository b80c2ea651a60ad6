"""Since when a GPU is in its state, corrected for the clock of its worker."""

import pytest

from stoker.status.machines import ClockCorrection
from tests.support.status_parts import NOW, card, machine


@pytest.mark.parametrize("off", [-600.0, 0.0, 600.0])
def test_state_that_began_between_two_snapshots_is_dated_between_them(off: float) -> None:
    correction = ClockCorrection()
    correction.apply([machine(card(since=NOW - 100 + off))], NOW)
    changed = machine(card(state="unknown", since=NOW + 4 + off, unread_since=NOW + 5 + off))
    for look in (10, 500):
        ((gpu,),) = (found.gpus for found in correction.apply([changed], NOW + look))
        for date in (gpu.since, gpu.unread_since):
            assert date is not None
            assert NOW <= date <= NOW + 10


def test_times_in_the_first_snapshot_are_taken_as_reported() -> None:
    correction = ClockCorrection()
    there = machine(card(since=NOW - 7200))
    away = machine(card(state="unknown", since=NOW + 1), there=False)
    dates = [
        gpu.since
        for look, seen in enumerate([there, there, away, there])
        for found in correction.apply([seen], NOW + look * 100)
        for gpu in found.gpus
    ]
    assert dates == [NOW - 7200, NOW - 7200, NOW + 1, NOW - 7200]
