"""What a worker gives to an attendant: an attempt at a job, kept on disk so that the next worker finds it again.

An attempt's directory is a run's record with this beside it:

    attempt.json     the assignment; written by the worker before the job starts
    delivered.json   the same, once the queue has the outcome and the last of the output
    output           what the job printed, and `output.1` the older part of it
    socket           where the attendant listens for a worker
    fit.json         how its batch size was found, if it was
    heeded.json      which snooze asked for through the queue was heeded last, if any was
"""

import contextlib
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from stoker.engines.local.capacity import ResourceRequest
from stoker.engines.local.fitting import BatchSizeFit
from stoker.fit.model import Fitted
from stoker.paths import write_atomically
from stoker.procfs import Identity
from stoker.queue.model import Outcome
from stoker.runs.plan import Plan
from stoker.runs.processes.syscalls import boot_clock
from stoker.runs.record import Record, Status

# In the environment of everything that an attempt starts: its id, which no other has.
ATTEMPT_TAG: Final = "STOKER_ATTEMPT_ID"
# What `ps` calls an attendant.
SHIM_NAME: Final = "stoker-job"
_UNDELIVERED: Final = "attempt.json"
_DELIVERED: Final = "delivered.json"
_FIT: Final = "fit.json"
_HEEDED: Final = "heeded.json"
# Before a lease ends, everything of the job must be gone: what the kernel needs to take a large process apart.
LONGEST_MARGIN: Final = 15.0
MARGIN_SHARE: Final = 0.1


class AttemptProcesses(msgspec.Struct, frozen=True):
    """The processes that look after a job, each by pid and start time."""

    attendant: tuple[int, int]
    reaper: tuple[int, int]
    cgroup: str | None = None
    """Where everything of the job is, if it has one."""

    @property
    def attendant_identity(self) -> Identity:
        return Identity(*self.attendant)

    @property
    def reaper_identity(self) -> Identity:
        return Identity(*self.reaper)


class AttemptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a job, and all that it takes to see it through without a worker."""

    attempt: str
    job: str
    number: int
    queue: str
    """The address of the queue, to be reached also when there is no worker."""
    host: str
    boot: str
    keepers: AttemptProcesses
    want: ResourceRequest
    """What it holds of the machine."""
    plan: Plan
    environment: dict[str, str]
    """What differs from the worker's own."""
    without: tuple[str, ...] = ()
    """Variables that the worker has and the job does not."""
    gpus: tuple[str, ...] = ()
    lease: float
    lease_until: float
    """On the clock that also counts while the machine sleeps: see `now()`."""
    log_limit: int
    fitting: BatchSizeFit | None = None
    """How its batch size is found before it starts."""
    commit: str | None = None
    """Run a snapshot of this commit instead of the directory as it is."""
    started: float
    """Seconds since the epoch."""

    @property
    def stop_before_end(self) -> float:
        """How long before the end of the lease a job must be asked to end, so that nothing of it is left then."""
        return self.plan.grace + self.margin

    @property
    def margin(self) -> float:
        """How long before the end of the lease a job is killed that did not end when it was asked to."""
        return min(LONGEST_MARGIN, self.lease * MARGIN_SHARE)


class AppliedSnooze(msgspec.Struct, frozen=True):
    """The wish that somebody told the queue and that was heeded last: the next worker must not heed it again."""

    until: float
    """As the database gave it; 0 when a snooze was ended."""
    by: str


class AttemptRecord(Record):
    """The directory of one attempt."""

    @property
    def output(self) -> Path:
        return self.directory / "output"

    def assign(self, attempt_spec: AttemptSpec) -> None:
        # Private: the address of the queue may hold a password.
        self._replace(_UNDELIVERED, attempt_spec)

    def attempt_spec(self) -> AttemptSpec | None:
        """None when its outcome was delivered, or it is not readable."""
        try:
            return msgspec.json.decode((self.directory / _UNDELIVERED).read_bytes(), type=AttemptSpec)
        except (OSError, ValueError):
            return None

    def last_assignment(self) -> AttemptSpec | None:
        """Like `assignment`, but raises OSError when it is there and cannot be read."""
        try:
            os.close(os.open(self.directory / _UNDELIVERED, os.O_RDONLY | os.O_CLOEXEC))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return self.attempt_spec()

    def last_status(self) -> Status:
        """Like `status`, but raises OSError when it is there and cannot be read."""
        try:
            os.close(os.open(self.directory / "status.json", os.O_RDONLY | os.O_CLOEXEC))
        except (FileNotFoundError, NotADirectoryError):
            return Status()
        return self.status()

    def is_assigned(self) -> bool:
        """Whether there is an assignment whose outcome was not delivered, readable or not."""
        return (self.directory / _UNDELIVERED).exists()

    def delivered(self) -> None:
        """The queue has everything: nobody needs to look here again."""
        try:
            (self.directory / _UNDELIVERED).replace(self.directory / _DELIVERED)
        except OSError:
            return  # done by another, or the disk is gone: then it is delivered again, and refused

    def write_fit(self, fitted: Fitted) -> None:
        """A reader sees all of it or nothing. Raises OSError."""
        self._replace(_FIT, fitted)

    def fit(self) -> Fitted | None:
        """None as long as no size was found."""
        try:
            return msgspec.json.decode((self.directory / _FIT).read_bytes(), type=Fitted)
        except (OSError, ValueError):
            return None

    def write_heeded(self, heeded: AppliedSnooze) -> None:
        """Raises OSError."""
        self._replace(_HEEDED, heeded)

    def heeded(self) -> AppliedSnooze | None:
        try:
            return msgspec.json.decode((self.directory / _HEEDED).read_bytes(), type=AppliedSnooze)
        except (OSError, ValueError):
            return None

    def _replace(self, name: str, value: msgspec.Struct) -> None:
        write_atomically(f"{self.directory}/{name}", msgspec.json.encode(value))

    def occupy(self) -> int:
        """A descriptor by which `is_attended` finds the attendant, also when somebody has deleted the directory."""
        return os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def listen(self) -> socket.socket:
        """The attendant's end, for a worker that comes later. Raises OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            with _short_path(self.directory) as path:
                # Left by a try that got no further.
                (self.directory / "socket").unlink(missing_ok=True)
                listener.bind(path)
                os.chmod(path, 0o600)  # noqa: PTH101 - the directory is private, so nobody comes in between
            listener.listen(4)
        except OSError:
            listener.close()
            raise
        return listener

    def connect(self) -> socket.socket:
        """The worker's end. Raises OSError when nobody listens."""
        # It does not wait for an attendant that is stopped and has many in front of its door already.
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            with _short_path(self.directory) as path:
                channel.connect(path)
        except OSError:
            channel.close()
            raise
        return channel


