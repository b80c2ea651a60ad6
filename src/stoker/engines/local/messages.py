"""The messages between a worker and its shims: each in one packet of a socket."""

import contextlib
import socket
from typing import Final, TypeAlias

import msgspec

from stoker.engines.attempt import AttemptResult, StopCause
from stoker.engines.local.record import AttemptProcesses

# Far more than any message needs; the attempt spec goes through a file.
_LONGEST: Final = 65536


class ShimReady(msgspec.Struct, frozen=True, tag="ready"):
    """From a shim without an attempt."""

    processes: AttemptProcesses


class StartAttempt(msgspec.Struct, frozen=True, tag="start"):
    """From the worker: run the attempt of this directory."""

    directory: str


class AttemptRunning(msgspec.Struct, frozen=True, tag="running"):
    """From a shim to a worker that has just connected: the job runs."""


class LeaseRenewed(msgspec.Struct, frozen=True, tag="renewed"):
    """From the worker: the queue holds the lease until then, on `lease_clock()`."""

    until: float


class StopAttempt(msgspec.Struct, frozen=True, tag="stop"):
    """From the worker: stop the job."""

    ending: StopCause
    reason: str


class ResultRecorded(msgspec.Struct, frozen=True, tag="recorded"):
    """From the worker: the queue has the result, which a shim sends as AttemptResult."""


ShimMessage: TypeAlias = (
    ShimReady | StartAttempt | AttemptRunning | LeaseRenewed | StopAttempt | AttemptResult | ResultRecorded
)

_DECODER: Final = msgspec.msgpack.Decoder[ShimMessage](ShimMessage)


class ShimChannel:
    """One end of the connection between a worker and a shim."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.open = True

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: ShimMessage) -> bool:
        """False when the other end is gone."""
        try:
            # A peer that is stopped must not block this end.
            self._connection.send(msgspec.msgpack.encode(message), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def receive(self) -> ShimMessage | None:
        """The next message, if there is one; `open` is false once the other end is gone."""
        try:
            packet = self._connection.recv(_LONGEST, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            packet = b""
        if not packet:
            self.open = False
            return None
        try:
            message: ShimMessage = _DECODER.decode(packet)
        except msgspec.DecodeError:
            return None  # from another version of Stoker
        return message

    def close(self) -> None:
        self.open = False
        with contextlib.suppress(OSError):
            self._connection.close()
