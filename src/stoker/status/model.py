"""The state of machines, GPUs, jobs and the queue at one moment."""

from typing import Final, Literal

import msgspec

from stoker.queue.explanation import Why
from stoker.queue.fields import State
from stoker.queue.groups import Group
from stoker.queue.model import Attempt, ClusterNode, Failure, Job, WorkerGpu
from stoker.rules.rule import RuleWarning
from stoker.units import format_memory

Level = Literal["good", "attention", "bad"]

# Numbers shown on a screen; the rest is only counted.
MOST_RUNNING: Final = 200
MOST_WAITING: Final = 50
MOST_ENDED: Final = 20


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a job, by the last progress bar in its log."""

    fraction: float | None
    """Of 1; None if unknown."""
    text: str
    """The bar's own figures without its drawing: `317/1000 [02:11<04:40, 2.44it/s, loss=0.31]`."""
    remaining: float | None = None
    """Seconds, from the bar."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """One worker and its GPUs."""

    worker: str
    host: str
    there: bool
    """Whether it sent a recent heartbeat. Otherwise its GPUs are unknown."""
    left: bool = False
    """Whether it stopped regularly."""
    seen: float
    started: float
    paused: bool
    problem: str | None
    simulated: bool
    absent: bool = False
    """Whether it has no GPU, which is not an error."""
    gpus: tuple[WorkerGpu, ...]
    """A GPU with jobs has their submitters as its `user`."""
    cluster: str = ""
    """The name of the cluster that its jobs run on; empty if they run on its own GPUs."""
    nodes: tuple[ClusterNode, ...] = ()
    """The machines of the cluster, unless the worker is lost."""
    engine: str = "local"
    version: str = ""
    """Its version of Stoker; empty if unknown."""
    labels: tuple[str, ...] = ()
    cpus: int | None = None
    """Total CPUs for its jobs; None if not counted."""
    cpus_taken: int = 0
    ram: int | None = None
    """Bytes."""
    ram_taken: int = 0

    @property
    def promised(self) -> str:
        """CPUs and RAM requested by running jobs, in words; empty if none."""
        parts = [f"{self.cpus_taken} of {self.cpus} CPUs"] if self.cpus is not None and self.cpus_taken else []
        if self.ram is not None and self.ram_taken:
            parts.append(f"{format_memory(self.ram_taken)} of {format_memory(self.ram)} of RAM")
        return ", ".join(parts)


class RunningJob(msgspec.Struct, frozen=True, kw_only=True):
    job: Job
    attempt: Attempt | None
    host: str
    gpus: tuple[str, ...]
    """The names of its GPUs."""
    why: Why
    progress: Progress | None
    last_line: str
    """The last line of its log, without escapes."""
    figures: dict[str, float | None] = {}
    """The newest values of its metrics near the end of its log; None if not a number."""
    snoozed_until: float | None = None
    warning: RuleWarning | None = None
    """The current warning of a rule."""

    @property
    def where(self) -> str:
        """Where it runs, if not on GPUs of its host: `Slurm job 4711 on node1`."""
        return self.attempt.where if self.attempt is not None else ""


class WaitingJob(msgspec.Struct, frozen=True, kw_only=True):
    job: Job
    why: Why


class EndedJob(msgspec.Struct, frozen=True, kw_only=True):
    job: Job
    why: Why
    stopped: str
    """The kind of the verdict that it was stopped by, such as `idle`; empty if no rule stopped it."""


class HealthIssue(msgspec.Struct, frozen=True, kw_only=True):
    """One issue."""

    level: Level
    message: str
    job: str | None = None
    host: str | None = None
    failure: Failure | None = None
    """The kind of its failures, which can be dismissed."""
    until: float | None = None
    """End of the newest of them."""


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The overall health."""

    level: Level
    headline: str
    """A few words: `All is well: 7 of 8 GPUs are in use`, `2 things need attention`."""
    points: tuple[HealthIssue, ...] = ()
    """Worst first."""


class GpuHours(msgspec.Struct, frozen=True, kw_only=True):
    """GPU-hours over a period."""

    since: float
    jobs: float = 0.0
    background: float = 0.0
    others: float = 0.0
    """Other users."""
    idle: float = 0.0
    unknown: float = 0.0
    saved: float = 0.0
    """Estimated GPU time saved by rules; see `status.usage`."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Queue, machines and jobs at one moment, by the database's clock."""

    now: float
    place: str
    """The queue's address, without a password."""
    paused: bool
    counts: dict[State, int]
    pending: int = 0
    """Number of running jobs that wait in the queue of a cluster."""
    machines: tuple[Machine, ...]
    running: tuple[RunningJob, ...]
    """Started jobs, newest first, then pending ones."""
    waiting: tuple[WaitingJob, ...]
    """Queued and held, in queue order."""
    groups: tuple[Group, ...] = ()
    """Groups with several jobs of which some run or wait among these, first in line first."""
    ended: tuple[EndedJob, ...]
    """The last jobs to end, newest first."""
    health: Health
    hours: GpuHours

    @property
    def begun(self) -> int:
        """Number of started jobs."""
        return max(0, self.counts.get("running", 0) - self.pending)

    @property
    def simulated(self) -> bool:
        """Whether any GPUs are simulated: every screen then says so."""
        return any(machine.simulated for machine in self.machines)
