"""The data model of the queue: jobs, attempts and workers."""

from typing import Any, Final, Literal, NamedTuple

import msgspec

from stoker.errors import BadInputError
from stoker.queue.fields import JobSpec, State
from stoker.rules.rule import RuleWarning

Outcome = Literal["succeeded", "failed", "cancelled", "preempted", "requeued", "lost"]
FailureCause = str
"""The cause of a failure: `exit`, `oom`, `time-limit`, `start`, `lost`, the name of a rule, or `refused`, which a
cluster would repeat, so it is not retried."""
Place = Literal["first", "last", "up", "down"]
Order = Literal["newest", "queue"]
Side = Literal["before", "after"]
Failure = Literal["failed", "stopped"]
"""The kind of a failure: by itself, or stopped by a rule."""
GpuUse = Literal["job", "background", "somebody", "free", "unknown"]

ENDED: Final[tuple[State, ...]] = ("succeeded", "failed", "cancelled")
# A worker counts as alive for this many seconds after a heartbeat, since a bad network may lose several.
HEARD_WITHIN: Final = 60.0


def is_host(host: str, name: str) -> bool:
    """True if `name` is the host's full name or its first part."""
    host, name = host.lower(), name.lower()
    return host == name or host.startswith(f"{name}.")


class NoSuchJobError(BadInputError):
    """No job has this id or name, or an id that begins with it."""


class KeptGpus(msgspec.Struct, frozen=True, kw_only=True):
    """A reservation of GPUs on one machine for a job that needs more than are free."""

    worker: str
    gpus: tuple[str, ...] = ()
    """Uuids of the reserved GPUs that are free now."""
    until: float | None = None
    """The latest start, by time limits of running jobs; None if one has no limit."""


class Job(JobSpec, frozen=True, kw_only=True):
    """A job in the queue with its state. Times are seconds since the epoch."""

    id: str
    state: State
    position: float
    submitted: float
    started: float | None
    ended: float | None
    not_before: float
    """The end of the backoff before a retry."""
    retries_left: int
    attempts: int
    attempt: str | None
    """The id of the current or last attempt."""
    exit_code: int | None
    reason: str
    """The reason of its state, for people."""
    link: str
    cancel_requested: float | None
    kept: KeptGpus | None = None
    """Its reservation, while it waits and that worker is alive."""

    @property
    def is_pending(self) -> bool:
        """True if it waits in a cluster manager: its state is running, but it has not started."""
        return self.state == "running" and self.started is None

    @property
    def shown_state(self) -> str:
        """Its state for people."""
        return "pending" if self.is_pending else self.state


class ReadyJob(JobSpec, frozen=True, kw_only=True):
    """A job that could start now, with only the fields that matter for placement."""

    shape: str
    """A key shared by jobs with the same requirements, which are interchangeable for placement."""
    position: float
    submitted: float
    kept: KeptGpus | None = None

    @property
    def rank(self) -> tuple[bool, int, float, float, str]:
        """The sort key of placement: preemptible jobs come last."""
        return (self.preemptible, -self.priority, self.position, self.submitted, self.id)


class NotifyUrl(msgspec.Struct, frozen=True, kw_only=True):
    """A notification URL from the page, with its events."""

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
    """Uuids of its GPUs."""
    started: float
    lease_expires: float
    ended: float | None = None
    outcome: Outcome | None = None
    """None while it runs."""
    exit_code: int | None = None
    reason: str = ""
    pending: bool = False
    """It waits in a cluster manager; `started` is then the time of the claim."""
    where: str = ""
    """Its place for people, unless it runs on GPUs of its worker: `Slurm job 4711 on node1`."""


class DeferredStart(msgspec.Struct, frozen=True):
    """When and where a cluster manager runs an attempt, as known so far."""

    pending: bool
    where: str
    began: float | None = None
    """The actual start in seconds since the epoch, by the engine's clock; None while it is pending."""


