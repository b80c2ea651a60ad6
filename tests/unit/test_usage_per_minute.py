"""GPU use per minute, from looks at irregular times."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.engines.gpu_usage import KEPT_MINUTES, LONGEST_GAP, UsagePerMinute
from stoker.queue.model import GpuUse, Usage

# At the start of a minute of the wall clock; the clock of the looks has another origin.
NOON = 29_000_000 * 60.0
BOOTED = NOON - 12_345.678


class Site:
    """One GPU that is looked at, by the seconds since noon."""

    def __init__(self) -> None:
        self.meter = UsagePerMinute("node7")
        self.set_by = 0.0
        """How far the wall clock was set forward."""

    def see(self, *looks: float, state: GpuUse = "job", utilization: float | None = 0.5, memory: int = 100) -> "Site":
        for second in looks:
            wall = NOON + second
            self.meter.observe("g", state, wall - BOOTED, wall + self.set_by, utilization, memory)
        return self

    def leave(self, second: float, state: GpuUse = "job") -> "Site":
        self.meter.note_end("g", state, NOON + second - BOOTED)
        return self

    def written(self) -> dict[int, Usage]:
        """By the minutes since noon, with the one under way."""
        return {row.minute - int(NOON // 60): row for row in self.meter.so_far()}


def seconds(row: Usage) -> dict[GpuUse, float]:
    return {state: round(amount, 3) for state, amount in row.seconds.items()}


def test_minute_is_reported_when_it_is_over() -> None:
    site = Site().see(*range(0, 60, 5))
    assert site.meter.finished() == []
    assert seconds(site.written()[0]) == {"job": 55.0}
    (row,) = site.see(62.0).meter.finished()
    assert (row.host, row.gpu, row.minute) == ("node7", "g", NOON // 60)
    assert seconds(row) == {"job": 60.0}
    site.meter.written([row])
    assert site.meter.finished() == []
    assert seconds(site.written()[1]) == {"job": 2.0}


def test_last_minute_of_an_unwatched_gpu_is_reported_and_dropped() -> None:
    site = Site().see(0.0, 10.0)
    site.meter.forget("g")
    assert site.meter.finished() == []
    site.meter.pass_time(NOON + 61.0)
    (row,) = site.meter.finished()
    assert seconds(row) == {"job": 10.0}
    site.meter.written([row])
    assert site.meter.so_far() == []
    # It is another one of that name.
    assert site.see(70.0, 75.0).written()[1].seconds == {"job": 5.0}


def test_span_has_the_state_of_the_look_at_its_end() -> None:
    site = Site().see(0.0).see(10.0, state="free").see(15.0, state="unknown", utilization=None).see(20.0, state="job")
    assert seconds(site.written()[0]) == {"free": 10.0, "unknown": 5.0, "job": 5.0}


def test_job_that_came_and_went_between_two_looks_is_counted() -> None:
    site = Site().see(0.0, state="free").leave(3.0).see(3.5, state="free")
    assert seconds(site.written()[0]) == {"job": 3.0, "free": 0.5}


def test_end_later_than_the_look_counts_no_second_twice() -> None:
    site = Site().see(0.0, state="free").leave(3.2).see(3.0, state="free").see(5.0, state="free")
    assert seconds(site.written()[0]) == {"job": 3.0, "free": 2.0}


def test_longer_gap_is_not_counted() -> None:
    site = Site().see(0.0, LONGEST_GAP)
    assert seconds(site.written()[0]) == {"job": LONGEST_GAP}
    gap = Site().see(0.0, LONGEST_GAP + 0.1, LONGEST_GAP + 5.1)
    assert seconds(gap.written()[0]) == {"job": 5.0}


def test_minute_without_looks_has_no_row() -> None:
    assert set(Site().see(0.0, 5.0, 200.0, 205.0).written()) == {0, 3}
    assert Site().see(0.0).written() == {}


def test_utilization_is_the_mean_over_the_time_in_which_it_is_known() -> None:
    site = Site().see(0.0).see(10.0, utilization=1.0).see(40.0, utilization=0.0)
    assert site.written()[0].utilization == pytest.approx(0.25)
    site.see(50.0, utilization=None)
    assert site.written()[0].utilization == pytest.approx(0.25)
    assert Site().see(0.0, 5.0, utilization=None).written()[0].utilization is None


def test_power_is_the_mean_over_the_time_in_which_it_is_known() -> None:
    meter = UsagePerMinute("node7")
    for second, watts in ((0.0, 50.0), (10.0, 300.0), (40.0, 100.0), (50.0, None)):
        meter.observe("g", "job", NOON + second - BOOTED, NOON + second, None, None, watts)
    (row,) = meter.so_far()
    assert row.power == pytest.approx(150.0)
    assert Site().see(0.0, 5.0).written()[0].power is None


def test_memory_is_the_maximum_of_the_looks() -> None:
    site = Site().see(0.0, memory=900).see(5.0, memory=0)
    assert site.written()[0].memory == 0
    assert site.see(10.0, memory=300).see(15.0, memory=200).written()[0].memory == 300
    site.meter.observe("g", "unknown", NOON + 20.0 - BOOTED, NOON + 20.0, None, None)
    assert site.written()[0].memory == 300


def test_unwritten_minutes_are_kept_for_an_hour() -> None:
    site = Site().see(*range(0, 61, 20))
    last = KEPT_MINUTES * 60.0
    assert 0 in site.see(last + 59.0).written()
    assert 0 not in site.see(last + 60.0).written()


def test_clock_set_back_makes_no_minute_longer() -> None:
    site = Site().see(*range(0, 51, 5))
    site.set_by = -45.0
    site.see(*range(55, 101, 5))
    assert seconds(site.written()[0]) == {"job": 60.0}


def test_drifting_clocks_report_no_minute_twice() -> None:
    site = Site().see(50.0, 60.001)
    site.meter.written(site.meter.finished())
    site.set_by = -0.002
    assert set(site.see(65.0).written()) == {1}
    site.set_by = -10.0
    assert set(site.see(66.0, 67.0).written()) == {0, 1}


@given(
    st.lists(
        st.tuples(
            st.floats(0.001, 2 * LONGEST_GAP, allow_nan=False),
            st.sampled_from(["job", "background", "somebody", "free", "unknown"]),
            st.one_of(st.none(), st.floats(0.0, 1.0)),
            st.booleans(),
        ),
        max_size=60,
    ),
    st.floats(0.0, 60.0),
)
def test_minute_never_exceeds_its_seconds_and_every_look_is_counted(
    steps: list[tuple[float, GpuUse, float | None, bool]], begin: float
) -> None:
    site = Site().see(begin)
    moments = [begin]
    rows: list[Usage] = []
    for wait, state, utilization, departs in steps:
        moments.append(moments[-1] + wait)
        if departs:
            site.leave(moments[-1] - wait / 3)
        site.see(moments[-1], state=state, utilization=utilization)
        rows += (over := site.meter.finished())
        site.meter.written(over)
    rows += site.meter.so_far()
    assert len({row.minute for row in rows}) == len(rows)
    for row in rows:
        assert 0 < sum(row.seconds.values()) <= 60.0 + 1e-9
        assert row.utilization is None or 0 <= row.utilization <= 1 + 1e-9
    clocked = [NOON + moment - BOOTED for moment in moments]
    looked_at = sum(late - early for early, late in pairwise(clocked) if late - early <= LONGEST_GAP)
    assert sum(sum(row.seconds.values()) for row in rows) == pytest.approx(looked_at, abs=1e-3)
