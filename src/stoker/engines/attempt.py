"""The directory of one attempt: its spec and its result.

It holds the record of the run, and:

    attempt.json     the attempt spec, written before the job starts
    delivered.json   the same file, renamed once the queue has the outcome and the end of the log
    output           the job's output; `output.1` has the older part
    socket           the local engine's shim listens here for a worker
    fit.json         the batch size that was found, and how
    code, code-*     the job's code with --pin or --snapshot, removed after the run
    code.tar.z       the same code as an archive, if the machine cannot reach the queue
    snoozed.json     the last snooze that was applied on request of the queue
"""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec

from stoker.fit.model import FitSpec, Fitted
from stoker.fit.oom import is_out_of_memory
from stoker.logs.reader import read_tail
from stoker.paths import write_atomically
from stoker.queue.code.archive import CodeSnapshot
from stoker.queue.commands import Command
from stoker.queue.model import FailureCause, Outcome
from stoker.runs.plan import Plan
from stoker.runs.processes.syscalls import boot_clock
from stoker.runs.record import Record, Status

# Every process of an attempt has its id in this variable.
ATTEMPT_TAG: Final = "STOKER_ATTEMPT_ID"
UNDELIVERED: Final = "attempt.json"
_DELIVERED: Final = "delivered.json"
# The code snapshot, if the machine cannot reach the queue.
ARCHIVE: Final = "code.tar.z"
_FIT: Final = "fit.json"
_SNOOZED: Final = "snoozed.json"
# No process may survive the lease, and the kernel needs time to tear down a large one.
LONGEST_MARGIN: Final = 15.0
MARGIN_SHARE: Final = 0.1

# The exit code after SIGKILL, which the kernel's OOM killer sends too.
_KILLED: Final = 128 + signal.SIGKILL
# A program prints its fatal error last.
_LAST_OUTPUT: Final = 64 * 1024

TIME_LIMIT: Final[FailureCause] = "time-limit"
_FAILURES: Final[Mapping[str, FailureCause]] = {"rule": "", "could not start": "start"}
_NO_FAILURES: Final[Mapping[str, Outcome]] = {
    "cancelled": "cancelled",
    "preempted": "preempted",
    "not started": "requeued",
}
StopCause: TypeAlias = Literal["cancelled", "preempted", "lease"]
"""Why a worker stops an attempt; `lease`: it lost the lease, and another worker may run the job."""
T = TypeVar("T")


class BatchSizeFit(msgspec.Struct, frozen=True, kw_only=True):
    """How to find the batch size of a job; part of its attempt spec."""

    spec: FitSpec
    command: Command
    """The job's command, possibly with placeholders for size and id."""
    job: str
    number: int
    """The attempt's number, which keeps the ids of its probes unique."""
    most_memory: int | None = None
    """The limit in bytes on each shared GPU."""


class AttemptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a supervisor needs to run an attempt without a worker. Engines add what identifies it later."""

    attempt: str
    job: str
    number: int
    queue: str
    """The queue's address, valid in any directory and environment."""
    plan: Plan
    environment: dict[str, str]
    """Variables that differ from the worker's environment."""
    without: tuple[str, ...] = ()
    """Variables of the worker that the job does not inherit."""
    gpus: tuple[str, ...] = ()
    lease: float
    lease_until: float
    """On `lease_clock()`."""
    log_limit: int
    fitting: BatchSizeFit | None = None
    """Set if the batch size is found before the job starts."""
    commit: str | None = None
    """The job runs in a worktree of this commit."""
    code: CodeSnapshot | None = None
    """The job runs this code, stored in the queue."""
    started: float
    """Seconds since the epoch."""
    requeue_at_limit: bool = False
    """The job is requeued at its time limit."""

    @property
    def stop_before_end(self) -> float:
        """Seconds before the end of the lease at which the job gets SIGTERM, so that none of it outlives the lease."""
        return self.plan.grace + self.margin

    @property
    def margin(self) -> float:
        """Seconds before the end of the lease at which the job gets SIGKILL."""
        return min(LONGEST_MARGIN, self.lease * MARGIN_SHARE)

    def reaper_deadline(self, until: float) -> float:
        """When the reaper stops a job whose supervisor has not; `until`: the end of the lease."""
        return until - self.margin / 2


class AttemptResult(msgspec.Struct, frozen=True, tag="result"):
    """How an attempt ended, as the queue keeps it."""

    outcome: Outcome
    exit_code: int | None
    reason: str
    cause: FailureCause = ""
    """The cause of a failure, for `--retry-on`; empty otherwise."""


class AppliedSnooze(msgspec.Struct, frozen=True):
    """The last snooze taken from the queue: the next worker must not apply it again."""

    until: float
    """The queue's value; 0 ended a snooze."""
    by: str


