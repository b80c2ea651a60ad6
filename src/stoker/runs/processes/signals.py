"""Signals as a stream with their senders, which tells Ctrl-C at a terminal from `kill`; and terminal settings."""

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

# Signals forwarded to the job. Schedulers announce a stop by user signals.
FORWARDED: Final = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip
# SI_KERNEL in <asm-generic/siginfo.h>: sent by the kernel, on a terminal to its whole foreground group.
_FROM_KERNEL: Final = 0x80
# At a REPL, people press Ctrl-C now and then for other reasons.
DOUBLE_PRESS: Final = 2.0
# struct signalfd_siginfo has 128 bytes: number, errno, code, pid, uid, and unused fields.
_RECORD: Final = 128
_FIRST_FIELDS: Final = struct.Struct("=IiiII")


class Received(NamedTuple):
    """A received signal."""

    signal: int
    code: int
    """si_code, the kind of its source."""
    sender: int
    """The pid of the sender; 0 for the kernel, or a process outside this pid namespace."""
    user: int

    @property
    def from_kernel(self) -> bool:
        """True if the terminal sent it to the whole foreground group, including the job.

        The hangup of a terminal goes only to the leader of its session. If that is this process, the job does not have
        it.
        """
        only_leader = self.signal == signal.SIGHUP and os.getsid(0) == os.getpid()
        return self.code == _FROM_KERNEL and not only_leader


class DoublePress:
    """Detects Ctrl-C pressed twice in a row at the terminal.

    SIGINT from a program never counts: trainings write checkpoints on it, and jobs signal their own process group.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pressed = -math.inf

    def is_second(self, received: Received) -> bool:
        """True if this signal is the second press."""
        if received.signal != signal.SIGINT or not received.from_kernel:
            return False
        before, self._pressed = self._pressed, self._clock()
        return self._pressed - before <= DOUBLE_PRESS


class SignalStream:
    """Blocks these signals until `close()`, and reads them instead."""

    def __init__(self, signals: Iterable[int]) -> None:
        self._signals = frozenset(signals)
        self.original: frozenset[int] = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, self._signals))
        """The previous signal mask, for child processes."""
        self._descriptor = signal_descriptor(self._signals)

    def fileno(self) -> int:
        """A descriptor that becomes readable when a signal arrives."""
        return self._descriptor

    def read(self) -> list[Received]:
        """New signals; never blocks. Several equal signals may appear as one."""
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
        """Restores the signal mask. Unread signals take effect now."""
        os.close(self._descriptor)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.original)

    def __enter__(self) -> "SignalStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Terminal:
    """The current settings of the controlling terminal, if any."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._settings: list[Any] = []
        with contextlib.suppress(OSError, termios.error):
            self._descriptor = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
            self._settings = termios.tcgetattr(self._descriptor)

    def restore(self) -> None:
        """Restores them, unless another group is in the foreground. A killed REPL leaves the terminal in raw mode."""
        if self._descriptor is None or not self._settings:
            return
        # SIGTTOU would suspend a background process that touches the terminal.
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
        """True if the foreground group is this one, or empty, as after a killed shell."""
        group = os.tcgetpgrp(descriptor)
        if group == os.getpgrp():
            return True
        try:
            os.killpg(group, 0)
        except OSError as error:
            return isinstance(error, ProcessLookupError)
        return False