class _short_path:  # noqa: N801 - reads as the function that it is
    """Sockets have short names only: the directory is named by a descriptor of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> str:
        self._descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return f"/proc/self/fd/{self._descriptor}/socket"

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)


def undelivered(home: Path) -> Iterator[tuple[AttemptRecord, AttemptSpec]]:
    """The attempts whose outcomes the queue does not have yet, as far as is known here."""
    try:
        names = sorted(os.listdir(home / "attempts"))  # noqa: PTH208 - thousands of names, one call
    except OSError:
        return
    for name in names:
        record = AttemptRecord(home / "attempts" / name)
        attempt_spec = record.attempt_spec()
        if attempt_spec is not None:
            yield record, attempt_spec


def has_shim(directory: Path) -> bool:
    """Whether an attendant has its attempt there, deleted or not. Raises OSError when that cannot be told."""
    place = os.path.realpath(directory)
    for name in os.listdir("/proc"):  # noqa: PTH208 - one call
        if not name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or somebody else's
            if Path(f"/proc/{name}/comm").read_text(errors="replace").strip() != SHIM_NAME:
                continue
            descriptors = os.listdir(f"/proc/{name}/fd")  # noqa: PTH208 - one call
            if any(_leads_to(f"/proc/{name}/fd/{one}", place) for one in descriptors):
                return True
    return False


def _leads_to(link: str, place: str) -> bool:
    try:
        return os.readlink(link) in {place, f"{place} (deleted)"}  # noqa: PTH115 - also what is no path
    except OSError:
        return False


def now() -> float:
    """What leases are held against."""
    return boot_clock()


def _death(code: int | None) -> str:
    """By which signal it died; what else a code means, only the command knows."""
    try:
        return f"it died of {signal.Signals((code or 0) - 128).name}"
    except ValueError:
        return ""


def conclusion(status: Status) -> tuple[Outcome, int | None, str]:
    """Outcome, exit code and sentence of an attempt, from what its supervisor wrote down last."""
    sentence = status.reason.rstrip(".")
    match "rule" if status.rule else status.ending:
        case "by itself":
            return ("succeeded" if status.exit_code == 0 else "failed"), status.exit_code, _death(status.exit_code)
        case "rule" | "time limit" | "could not start":
            return "failed", status.exit_code, sentence
        case "cancelled":
            return "cancelled", None, sentence
        case "preempted":
            return "preempted", None, sentence
        case "not started":
            return "requeued", None, sentence
    return "lost", None, sentence or "its supervisor was killed"


class _Assigned(msgspec.Struct):
    attempt: str


def is_output_of(directory: Path, attempt: str) -> bool:
    """A link is not followed: what it leads to need not be the output of anything.

    Names of attempts are unique in one queue only, so a directory that says it is of another one is left alone too.
    """
    if not stat.S_ISDIR(_kind(directory)):
        return False
    kinds = [_kind(directory / name) for name in ("output", "output.1")]
    if not any(kinds) or not all(stat.S_ISREG(kind) for kind in kinds if kind):
        return False
    return _owner(directory) in {None, attempt}


def _kind(path: Path) -> int:
    """What kind of file it is; 0 when there is none."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


def _owner(directory: Path) -> str | None:
    """The id of the attempt that it is of, if it says so."""
    for name in ("attempt.json", "delivered.json"):
        try:
            return msgspec.json.decode((directory / name).read_bytes(), type=_Assigned).attempt
        except (OSError, msgspec.DecodeError):
            continue
    return None
