"""The seam under the worker: an engine runs attempts; the worker claims, renews, delivers and reports for any engine.

An engine is a package with `OPTIONS`, the options that `stoker work` takes for it, `create`, which makes it, and
`check`, which refuses jobs that it can never run.
Nothing above the seam knows of processes, cgroups, machines or a cluster's job ids.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from stoker.engines import EngineOption
from stoker.engines.attempt import (
    LONGEST_MARGIN,
    MARGIN_SHARE,
    AppliedSnooze,
    AttemptRecord,
    AttemptResult,
    AttemptSpec,
    StopCause,
)
from stoker.engines.delivery import LogTail
from stoker.engines.identity import WorkerIdentity
from stoker.errors import BadInputError
from stoker.queue import Attempt, Job, JobSpec
from stoker.queue.model import DeferredStart, ReadyJob, Snoozed, Usage, View
from stoker.rules.rule import RuleWarning
from stoker.runs.plan import DEFAULT_GRACE
from stoker.runs.record import Snooze
from stoker.units import format_duration

# A database that is restarted or moved is back within this time; a machine that died loses its jobs after it.
DEFAULT_LEASE: Final = 600.0
# With a shorter one, a single slow transaction or a machine that swaps looks like a machine that died.
SHORTEST_LEASE: Final = 5.0
# Weeks of output of a normal training; a progress bar that runs wild does not fill the disk.
DEFAULT_LOG_LIMIT: Final = 64 * 2**20

Log = Callable[[str], None]
"""Prints one message for the operator of the worker."""


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a worker that every engine has."""

    engine: str = "local"
    """The name of the engine in `ENGINES`."""
    queue: str | None = None
    """The address of the queue; None for the file in the state directory."""
    lease: float = DEFAULT_LEASE
    grace: float = DEFAULT_GRACE
    log_limit: int = DEFAULT_LOG_LIMIT
    until_empty: bool = False
    labels: tuple[str, ...] = ()
    """What jobs with `--label` look for."""

    def check(self) -> None:
        # Grace and margin must fit into half of the lease; the margin is a share of the lease, with an upper limit.
        needed = min(2 * self.grace / (1 - 2 * MARGIN_SHARE), 2 * (self.grace + LONGEST_MARGIN))
        needed = max(SHORTEST_LEASE, needed)
        if self.lease < needed:
            raise BadInputError(
                f"a lease of {format_duration(self.lease)} leaves no time to stop a job with a grace of "
                f"{format_duration(self.grace)} before it ends: use at least {format_duration(needed)}"
            )


class EngineModule(Protocol):
    """What an engine's package exports."""

    OPTIONS: tuple[EngineOption, ...]

    def create(self, options: WorkerOptions, own: Mapping[str, Any], log: Log) -> "Engine":
        """`own`: the values of its own options. Called in a process of one thread without any connection.

        Raises StokerError.
        """
        ...

    def check(self, job: JobSpec, view: View | None = None) -> None:
        """Raises BadInputError when this engine can never run such a job. Pure.

        `view`: what a live worker with this engine reports; None when only what holds everywhere is checked.
        """
        ...


class CannotTellError(Exception):
    """The engine cannot find out now. Nothing is concluded from that: the worker asks again later."""


