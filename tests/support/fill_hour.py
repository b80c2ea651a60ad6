"""A simulated hour with users on eight GPUs, and what the filler did.

`OtherUsers` and `Slot` are the real ones. The machine, its users and the times of looks are simulated: scans and looks
at the interval, and one of each soon after an event.
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
# The longest delay of an event, not the usual one.
SLOWEST_EVENT: Final = 0.5
# After a user came or left, a second look spans only the time after it.
CLEAN_AFTER: Final = 1.0
BETWEEN_STARTS: Final = 60.0
LOADING: Final = 12.0
_PROGRAM: Final = 1000
_OTHER_USER: Final = 2000


class UserPattern(NamedTuple):
    """Mean times of users on a GPU, in seconds."""

    absent: float
    present: float
    short: float = 0.3
    """The share of users who stay for a few seconds."""
    without_events: float = 0.2
    """The share of users without events: in a container with another device node."""


class Span(NamedTuple):
    begin: float
    end: float

    def overlap(self, other: "Span") -> float:
        return max(0.0, min(self.end, other.end) - max(self.begin, other.begin))


class OtherUse(NamedTuple):
    span: Span
    has_events: bool

    @property
    def limit(self) -> float:
        """The longest time a program may run beside this user."""
        return (SLOWEST_EVENT if self.has_events else INTERVAL) + GRACE


class Run(NamedTuple):
    """A program: its start, the request to stop, and its end."""

    begin: float
    asked: float
    gone: float


class SimulatedGpu:
    """One GPU with its users, its program, and the history of both."""

    def __init__(self, number: int, program: Background, pattern: UserPattern, chance: random.Random) -> None:
        self.device = a_gpu(number)
        self.slot = Slot(program, (self.device.uuid,), 0.0)
        self.uses = list(_uses(pattern, chance))
        self.runs: list[Run] = []
        self._chance = chance
        self._started = 0.0
        self._asked = math.inf
        self.gone_at = math.inf

    @property
    def occupied(self) -> bool:
        return self.slot.state != "waiting"

    def used_within(self, begin: float, end: float, came_before: float = math.inf) -> bool:
        return any(came < min(end, came_before) and left > begin for (came, left), _has_events in self.uses)

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

    # Results

    def longest_beside(self) -> Iterator[tuple[float, OtherUse]]:
        """For every use by others, how long a program ran beside it."""
        for use in self.uses:
            yield max((use.span.overlap(Span(run.begin, run.gone)) for run in self.runs), default=0.0), use

    def least_between_starts(self) -> float:
        starts = [run.begin for run in self.runs]
        return min((later - earlier for earlier, later in itertools.pairwise(starts)), default=math.inf)

    def possible(self) -> list[Span]:
        """When an ideal program could have run: `idle_for` after each user left."""
        ends = [0.0, *(use.span.end for use in self.uses)]
        begins = [*(use.span.begin for use in self.uses), HOUR]
        found: list[Span] = []
        for left, came in zip(ends, begins, strict=True):
            begin = max(left + self.slot.program.idle_for, found[-1].begin + BETWEEN_STARTS if found else 0.0)
            if begin < came:
                found.append(Span(begin, came))
        return found

    def filled(self) -> float:
        ran = [Span(run.begin, run.asked) for run in self.runs]
        return sum(span.overlap(run) for span in self.possible() for run in ran)


def an_hour(pattern: UserPattern, idle_for: float, seed: int) -> list[SimulatedGpu]:
    """Simulates the hour; returns every GPU."""
    chance = random.Random(seed)
    program = Background(name="background", command=("true",), idle_for=idle_for, grace=GRACE)
    gpus = [SimulatedGpu(number, program, pattern, chance) for number in range(GPUS)]
    now = 0.0

    def is_alive(who: Identity) -> bool:
        return gpus[who.pid - _OTHER_USER].used_within(now, now)

    with unittest.mock.patch("stoker.fill.other_users.is_alive", is_alive):
        for now in _moments(gpus, chance):  # noqa: B007 - read by `is_alive`
            pass
    for gpu in gpus:
        gpu.close()
    return gpus


def _moments(gpus: list[SimulatedGpu], chance: random.Random) -> Iterator[float]:
    """The times of events; each is yielded before it is handled."""
    other_users = OtherUsers(lambda pid: pid < _OTHER_USER, {})
    scans = sorted(_event_scans(gpus, chance))
    next_scan = next_look = looked = 0.0
    again = False
    held: dict[str, tuple[DeviceHolder, ...]] = {}
    now = 0.0
    while now < HOUR:
        yield now
        if now >= next_look:
            other_users.looked(_look(gpus, looked, now))
            looked, next_look, again = now, now + (CLEAN_AFTER if again else INTERVAL), False
        if now >= next_scan or (scans and now >= scans[0]):
            scans = [at for at in scans if at > now]
            next_scan = now + INTERVAL
            before, held = held, {gpu.device.uuid: _holders(gpu, now) for gpu in gpus}
            other_users.scanned(Scan(held, 0))
            if before != held:
                next_look, again = now, True
                continue
        for gpu in gpus:
            gpu.decide(now, other_users, {other.device.uuid for other in gpus if other.occupied})
        due = [gpu.slot.due(now) for gpu in gpus] + [gpu.gone_at for gpu in gpus]
        # A loop that wakes slightly early decides nothing: time must advance.
        now = max(now + 1e-6, min(next_scan, next_look, *scans[:1], *due))


def _uses(pattern: UserPattern, chance: random.Random) -> Iterator[OtherUse]:
    at = chance.expovariate(1 / pattern.absent)
    while at < HOUR:
        stays = chance.uniform(1, 6) if chance.random() < pattern.short else chance.expovariate(1 / pattern.present)
        yield OtherUse(Span(at, min(at + stays, HOUR)), chance.random() >= pattern.without_events)
        at += stays + chance.expovariate(1 / pattern.absent)


def _event_scans(gpus: list[SimulatedGpu], chance: random.Random) -> Iterator[float]:
    """The scans that follow an event."""
    for gpu in gpus:
        for use in gpu.uses:
            for event in use.span if use.has_events else ():
                yield event + chance.uniform(0.005, SLOWEST_EVENT)


def _holders(gpu: SimulatedGpu, now: float, came_before: float = math.inf) -> tuple[DeviceHolder, ...]:
    own = [DeviceHolder(_PROGRAM + gpu.device.index, 1, "background", "background", "root")] if gpu.occupied else []
    others = (
        [DeviceHolder(_OTHER_USER + gpu.device.index, 1, "python", "python", "alice")]
        if gpu.used_within(now, now, came_before)
        else []
    )
    return (*own, *others)


def _look(gpus: list[SimulatedGpu], before: float, now: float) -> Look:
    devices = tuple(gpu.device for gpu in gpus)
    readings = []
    for gpu in gpus:
        # The driver lists a process some time after it opens the node.
        at_work = now - LOADING
        worked = gpu.occupied or gpu.used_within(before, now, at_work) or any(run.gone > before for run in gpu.runs)
        listed = tuple(a_process(holder.pid, started=1, name=holder.name) for holder in _holders(gpu, now, at_work))
        readings.append(a_reading(gpu.device, 0.9 if worked else 0.0, processes=listed))
    return Look("test", now, now, devices, tuple(readings))
