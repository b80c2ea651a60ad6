"""An attempt of the local engine on disk: which processes supervise it, and the socket of its shim."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from stoker.engines.attempt import UNDELIVERED, AttemptRecord, AttemptSpec
from stoker.engines.local.capacity import ResourceRequest
from stoker.procfs import Identity

# The name of a shim's process.
SHIM_NAME: Final = "stoker-shim"


class AttemptProcesses(msgspec.Struct, frozen=True):
    """The processes that supervise a job, each by pid and start time."""

    shim: tuple[int, int]
    reaper: tuple[int, int]
    cgroup: str | None = None
    """The job's cgroup, if it has one."""

    @property
    def shim_identity(self) -> Identity:
        return Identity(*self.shim)

    @property
    def reaper_identity(self) -> Identity:
        return Identity(*self.reaper)


class LocalAttemptSpec(AttemptSpec, frozen=True, kw_only=True):
    """An attempt on this machine."""

    host: str
    boot: str
    processes: AttemptProcesses
    request: ResourceRequest
    """What it holds of the machine."""


class LocalAttemptRecord(AttemptRecord):
    """The directory of one attempt of the local engine."""

    def attempt_spec(self) -> LocalAttemptSpec | None:
        """None when its outcome was delivered, or it is not readable."""
        try:
            return msgspec.json.decode((self.directory / UNDELIVERED).read_bytes(), type=LocalAttemptSpec)
        except (OSError, ValueError):
            return None

    def checked_attempt_spec(self) -> LocalAttemptSpec | None:
        """Like `attempt_spec`, but raises OSError when it is there and cannot be read."""
        try:
            os.close(os.open(self.directory / UNDELIVERED, os.O_RDONLY | os.O_CLOEXEC))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return self.attempt_spec()

    def hold_open(self) -> int:
        """A descriptor by which `has_shim` finds the shim, even after the directory was deleted."""
        return os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def listen(self) -> socket.socket:
        """The shim's end, for a worker that starts later. Raises OSError."""
        listener = _socket()
        try:
            with _socket_path(self.directory) as path:
                # Left by an earlier try that failed.
                (self.directory / "socket").unlink(missing_ok=True)
                listener.bind(path)
                os.chmod(path, 0o600)  # noqa: PTH101 - the directory is private
            listener.listen(4)
        except OSError:
            listener.close()
            raise
        return listener

    def connect(self) -> socket.socket:
        """The worker's end. Raises OSError when no shim listens."""
        # Non-blocking: a shim that is stopped, with a full backlog, is not waited for.
        channel = _socket()
        try:
            with _socket_path(self.directory) as path:
                channel.connect(path)
        except OSError:
            channel.close()
            raise
        return channel


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)


@contextlib.contextmanager
def _socket_path(directory: Path) -> Iterator[str]:
    """The path of the socket through a descriptor of its directory, since socket paths have at most 107 bytes."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/socket"
    finally:
        os.close(descriptor)


def undelivered(home: Path) -> Iterator[tuple[LocalAttemptRecord, LocalAttemptSpec]]:
    """The attempts whose outcomes the queue does not have yet, as far as can be read."""
    try:
        names = sorted(os.listdir(home / "attempts"))  # noqa: PTH208 - thousands of names, one call
    except OSError:
        return
    for name in names:
        record = LocalAttemptRecord(home / "attempts" / name)
        attempt_spec = record.attempt_spec()
        if attempt_spec is not None:
            yield record, attempt_spec


def has_shim(directory: Path) -> bool:
    """Whether a shim runs the attempt of this directory, deleted or not. Raises OSError when that is unknown."""
    path = os.path.realpath(directory)
    for name in os.listdir("/proc"):  # noqa: PTH208 - one call
        if not name.isdigit():
            continue
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # gone, or another user's
            if Path(f"/proc/{name}/comm").read_text(errors="replace").strip() != SHIM_NAME:
                continue
            descriptors = os.listdir(f"/proc/{name}/fd")  # noqa: PTH208 - one call
            if any(_leads_to(f"/proc/{name}/fd/{one}", path) for one in descriptors):
                return True
    return False


def _leads_to(link: str, path: str) -> bool:
    try:
        return os.readlink(link) in {path, f"{path} (deleted)"}  # noqa: PTH115 - also what is no path
    except OSError:
        return False
