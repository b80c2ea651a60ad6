"""GPU-hours of a week, what stopping idle jobs saved, and the minutes of the last hour for a chart."""

import pytest

from stoker.queue.model import GpuUse, Usage
from stoker.status.model import GpuHours
from stoker.status.usage import WEEK, gpu_hours, usage_history
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


def test_minute_has_its_main_state() -> None:
    rows = [usage(MINUTE - 1, job=20, free=40), usage(MINUTE, job=30, free=30)]
    (found,) = usage_history(rows, NOW, minutes=2).gpus
    assert found.state == ("free", "job")
    assert usage_history([usage(MINUTE)], NOW, minutes=1).gpus[0].state == (None,)
