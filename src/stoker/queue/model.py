"""What the queue holds: jobs, the attempts at them, and the workers that make those."""

import re
from typing import Any, Final, Literal, NamedTuple

import msgspec

from stoker.errors import BadInputError
from stoker.queue.fields import JobSpec, State

Outcome = Literal["succeeded", "failed", "cancelled", "preempted", "requeued", "lost"]
Place = Literal["first", "last", "up", "down"]
Order = Literal["newest", "queue"]
Side = Literal["before", "after"]
Failure = Literal["failed", "stopped"]
"""How a job failed: by itself, or because a rule stopped it."""
GpuUse = Literal["job", "background", "somebody", "free", "unknown"]

ENDED: Final[tuple[State, ...]] = ("succeeded", "failed", "cancelled")
# A worker counts as there for this many seconds after a heartbeat: a bad network may lose several.
HEARD_WITHIN: Final = 60.0


# What `sweep.variants` puts behind the name of a sweep: `lr=1e-3 seed=1`.
_OF_SWEEP: Final = re.compile(r"(?P<name>.+?) [A-Za-z_][A-Za-z0-9_.-]*=")


def sweep_name(name: str) -> str:
    """The name of the sweep that a job of this name is of; empty when it is of none that has one."""
    found = _OF_SWEEP.match(name)
    return found["name"] if found else ""


class NoSuchJobError(BadInputError):
    """No job has this id, name or beginning of an id."""


class KeptGpus(msgspec.Struct, frozen=True, kw_only=True):
    """The one machine that keeps GPUs free for a job that needs more of them than are free at once."""

    worker: str
    gpus: tuple[str, ...] = ()
    """Uuids of those that it could have now."""
    until: float | None = None
    """When it can start at the latest, by the time limits of what runs there; None when nothing bounds that."""


class Job(JobSpec, frozen=True, kw_only=True):
    """A command in the queue, with what it needs and what became of it. Times are seconds since the epoch."""

    id: str
    state: State
    position: float
    submitted: float
    started: float | None
    ended: float | None
    not_before: float
    """It waits until then: the back-off of a retry."""
    retries_left: int
    attempts: int
    attempt: str | None
    """The id of the current attempt, or of the last one."""
    exit_code: int | None
    reason: str
    """Why it is as it is, for people."""
    link: str
    cancel_requested: float | None
    kept: KeptGpus | None = None
    """Only while it waits, and while the worker that keeps them is there."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try at a job. Its outcome is written by its id alone."""

    id: str
    job: str
    worker: str
    number: int
    gpus: tuple[str, ...]
    """Uuids of the GPUs it was given."""
    started: float
    lease_expires: float
    ended: float | None = None
    outcome: Outcome | None = None
    """None while it runs."""
    exit_code: int | None = None
    reason: str = ""


class WorkerGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as its worker sees it; None where it cannot tell."""

    uuid: str
    index: int
    name: str
    memory_total: int | None = None
    memory_used: int | None = None
    utilization: float | None = None
    """A fraction of 1."""
    jobs: tuple[str, ...] = ()
    """Ids of the queue's jobs that hold it."""
    note: str = ""
    """Why nothing else may have it, for people."""
    state: GpuUse = "unknown"
    """`unknown` when it cannot be read; never `free` then."""
    user: str = ""
    """Whose work it is when it is no job's: the background program's name, or `alice's python (pid 4242)`."""
    since: float | None = None
    """Since when it does that, in seconds since the epoch."""
    unread_since: float | None = None
    """Since when it cannot be read; None when it can."""
    kept_for: str = ""
    """The id of the job that it is kept free for; its note says how many that needs."""


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of its machine with each heartbeat."""

    gpus: tuple[WorkerGpu, ...] = ()
    waiting: dict[str, str] = {}
    """Why jobs do not start there, by their ids, as part of a sentence."""
    problem: str | None = None
    """Why the machine cannot be read, if so."""
    simulated: bool = False
    """Whether its GPUs are simulated, which every view says."""
    absent: bool = False
    """Whether there is no GPU to read at all, which is no fault."""
    left: bool = False
    """Whether its worker has left properly; one that is silent and has not is reported as missing."""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """The process that owns one machine's GPUs; every start has a new id."""

    id: str
    host: str
    view: View
    started: float
    seen: float
    """Its last heartbeat; for a worker that has left, when it left."""
    paused: bool

    def is_there(self, now: float) -> bool:
        """Whether its last heartbeat is recent and it has not left since."""
        return not self.view.left and now - self.seen <= HEARD_WITHIN


class AttemptDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an attempt beyond its outcome, where every machine can read it."""

    cause: str = ""
    """How its run ended, as its record has it: `idle`, `time limit` and the like; empty while it runs."""
    rule: str = ""
    """The name of the rule that stopped it; empty if none did. The cause is then the kind of its verdict."""
    report: str = ""
    """Why it was stopped, in Markdown."""
    fit: dict[str, Any] = {}
    """How its batch size was found: the fields of `fit.model.Fitted`."""


class Snoozed(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody wants an attempt left alone for a while, whatever its GPUs do."""

    seconds: float
    """From now on; 0 ends it."""
    by: str
    until: float = 0.0
    """The same by the database's clock, 0 when it was ended. With `by` it identifies the request."""


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """What people want of a worker's attempts, by their ids."""

    cancelled: frozenset[str] = frozenset()
    snoozed: dict[str, Snoozed] = {}


class LogRequest(NamedTuple):
    """Somebody wants to read the whole output of this attempt, on another machine."""

    attempt: str
    job: str
    number: int
    worker: str
    """Which ran it."""
    edition: str
    """What readers have of it now; empty when they have none."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What one GPU did in one minute."""

    host: str
    gpu: str
    """Its uuid."""
    minute: int
    """Minutes since the epoch."""
    seconds: dict[GpuUse, float]
    """Seconds by use; together at most a minute, less when the GPU was not read."""
    utilization: float | None = None
    """The mean, a fraction of 1."""
    memory: int | None = None
    """The most that was in use, in bytes."""
