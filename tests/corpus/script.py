"""What a job does, as a list of segments in each of which nothing changes: the ground truth behind a trace."""

import math
import random
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeVar

from stoker.gpus.model import Trust
from tests.corpus.boards import Board, Range

T = TypeVar("T")

MINUTE: Final = 60.0
HOUR: Final = 3600.0
NEVER: Final = math.inf

Sampling = Literal["buffered", "momentary", "means"]
"""The driver's buffered samples; one sample per look; a counter that covers all the time but has no peak."""
Listing = Literal["shares", "own", "no shares", "foreign", "hidden"]
"""Processes with what each of them used; only the job's own, as in a container; without what each used; with pids of
another namespace; no list at all."""


class Load(NamedTuple):
    """What a job makes of one GPU."""

    utilization: float = 0.0
    peak: float = 0.0
    watts: float = 0.0
    memory: float = 0.0
    """Memory-controller utilization."""
    sm: float = 0.0
    tensor: float = 0.0
    dram: float = 0.0
    link: float = 0.0
    """Bytes per second over PCIe and NVLink."""
    held: float = 0.0
    """GiB of device memory of the job; 0: it has no context and its process is not listed."""
    throttling: tuple[str, ...] = ()


class Segment(NamedTuple):
    """A stretch of time."""

    seconds: float
    loads: tuple[Load, ...]
    """One for each GPU of the machine."""
    step_every: float = NEVER
    line_every: float = NEVER
    """Seconds between lines of output."""
    ends_step: bool = False
    """Whether a step is done at the end of this segment."""
    saves: bool = False
    """Whether a checkpoint is written at the end of this segment."""
    cpu: float = 0.1
    io: float = 0.0
    collective: bool = False
    """Whether a collective of PyTorch is pending all the time, as its watchdog sees it."""
    telemetry_every: float = NEVER
    """Seconds between entries in the event files that no step has caused."""


class Guest(NamedTuple):
    """A process on the machine that does not belong to the job."""

    name: str
    user: str
    pid: int
    gpus: tuple[int, ...]
    utilization: float
    watts: float
    """On top of what the board draws anyway."""
    memory: float = 0.0
    held: float = 0.3
    period: float = NEVER
    """It works once per period, for `length`; without a period all the time."""
    length: float = NEVER
    offset: float = 0.0
    resident: bool = True
    """Whether it holds its context between the times it works."""

    def share_of(self, begun: float, ended: float) -> float:
        """The share of this stretch of time in which it works."""
        if self.period == NEVER:
            return 1.0
        if ended <= begun:
            return float((ended - self.offset) % self.period < self.length)
        worked = self._worked(ended) - self._worked(begun)
        return worked / (ended - begun)

    def _worked(self, until: float) -> float:
        whole, rest = divmod(until - self.offset, self.period)
        return whole * self.length + min(rest, self.length)


class Fault(NamedTuple):
    """A stretch of time in which looks fail."""

    begun: float
    ended: float
    kind: Literal["look", "absent", "gpu", "gone", "gap", "clock"]
    """The whole look failed; no GPU was listed in it; one GPU failed; it is not listed; nobody looked; the wall clock
    was wrong by a day."""
    reason: str = ""
    gpu: int = 0


class Setting(NamedTuple):
    """The machine, and how it and the job are seen."""

    board: Board
    gpus: int
    """How many the machine has."""
    used: int
    """How many the job uses, from the first on."""
    every: float
    sampling: Sampling
    listing: Listing
    trust: Trust
    seen: bool = True
    """Whether the job's progress, CPU time and I/O can be seen; its processes always are."""
    user: str = "alice"


