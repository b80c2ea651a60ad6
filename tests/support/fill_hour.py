"""An hour of people coming and going on eight GPUs, on a simulated clock, and what the filler made of it.

Perception and decisions are the filler's own (`OtherUsers`, `Slot`). The machine, the people and the moments at which
the filler looks are simulated: scans and looks at the interval, and one of each soon after an event.
"""

import itertools
import math
import random
import unittest.mock
from collections.abc import Iterator
from typing import Final, NamedTuple

from stoker.fill.config import Background
from stoker.fill.other_users import OtherUsers
from stoker.fill.slot import Slot, StartProgram, StopProgram
from stoker.gpus.model import Look
from stoker.presence.holders import DeviceHolder, Scan
from stoker.procfs import Identity
from tests.support.looks import a_gpu, a_process, a_reading

HOUR: Final = 3600.0
GPUS: Final = 8
INTERVAL: Final = 10.0
GRACE: Final = 10.0
# The worst that is promised of an events, not what is usual.
SLOWEST_EVENT: Final = 0.5
# After a user came or left, the second sample covers only the time after it.
CLEAN_AFTER: Final = 1.0
BETWEEN_STARTS: Final = 60.0
LOADING: Final = 12.0
_PROGRAM: Final = 1000
_OTHER_USER: Final = 2000


class Crowd(NamedTuple):
    """How people come and go, in seconds on the average."""

    absent: float
    present: float
    short: float = 0.3
    """The share of those who stay for some seconds only."""
    without_event: float = 0.2
    """The share of users without device events: in a container with a separate node."""


class Stretch(NamedTuple):
    begin: float
    end: float

    def overlap(self, other: "Stretch") -> float:
        return max(0.0, min(self.end, other.end) - max(self.begin, other.begin))


class Use(NamedTuple):
    stretch: Stretch
    has_event: bool

    @property
    def promise(self) -> float:
        """The longest that a program may run beside it."""
        return (SLOWEST_EVENT if self.has_event else INTERVAL) + GRACE


class Run(NamedTuple):
    """A program from its start until it was asked to end, and until it was gone."""

    begin: float
    asked: float
    gone: float


class SharedGpu:
    """One GPU: its people, its program, and what became of both."""

    def __init__(self, number: int, program: Background, crowd: Crowd, chance: random.Random) -> None:
        self.gpu = a_gpu(number)
        self.slot = Slot(program, (self.gpu.uuid,), 0.0)
        self.uses = list(_uses(crowd, chance))
        self.runs: list[Run] = []
        self._chance = chance
        self._started = 0.0
        self._asked = math.inf
        self.gone_at = math.inf

    @property
    def occupied(self) -> bool:
        return self.slot.state != "waiting"

    def used_within(self, begin: float, end: float, came_before: float = math.inf) -> bool:
        return any(came < min(end, came_before) and left > begin for (came, left), _has_event in self.uses)

    def decide(self, now: float, other_users: OtherUsers, occupied: set[str]) -> None:
        if now >= self.gone_at:
            self.runs.append(Run(self._started, self._asked, now))
            self.gone_at = math.inf
            self.slot.gone(now)
        match self.slot.decide(now, other_users.views(occupied), None):
            case StartProgram():
                self._started, self._asked = now, math.inf
                self.slot.started(now)
            case StopProgram(reason=reason):
                self._asked = now
                self.gone_at = now + self._chance.uniform(0.0, GRACE)
                self.slot.stopping(now, reason)

    def close(self) -> None:
        if self.occupied:
            self.runs.append(Run(self._started, min(self._asked, HOUR), HOUR))

    # What is to be said of the hour

    def longest_beside(self) -> Iterator[tuple[float, Use]]:
        """For every use, how long a program ran beside it."""
        for use in self.uses:
            yield max((use.stretch.overlap(Stretch(run.begin, run.gone)) for run in self.runs), default=0.0), use

    def least_between_starts(self) -> float:
        starts = [run.begin for run in self.runs]
        return min((later - earlier for earlier, later in itertools.pairwise(starts)), default=math.inf)

    def possible(self) -> list[Stretch]:
        """When a program could have run that knew of everybody at once: `idle_for` after each who left."""
        ends = [0.0, *(use.stretch.end for use in self.uses)]
        begins = [*(use.stretch.begin for use in self.uses), HOUR]
        found: list[Stretch] = []
        for left, came in zip(ends, begins, strict=True):
            begin = max(left + self.slot.program.idle_for, found[-1].begin + BETWEEN_STARTS if found else 0.0)
            if begin < came:
                found.append(Stretch(begin, came))
        return found

    def filled(self) -> float:
        ran = [Stretch(run.begin, run.asked) for run in self.runs]
        return sum(stretch.overlap(run) for stretch in self.possible() for run in ran)


