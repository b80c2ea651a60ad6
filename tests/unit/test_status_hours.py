"""GPU-hours of a week, what stopping idle jobs saved, and the minutes of the last hour for a chart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.queue.model import GpuUse, Usage
from stoker.status.model import GpuHours
from stoker.status.usage import WEEK, gpu_hours, minutes_per_point, usage_history
from tests.support.status_parts import NOW

HOUR = 3600.0


def test_gpu_seconds_are_converted_to_hours_per_use() -> None:
    totals: dict[GpuUse, float] = {"job": 7200, "background": 1800, "somebody": 900, "free": 3600, "unknown": 0}
    assert gpu_hours(totals, [], NOW) == GpuHours(since=NOW - WEEK, jobs=2, background=0.5, others=0.25, idle=1)
    assert gpu_hours({}, [], NOW) == GpuHours(since=NOW - WEEK)


@pytest.mark.parametrize(
    ("stops", "saved"),
    [
        ([(NOW - 2 * HOUR, 1)], 2),
        ([(NOW - 2 * HOUR, 4)], 8),
        ([(NOW - 50 * HOUR, 2)], 24),
        ([(NOW - 2 * HOUR, 1), (NOW - 13 * HOUR, 1)], 14),
        ([(NOW - HOUR, 0)], 0),
        ([(NOW + 5, 1)], 0),
        ([(NOW - WEEK - 1, 8)], 0),
    ],
)
def test_saving_of_an_idle_stop_is_limited(stops: list[tuple[float, int]], saved: float) -> None:
    assert gpu_hours({}, stops, NOW).saved == saved


# NOW is the beginning of a minute.
MINUTE = int(NOW // 60)


def usage(minute: int, gpu: str = "GPU-0", *, host: str = "box", **seconds: float) -> Usage:
    return Usage(host=host, gpu=gpu, minute=minute, seconds=seconds, utilization=0.5, memory=7)  # type: ignore[arg-type]  # by name


def test_all_series_have_the_same_minutes_with_gaps() -> None:
    rows = [usage(MINUTE - 2, job=60), usage(MINUTE, free=10), usage(MINUTE, "GPU-1", job=10)]
    history = usage_history(rows, NOW + 10, minutes=3)
    assert history.times == tuple((MINUTE - ago) * 60 for ago in (2, 1, 0))
    first, second = history.gpus
    assert (first.gpu, first.utilization, first.memory) == ("GPU-0", (0.5, None, 0.5), (7, None, 7))
    assert first.state == ("job", None, "free")
    assert second.state == (None, None, "job")


def test_older_minutes_and_other_machines_are_kept_apart() -> None:
    rows = [usage(MINUTE - 60, job=60), usage(MINUTE, host="a", free=60), usage(MINUTE, host="b", free=60)]
    history = usage_history(rows, NOW)
    assert len(history.times) == 60
    assert [(found.host, found.state[-1]) for found in history.gpus] == [("a", "free"), ("b", "free")]


@given(minutes=st.integers(1, 7 * 1440), points=st.integers(2, 1440), now=st.integers(0, 10**10))
def test_history_has_at_most_as_many_points_as_asked_for_and_covers_its_time(
    minutes: int, points: int, now: int
) -> None:
    step = minutes_per_point(minutes, points)
    history = usage_history([], NOW + now, minutes, step)
    assert len(history.times) <= points
    assert step == 1 or minutes > points
    last = (NOW + now) // 60 * 60
    assert history.times[0] <= last - (minutes - 1) * 60
    assert history.times[-1] <= last < history.times[-1] + step * 60
    # A point stays where it is while time passes.
    assert all(time % (step * 60) == 0 for time in history.times)


def test_points_of_several_minutes_have_peaks_and_gaps() -> None:
    rows = [
        Usage(
            host="box",
            gpu="GPU-0",
            minute=(MINUTE // 5 - 2) * 5,
            seconds={"job": 120.0, "free": 180.0},
            utilization=0.25,
            utilization_peak=0.75,
            memory=100,
            memory_peak=250,
            power_peak=None,
        )
    ]
    history = usage_history(rows, NOW, minutes=11, step=5)
    assert history.step == 5
    (found,) = history.gpus
    assert (found.utilization, found.utilization_peak) == ((0.25, None, None), (0.75, None, None))
    assert (found.memory, found.memory_peak) == ((100, None, None), (250, None, None))
    assert found.power == found.power_peak == (None, None, None)
    assert found.state == ("free", None, None)
    # The peak of one minute is its value.
    (single,) = usage_history([usage(MINUTE)], NOW, minutes=1).gpus
    assert (single.utilization_peak, single.memory_peak) == ((0.5,), (7,))


def test_minute_has_its_main_state() -> None:
    rows = [usage(MINUTE - 1, job=20, free=40), usage(MINUTE, job=30, free=30)]
    (found,) = usage_history(rows, NOW, minutes=2).gpus
    assert found.state == ("free", "job")
    assert usage_history([usage(MINUTE)], NOW, minutes=1).gpus[0].state == (None,)
