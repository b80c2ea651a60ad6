"""What the queue holds: jobs, the attempts at them, and the workers that make those."""

import math
import re
from typing import Any, Final, Literal, NamedTuple

import msgspec

from stoker.errors import BadInputError

State = Literal["queued", "held", "running", "succeeded", "failed", "cancelled"]
Outcome = Literal["succeeded", "failed", "cancelled", "preempted", "requeued", "lost"]
Place = Literal["first", "last", "up", "down"]
Order = Literal["newest", "queue"]
Side = Literal["before", "after"]
Failure = Literal["failed", "stopped"]
"""How a job failed: by itself, or because a rule stopped it."""
GpuUse = Literal["job", "background", "somebody", "free", "unknown"]

ENDED: Final[tuple[State, ...]] = ("succeeded", "failed", "cancelled")
ID: Final = re.compile(r"[0-9a-f]{8}")
# A name or a tag is one line of a table; more belongs in the command.
LONGEST_LABEL: Final = 200
# A worker counts as there when it was heard within so many seconds: several heartbeats may be missed on a bad network.
HEARD_WITHIN: Final = 60.0


# What `sweep.named` puts behind the name of a sweep: `lr=1e-3 seed=1`.
_OF_SWEEP: Final = re.compile(r"(?P<name>.+?) [A-Za-z_][A-Za-z0-9_.-]*=")


def sweep_name(name: str) -> str:
    """The name of the sweep that a job of this name is of; empty when it is of none that has one."""
    found = _OF_SWEEP.match(name)
    return found["name"] if found else ""


class NoSuchJobError(BadInputError):
    """No job has this id or name, nor an id that begins so."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked for: the part of a job that they may edit."""

    command: str | tuple[str, ...]
    """Text for the shell, or the words of a command that needs none."""
    directory: str = "/"
    environment: dict[str, str] = {}
    """What is added to the worker's own environment."""
    name: str = ""
    tags: tuple[str, ...] = ()
    gpus: int = 1
    """How many; 0 for a job that needs none."""
    memory: int | None = None
    """Bytes wanted on each GPU."""
    share: bool = False
    """Whether it may share a GPU with others."""
    batch_size: int | None = None
    """What `{batch_size}` in the command becomes."""
    priority: int = 0
    after: tuple[str, ...] = ()
    """Ids of jobs that must have succeeded."""
    after_any: tuple[str, ...] = ()
    """Ids of jobs that must have ended, however."""
    retries: int = 0
    backoff: float = 30.0
    """Seconds before the first retry; each further one waits twice as long."""
    time_limit: float | None = None
    policy: dict[str, str | int | float | bool | None] = {}
    """The settings of the rules it runs under, as far as they are not the defaults."""
    fit: dict[str, Any] = {}
    """How its batch size is found on the GPUs that it gets, as `stoker fit` takes it; empty: it is not."""
    preemptible: bool = False
    on_loss: Literal["retry", "hold"] = "retry"
    """What becomes of it when the machine that ran it is not heard of again."""
    commit: str | None = None
    dirty: bool | None = None
    pin: bool = False
    """Whether it runs from a snapshot of `commit`."""
    submitter: str = ""
    """Who put it into the queue, for people."""


class NewJob(JobSpec, frozen=True, kw_only=True):
    """A job to be submitted."""

    id: str | None = None
    """Chosen beforehand when other jobs of the same submission come after it."""
    held: bool = False
    origin: str | None = None
    """Where it came from, such as a row of a sheet: the same origin becomes a job only once."""


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
    origin: str | None
    kept: KeptGpus | None = None
    """Only while it waits, and while the worker that keeps them is there."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try at a job: only who knows its id may write its outcome."""

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
    """Since when it cannot be read, whoever holds it; None when it can."""
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
    """Whether its GPUs are not real: whoever shows them says so."""
    absent: bool = False
    """Whether there is no GPU to read at all, which is no fault."""
    left: bool = False
    """Whether its worker has said goodbye; one that is silent and has not is missed."""


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """The process that owns one machine's GPUs; every start of it has an id of its own."""

    id: str
    host: str
    view: View
    started: float
    seen: float
    """When it was last heard of; of one that has left, when it said goodbye."""
    paused: bool

    def is_there(self, now: float) -> bool:
        """Whether it was heard of lately and has not said goodbye since."""
        return not self.view.left and now - self.seen <= HEARD_WITHIN


class Cause(NamedTuple):
    """Why an attempt ended."""

    name: str
    rule: str = ""
    """The rule that stopped it, if one did."""


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
    """The same by the database's clock, 0 when it was ended: by this and who asked, a wish is told from another."""


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


class LogChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A part of an output, on its way to whoever wants it."""

    edition: str
    """Another one begins anew, and may have other lines."""
    start: int
    """Where it begins among all finished lines, in bytes."""
    finished: bytes = b""
    unfinished: bytes = b""
    """The line after them, as it is now."""
    is_behind: bool = False
    """Whether there is more to be had at once."""
    is_complete: bool = False
    """Whether the attempt has ended, and this is the last of it."""

    @property
    def size(self) -> int:
        return self.start + len(self.finished)


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What one GPU did in one minute."""

    host: str
    gpu: str
    """Its uuid."""
    minute: int
    """Minutes since the epoch."""
    seconds: dict[GpuUse, float]
    """How long it did what; together at most a minute, less when nobody looked."""
    utilization: float | None = None
    """The mean, a fraction of 1."""
    memory: int | None = None
    """The most that was in use, in bytes."""


def check(asked: JobSpec) -> None:
    """Refuses what cannot be meant."""
    if not asked.command or (isinstance(asked.command, tuple) and not asked.command[0]):
        raise BadInputError("a job needs a command: none was given")
    _check_numbers(asked)
    for what, label in [("name", asked.name), *(("tag", tag) for tag in asked.tags)]:
        if len(label) > LONGEST_LABEL or any(ord(letter) < 32 for letter in label) or (what == "tag" and not label):
            raise BadInputError(f"{label[:40]!r} cannot be a {what}: one line of at most {LONGEST_LABEL} letters can")
    for needed in (*asked.after, *asked.after_any):
        if not ID.fullmatch(needed):
            raise BadInputError(f"a job cannot come after {needed!r}: that is not the id of a job")


def _check_numbers(asked: JobSpec) -> None:
    for what, number in [("gpus", asked.gpus), ("retries", asked.retries)]:
        if not 0 <= number < 2**31:
            raise BadInputError(f"a job cannot have {what} of {number}: zero or a sensible number is meant")
    if asked.batch_size is not None and not 1 <= asked.batch_size <= 2**31:
        raise BadInputError(f"a batch size of {asked.batch_size} cannot be: one or more is meant")
    if asked.memory is not None and not 0 <= asked.memory < 2**63:
        raise BadInputError(f"a job cannot want {asked.memory} bytes of memory: zero or a sensible number is meant")
    if abs(asked.priority) >= 2**31:
        raise BadInputError(f"a priority of {asked.priority} is too far out: it fits in 32 bits")
    for what, seconds in [("back-off", asked.backoff), ("time limit", asked.time_limit)]:
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
            raise BadInputError(f"a {what} of {seconds} s cannot be: zero or more is meant")
