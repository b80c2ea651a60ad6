"""One attempt at a job, on disk: what an engine runs, and what became of it.

An attempt's directory is a run's record with this beside it:

    attempt.json     the attempt spec, written before the job starts
    delivered.json   the same, once the queue has the outcome and the last of the log
    output           what the job printed, and `output.1` the older part of it
    socket           where the local engine's shim listens for a worker
    fit.json         how its batch size was found, if it was
    code, code-*     the code that it runs, with --pin or --snapshot, while it runs
    code.tar.z       the same as an archive, where its machine does not reach the queue
    snoozed.json     which snooze asked for through the queue was applied last, if any
"""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, TypeAlias

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

# In the environment of every process of an attempt: its id, which no other attempt has.
ATTEMPT_TAG: Final = "STOKER_ATTEMPT_ID"
UNDELIVERED: Final = "attempt.json"
_DELIVERED: Final = "delivered.json"
# Its code, where its machine does not reach the queue.
ARCHIVE: Final = "code.tar.z"
_FIT: Final = "fit.json"
_SNOOZED: Final = "snoozed.json"
# Everything of a job must be gone before its lease ends: the time the kernel needs to take a large process apart.
LONGEST_MARGIN: Final = 15.0
MARGIN_SHARE: Final = 0.1

# The code of a process that was killed by SIGKILL: where the kernel does that for lack of memory, too.
_KILLED: Final = 128 + signal.SIGKILL
# The error that ends a program is in its last lines.
_LAST_OUTPUT: Final = 64 * 1024

TIME_LIMIT: Final[FailureCause] = "time-limit"
_FAILURES: Final[Mapping[str, FailureCause]] = {"rule": "", "could not start": "start"}
_NO_FAILURES: Final[Mapping[str, Outcome]] = {
    "cancelled": "cancelled",
    "preempted": "preempted",
    "not started": "requeued",
}
StopCause: TypeAlias = Literal["cancelled", "preempted", "lease"]
"""Why a worker stops an attempt; `lease`: the queue has given it up, and another worker may run the job."""


class BatchSizeFit(msgspec.Struct, frozen=True, kw_only=True):
    """How the batch size of a job is found; part of its attempt spec."""

    spec: FitSpec
    command: Command
    """As the job has it, with or without placeholders for the size and the id."""
    job: str
    number: int
    """Of the attempt: its probes have other ids than those of other attempts."""
    most_memory: int | None = None
    """Bytes that it may use on each GPU that it shares."""


class AttemptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to run one attempt to its end without a worker. Engines add what they need to find it again."""

    attempt: str
    job: str
    number: int
    queue: str
    """The address of the queue, valid in any directory and environment."""
    plan: Plan
    environment: dict[str, str]
    """What differs from the worker's own environment."""
    without: tuple[str, ...] = ()
    """Variables that the worker has and the job does not."""
    gpus: tuple[str, ...] = ()
    lease: float
    lease_until: float
    """On `lease_clock()`."""
    log_limit: int
    fitting: BatchSizeFit | None = None
    """How its batch size is found before it starts."""
    commit: str | None = None
    """Run a worktree of this commit instead of the directory as it is."""
    code: CodeSnapshot | None = None
    """Run this code, which the queue has."""
    started: float
    """Seconds since the epoch."""
    requeue_at_limit: bool = False
    """Whether it goes back to the queue when its time is over."""

    @property
    def stop_before_end(self) -> float:
        """How long before the end of the lease a job must be asked to end, so that nothing of it is left then."""
        return self.plan.grace + self.margin

    @property
    def margin(self) -> float:
        """How long before the end of the lease a job is killed that did not end when it was asked to."""
        return min(LONGEST_MARGIN, self.lease * MARGIN_SHARE)


class AttemptResult(msgspec.Struct, frozen=True, tag="result"):
    """How an attempt ended, as the queue keeps it."""

    outcome: Outcome
    exit_code: int | None
    reason: str
    cause: FailureCause = ""
    """By what it failed, for `--retry-on`; empty when it did not."""


