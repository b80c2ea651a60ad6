"""What the GPUs did: hours over a week with what stops by rules saved, and minutes over an hour.

What was saved is an estimate: a job that hangs holds its GPUs until a person looks, probably the next
morning. So each such stop saved the time from the stop until now, but no more than
`UNTIL_SOMEBODY_LOOKS`, on each GPU that the job held.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from stoker.queue.model import GpuUse, Usage
from stoker.status.model import GpuHours

WEEK: Final = 7 * 86400.0
# From an evening to the next morning.
UNTIL_SOMEBODY_LOOKS: Final = 12 * 3600.0


def gpu_hours(totals: Mapping[GpuUse, float], stops: Iterable[tuple[float, int]], now: float) -> GpuHours:
    """`totals` are seconds of one GPU since `now - WEEK`; `stops` say when a rule stopped a job and what it freed."""
    since = now - WEEK
    saved = sum(_saved(now - ended) * gpus for ended, gpus in stops if ended >= since)
    return GpuHours(
        since=since,
        jobs=_hours(totals.get("job", 0.0)),
        background=_hours(totals.get("background", 0.0)),
        others=_hours(totals.get("somebody", 0.0)),
        idle=_hours(totals.get("free", 0.0)),
        unknown=_hours(totals.get("unknown", 0.0)),
        saved=_hours(saved),
    )


def _saved(ago: float) -> float:
    # Clocks may differ: a stop in the future has saved nothing yet.
    return min(max(0.0, ago), UNTIL_SOMEBODY_LOOKS)


def _hours(seconds: float) -> float:
    return seconds / 3600.0


# The first of these that shared a minute stands for it.
_IN_ORDER: Final[tuple[GpuUse, ...]] = ("job", "background", "somebody", "unknown", "free")


class GpuSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's minutes; None without a reading."""

    host: str
    gpu: str
    """Its uuid."""
    utilization: tuple[float | None, ...]
    """A fraction of 1."""
    memory: tuple[int | None, ...]
    """Bytes."""
    state: tuple[GpuUse | None, ...]
    """Its main state in the minute."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Several GPUs over the same minutes; the last minute is not over."""

    times: tuple[int, ...]
    """When each minute begins, in seconds since the epoch."""
    gpus: tuple[GpuSeries, ...]


def usage_history(rows: Sequence[Usage], now: float, minutes: int = 60) -> History:
    """The last minutes of every GPU in the rows, by host and uuid."""
    last = int(now // 60)
    first = last - minutes + 1
    by_gpu: dict[tuple[str, str], dict[int, Usage]] = {}
    for row in rows:
        if first <= row.minute <= last:
            by_gpu.setdefault((row.host, row.gpu), {})[row.minute] = row
    return History(
        times=tuple(minute * 60 for minute in range(first, last + 1)),
        gpus=tuple(
            _one(host, gpu, [by_minute.get(minute) for minute in range(first, last + 1)])
            for (host, gpu), by_minute in sorted(by_gpu.items())
        ),
    )


def _one(host: str, gpu: str, rows: Sequence[Usage | None]) -> GpuSeries:
    return GpuSeries(
        host=host,
        gpu=gpu,
        utilization=tuple(None if row is None else row.utilization for row in rows),
        memory=tuple(None if row is None else row.memory for row in rows),
        state=tuple(None if row is None else _mostly(row) for row in rows),
    )


def _mostly(row: Usage) -> GpuUse | None:
    longest = max(_IN_ORDER, key=lambda state: row.seconds.get(state, 0.0))
    return longest if row.seconds.get(longest, 0.0) > 0.0 else None