def an_hour(crowd: Crowd, idle_for: float, seed: int) -> list[SharedGpu]:
    """Every GPU after it."""
    chance = random.Random(seed)
    program = Background(name="background", command=("true",), idle_for=idle_for, grace=GRACE)
    shared_gpus = [SharedGpu(number, program, crowd, chance) for number in range(GPUS)]
    now = 0.0

    def is_alive(who: Identity) -> bool:
        return shared_gpus[who.pid - _OTHER_USER].used_within(now, now)

    with unittest.mock.patch("stoker.fill.other_users.is_alive", is_alive):
        for now in _moments(shared_gpus, chance):  # noqa: B007 - `is_alive` is asked at that moment
            pass
    for shared in shared_gpus:
        shared.close()
    return shared_gpus


def _moments(shared_gpus: list[SharedGpu], chance: random.Random) -> Iterator[float]:
    """Yields each moment with something to do, before it is done."""
    other_users = OtherUsers(lambda pid: pid < _OTHER_USER, {})
    scans = sorted(_events(shared_gpus, chance))
    next_scan = next_look = looked = 0.0
    again = False
    held: dict[str, tuple[DeviceHolder, ...]] = {}
    now = 0.0
    while now < HOUR:
        yield now
        if now >= next_look:
            other_users.looked(_look(shared_gpus, looked, now))
            looked, next_look, again = now, now + (CLEAN_AFTER if again else INTERVAL), False
        if now >= next_scan or (scans and now >= scans[0]):
            scans = [at for at in scans if at > now]
            next_scan = now + INTERVAL
            before, held = held, {shared.gpu.uuid: _holders(shared, now) for shared in shared_gpus}
            other_users.scanned(Scan(held, 0))
            if before != held:
                next_look, again = now, True
                continue
        for shared in shared_gpus:
            shared.decide(now, other_users, {other.gpu.uuid for other in shared_gpus if other.occupied})
        due = [shared.slot.due(now) for shared in shared_gpus] + [shared.gone_at for shared in shared_gpus]
        # A loop that is woken a moment early decides nothing: time goes on all the same.
        now = max(now + 1e-6, min(next_scan, next_look, *scans[:1], *due))


def _uses(crowd: Crowd, chance: random.Random) -> Iterator[Use]:
    at = chance.expovariate(1 / crowd.absent)
    while at < HOUR:
        stays = chance.uniform(1, 6) if chance.random() < crowd.short else chance.expovariate(1 / crowd.present)
        yield Use(Stretch(at, min(at + stays, HOUR)), chance.random() >= crowd.without_event)
        at += stays + chance.expovariate(1 / crowd.absent)


def _events(shared_gpus: list[SharedGpu], chance: random.Random) -> Iterator[float]:
    """The scans that follow an event."""
    for shared in shared_gpus:
        for use in shared.uses:
            for event in use.stretch if use.has_event else ():
                yield event + chance.uniform(0.005, SLOWEST_EVENT)


def _holders(shared: SharedGpu, now: float, came_before: float = math.inf) -> tuple[DeviceHolder, ...]:
    own = [DeviceHolder(_PROGRAM + shared.gpu.index, 1, "background", "background", "root")] if shared.occupied else []
    others = (
        [DeviceHolder(_OTHER_USER + shared.gpu.index, 1, "python", "python", "alice")]
        if shared.used_within(now, now, came_before)
        else []
    )
    return (*own, *others)


def _look(shared_gpus: list[SharedGpu], before: float, now: float) -> Look:
    gpus = tuple(shared.gpu for shared in shared_gpus)
    readings = []
    for shared in shared_gpus:
        # Who opens a node becomes a process of the driver's only later, and works later still.
        at_work = now - LOADING
        worked = (
            shared.occupied or shared.used_within(before, now, at_work) or any(run.gone > before for run in shared.runs)
        )
        listed = tuple(a_process(holder.pid, started=1, name=holder.name) for holder in _holders(shared, now, at_work))
        readings.append(a_reading(shared.gpu, 0.9 if worked else 0.0, processes=listed))
    return Look("test", now, now, gpus, tuple(readings))