class AppliedSnooze(msgspec.Struct, frozen=True):
    """The snooze from the queue that was applied last: the next worker must not apply it again."""

    until: float
    """As the database gave it; 0 when a snooze was ended."""
    by: str


class AttemptRecord(Record):
    """The directory of one attempt."""

    @property
    def output(self) -> Path:
        return self.directory / "output"

    def write_attempt(self, attempt_spec: AttemptSpec) -> bytes:
        """Returns what is written. Raises OSError."""
        content = msgspec.json.encode(attempt_spec)
        # Private: the address of the queue may hold a password.
        write_atomically(f"{self.directory}/{UNDELIVERED}", content)
        return content

    def has_attempt(self) -> bool:
        """Whether there is an attempt whose outcome was not delivered, readable or not."""
        return (self.directory / UNDELIVERED).exists()

    def delivered(self) -> None:
        """The queue has everything of this attempt."""
        try:
            (self.directory / UNDELIVERED).replace(self.directory / _DELIVERED)
            (self.directory / ARCHIVE).unlink(missing_ok=True)
        except OSError:
            return  # another process did it, or the disk is gone: then it is delivered again, and refused

    def checked_status(self) -> Status:
        """Like `status`, but raises OSError when it is there and cannot be read."""
        try:
            os.close(os.open(self.directory / "status.json", os.O_RDONLY | os.O_CLOEXEC))
        except (FileNotFoundError, NotADirectoryError):
            return Status()
        return self.status()

    def write_fit(self, fitted: Fitted) -> None:
        """Raises OSError."""
        self._replace(_FIT, fitted)

    def fit(self) -> Fitted | None:
        """None until a size is found."""
        try:
            return msgspec.json.decode((self.directory / _FIT).read_bytes(), type=Fitted)
        except (OSError, ValueError):
            return None

    def write_applied_snooze(self, applied: AppliedSnooze) -> None:
        """Raises OSError."""
        self._replace(_SNOOZED, applied)

    def applied_snooze(self) -> AppliedSnooze | None:
        try:
            return msgspec.json.decode((self.directory / _SNOOZED).read_bytes(), type=AppliedSnooze)
        except (OSError, ValueError):
            return None

    def _replace(self, name: str, value: msgspec.Struct) -> None:
        write_atomically(f"{self.directory}/{name}", msgspec.json.encode(value))


def lease_clock() -> float:
    """The clock of leases, which goes on while the machine sleeps."""
    return boot_clock()


CANCELLED: Final = "It was cancelled."
"""Why a job is stopped that somebody has cancelled."""


def why_stopped(reason: str) -> str:
    """The reason of an outcome, which is not repeated in it."""
    return "" if reason.rstrip(".") == CANCELLED.rstrip(".") else reason


def result_of(
    status: Status, requeue_at_limit: bool = False, output: Path | None = None, kills: int = 0
) -> AttemptResult:
    """The result of an attempt, from the last status that its supervisor wrote.

    `output`: what it printed; `kills`: processes of this machine that the kernel has killed for lack of memory while it
    ran.
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
    """Back to the queue, unless it was watched and showed no sign of progress, not even output: it would never end."""
    if status.progress is not None and status.progress.trust == "none":
        return _out_of_time(status, f"{reason}, and it made no progress: it is not requeued")
    return AttemptResult("requeued", None, reason, TIME_LIMIT)


def _failure(code: int | None, output: Path | None, kills: int) -> tuple[str, FailureCause]:
    """Why it died, in words and as a cause."""
    if code == _KILLED and kills:
        return "it was killed for lack of RAM", "oom"
    if output is not None and is_out_of_memory(read_tail(output, _LAST_OUTPUT), code) is not None:
        return _death(code), "oom"
    return _death(code), "exit"


def _death(code: int | None) -> str:
    """By which signal it died; other exit codes only the command can explain."""
    try:
        return f"it died of {signal.Signals((code or 0) - 128).name}"
    except ValueError:
        return ""
