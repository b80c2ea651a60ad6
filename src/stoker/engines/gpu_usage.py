"""The state of each GPU per minute, for charts and GPU-hours.

Pure: no clock and no I/O. Durations come from the monotonic clock of the looks; the wall clock only selects the minute.
A look's readings cover the time since the previous look.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from stoker.queue.model import GpuUse, Usage

MINUTE: Final = 60.0
# A machine that swaps may miss several looks. A longer gap counts as unknown.
LONGEST_GAP: Final = 30.0
# Older minutes are dropped, to bound memory while the queue is away for days.
KEPT_MINUTES: Final = 60


class UsagePerMinute:
    """Sums up looks per GPU and minute."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._gpus: dict[str, _Watched] = {}
        self._minutes: dict[tuple[str, int], _Minute] = {}
        self._newest = -(2**63)
        """The minute of the last look."""
        self._written_until: dict[str, float] = {}
        """Wall-clock end of the last written minute of each GPU."""

    def note_end(self, gpu: str, state: GpuUse, at: float) -> None:
        """Records that a job or program left the GPU: it was in this state until `at`, whatever the next look shows."""
        if (watched := self._gpus.get(gpu)) is not None:
            watched.parts.append(_Part(at, state))

    def observe(
        self,
        gpu: str,
        state: GpuUse,
        at: float,
        wall: float,
        utilization: float | None,
        memory: int | None,
        power: float | None = None,
    ) -> None:
        """Adds a look. `at`: monotonic seconds; `wall`: seconds since the epoch."""
        watched = self._gpus.get(gpu)
        self._gpus[gpu] = _Watched(at, [])
        self._turn_to(math.floor(wall / MINUTE))
        if watched is None or not 0 < at - watched.at <= LONGEST_GAP:
            return
        begun, floor = watched.at, self._written_before(gpu, wall)
        for part in (*watched.parts, _Part(at, state)):
            # A stop noticed during the look may be later than the look.
            until = min(part.until, at)
            for minute, seconds in _split(max(begun + wall - at, floor), until + wall - at):
                kept = self._minutes.setdefault((gpu, minute), _Minute())
                kept.add(part.state, seconds, utilization, memory, power)
            begun = max(begun, until)

    def pass_time(self, wall: float) -> None:
        """Ends minutes that pass without a look."""
        self._turn_to(math.floor(wall / MINUTE))

    def forget(self, gpu: str) -> None:
        """Removes a GPU. Its minutes are kept until they are written."""
        self._gpus.pop(gpu, None)
        self._written_until.pop(gpu, None)

    def finished(self) -> list[Usage]:
        """Past minutes that are not written yet."""
        return [self._row(*key) for key in self._minutes if key[1] < self._newest]

    def so_far(self) -> list[Usage]:
        """All unwritten minutes, including the current one."""
        return [self._row(*key) for key in self._minutes]

    def written(self, rows: Iterable[Usage]) -> None:
        """Drops rows that the queue has."""
        for row in rows:
            self._minutes.pop((row.gpu, row.minute), None)
            if row.gpu in self._gpus:
                self._written_until[row.gpu] = (row.minute + 1) * MINUTE

    def _written_before(self, gpu: str, wall: float) -> float:
        """The end of the last written minute; nothing is added before it.

        The clocks drift apart: a look's span may start a few milliseconds before its minute, and would then overwrite
        the row of the previous minute.
        """
        if wall < self._written_until.get(gpu, -math.inf):
            del self._written_until[gpu]  # the clock was set back
        return self._written_until.get(gpu, -math.inf)

    def _turn_to(self, minute: int) -> None:
        if minute != self._newest:
            self._newest = minute
            for key in [key for key in self._minutes if key[1] < minute - KEPT_MINUTES]:
                del self._minutes[key]

    def _row(self, gpu: str, minute: int) -> Usage:
        kept = self._minutes[gpu, minute]
        return Usage(
            host=self._host,
            gpu=gpu,
            minute=minute,
            seconds=dict(kept.seconds),
            utilization=kept.worked / kept.judged if kept.judged else None,
            memory=kept.memory,
            power=kept.joules / kept.metered if kept.metered else None,
        )


class _Part(NamedTuple):
    """A part of the time between two looks, with a state known before the second look."""

    until: float
    state: GpuUse


class _Watched(NamedTuple):
    at: float
    """The time of the last look."""
    parts: list[_Part]


class _Minute:
    """One GPU in one minute."""

    def __init__(self) -> None:
        self.seconds: dict[GpuUse, float] = {}
        self.worked = 0.0
        """Seconds weighted by utilization."""
        self.judged = 0.0
        """Seconds with known utilization."""
        self.memory: int | None = None
        self.joules = 0.0
        self.metered = 0.0
        """Seconds with known power."""

    def add(
        self, state: GpuUse, seconds: float, utilization: float | None, memory: int | None, power: float | None
    ) -> None:
        # A clock set back repeats minutes, but no minute may exceed 60 seconds.
        seconds = min(seconds, MINUTE - sum(self.seconds.values()))
        if seconds <= 0:
            return
        self.seconds[state] = self.seconds.get(state, 0.0) + seconds
        if utilization is not None:
            self.worked += utilization * seconds
            self.judged += seconds
        if memory is not None:
            self.memory = max(memory, self.memory or 0)
        if power is not None:
            self.joules += power * seconds
            self.metered += seconds


def _split(begun: float, until: float) -> Iterator[tuple[int, float]]:
    """Splits a wall-clock span into minutes, with its seconds in each."""
    while begun < until:
        minute = math.floor(begun / MINUTE)
        ends = min(until, (minute + 1) * MINUTE)
        yield minute, ends - begun
        begun = ends
