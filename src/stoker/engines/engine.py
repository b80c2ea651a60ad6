"""The seam under the worker: an engine runs attempts; the worker claims, renews, delivers and reports for any engine.

An engine is a package that exports `OPTIONS`, its options for `stoker work`, `create`, its constructor, and `check`,
which refuses jobs that it can never run. Code above the seam knows no processes, cgroups, machines or cluster job ids.
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

# Long enough to restart or move a database; the jobs of a dead machine are lost after this time.
DEFAULT_LEASE: Final = 600.0
# With a shorter lease, one slow transaction or a machine that swaps looks like a dead machine.
SHORTEST_LEASE: Final = 5.0
# Weeks of output of a normal training; keeps a runaway progress bar from filling the disk.
DEFAULT_LOG_LIMIT: Final = 64 * 2**20

# From the start of an attempt to the first instructions of its job. What can wait leaves it the processor.
STARTS_WITHIN: Final = 0.0003

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
    """Jobs select a worker by these with `--label`."""

    def check(self) -> None:
        # Grace and margin must fit into half of the lease. The margin is a capped share of the lease.
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
        """`own`: the values of `OPTIONS`. Called in a single-threaded process without connections.

        Raises StokerError.
        """
        ...

    def check(self, job: JobSpec, view: View | None = None) -> None:
        """Raises BadInputError if this engine can never run the job. Pure.

        `view`: the report of a live worker of this engine; without it, only checks that hold everywhere are made.
        """
        ...


class CannotTellError(Exception):
    """The engine cannot find out now. The worker concludes nothing and asks again later."""


class RunningAttempt(ABC):
    """An attempt that an engine has started or found. It stays until it is delivered."""

    def __init__(self, record: AttemptRecord, attempt_spec: AttemptSpec) -> None:
        self.record = record
        self.spec = attempt_spec
        self.since = time.monotonic() - max(0.0, time.time() - attempt_spec.started)
        self.where = ""
        """Where it runs, for people: `GPU 0`, `Slurm job 4711 on node1`."""
        self.pending = False
        """It waits in the queue of a cluster manager."""
        self.began: float | None = None
        """When the cluster manager started it, in seconds since the epoch; None if it started with its claim."""
        self.recorded_start: DeferredStart | None = None
        """The start as recorded in the queue."""
        self.stopping = False
        self.result: AttemptResult | None = None
        """The result, once the engine has proof of it."""
        self.provisional = False
        """The result may still change, so it is not delivered yet."""
        self.gpu_failed = False
        """It is requeued because of its GPU: others can start here."""
        self.log_tail = LogTail(record, attempt_spec)
        self.recorded = False
        """The queue has the outcome. The end of the log may still be missing."""
        self.snooze_failed = False
        """The last snooze could not be written. This is logged once."""
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
        """When and where it runs, for the queue; None if it started with its claim."""
        if not self.pending and self.began is None:
            return None
        return DeferredStart(self.pending, self.where, None if self.pending else self.began)

    def lasted(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.since if self.began is None else max(0.0, time.time() - self.began)

    @property
    @abstractmethod
    def is_settled(self) -> bool:
        """True once log and report are complete. Always after its result."""

    @abstractmethod
    def stop(self, cause: StopCause, reason: str) -> None:
        """Stops the job with the grace of its plan. A job that has just ended keeps its own result."""

    @abstractmethod
    def renewed(self, until: float) -> None:
        """The lease now lasts until this moment on `lease_clock()`."""

    @abstractmethod
    def acknowledge(self) -> None:
        """The queue has the result; the engine can discard it."""

    def warning(self) -> RuleWarning | None:
        """The current warning of its supervisor, from its last status."""
        version = self.record.status_version()
        if version != self._status_version:
            self._status_version, self._warning = version, self.record.status().warning
        return self._warning if self.result is None and not self.stopping else None

    def apply_snooze(self, snooze: Snoozed) -> bool:
        """Passes a snooze of the queue on to the supervisor. False if it is not new. Raises StokerError.

        A snooze is applied once, since the job may have requested another one after it. After an error the same snooze
        is still new.
        """
        applied = AppliedSnooze(snooze.until, snooze.by)
        changed = applied != self._applied and self._write_snooze(snooze)
        self._applied = applied
        if self._applied_on_disk != applied:
            # While the disk is full, at least this worker remembers it.
            with contextlib.suppress(OSError):
                self.record.write_applied_snooze(applied)
                self._applied_on_disk = applied
        return changed

    def _write_snooze(self, snooze: Snoozed) -> bool:
        if snooze.seconds > 0:
            self.record.write_snooze(Snooze(time.monotonic() + snooze.seconds, time.time() + snooze.seconds, snooze.by))
            return True
        # Also ends a snooze from an earlier worker or from a person on this machine.
        if self.record.snooze() is None:
            return False
        self.record.write_snooze(None)
        return True


AttemptT_co = TypeVar("AttemptT_co", bound=RunningAttempt, covariant=True)


class Found(NamedTuple, Generic[AttemptT_co]):
    """Attempts of an earlier worker that were unknown so far."""

    attempts: Sequence[AttemptT_co]
    complete: bool
    """False if part of the search failed: the worker searches again, and starts nothing until then."""


class Start(NamedTuple):
    """A job that fits now."""

    job: str
    gpus: tuple[str, ...] = ()
    """Uuids of the GPUs it gets."""
    pending: bool = False
    """True if a cluster manager gets it and starts it later."""


class Reservation(msgspec.Struct, frozen=True):
    """GPUs that this worker reserves for a job until all that it needs are free."""

    job: str
    wanted: int
    """The number of GPUs it needs."""
    gpus: tuple[str, ...]
    """Uuids of all reserved GPUs."""
    ready: tuple[str, ...]
    """Those that are free for it now."""
    starts_in: float
    """Upper bound in seconds until it starts, by time limits; infinite without them."""
    affects_others: bool = False
    """Other jobs wait or stop for it. Otherwise other workers need not know."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What can start now."""

    start: tuple[Start, ...] = ()
    preempt: tuple[str, ...] = ()
    """Attempts to stop for a waiting job; passed to `commit` once the reservations are agreed on."""
    reserved: tuple[Reservation, ...] = ()
    never: frozenset[str] = frozenset()
    """Waiting jobs that can never start here."""
    complete: bool = True
    """False while capacity is unknown: reservations stay, and `step` reports a change."""


