"""What the queue holds: jobs, attempts and workers."""

from typing import Any, Final, Literal, NamedTuple

import msgspec

from stoker.errors import BadInputError
from stoker.queue.fields import JobSpec, State
from stoker.rules.rule import RuleWarning

Outcome = Literal["succeeded", "failed", "cancelled", "preempted", "requeued", "lost"]
FailureCause = str
"""By what an attempt failed: `exit`, `oom`, `time-limit`, `start`, `lost`, the name of a rule, or `refused`: a cluster
would refuse it again, so it is not tried again."""
Place = Literal["first", "last", "up", "down"]
Order = Literal["newest", "queue"]
Side = Literal["before", "after"]
Failure = Literal["failed", "stopped"]
"""How a job failed: by itself, or because a rule stopped it."""
GpuUse = Literal["job", "background", "somebody", "free", "unknown"]

ENDED: Final[tuple[State, ...]] = ("succeeded", "failed", "cancelled")
# A worker counts as live for this many seconds after a heartbeat: a bad network may lose several.
HEARD_WITHIN: Final = 60.0


def is_host(host: str, name: str) -> bool:
    """Whether people call this machine so: by its name, or by the first part of it."""
    host, name = host.lower(), name.lower()
    return host == name or host.startswith(f"{name}.")


class NoSuchJobError(BadInputError):
    """No job has this id or name, or an id that begins with it."""


class KeptGpus(msgspec.Struct, frozen=True, kw_only=True):
    """The reservation of GPUs for a job that needs more of them than are free at once; on one machine."""

    worker: str
    gpus: tuple[str, ...] = ()
    """Uuids of those that are free for it now."""
    until: float | None = None
    """When it can start at the latest, by the time limits of the jobs there; None when one has none."""


class Job(JobSpec, frozen=True, kw_only=True):
    """A command in the queue, with what it needs and what became of it. Times are seconds since the epoch."""

    id: str
    state: State
    position: float
    submitted: float
    started: float | None
    ended: float | None
    not_before: float
    """The end of the back-off before a retry."""
    retries_left: int
    attempts: int
    attempt: str | None
    """The id of the current attempt, or of the last one."""
    exit_code: int | None
    reason: str
    """Why it is in its state, for people."""
    link: str
    cancel_requested: float | None
    kept: KeptGpus | None = None
    """Only while it waits and the worker with the reservation is live."""

    @property
    def is_pending(self) -> bool:
        """Whether it was given to a cluster manager and waits there: it is running, and did not start."""
        return self.state == "running" and self.started is None

    @property
    def shown_state(self) -> str:
        """Its state for people."""
        return "pending" if self.is_pending else self.state


class ReadyJob(JobSpec, frozen=True, kw_only=True):
    """A job that could start now, as engines see it before they decide: of its fields only those that place it."""

    shape: str
    """The same for all jobs that fit into the same places: any of them may start in the place of another."""
    position: float
    submitted: float
    kept: KeptGpus | None = None

    @property
    def rank(self) -> tuple[bool, int, float, float, str]:
        """The order in which jobs are considered: preemptible ones use what is left."""
        return (self.preemptible, -self.priority, self.position, self.submitted, self.id)


class NotifyUrl(msgspec.Struct, frozen=True, kw_only=True):
    """A URL that was added on the page, with the events that are sent to it."""

    id: str
    url: str
    """A secret."""
    name: str
    events: tuple[str, ...]
    added: float

    def __repr__(self) -> str:
        return f"<NotifyUrl {self.id}>"


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try at a job. Only its id may write its outcome."""

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
    pending: bool = False
    """Whether a cluster manager has it and it did not begin: `started` is then when it was claimed."""
    where: str = ""
    """Where it runs, for people, if that is not on GPUs of its worker: `Slurm job 4711 on node1`."""


class DeferredStart(msgspec.Struct, frozen=True):
    """What a cluster manager, which decides when and where an attempt runs, has given to it so far."""

    pending: bool
    where: str
    began: float | None = None
    """When it really started, in seconds since the epoch by the engine's clock; None while it is pending."""


class WorkerGpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as its worker sees it; None where a value is unknown."""

    uuid: str
    index: int
    name: str
    memory_total: int | None = None
    memory_used: int | None = None
    utilization: float | None = None
    """A fraction of 1."""
    memory_activity: float | None = None
    """The fraction of time in which its memory was read or written."""
    sm_clock: float | None = None
    """MHz."""
    xids: tuple[int, ...] = ()
    """XID errors since its worker started, at most the last 32."""
    jobs: tuple[str, ...] = ()
    """Ids of the queue's jobs that hold it."""
    note: str = ""
    """Why nothing else may have it, for people."""
    state: GpuUse = "unknown"
    """`unknown` when it cannot be read or is out of rotation; never `free` then."""
    user: str = ""
    """Who uses it if no job does: the name of a background program, or `alice's python (pid 4242)`."""
    since: float | None = None
    """Since when it is in this state, in seconds since the epoch."""
    unread_since: float | None = None
    """Since when it cannot be read; None when it can."""
    kept_for: str = ""
    """The id of the job that it is reserved for; the note says how many GPUs that needs."""
    quarantine: str = ""
    """Why it is out of rotation: nothing is started there; empty when it is not."""
    quarantined_since: float | None = None
    """In seconds since the epoch."""


