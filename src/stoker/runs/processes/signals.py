"""Signals as things to read, with who sent them: what a terminal said to all is told from what was said to Stoker."""

import contextlib
import math
import os
import signal
import struct
import termios
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from stoker.runs.processes.syscalls import signal_descriptor

# A signal that says "end", whoever sends it, is for the job. The user signals too: schedulers announce with them.
FORWARDED: Final = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
# <asm-generic/siginfo.h>: sent by the kernel itself, for a terminal to its whole foreground group.
_FROM_KERNEL: Final = 0x80
# Two presses of Ctrl-C that belong together. A person at a REPL presses it once in a while for other reasons.
DOUBLE_PRESS: Final = 2.0
# struct signalfd_siginfo is 128 bytes: number, errno, code, pid, uid, and more that is not read here.
_RECORD: Final = 128
_FIRST_FIELDS: Final = struct.Struct("=IiiII")


class Received(NamedTuple):
    """One signal that came."""

    signal: int
    code: int
    """si_code: why it was sent."""
    sender: int
    """The pid of who sent it; 0 when that was the kernel, or somebody outside this pid namespace."""
    user: int

    @property
    def from_kernel(self) -> bool:
        """Whether the kernel sent it, for a terminal, to the whole group in front: the job has it already.

        When a terminal goes away only the leader of its session is told. Is that this process, then nobody else was.
        """
        told_alone = self.signal == signal.SIGHUP and os.getsid(0) == os.getpid()
        return self.code == _FROM_KERNEL and not told_alone


class DoublePress:
    """Tells when a person at the terminal pressed Ctrl-C twice in a row.

    SIGINT from a program never counts, however often it comes: trainings write checkpoints when they get it, and jobs
    signal their own process group.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pressed = -math.inf

    def is_second(self, received: Received) -> bool:
        """Whether this signal is the second press."""
        if received.signal != signal.SIGINT or not received.from_kernel:
            return False
        before, self._pressed = self._pressed, self._clock()
        return self._pressed - before <= DOUBLE_PRESS


class SignalStream:
    """These signals wait here to be read, from now until `close()`, instead of doing what they do."""

    def __init__(self, signals: Iterable[int]) -> None:
        self._signals = frozenset(signals)
        self.original: frozenset[int] = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, self._signals))
        """What was blocked before: what a program started from here must find."""
        self._descriptor = signal_descriptor(self._signals)

    def fileno(self) -> int:
        """Readable when a signal came."""
        return self._descriptor

    def read(self) -> list[Received]:
        """The signals that came since; never blocks. Equal ones that came together may be one."""
        found: list[Received] = []
        while True:
            try:
                records = os.read(self._descriptor, 16 * _RECORD)
            except BlockingIOError:
                return found
            for start in range(0, len(records), _RECORD):
                number, _errno, code, pid, uid = _FIRST_FIELDS.unpack_from(records, start)
                found.append(Received(number, code, pid, uid))

    def close(self) -> None:
        """The signals do again what they did before; those that came and were not read do it now."""
        os.close(self._descriptor)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.original)

    def __enter__(self) -> "SignalStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