class Step(NamedTuple):
    """Events since the last step."""

    ended: Sequence[RunningAttempt] = ()
    """Attempts that have a result now."""
    changed: bool = False
    """More jobs may be able to start."""


class Engine(Protocol):
    """Runs attempts. Attempts outlive the engine object and the worker."""

    @property
    def attempts(self) -> Mapping[str, RunningAttempt]:
        """All attempts by id, from `start` or `find` until `forget`."""
        ...

    @property
    def lease(self) -> float:
        """The lease of an attempt without renewal, in seconds."""
        ...

    def open(self, identity: WorkerIdentity) -> None:
        """Called once, with the worker's identity."""
        ...

    def find(self) -> Found[RunningAttempt]:
        """Finds attempts of earlier workers of this home, without the queue.

        Processes without a supervisor are stopped: another worker may start the job when the lease ends.
        """
        ...

    def is_started(self, attempt: Attempt) -> bool:
        """True if any process of this attempt runs. An earlier worker claimed it, and `find` did not find it.

        Raises CannotTellError.
        """
        ...

    def decide(self, waiting: Sequence[ReadyJob], queue_time: float) -> Decision:
        """The jobs that can start now, in their order. `queue_time`: the queue's clock."""
        ...

    def prepare(self, waiting: Sequence[ReadyJob], read: Callable[[str], Job | None]) -> str:
        """Gets ready what will probably be claimed when an attempt ends; the id that it must be claimed with.

        Nothing of it runs, and no later worker finds it, before `start` is called with that id. If that is for another
        job, or for one that was changed, what was prepared is thrown away; with nothing waiting, it is at once. Empty
        when nothing is prepared: an engine need not do this. `read`: a job of the queue; raises what that raises.
        """
        ...

    def start(self, job: Job, attempt: Attempt, claimed_at: float) -> RunningAttempt:
        """Starts a claimed attempt. `claimed_at`: when the claim was sent, on `lease_clock()`.

        Everything that `find` needs is on disk before the job starts. Raises BadInputError if the job is at fault,
        StokerError or OSError if the engine is; nothing runs then.
        """
        ...

    def commit(self, preempt: Collection[str]) -> None:
        """Ends a round of `decide` and `start`: stops these attempts, and may use the idle rest for something else."""
        ...

    def forget(self, attempt: str) -> None:
        """Drops a delivered attempt."""
        ...

    def wait_for(self) -> tuple[Iterable[int], float]:
        """File descriptors, and the monotonic time when `step` is due at the latest. Called right before each wait."""
        ...

    def step(self, readable: Collection[int]) -> Step:
        """Handles events. Raises OSError if the machine lacks resources; the worker calls it again."""
        ...

    def report(self) -> View:
        """The content of the heartbeat: machines, GPUs, and why jobs of the last decision wait."""
        ...

    def usage(self, *, final: bool = False) -> Sequence[Usage]:
        """The usage of each GPU in past minutes that are not written yet; with the current minute if `final`."""
        ...

    def usage_written(self, rows: Iterable[Usage]) -> None: ...

    def tidy(self) -> None:
        """Removes leftovers of ended attempts. Called every few minutes."""
        ...

    def close(self) -> None:
        """Attempts keep running; the next worker finds them."""
        ...
