"""The terminal in front of which a job runs: given back as it was when the job could not do that itself."""

import contextlib
import os
import signal
import termios
from typing import Any


class Terminal:
    """The settings of the controlling terminal at this moment, where there is one."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._settings: list[Any] = []
        with contextlib.suppress(OSError, termios.error):
            self._descriptor = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            self._settings = termios.tcgetattr(self._descriptor)

    def restore(self) -> None:
        """Puts them back, unless the terminal belongs to somebody else by now: a REPL that is killed leaves it raw."""
        if self._descriptor is None or not self._settings:
            return
        # A process in the background is stopped for touching the terminal, unless it does not want to hear of it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
        try:
            with contextlib.suppress(OSError, termios.error):
                if self._is_ours(self._descriptor):
                    termios.tcsetattr(self._descriptor, termios.TCSANOW, self._settings)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @staticmethod
    def _is_ours(descriptor: int) -> bool:
        """Whether this group is in the foreground, or one of which nobody is left, as after a shell that was killed."""
        group = os.tcgetpgrp(descriptor)
        if group == os.getpgrp():
            return True
        try:
            os.killpg(group, 0)
        except OSError as error:
            return isinstance(error, ProcessLookupError)
        return False