class RunningAttempt(ABC):
    """An attempt that an engine has started or found, until the queue has everything of it."""

    def __init__(self, record: AttemptRecord, attempt_spec: AttemptSpec) -> None:
        self.record = record
        self.spec = attempt_spec
        self.since = time.monotonic() - max(0.0, time.time() - attempt_spec.started)
        self.where = ""
        """Where it runs, for people: `GPU 0`, `Slurm job 4711 on node1`."""
        self.pending = False
        """Whether a cluster manager has it and it did not begin."""
        self.began: float | None = None
        """When a cluster manager let it begin, in seconds since the epoch; None if it began with its claim."""
        self.recorded_start: DeferredStart | None = None
        """What the queue knows of that."""
        self.stopping = False
        self.result: AttemptResult | None = None
        """How it ended, once the engine has proof of that."""
        self.provisional = False
        """Whether the result may still change, and is not delivered yet."""
        self.gpu_failed = False
        """Whether it is requeued because of its GPU: others can start here."""
        self.log_tail = LogTail(record, attempt_spec)
        self.recorded = False
        """Whether the queue has the outcome. The last of the log may still be missing."""
        self.snooze_failed = False
        """Whether the last snooze could not be written, which is logged once."""
        self._applied = self._applied_on_disk = record.applied_snooze()
        self._status_version = 0
        self._warning: RuleWarning | None = None

    @property
    def id(self) -> str:
        return self.spec.attempt

    @property
    def job(self) -> str:
        return self.spec.job

    @property
    def deferred_start(self) -> DeferredStart | None:
        """What the queue should know of when and where it runs; None if the claim says everything."""
        if not self.pending and self.began is None:
            return None
        return DeferredStart(self.pending, self.where, None if self.pending else self.began)

    def lasted(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.since if self.began is None else max(0.0, time.time() - self.began)

    @property
    @abstractmethod
    def is_settled(self) -> bool:
        """Whether nothing more is written to its log and report. Always after its result."""

    @abstractmethod
    def stop(self, cause: StopCause, reason: str) -> None:
        """Stops the job, with the grace of its plan. The result follows; one that ended meanwhile keeps its own."""

    @abstractmethod
    def renewed(self, until: float) -> None:
        """The queue holds the lease until then, on `lease_clock()`."""

    @abstractmethod
    def acknowledge(self) -> None:
        """The queue has the result: it need not be kept any longer."""

    def warning(self) -> RuleWarning | None:
        """What its supervisor warns of now, by the status that it wrote last."""
        version = self.record.status_version()
        if version != self._status_version:
            self._status_version, self._warning = version, self.record.status().warning
        return self._warning if self.result is None and not self.stopping else None

    def apply_snooze(self, snooze: Snoozed) -> bool:
        """Writes a snooze where the supervisor reads it. False when it is not new. Raises StokerError.

        One that was applied before is not written again, since the job itself may have asked for something else since.
        One that could not be written is new the next time too.
        """
        applied = AppliedSnooze(snooze.until, snooze.by)
        changed = applied != self._applied and self._write_snooze(snooze)
        self._applied = applied
        if self._applied_on_disk != applied:
            # Until the disk takes it, this worker at least knows.
            with contextlib.suppress(OSError):
                self.record.write_applied_snooze(applied)
                self._applied_on_disk = applied
        return changed

    def _write_snooze(self, snooze: Snoozed) -> bool:
        if snooze.seconds > 0:
            self.record.write_snooze(Snooze(time.monotonic() + snooze.seconds, time.time() + snooze.seconds, snooze.by))
            return True
        # Also ends one that an earlier worker wrote, or that a person asked for on this machine.
        if self.record.snooze() is None:
            return False
        self.record.write_snooze(None)
        return True


AttemptT_co = TypeVar("AttemptT_co", bound=RunningAttempt, covariant=True)


class Found(NamedTuple, Generic[AttemptT_co]):
    """The attempts of an earlier worker that were not known yet."""

    attempts: Sequence[AttemptT_co]
    complete: bool
    """False when something could not be looked at: the worker searches again, and starts nothing until then."""


class Start(NamedTuple):
    """A job that fits now."""

    job: str
    gpus: tuple[str, ...] = ()
    """Uuids of the GPUs it gets."""
    pending: bool = False
    """Whether it is given to a cluster manager, which lets it begin later."""


class Reservation(msgspec.Struct, frozen=True):
    """GPUs that this worker reserves for a job until it has all that it asks for."""

    job: str
    wanted: int
    """How many GPUs it asks for."""
    gpus: tuple[str, ...]
    """Uuids of all that are reserved."""
    ready: tuple[str, ...]
    """Those of them that it could have now."""
    starts_in: float
    """Seconds until it starts at the latest, by the time limits; infinite when nothing bounds it."""
    affects_others: bool = False
    """Whether other jobs wait or stop for it. If not, other workers need not know."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What can start now."""

    start: tuple[Start, ...] = ()
    preempt: tuple[str, ...] = ()
    """What is stopped so that a waiting job has room; passed to `commit` once the reservations are agreed on."""
    reserved: tuple[Reservation, ...] = ()
    never: frozenset[str] = frozenset()
    """The waiting jobs that can never start here."""
    complete: bool = True
    """False when capacity is not known well enough yet: reservations stay as they are, and `step` reports a change."""


class Step(NamedTuple):
    """What has happened since the last step."""

    ended: Sequence[RunningAttempt] = ()
    """The attempts whose result has become known."""
    changed: bool = False
    """Whether jobs may be able to start that could not before."""


class Engine(Protocol):
    """Runs attempts. Attempts outlive the engine object and the worker."""

    @property
    def attempts(self) -> Mapping[str, RunningAttempt]:
        """All attempts by id, from `start` or `find` until `forget`."""
        ...

    @property
    def lease(self) -> float:
        """How long the queue leaves an attempt to this worker without a renewal, in seconds."""
        ...

    def open(self, identity: WorkerIdentity) -> None:
        """Called once, when the worker has its identity."""
        ...

    def find(self) -> Found[RunningAttempt]:
        """Looks for attempts that an earlier worker of this home started, without the queue.

        What no supervisor looks after any more is stopped, for another worker may start the job when the lease ends.
        """
        ...

    def is_started(self, attempt: Attempt) -> bool:
        """Whether anything of this attempt runs, which an earlier worker claimed and `find` did not find.

        Raises CannotTellError.
        """
        ...

    def decide(self, waiting: Sequence[ReadyJob], queue_time: float) -> Decision:
        """Which of these jobs can start now, in their order. `queue_time`: the queue's clock."""
        ...

    def start(self, job: Job, attempt: Attempt, claimed_at: float) -> RunningAttempt:
        """Starts a claimed attempt. `claimed_at`: when the claim was sent, on `lease_clock()`.

        Everything needed to find it again is on disk before the job starts. Raises BadInputError when the job is at
        fault, StokerError or OSError when the engine is; nothing runs then.
        """
        ...

    def commit(self, preempt: Collection[str]) -> None:
        """Ends a round of `decide` and `start`: stops these, and may use what is left for something else."""
        ...

    def forget(self, attempt: str) -> None:
        """The queue has everything of it."""
        ...

    def wait_for(self) -> tuple[Iterable[int], float]:
        """Descriptors, and the monotonic time at which `step` is due at the latest. Called right before each wait."""
        ...

    def step(self, readable: Collection[int]) -> Step:
        """Handles what has come. Raises OSError when the machine is short of something; it is called again."""
        ...

    def report(self) -> View:
        """What the heartbeat says: machines, GPUs, and why jobs of the last decision wait."""
        ...

    def usage(self, *, final: bool = False) -> Sequence[Usage]:
        """What each GPU did in the minutes that are over and not written yet; with the current minute if `final`."""
        ...

    def usage_written(self, rows: Iterable[Usage]) -> None: ...

    def tidy(self) -> None:
        """Removes what ended attempts left behind. Called every few minutes."""
        ...

    def close(self) -> None:
        """Attempts go on; the next worker finds them."""
        ...
