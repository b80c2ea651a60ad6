"""What each GPU did over the last hour, minute by minute, as a chart wants it: arrays of one length."""

from collections.abc import Sequence
from typing import Final

import msgspec

from stoker.queue.model import GpuUse, Usage

# When a minute was shared, what is named first here is told of it: a job is what people look for.
_IN_ORDER: Final[tuple[GpuUse, ...]] = ("job", "background", "somebody", "unknown", "free")


class GpuSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU's minutes; None where nobody looked."""

    host: str
    gpu: str
    """Its uuid."""
    utilization: tuple[float | None, ...]
    """A fraction of 1."""
    memory: tuple[int | None, ...]
    """Bytes."""
    state: tuple[GpuUse | None, ...]
    """What it did most of the minute."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Several GPUs over the same minutes, the last of which is still under way."""

    times: tuple[int, ...]
    """When each minute begins, in seconds since the epoch."""
    gpus: tuple[GpuSeries, ...]


def series(rows: Sequence[Usage], now: float, minutes: int = 60) -> History:
    """The last so many minutes of every GPU that the rows tell of, by host and uuid."""
    last = int(now // 60)
    first = last - minutes + 1
    told: dict[tuple[str, str], dict[int, Usage]] = {}
    for row in rows:
        if first <= row.minute <= last:
            told.setdefault((row.host, row.gpu), {})[row.minute] = row
    return History(
        times=tuple(minute * 60 for minute in range(first, last + 1)),
        gpus=tuple(
            _one(host, gpu, [by_minute.get(minute) for minute in range(first, last + 1)])
            for (host, gpu), by_minute in sorted(told.items())
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