class WorkerGpu(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU as reported by its worker; None for unknown values."""

    uuid: str
    index: int
    name: str
    memory_total: int | None = None
    memory_used: int | None = None
    utilization: float | None = None
    """Between 0 and 1."""
    memory_activity: float | None = None
    """The fraction of time with memory reads or writes."""
    sm_clock: float | None = None
    """MHz."""
    xids: tuple[int, ...] = ()
    """The last 32 XID errors since its worker started."""
    jobs: tuple[str, ...] = ()
    """Ids of the queue's jobs on it."""
    note: str = ""
    """Why it is not available for other jobs, for people."""
    state: GpuUse = "unknown"
    """`unknown` if it cannot be read or is out of rotation; never `free` then."""
    user: str = ""
    """Its user, if no job: the name of a background program, or `alice's python (pid 4242)`."""
    since: float | None = None
    """The start of this state in seconds since the epoch."""
    unread_since: float | None = None
    """Since when it cannot be read; None if it can."""
    kept_for: str = ""
    """The id of the job that has it reserved; the note has the number of GPUs."""
    quarantine: str = ""
    """Why it is out of rotation, so that nothing starts there; empty if it is in rotation."""
    quarantined_since: float | None = None
    """Seconds since the epoch."""


class ClusterNode(msgspec.Struct, frozen=True, kw_only=True):
    """A machine of a cluster, as reported by the cluster manager."""

    name: str
    partitions: tuple[str, ...] = ()
    state: str = ""
    """The cluster manager's term, for people: `idle`, `mixed`, `drained`."""
    available: bool = True
    """Jobs can start there."""
    reason: str = ""
    """The administrator's reason for taking it out of service."""
    gpus: int = 0
    gpus_allocated: int = 0
    """GPUs allocated to jobs of any user."""
    own: int = 0
    """GPUs allocated to jobs of this queue."""
    gpu_model: str = ""
    cpus: int = 0
    cpus_allocated: int = 0
    memory: int = 0
    """Bytes."""
    features: tuple[str, ...] = ()
    """Features that `--label` matches."""
    jobs: tuple[str, ...] = ()
    """Ids of this queue's jobs on it."""

    @property
    def gpus_free(self) -> int:
        return max(0, self.gpus - self.gpus_allocated) if self.available else 0

    @property
    def gpus_down(self) -> int:
        """Unallocated GPUs that no job can get."""
        return 0 if self.available else max(0, self.gpus - self.gpus_allocated)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's report on its machine or cluster with each heartbeat."""

    engine: str = "local"
    """The name of its engine, as in `stoker work --engine`."""
    gpus: tuple[WorkerGpu, ...] = ()
    cluster: str = ""
    """The name of its cluster; empty if jobs run on its own machine."""
    nodes: tuple[ClusterNode, ...] = ()
    """The machines of the cluster."""
    waiting: dict[str, str] = {}
    """Why jobs do not start there, by job id. Each text is a predicate."""
    warnings: dict[str, RuleWarning] = {}
    """Current warnings of rules, by attempt id. Times are by the worker's clock."""
    problem: str | None = None
    """Why the machine cannot be read; None if it can."""
    simulated: bool = False
    """Its GPUs are simulated."""
    absent: bool = False
    """The machine has no GPU, which is not a problem."""
    left: bool = False
    """Its worker has exited properly; otherwise a silent worker is reported as missing."""
    removed: bool = False
    """A person has removed the machine from the queue."""
    version: str = ""
    """Its version of Stoker."""
    labels: tuple[str, ...] = ()
    """The labels from `stoker work --label`."""
    cpus: int | None = None
    """The CPUs for all its jobs; None if they are not counted."""
    cpus_taken: int = 0
    """The CPUs that running jobs requested."""
    ram: int | None = None
    """The RAM for all its jobs in bytes; None if it is not counted."""
    ram_taken: int = 0


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """The process that owns a machine's GPUs. Every start has a new id."""

    id: str
    host: str
    view: View
    started: float
    seen: float
    """The time of its last heartbeat, or of its exit."""
    paused: bool

    def is_there(self, now: float) -> bool:
        """True if its last heartbeat is recent and it has not exited."""
        return not self.view.left and now - self.seen <= HEARD_WITHIN


# In bytes. A report is a few pages; a longer one is complete only on the machine that ran the job.
LONGEST_REPORT: Final = 256 * 1024
UNREADABLE: Final = "what the queue has of it cannot be read"


class AttemptDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Details of an attempt beyond its outcome."""

    cause: str = ""
    """The ending in its record: `idle`, `time limit` and so on; empty while it runs."""
    rule: str = ""
    """The rule that stopped it, if any. The cause is then the kind of the verdict."""
    report: str = ""
    """The report on a stop, in Markdown."""
    fit: dict[str, Any] = {}
    """The result of its fit: the fields of `fit.model.Fitted`."""


class Snoozed(msgspec.Struct, frozen=True, kw_only=True):
    """A request to keep rules from stopping an attempt for a while."""

    seconds: float
    """Its remaining time; 0 ends it."""
    by: str
    until: float = 0.0
    """The end by the database's clock; 0 if it was ended early. With `by` it identifies the request."""


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """Requests for a worker's attempts, by id."""

    cancelled: frozenset[str] = frozenset()
    snoozed: dict[str, Snoozed] = {}


class LogRequest(NamedTuple):
    """A request for the whole log of an attempt, from another machine."""

    attempt: str
    job: str
    number: int
    worker: str
    """The worker that ran it."""
    edition: str
    """The edition that readers have; empty without any."""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of a GPU in a minute, or in several: then values are means, and peaks those of single minutes."""

    host: str
    gpu: str
    """Its uuid."""
    minute: int
    """The first minute since the epoch."""
    seconds: dict[GpuUse, float]
    """Seconds per use. Their sum is less than the duration if the GPU was not always read."""
    utilization: float | None = None
    """The mean, between 0 and 1."""
    memory: int | None = None
    """The peak in the minute, in bytes."""
    power: float | None = None
    """The mean, in watts."""
    utilization_peak: float | None = None
    memory_peak: int | None = None
    power_peak: float | None = None