class Draw:
    """Random choices of one trace."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def between(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)

    def within(self, limits: Range) -> float:
        return self._random.uniform(*limits)

    def minutes(self, low: float, high: float) -> float:
        return self._random.uniform(low, high) * MINUTE

    def hours(self, low: float, high: float) -> float:
        return self._random.uniform(low, high) * HOUR

    def count(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def one_of(self, choices: Sequence[T]) -> T:
        return self._random.choice(choices)

    def chance(self, share: float) -> bool:
        return self._random.random() < share

    def pid(self) -> int:
        return self._random.randint(2_000, 400_000)


class Script:
    """Builds the segments of one job on one machine."""

    def __init__(self, draw: Draw, setting: Setting) -> None:
        self.draw = draw
        self.setting = setting
        self.board = setting.board
        self.segments: list[Segment] = []
        self.guests: list[Guest] = []
        self.faults: list[Fault] = []
        self.now = 0.0
        self.from_when: float | None = None
        """The second from which a stop is right."""
        self.sends_heartbeats = True
        """Whether it is a training loop, into which heartbeats can be built."""
        self._held = draw.between(0.25, 0.92) * setting.board.memory

    # Loads of a GPU

    def bare(self) -> Load:
        """The job has no context there."""
        return Load(watts=self.board.bare * self.draw.between(0.97, 1.05))

    def resting(self, held: float | None = None) -> Load:
        """A context, and no kernel."""
        watts = self.board.context * self.draw.between(0.95, 1.06)
        return Load(watts=watts, held=self._held if held is None else held)

    def training(self, level: float | None = None) -> Load:
        """`level`: where in the board's usual range of watts."""
        draw, (low, high) = self.draw, self.board.busy
        part = draw.between(0.1, 0.95) if level is None else level
        utilization = draw.between(0.84, 0.995)
        return Load(
            utilization=utilization,
            peak=1.0,
            watts=low + (high - low) * part,
            # Many small kernels, or much arithmetic on little data, leave the memory alone for most of the time.
            memory=draw.between(0.22, 0.72) if draw.chance(0.8) else draw.between(0.04, 0.2),
            sm=draw.between(0.62, 0.93),
            tensor=draw.between(0.12, 0.48),
            dram=draw.between(0.16, 0.55),
            link=draw.between(1e9, 4e10),
            held=self._held,
        )

    def light(self, utilization: float, *, depth: float = 0.5, memory: float | None = None) -> Load:
        """Kernels for a part of the time. `depth`: how much of the chip they use while they run."""
        draw, board = self.draw, self.board
        full = board.busy[0] + (board.busy[1] - board.busy[0]) * 0.5
        busy = utilization * depth
        return Load(
            utilization=utilization,
            peak=min(1.0, utilization * draw.between(1.3, 2.5) + 0.05),
            watts=board.context * draw.between(0.97, 1.08) + (full - board.context) * busy * draw.between(0.7, 1.0),
            memory=busy * draw.between(0.3, 0.6) if memory is None else memory,
            sm=busy * draw.between(0.6, 0.9),
            tensor=busy * draw.between(0.05, 0.3),
            dram=busy * draw.between(0.2, 0.5) if memory is None else memory * draw.between(0.6, 0.9),
            link=busy * draw.between(1e8, 5e9),
            held=self._held,
        )

    def spinning(self, watts: float | None = None) -> Load:
        """A collective that waits: its kernel runs all the time on a few of the SMs and touches no memory."""
        draw = self.draw
        return Load(
            utilization=1.0 if draw.chance(0.8) else draw.between(0.985, 0.998),
            peak=1.0,
            watts=draw.within(self.board.spin) if watts is None else watts,
            memory=0.0 if draw.chance(0.65) else draw.between(0.003, 0.012),
            sm=draw.between(0.03, 0.17),
            tensor=0.0,
            dram=draw.between(0.0, 0.004),
            link=draw.between(0.0, 2e5),
            held=self._held,
        )

    def watts_of(self, low: float, high: float) -> float:
        """A place between idle with a context (0) and the middle of training (1), in watts."""
        full = sum(self.board.busy) / 2
        return self.board.context + (full - self.board.context) * self.draw.between(low, high)

    # Segments

    def everywhere(self, load: Load) -> tuple[Load, ...]:
        """This load on each GPU that the job uses, the others bare. Boards of one machine differ a little."""
        used = [
            load._replace(watts=self._capped(load.watts * self.draw.between(0.97, 1.03)))
            for _ in range(self.setting.used)
        ]
        return (*used, *(self.bare() for _ in range(self.setting.gpus - self.setting.used)))

    def each(self, *loads: Load) -> tuple[Load, ...]:
        """These loads on the first GPUs, the others bare."""
        capped = [load._replace(watts=self._capped(load.watts)) for load in loads]
        return (*capped, *(self.bare() for _ in range(self.setting.gpus - len(loads))))

    def add(
        self,
        seconds: float,
        load: Load | tuple[Load, ...],
        *,
        step_every: float = NEVER,
        line_every: float = NEVER,
        ends_step: bool = False,
        saves: bool = False,
        cpu: float | None = None,
        io: float | None = None,
        collective: bool = False,
        telemetry_every: float = NEVER,
    ) -> None:
        """Appends a segment. A load, which has fields, is meant for all of the job's GPUs."""
        loads = self.everywhere(load) if isinstance(load, Load) else load
        self.segments.append(
            Segment(
                seconds,
                loads,
                step_every,
                line_every,
                ends_step,
                saves,
                self.draw.between(0.9, 1.3) * self.setting.used if cpu is None else cpu,
                self.draw.between(1e4, 3e7) if io is None else io,
                collective,
                telemetry_every,
            )
        )
        self.now += seconds

    def start(self, low: float = 0.5, high: float = 6.0) -> None:
        """Imports, reading the data set's index, loading weights."""
        self.add(self.draw.between(10, 50), self.everywhere_bare(), cpu=self.draw.between(0.7, 1.4), io=4e7)
        self.add(self.draw.minutes(low, high), self.resting(), line_every=20, cpu=self.draw.between(0.8, 3), io=2e8)

    def everywhere_bare(self) -> tuple[Load, ...]:
        return tuple(self.bare() for _ in range(self.setting.gpus))

    def train(
        self,
        seconds: float,
        *,
        step_every: float | None = None,
        load: Load | tuple[Load, ...] | None = None,
        save_every: float | None = None,
    ) -> None:
        """Steps at a steady pace with a log line every few steps, and now and then a short save."""
        draw = self.draw
        pace = (
            draw.one_of((0.15, 0.4, 1.1, 3.0, 8.0, 25.0)) * draw.between(0.7, 1.4) if step_every is None else step_every
        )
        lines = pace * draw.one_of((1, 10, 50)) if pace < 20 else pace
        loads = self.everywhere(self.training()) if load is None else load
        if isinstance(loads, Load):
            loads = self.everywhere(loads)
        apart = draw.minutes(15, 60) if save_every is None else save_every
        resting = self.everywhere(self.resting())
        left = seconds
        while left > 0:
            part = min(left, apart)
            self.add(part, loads, step_every=pace, line_every=lines)
            left -= part
            if left > 0:
                length = min(draw.between(4, 45), left)
                self.add(length, resting, saves=True, cpu=draw.between(0.8, 1.6), io=draw.between(2e8, 2e9))
                left -= length

    def hang(self) -> None:
        """From here on nothing is done any more. A stop is right once a person would be sure of that."""
        self.from_when = self.now + self.draw.minutes(2, 5)

    def _capped(self, watts: float) -> float:
        return watts if self.board.limit is None else min(watts, self.board.limit * 1.01)
