"""The helper process as its prober sees it: asked, heard, buried. Nothing here blocks."""

import contextlib
import os
import select
from typing import Final

from stoker.gpus.frame import ASK, HEADER
from stoker.gpus.spawn import Helper

# How long a helper gets to leave by itself before it is asked to by SIGTERM. Never SIGKILL: drivers have been seen to
# freeze after one of their clients was killed in the middle of a call.
_GOODBYE: Final = 0.5
_CHUNK: Final = 1 << 18


class HelperProcess:
    """One child and the pipes to it. `death` is None while it lives, then says how it went."""

    def __init__(self, helper: Helper) -> None:
        self.death: str | None = None
        self._helper = helper
        self._received = bytearray()
        os.set_blocking(helper.answers, False)

    @property
    def pid(self) -> int:
        return self._helper.pid

    def fileno(self) -> int:
        return self._helper.answers

    def ask(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # a helper that is gone is noticed when its answer is collected
            os.write(self._helper.questions, ASK)

    def receive(self) -> bytes | None:
        """A whole message, or None while there is none; notices when the helper is gone."""
        while self.death is None:
            try:
                piece = os.read(self._helper.answers, _CHUNK)
            except BlockingIOError:
                return None
            if not piece:
                self._bury()
                return None
            if not self._received and len(piece) == HEADER.size + HEADER.unpack_from(piece)[0]:
                return piece[HEADER.size :]
            self._received += piece
            if (message := self._assembled()) is not None:
                return message
        return None

    def _assembled(self) -> bytes | None:
        """The message that came in several pieces, once it is whole."""
        if len(self._received) < HEADER.size:
            return None
        ends = HEADER.size + HEADER.unpack_from(self._received)[0]
        if len(self._received) < ends:
            return None
        message = bytes(memoryview(self._received)[HEADER.size : ends])
        self._received.clear()
        return message

    def _bury(self) -> None:
        self.release()
        self.death = "ended"
        if not self.reaped_within(_GOODBYE):
            self.death = "is stuck in the driver on its way out"

    def reaped_within(self, seconds: float) -> bool:
        """Whether the child has ended within this time; it is then reaped and `death` says how it went."""
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        except OSError:
            return False  # no descriptor is left to see that by: it is asked again
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
        self.death = _how(ended)
        return True

    def release(self) -> None:
        """Closes the pipes, at which a helper that is not blocked ends by itself."""
        os.close(self._helper.questions)
        os.close(self._helper.answers)

    def dismiss(self, *, busy: bool) -> None:
        """Says goodbye. A busy helper may be blocked in the driver: it is asked at once, and then left alone."""
        self.release()
        if self.reaped_within(0.0 if busy else _GOODBYE):
            return
        import signal

        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        self.reaped_within(_GOODBYE)


def _how(ended: os.waitid_result | None) -> str:
    if ended is None or ended.si_code == os.CLD_EXITED:
        return f"ended with code {ended.si_status if ended else '?'}"
    import signal

    return f"was killed by {signal.Signals(ended.si_status).name}"