class ClusterNode(msgspec.Struct, frozen=True, kw_only=True):
    """One machine of a cluster, as the cluster manager reports it."""

    name: str
    partitions: tuple[str, ...] = ()
    state: str = ""
    """For people, in the cluster manager's words: `idle`, `mixed`, `drained`."""
    available: bool = True
    """Whether jobs can start there."""
    reason: str = ""
    """Why it is not available, as its administrator wrote it."""
    gpus: int = 0
    gpus_allocated: int = 0
    """By anybody's jobs."""
    own: int = 0
    """How many of them have jobs of this queue."""
    gpu_model: str = ""
    cpus: int = 0
    cpus_allocated: int = 0
    memory: int = 0
    """In bytes."""
    features: tuple[str, ...] = ()
    """What `--label` finds there."""
    jobs: tuple[str, ...] = ()
    """Ids of this queue's jobs that run there."""

    @property
    def gpus_free(self) -> int:
        return max(0, self.gpus - self.gpus_allocated) if self.available else 0

    @property
    def gpus_down(self) -> int:
        """GPUs that no job has and none can have."""
        return 0 if self.available else max(0, self.gpus - self.gpus_allocated)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker reports of its machine or cluster with each heartbeat."""

    engine: str = "local"
    """The name of its engine, as in `stoker work --engine`."""
    gpus: tuple[WorkerGpu, ...] = ()
    cluster: str = ""
    """The name of the cluster that its jobs run on; empty if they run on its own machine."""
    nodes: tuple[ClusterNode, ...] = ()
    """The machines of the cluster."""
    waiting: dict[str, str] = {}
    """Why jobs do not start there, by their ids, or do not begin on its cluster; each is part of a sentence."""
    warnings: dict[str, RuleWarning] = {}
    """What rules warn of now, by the ids of the attempts that run there. Times are by the worker's clock."""
    problem: str | None = None
    """Why the machine cannot be read; None when it can."""
    simulated: bool = False
    """Whether its GPUs are simulated."""
    absent: bool = False
    """Whether the machine has no GPU, which is not a problem."""
    left: bool = False
    """Whether its worker has exited properly; one that is silent otherwise is reported as missing."""
    removed: bool = False
    """Whether somebody removed the machine from the queue after that."""
    version: str = ""
    """The version of Stoker that it runs."""
    labels: tuple[str, ...] = ()
    """As given to `stoker work --label`."""
    cpus: int | None = None
    """How many CPUs its jobs may have together; None where that is not counted."""
    cpus_taken: int = 0
    """How many of them running jobs asked for."""
    ram: int | None = None
    """The same for RAM, in bytes."""
    ram_taken: int = 0


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


# In bytes. A report is a few pages; one on thousands of processes is complete only on the machine that ran them.
LONGEST_REPORT: Final = 256 * 1024
UNREADABLE: Final = "what the queue has of it cannot be read"


class AttemptDetails(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an attempt beyond its outcome."""

    cause: str = ""
    """How its run ended, as in its record: `idle`, `time limit` and so on; empty while it runs."""
    rule: str = ""
    """The name of the rule that stopped it; empty if none did. The cause is then the kind of its verdict."""
    report: str = ""
    """Why it was stopped, in Markdown."""
    fit: dict[str, Any] = {}
    """How its batch size was found: the fields of `fit.model.Fitted`."""


class Snoozed(msgspec.Struct, frozen=True, kw_only=True):
    """A request that no rule stops an attempt for a while."""

    seconds: float
    """From now on; 0 ends it."""
    by: str
    until: float = 0.0
    """The end by the database's clock; 0 when somebody has ended it. With `by` it identifies the request."""


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """What people want of a worker's attempts, by their ids."""

    cancelled: frozenset[str] = frozenset()
    snoozed: dict[str, Snoozed] = {}


class LogRequest(NamedTuple):
    """A request for the whole log of an attempt, from another machine."""

    attempt: str
    job: str
    number: int
    worker: str
    """The one that ran it."""
    edition: str
    """What readers have of it now; empty when they have nothing."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What one GPU did in one minute, or in several: then values are means, and the peaks those of single minutes."""

    host: str
    gpu: str
    """Its uuid."""
    minute: int
    """Minutes since the epoch; of several, the first."""
    seconds: dict[GpuUse, float]
    """Seconds by use; together at most its length, less when the GPU was not read."""
    utilization: float | None = None
    """The mean, a fraction of 1."""
    memory: int | None = None
    """The most that was in use in the minute, in bytes."""
    power: float | None = None
    """The mean, in watts."""
    utilization_peak: float | None = None
    memory_peak: int | None = None
    power_peak: float | None = None
