"""Looks shared by several clients: joins those that a client has not seen yet. Pure.

A source reports the time since its last read, but clients read at different moments, so a client may have missed
several looks. Every client has a mark at its last look. Looks between two marks are joined at once, so that there are
never more of them than clients.
"""

from functools import reduce
from typing import Final

import msgspec

from stoker.gpus.model import Look, Maybe, Pipes, Process, Reading, Unknown, Utilization, known

# The driver's longest averaging period. A look this soon after another may find no sample in the buffer, and then takes
# a single one that covers the time between both.
SHORTEST_SPAN: Final = 1.0
# Below this an energy difference is mostly the counter's resolution.
_SHORTEST_POWER_SPAN: Final = 0.5


class _Mark:
    """The position of clients that have seen everything up to the look `at`."""

    __slots__ = ("at", "clients", "looks", "since")

    def __init__(self, at: Look) -> None:
        self.at = at
        self.clients = 0
        self.since: Look | None = None
        """The joined looks after it, until the next mark."""
        self.looks = 0
        """The number of joined looks."""

    def append(self, look: Look, looks: int) -> None:
        self.since = look if self.since is None else joined(self.since, look)
        self.looks += looks


class LookHistory:
    """The looks that at least one client has not seen."""

    def __init__(self) -> None:
        self.latest: Look | None = None
        self.span = 0.0
        """Seconds between the last two looks."""
        self._number = 0
        self._marks: dict[int, _Mark] = {}
        """Marks by number, in order."""

    def add(self, look: Look) -> None:
        self.span = 0.0 if self.latest is None else look.at - self.latest.at
        self.latest = look
        self._number += 1
        if self._marks:
            self._marks[next(reversed(self._marks))].append(look, 1)

    def mark(self) -> int:
        """Creates a mark at the latest look, which must exist."""
        if self._number not in self._marks and self.latest is not None:
            self._marks[self._number] = _Mark(self.latest)
        self._marks[self._number].clients += 1
        return self._number

    @property
    def is_first(self) -> bool:
        """True if there has been only one look."""
        return self._number == 1

    def is_at_end(self, number: int) -> bool:
        return number == self._number

    def since(self, number: int) -> Look:
        """The looks after a mark, joined. There must be at least one."""
        marks = [mark for other, mark in self._marks.items() if other >= number]
        look = reduce(joined, [mark.since for mark in marks if mark.since is not None])
        if sum(mark.looks for mark in marks) == 1:
            return look
        return _with_power(look, marks[0].at)

    def release(self, number: int) -> None:
        """Removes a client from a mark."""
        mark = self._marks[number]
        mark.clients -= 1
        if mark.clients:
            return
        before = [other for other in self._marks if other < number]
        if before and mark.since is not None:
            self._marks[before[-1]].append(mark.since, mark.looks)
        del self._marks[number]


def joined(earlier: Look, later: Look) -> Look:
    """Joins two successive looks. Values missing in the first come from the second alone."""
    if earlier.problem is not None or later.problem is not None:
        return later
    before = {reading.uuid: reading for reading in earlier.readings}
    readings = tuple(
        [later if (first := before.get(later.uuid)) is None else _joined(first, later) for later in later.readings]
    )
    return msgspec.structs.replace(later, readings=readings, note=later.note or earlier.note)


def _joined(earlier: Reading, later: Reading) -> Reading:
    if known(earlier.utilization) != known(later.utilization):
        return later  # its span excludes the uncovered time before it
    before, span = earlier.span, later.span
    return msgspec.structs.replace(
        later,
        span=before + span,
        utilization=joined_use(earlier.utilization, later.utilization, before, span),
        memory_activity=joined_use(earlier.memory_activity, later.memory_activity, before, span),
        power=_mean(earlier.power, later.power, before, span),
        processes=_joined_processes(earlier.processes, later.processes, before, span),
        pipes=_joined_pipes(earlier.pipes, later.pipes, before, span),
    )


def joined_use(
    earlier: Maybe[Utilization], later: Maybe[Utilization], before: float, span: float
) -> Maybe[Utilization]:
    """The peak of both and their mean; unknown if one of them is."""
    if isinstance(earlier, Unknown) or isinstance(later, Unknown):
        return earlier if isinstance(earlier, Unknown) else later
    whole = before + span
    mean = (earlier.mean * before + later.mean * span) / whole if whole > 0 else max(earlier.mean, later.mean)
    samples = earlier.samples + later.samples
    momentary = (earlier.samples == 1) + (later.samples == 1)
    if momentary == 2 or (momentary and (before if earlier.samples == 1 else span) > SHORTEST_SPAN):
        samples = 1  # two momentary samples cover no more time than one
    return Utilization(max(earlier.peak, later.peak), mean, samples)


def _mean(earlier: Maybe[float], later: Maybe[float], before: float, span: float) -> Maybe[float]:
    if isinstance(earlier, Unknown) or isinstance(later, Unknown) or before + span <= 0:
        return later
    return (earlier * before + later * span) / (before + span)


def _joined_processes(
    earlier: Maybe[tuple[Process, ...]], later: Maybe[tuple[Process, ...]], before: float, span: float
) -> Maybe[tuple[Process, ...]]:
    """The processes of the second look, with their activity in both."""
    if isinstance(earlier, Unknown) or isinstance(later, Unknown) or not later:
        return later
    first = {process.pid: process for process in earlier}
    return tuple(
        [
            _joined_process(one, process, before, span)
            if (one := first.get(process.pid)) is not None and one.started == process.started
            else process
            for process in later
        ]
    )


def _joined_process(earlier: Process, later: Process, before: float, span: float) -> Process:
    return msgspec.structs.replace(
        later,
        utilization=_mean(earlier.utilization, later.utilization, before, span),
        memory_activity=_mean(earlier.memory_activity, later.memory_activity, before, span),
    )


def _joined_pipes(earlier: Maybe[Pipes], later: Maybe[Pipes], before: float, span: float) -> Maybe[Pipes]:
    if isinstance(earlier, Unknown) or isinstance(later, Unknown):
        return later
    return Pipes(*(_mean(first, second, before, span) for first, second in zip(earlier, later, strict=True)))


def _with_power(look: Look, before: Look) -> Look:
    """The look with the mean power since `before`, by the energy counter if there is one."""
    elapsed = look.at - before.at
    counters = {reading.uuid: reading.energy for reading in before.readings}
    if elapsed < _SHORTEST_POWER_SPAN:
        return look
    readings = tuple([_counted(reading, counters.get(reading.uuid), elapsed) for reading in look.readings])
    return msgspec.structs.replace(look, readings=readings)


def _counted(reading: Reading, before: Maybe[float] | None, elapsed: float) -> Reading:
    now = reading.energy
    # A counter goes backwards when the driver is reloaded.
    if before is None or not known(before) or not known(now) or not known(reading.power) or now < before:
        return reading
    return msgspec.structs.replace(reading, power=(now - before) / elapsed)
