"""The words of this room: the state of machines, GPUs, jobs and the queue at one moment, for people."""

from typing import Final, Literal

import msgspec

from stoker.queue.explanation import Why
from stoker.queue.fields import State
from stoker.queue.model import Attempt, Failure, GpuUse, Job

Level = Literal["good", "attention", "bad"]

# What a screen shows of each; the rest is counted, and listed on a page of its own.
MOST_RUNNING: Final = 200
MOST_WAITING: Final = 50
MOST_ENDED: Final = 20


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a job says it is, by the last progress bar in its output."""

    fraction: float | None
    """Of 1; None when the bar does not say."""
    text: str
    """The bar's own figures without its drawing: `317/1000 [02:11<04:40, 2.44it/s, loss=0.31]`."""
    remaining: float | None = None
    """Seconds, by its own word."""


class GpuCard(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU. None where its worker cannot tell."""

    uuid: str
    index: int
    name: str
    memory_total: int | None
    memory_used: int | None
    utilization: float | None
    state: GpuUse
    user: str
    """For whom: the submitter of its job, the name of a background program, `alice's python (pid 4242)`; or empty."""
    since: float | None
    note: str
    jobs: tuple[str, ...]
    """Ids of the queue's jobs on it."""
    unread_since: float | None = None
    """Since when it cannot be read, whoever holds it."""
    kept_for: str = ""
    """The id of the job that it is kept free for."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One worker and its GPUs."""

    worker: str
    host: str
    there: bool
    """Whether it was heard of lately. What its GPUs did when it was not is told as unknown."""
    left: bool = False
    """Whether it said goodbye: then nobody misses it."""
    seen: float
    started: float
    paused: bool
    problem: str | None
    simulated: bool
    absent: bool = False
    """Whether it has no GPU at all, which is no fault."""
    gpus: tuple[GpuCard, ...]


class RunningJob(msgspec.Struct, frozen=True, kw_only=True):
    job: Job
    attempt: Attempt | None
    host: str
    gpus: tuple[str, ...]
    """What people call its GPUs."""
    why: Why
    progress: Progress | None
    last_line: str
    """The last line that it printed, without escapes."""
    snoozed_until: float | None = None


class WaitingJob(msgspec.Struct, frozen=True, kw_only=True):
    job: Job
    why: Why


class EndedJob(msgspec.Struct, frozen=True, kw_only=True):
    job: Job
    why: Why
    stopped: str
    """The kind of the verdict that it was stopped by, such as `idle`; empty if no rule stopped it."""
    """Whether it was stopped because its GPUs stayed idle."""


class HealthIssue(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that somebody should know."""

    level: Level
    sentence: str
    job: str | None = None
    host: str | None = None
    failure: Failure | None = None
    """It is about jobs that failed so, which somebody may dismiss."""
    until: float | None = None
    """When the newest of them ended."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to "is everything all right?"."""

    level: Level
    headline: str
    """A few words: `All is well: 7 of 8 GPUs are in use`, `2 things need you`."""
    points: tuple[HealthIssue, ...] = ()
    """Worst first."""


class GpuHours(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours over a stretch of time."""

    since: float
    jobs: float = 0.0
    background: float = 0.0
    others: float = 0.0
    """Somebody else's work on the GPUs of our workers."""
    idle: float = 0.0
    unknown: float = 0.0
    saved: float = 0.0
    """What jobs that a rule stopped would have held on to; see `overview.hours`."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Everything at one moment, by the database's clock."""

    now: float
    place: str
    """Where the queue is, for people; no password in it."""
    paused: bool
    counts: dict[State, int]
    machines: tuple[Machine, ...]
    running: tuple[RunningJob, ...]
    waiting: tuple[WaitingJob, ...]
    """Queued and held, in their order."""
    ended: tuple[EndedJob, ...]
    """The last ones, newest first."""
    health: Health
    hours: GpuHours

    @property
    def simulated(self) -> bool:
        """Whether any machine's GPUs are simulated: then every screen says so."""
        return any(machine.simulated for machine in self.machines)
