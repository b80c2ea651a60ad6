"""The interface of worker and shim: the attempt on disk, the shim's socket, and the messages."""

import contextlib
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

import msgspec

from stoker.engines.attempt import UNDELIVERED, AttemptRecord, AttemptResult, AttemptSpec, StopCause
from stoker.engines.local.capacity import ResourceRequest
from stoker.procfs import Identity

# A plain number: the flags of an enum take as long to combine as the message takes to send.
_FLAGS: Final = int(socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
_RECEIVE_FLAGS: Final = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
# The name of a shim's process.
SHIM_NAME: Final = "stoker-shim"
_LONGEST: Final = 65536
# Far more than other messages need. A longer attempt spec is read from its file.
_LONGEST_SPEC: Final = _LONGEST // 2


class AttemptProcesses(msgspec.Struct, frozen=True):
    """The supervisors of a job, each by pid and start time."""

    shim: Identity
    reaper: Identity
    cgroup: str | None = None
    """The job's cgroup, if it has one."""


class LocalAttemptSpec(AttemptSpec, frozen=True, kw_only=True):
    """An attempt on this machine."""

    host: str
    boot: str
    processes: AttemptProcesses
    request: ResourceRequest
    """The resources that it holds."""
    submitter: str = ""


# Created once in the fork server, which saves each shim time and 0.6 MB.
_SPEC_DECODER: Final = msgspec.json.Decoder(LocalAttemptSpec)


class LocalAttemptRecord(AttemptRecord):
    """The directory of one attempt of the local engine."""

    def attempt_spec(self) -> LocalAttemptSpec | None:
        """The spec; None if the outcome is delivered or the file is damaged. Raises OSError if it cannot be read."""
        try:
            return _SPEC_DECODER.decode((self.directory / UNDELIVERED).read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None

    def hold_open(self) -> int:
        """Opens a descriptor by which `has_shim` finds the shim, even if the directory is deleted."""
        return os.open(self.directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def listen(self) -> socket.socket:
        """The shim's socket, for a worker that starts later. Raises OSError."""
        listener = _socket()
        try:
            with _socket_path(self.directory) as path:
                # An earlier failed try may have left it.
                (self.directory / "socket").unlink(missing_ok=True)
                listener.bind(path)
                os.chmod(path, 0o600)  # noqa: PTH101 - the directory is private
            listener.listen(4)
        except OSError:
            listener.close()
            raise
        return listener

    def connect(self) -> socket.socket:
        """Connects the worker to the shim. Raises OSError if no shim listens."""
        # Non-blocking: a suspended shim with a full backlog must not block the worker.
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
    """The socket's path via a descriptor of its directory, since socket paths are limited to 107 bytes."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/socket"
    finally:
        os.close(descriptor)


def has_shim(directory: Path) -> bool:
    """True if a shim runs the attempt of this directory, deleted or not. Raises OSError if that is unknown."""
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


# Messages, one per packet


class ShimReady(msgspec.Struct, frozen=True, tag="ready"):
    """From an idle shim. The first one brings the connection to its reaper."""

    processes: AttemptProcesses


class StartAttempt(msgspec.Struct, frozen=True, tag="start"):
    """From the worker: run the attempt of this directory."""

    directory: str
    spec: bytes = b""
    """The content of `attempt.json`; empty if that is too long."""
    is_claimed: bool = True
    """False: prepare the attempt, and run nothing before `AttemptClaimed`. The directory does not exist until then."""

    @classmethod
    def of(cls, record: LocalAttemptRecord, spec: bytes) -> "StartAttempt":
        return cls(str(record.directory), spec if len(spec) <= _LONGEST_SPEC else b"")

    @classmethod
    def ahead(cls, directory: Path, spec: bytes) -> "StartAttempt | None":
        """None when the spec is too long for a message."""
        return cls(str(directory), spec, is_claimed=False) if len(spec) <= _LONGEST_SPEC else None

    def attempt_spec(self) -> LocalAttemptSpec | None:
        """The spec; None if it cannot be decoded. Raises OSError."""
        if not self.spec:
            return LocalAttemptRecord(Path(self.directory)).attempt_spec()
        try:
            return _SPEC_DECODER.decode(self.spec)
        except ValueError:
            return None


class AttemptClaimed(msgspec.Struct, frozen=True, tag="claimed"):
    """From the worker: the attempt that was prepared is claimed, and runs."""

    lease_until: float
    """On `lease_clock()`."""
    is_ordered: bool = False
    """The worker orders the start from the reaper, too."""


class LeaseRenewed(msgspec.Struct, frozen=True, tag="renewed"):
    """From the worker: the lease now lasts until this moment on `lease_clock()`."""

    until: float


class StopAttempt(msgspec.Struct, frozen=True, tag="stop"):
    """From the worker: stop the job."""

    ending: StopCause
    reason: str


class ResultRecorded(msgspec.Struct, frozen=True, tag="recorded"):
    """From the worker: the queue has the result, which the shim had sent as AttemptResult."""


ShimMessage: TypeAlias = (
    ShimReady | StartAttempt | AttemptClaimed | LeaseRenewed | StopAttempt | AttemptResult | ResultRecorded
)

_DECODER: Final = msgspec.msgpack.Decoder[ShimMessage](ShimMessage)


class ShimChannel:
    """One end of the connection between a worker and a shim. The worker's may include one to the shim's reaper."""

    def __init__(self, connection: socket.socket, *, is_new: bool = False) -> None:
        """`is_new`: the first message brings the connection to the reaper."""
        self._connection = connection
        self._is_new = is_new
        self.open = True
        self._reaper: socket.socket | None = None

    def fileno(self) -> int:
        return self._connection.fileno()

    def reaper_fileno(self) -> int:
        """-1 without a connection to the reaper."""
        return -1 if self._reaper is None else self._reaper.fileno()

    @staticmethod
    def encoded(message: ShimMessage) -> bytes:
        return msgspec.msgpack.encode(message)

    def send(self, message: ShimMessage) -> bool:
        """Sends a message; False if the other end is closed."""
        try:
            # A suspended peer must not block this end.
            self._connection.send(self.encoded(message), _FLAGS)
        except OSError:
            return False
        return True

    def send_with(self, message: ShimMessage, descriptor: int) -> bool:
        """Like `send`; the other end receives a copy of the descriptor by `receive_with`."""
        try:
            socket.send_fds(self._connection, [self.encoded(message)], [descriptor], _FLAGS)
        except OSError:
            return False
        return True

    def can_order_start(self) -> bool:
        """Whether there is a reaper that `order_start` reaches."""
        if self._reaper is None:
            return False
        poll = select.poll()
        poll.register(self._reaper.fileno(), 0)
        return not poll.poll(0)  # a hang-up says that nobody reads

    def order_start(self, order: bytes) -> None:
        """Orders the start of the prepared attempt from the reaper. The shim does, too, if that fails."""
        if self._reaper is not None:
            with contextlib.suppress(OSError):
                self._reaper.send(order, _FLAGS)

    def receive_report(self) -> ShimMessage | None:
        """The result of an attempt from its reaper, if there is one."""
        if self._reaper is None:
            return None
        try:
            packet = self._reaper.recv(_LONGEST, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            packet = b""
        if packet:
            return _decoded(packet)
        self._close_reaper()
        return None

    def receive(self) -> ShimMessage | None:
        """The next message, if any. `open` becomes false when the other end closes."""
        try:
            packet = self._receive_first() if self._is_new else self._connection.recv(_LONGEST, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            packet = b""
        if not packet:
            self.open = False
            return None
        return _decoded(packet)

    def _receive_first(self) -> bytes:
        packet, descriptors, _flags, _address = socket.recv_fds(self._connection, _LONGEST, 1, _RECEIVE_FLAGS)
        self._is_new = False
        for descriptor in descriptors:
            self._reaper = socket.socket(fileno=descriptor)
        return packet

    def _close_reaper(self) -> None:
        if self._reaper is not None:
            self._reaper.close()
            self._reaper = None

    def close(self) -> None:
        self.open = False
        with contextlib.suppress(OSError):
            self._connection.close()
        self._close_reaper()


def _decoded(packet: bytes) -> ShimMessage | None:
    try:
        message: ShimMessage = _DECODER.decode(packet)
    except msgspec.DecodeError:
        return None  # from another version of Stoker
    return message