class AttemptRecord(Record):
    """The directory of one attempt."""

    @property
    def output(self) -> Path:
        return self.directory / "output"

    def write_attempt(self, attempt_spec: AttemptSpec) -> bytes:
        """Writes the spec and returns the bytes. Raises OSError."""
        content = msgspec.json.encode(attempt_spec)
        # Private: the queue's address may contain a password.
        write_atomically(f"{self.directory}/{UNDELIVERED}", content)
        return content

    def has_attempt(self) -> bool:
        """True if the directory has an undelivered attempt, readable or not."""
        return (self.directory / UNDELIVERED).exists()

    def delivered(self) -> None:
        """Marks the attempt as delivered: the queue has everything."""
        try:
            os.replace(f"{self.directory}/{UNDELIVERED}", f"{self.directory}/{_DELIVERED}")  # noqa: PTH105 - as text
            if os.path.lexists(archive := f"{self.directory}/{ARCHIVE}"):
                os.unlink(archive)  # noqa: PTH108
        except OSError:
            return  # another process did it, or the disk failed: a second delivery is refused

    def checked_status(self) -> Status:
        """Like `status`, but raises OSError if the file exists and cannot be read."""
        try:
            os.close(os.open(self.directory / "status.json", os.O_RDONLY | os.O_CLOEXEC))
        except (FileNotFoundError, NotADirectoryError):
            return Status()
        return self.status()

    def write_fit(self, fitted: Fitted) -> None:
        """Raises OSError."""
        self._replace(_FIT, fitted)

    def fit(self) -> Fitted | None:
        """The batch size that was found; None until then."""
        return self._read(_FIT, Fitted)

    def write_applied_snooze(self, applied: AppliedSnooze) -> None:
        """Raises OSError."""
        self._replace(_SNOOZED, applied)

    def applied_snooze(self) -> AppliedSnooze | None:
        return self._read(_SNOOZED, AppliedSnooze)

    def _read(self, name: str, kind: type[T]) -> T | None:
        """None without such a file, or if it is unreadable."""
        path = f"{self.directory}/{name}"
        if not os.access(path, os.F_OK):
            return None  # as for most attempts; an exception takes longer
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - between two jobs, where Path takes its time
                return msgspec.json.decode(file.read(), type=kind)
        except (OSError, ValueError):
            return None

    def _replace(self, name: str, value: msgspec.Struct) -> None:
        write_atomically(f"{self.directory}/{name}", msgspec.json.encode(value))


def lease_clock() -> float:
    """The clock of leases. It keeps running while the machine is suspended."""
    return boot_clock()


CANCELLED: Final = "It was cancelled."
"""The reason of a cancelled run."""


def why_stopped(reason: str) -> str:
    """The reason, or nothing where the outcome already says it."""
    return "" if reason.rstrip(".") == CANCELLED.rstrip(".") else reason


def result_of(
    status: Status, requeue_at_limit: bool = False, output: Path | None = None, kills: int = 0
) -> AttemptResult:
    """The result of an attempt, derived from the last status of its supervisor.

    `output`: the job's log; `kills`: the number of OOM kills on this machine during the run.
    """
    reason = status.reason.rstrip(".")
    kind = "rule" if status.rule else status.ending or ""
    if kind == "exited" and status.exit_code == 0:
        return AttemptResult("succeeded", 0, "")
    if kind == "exited":
        return AttemptResult("failed", status.exit_code, *_failure(status.exit_code, output, kills))
    if kind == "time limit":
        return _at_limit(status, reason) if requeue_at_limit else _out_of_time(status, reason)
    if kind in _FAILURES:
        return AttemptResult("failed", status.exit_code, reason, status.rule or _FAILURES[kind])
    if kind in _NO_FAILURES:
        return AttemptResult(_NO_FAILURES[kind], None, why_stopped(reason))
    return AttemptResult("lost", None, reason or "its supervisor was killed", "lost")


def _out_of_time(status: Status, reason: str) -> AttemptResult:
    return AttemptResult("failed", status.exit_code, reason, TIME_LIMIT)


def _at_limit(status: Status, reason: str) -> AttemptResult:
    """Requeues the job, unless it was watched and made no progress at all: it would never end."""
    if status.progress is not None and status.progress.trust == "none":
        return _out_of_time(status, f"{reason}, and it made no progress: it is not requeued")
    return AttemptResult("requeued", None, reason, TIME_LIMIT)


def _failure(code: int | None, output: Path | None, kills: int) -> tuple[str, FailureCause]:
    """The reason and the cause of a failure."""
    if code == _KILLED and kills:
        return "it was killed for lack of RAM", "oom"
    if output is not None and is_out_of_memory(read_tail(output, _LAST_OUTPUT), code) is not None:
        return _death(code), "oom"
    return _death(code), "exit"


def _death(code: int | None) -> str:
    """The signal that killed the command, if one did."""
    try:
        return f"it died of {signal.Signals((code or 0) - 128).name}"
    except ValueError:
        return ""
