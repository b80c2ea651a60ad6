"""What a worker and its attendants say to each other: small messages, each in one packet."""

import contextlib
import socket
from typing import Final, Literal, TypeAlias

import msgspec

from stoker.engines.local.attempt_spec import AttemptProcesses
from stoker.queue.model import Outcome

# Far more than any of them needs; the assignment itself goes by a file.
_LONGEST: Final = 65536


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """From an attendant that has nothing to do."""

    keepers: AttemptProcesses


class StartAttempt(msgspec.Struct, frozen=True, tag="attend"):
    """From the worker: run what is in this directory."""

    directory: str


class AttemptRunning(msgspec.Struct, frozen=True, tag="attending"):
    """From an attendant to a worker that has just come: the job runs."""


class LeaseRenewed(msgspec.Struct, frozen=True, tag="renewed"):
    """From the worker: the lease holds until then, on the clock of `assignment.now`."""

    until: float


class StopAttempt(msgspec.Struct, frozen=True, tag="stop"):
    """From the worker: stop the job."""

    ending: Literal["cancelled", "preempted", "lease"]
    sentence: str


class AttemptResult(msgspec.Struct, frozen=True, tag="over"):
    """From an attendant: the run is over; the status on disk says how."""

    outcome: Outcome
    exit_code: int | None
    sentence: str


class ResultRecorded(msgspec.Struct, frozen=True, tag="recorded"):
    """From the worker: the queue has the outcome."""


Message: TypeAlias = Ready | StartAttempt | AttemptRunning | LeaseRenewed | StopAttempt | AttemptResult | ResultRecorded

_DECODER: Final = msgspec.msgpack.Decoder[Message](Message)


class ShimChannel:
    """One end of the line between a worker and an attendant."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self.open = True

    def fileno(self) -> int:
        return self._line.fileno()

    def send(self, message: Message) -> bool:
        """False when nobody hears it any more."""
        try:
            # Whoever is stopped and hears nothing must not stop the other as well.
            self._line.send(msgspec.msgpack.encode(message), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def receive(self) -> Message | None:
        """The next message, if one has come; `open` is false once the other end is gone."""
        try:
            packet = self._line.recv(_LONGEST, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            packet = b""
        if not packet:
            self.open = False
            return None
        try:
            message: Message = _DECODER.decode(packet)
        except msgspec.DecodeError:
            # Of another version of Stoker: what it means is not known here, and nothing depends on it.
            return None
        return message

    def close(self) -> None:
        self.open = False
        with contextlib.suppress(OSError):
            self._line.close()
