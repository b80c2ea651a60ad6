"""The helper process as its prober sees it: started, asked, heard, buried. Nothing here blocks."""

import contextlib
import os
import select
import signal
import socket
import sys
from typing import Final

from stoker.gpus.frame import ASK, HEADER

# How long a helper gets to leave by itself before it is asked to by SIGTERM. Never SIGKILL: drivers have been seen to
# freeze after one of their clients was killed in the middle of a call.
_GOODBYE: Final = 0.5
_PROGRAM: Final = "from stoker.gpus.helper import main; main()"
_CHUNK: Final = 1 << 18


class HelperProcess:
    """One child and the socket to it. `death` is None while it lives, then says how it went."""

    def __init__(self, spec: str, root: str) -> None:
        ours, theirs = socket.socketpair()
        quiet = () if os.environ.get("STOKER_DEBUG") else ((os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),)
        try:
            # A session of its own: what the terminal signals to the person's programs is not for the reader.
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-P", "-c", _PROGRAM, spec, root],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0),
                    (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                    *quiet,
                ],
                setsid=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        ours.setblocking(False)
        self.spec = spec
        self.death: str | None = None
        self._channel = ours
        self._received = bytearray()

    def fileno(self) -> int:
        return self._channel.fileno()

    def ask(self) -> None:
        with contextlib.suppress(OSError):  # a helper that is gone is noticed when its answer is collected
            self._channel.send(ASK)

    def receive(self) -> bytes | None:
        """A whole message, or None while there is none; notices when the helper is gone."""
        while self.death is None:
            try:
                piece = self._channel.recv(_CHUNK)
            except BlockingIOError:
                break
            except ConnectionResetError:
                piece = b""
            if not piece:
                self._bury()
            self._received += piece
            if len(piece) < _CHUNK:
                break
        return self._message()

    def _message(self) -> bytes | None:
        if len(self._received) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self._received)
        ends = HEADER.size + length
        if len(self._received) < ends:
            return None
        message = bytes(memoryview(self._received)[HEADER.size : ends])
        del self._received[:ends]
        return message

    def _bury(self) -> None:
        self._channel.close()
        self.death = "ended"
        if self.reaped_within(_GOODBYE):
            return
        self.death = "is stuck in the driver on its way out"

    def reaped_within(self, seconds: float) -> bool:
        """Whether the child has ended within this time; it is then reaped and `death` says how it went."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(seconds * 1000):
                return False
            # By pidfd: a process that reaps all its children may have taken this one already.
            ended = os.waitid(os.P_PIDFD, descriptor, os.WEXITED)
        except ChildProcessError:
            return True
        finally:
            os.close(descriptor)
        if ended is not None and ended.si_code == os.CLD_EXITED:
            self.death = f"ended with code {ended.si_status}"
        elif ended is not None:
            self.death = f"was killed by {signal.Signals(ended.si_status).name}"
        return True

    def release(self) -> None:
        """Closes the channel, at which the helper ends by itself."""
        self._channel.close()

    def dismiss(self, *, busy: bool) -> None:
        """Says goodbye. A busy helper may be blocked in the driver: it is asked at once, and then left alone."""
        self.release()
        if self.reaped_within(0.0 if busy else _GOODBYE):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        self.reaped_within(_GOODBYE)
