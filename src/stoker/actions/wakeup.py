"""What ends the watcher's sleep from outside: a signal that says "end", or a deed that is done."""

import contextlib
import os
import signal
from types import FrameType
from typing import Any, Final

_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Wakeup:
    """A pipe that an event loop polls. Signals that were ignored at the start (nohup, a shell's `&`) stay ignored."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The first signal that said "end"."""
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before: dict[signal.Signals, Any] = {}
        self._before_descriptor = -1

    def __enter__(self) -> "Wakeup":
        # Without this a signal that comes just before the loop sleeps would be seen only when it wakes by itself.
        self._before_descriptor = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _ENDING:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._before_descriptor)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # The pipe stays open: a deed that was left behind may still ring.

    def fileno(self) -> int:
        return self._reader

    def ring(self) -> None:
        """Safe from any thread. A pipe that is full wakes as well."""
        with contextlib.suppress(OSError):
            os.write(self._writer, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number
        self.ring()
