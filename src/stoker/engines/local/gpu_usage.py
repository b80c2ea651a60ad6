"""What each GPU did, minute by minute: for charts, and for the hours that people count.

No clock and no I/O. Spans are measured on the clock of the looks, which nobody sets; the wall clock only says to which
minute they belong. What a look shows holds for the stretch since the look before it.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from stoker.queue.model import GpuUse, Usage

MINUTE: Final = 60.0
# Several looks may fail to come on a machine that swaps; of a longer time nobody knows what was done in it.
LONGEST_GAP: Final = 30.0
# What could not be told for longer is dropped: a worker whose queue is away for days must not grow.
KEPT_MINUTES: Final = 60


class UsagePerMinute:
    """Is told of every look, and adds up."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._gpus: dict[str, _Watched] = {}
        self._minutes: dict[tuple[str, int], _Minute] = {}
        self._newest = -(2**63)
        """The minute of the last look."""
        self._told_until: dict[str, float] = {}
        """The end of the last minute of each GPU that was told, by the wall clock."""

    def did(self, gpu: str, state: GpuUse, at: float) -> None:
        """That it did this until `at`, whatever the next look will find: something has just left it."""
        if (watched := self._gpus.get(gpu)) is not None:
            watched.parts.append(_Part(at, state))

    def saw(
        self, gpu: str, state: GpuUse, at: float, wall: float, utilization: float | None, memory: int | None
    ) -> None:
        """A look: `at` in monotonic seconds, `wall` in seconds since the epoch."""
        watched = self._gpus.get(gpu)
        self._gpus[gpu] = _Watched(at, [])
        self._turn_to(math.floor(wall / MINUTE))
        if watched is None or not 0 < at - watched.at <= LONGEST_GAP:
            return
        begun, floor = watched.at, self._told_before(gpu, wall)
        for part in (*watched.parts, _Part(at, state)):
            # A stop that was heard of while the look was under way may be later than it.
            until = min(part.until, at)
            for minute, seconds in _split(max(begun + wall - at, floor), until + wall - at):
                kept = self._minutes.setdefault((gpu, minute), _Minute())
                kept.add(part.state, seconds, utilization, memory)
            begun = max(begun, until)

    def finished(self) -> list[Usage]:
        """The minutes that are over, as far as they were not told yet."""
        return [self._row(*key) for key in self._minutes if key[1] < self._newest]

    def so_far(self) -> list[Usage]:
        """The same with the minute under way."""
        return [self._row(*key) for key in self._minutes]

    def told(self, rows: Iterable[Usage]) -> None:
        """These are where others read them."""
        for row in rows:
            self._minutes.pop((row.gpu, row.minute), None)
            self._told_until[row.gpu] = (row.minute + 1) * MINUTE

    def _told_before(self, gpu: str, wall: float) -> float:
        """Of what was before that nothing is told again.

        The clocks drift against each other: the last look of a new minute may seem to have been in the one before,
        and a row of a few milliseconds would take the place of that minute's.
        """
        if wall < self._told_until.get(gpu, -math.inf):
            del self._told_until[gpu]  # the clock was set back
        return self._told_until.get(gpu, -math.inf)

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
        )


class _Part(NamedTuple):
    """The part of a stretch between two looks that was known before its end."""

    until: float
    state: GpuUse


class _Watched(NamedTuple):
    at: float
    """When it was looked at last."""
    parts: list[_Part]


class _Minute:
    """What is known of one GPU in one minute."""

    def __init__(self) -> None:
        self.seconds: dict[GpuUse, float] = {}
        self.worked = 0.0
        """Seconds, weighted with the utilization in them."""
        self.judged = 0.0
        """Seconds of which the utilization is known."""
        self.memory: int | None = None

    def add(self, state: GpuUse, seconds: float, utilization: float | None, memory: int | None) -> None:
        # A clock that was set back sees a minute twice; no minute has more than its seconds.
        seconds = min(seconds, MINUTE - sum(self.seconds.values()))
        if seconds <= 0:
            return
        self.seconds[state] = self.seconds.get(state, 0.0) + seconds
        if utilization is not None:
            self.worked += utilization * seconds
            self.judged += seconds
        if memory is not None:
            self.memory = max(memory, self.memory or 0)


def _split(begun: float, until: float) -> Iterator[tuple[int, float]]:
    """The minutes that a stretch of the wall clock touches, and how much of it is in each."""
    while begun < until:
        minute = math.floor(begun / MINUTE)
        ends = min(until, (minute + 1) * MINUTE)
        yield minute, ends - begun
        begun = ends
