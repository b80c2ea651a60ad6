"""System calls that Python does not offer: prctl, signalfd, timerfd, kcmp, and a fork into a cgroup."""

import ctypes
import os
import signal
import struct
import time
from collections.abc import Iterable
from typing import Final

_SET_DEATH_SIGNAL: Final = 1
_SET_NAME: Final = 15
_SET_CHILD_SUBREAPER: Final = 36

_CLONE3: Final = 435  # The same on every architecture that Python and a GPU driver share.
_CLONE_INTO_CGROUP: Final = 0x2_0000_0000
_CLONE_ARGUMENTS: Final = struct.Struct("=11Q")

# kcmp(2), by machine.
_KCMP: Final = {"x86_64": 312, "aarch64": 272, "riscv64": 272, "ppc64le": 354}
_KCMP_FILE: Final = 0

# The size of sigset_t in glibc and musl, of which the kernel reads the first 64 bits.
_SIGNAL_SET_BYTES: Final = 128

_ABSOLUTE: Final = 1
# struct itimerspec: interval (zero here) and expiration, each in seconds and nanoseconds.
_TIMER: Final = struct.Struct("@4l")

# PyDLL keeps the GIL during the call: after a clone the child must hold it.
_libc: Final = ctypes.PyDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Makes orphaned descendants of this process its children."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def set_parent_death_signal(signum: int) -> None:
    """Requests this signal at the death of the parent. Check getppid afterwards: it may already be dead."""
    _prctl(_SET_DEATH_SIGNAL, signum)


def set_name(name: str) -> None:
    """Sets the process name in `ps` and `top`; the kernel keeps 15 bytes."""
    kept = ctypes.create_string_buffer(name.encode())  # must exist until the kernel has read it
    _prctl(_SET_NAME, ctypes.addressof(kept))


def signal_descriptor(signals: Iterable[int]) -> int:
    """A signalfd for these signals, which must be blocked."""
    bits = sum(1 << (signum - 1) for signum in set(signals))
    wanted = bits.to_bytes(_SIGNAL_SET_BYTES, "little")
    # SFD_NONBLOCK and SFD_CLOEXEC are by definition the flags of open(2).
    return _checked(_libc.signalfd(-1, wanted, os.O_NONBLOCK | os.O_CLOEXEC))


def boot_clock() -> float:
    """Seconds on a monotonic clock that includes suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class BootTimer:
    """A timer on `boot_clock`. If the machine is suspended at that time, it fires at the resume."""

    def __init__(self) -> None:
        # TFD_NONBLOCK and TFD_CLOEXEC are by definition the flags of open(2).
        self._descriptor = _checked(_libc.timerfd_create(time.CLOCK_BOOTTIME, os.O_NONBLOCK | os.O_CLOEXEC))

    def fileno(self) -> int:
        return self._descriptor

    def ring_at(self, moment: float) -> None:
        """Sets the time. The timer stays readable after it, until another time is set."""
        seconds, rest = divmod(max(moment, 0.001), 1.0)  # zero would disarm it
        setting = _TIMER.pack(0, 0, int(seconds), int(rest * 1e9))
        _checked(_libc.timerfd_settime(self._descriptor, _ABSOLUTE, setting, None))

    def close(self) -> None:
        os.close(self._descriptor)


def fork_into_cgroup(descriptor: int) -> int:
    """Like os.fork, but the child starts in the cgroup of this directory.

    Unlike writing to `cgroup.procs`, it does not wait for a lock shared by all forks of the machine (10 ms and more).
    Only for a single-threaded process whose child soon calls exec, since Python's fork hooks do not run.
    """
    arguments = _CLONE_ARGUMENTS.pack(_CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, descriptor)
    return _checked(_libc.syscall(_CLONE3, arguments, ctypes.c_size_t(len(arguments))))


def share_file(one: int, other: int, descriptor: int, other_descriptor: int) -> bool:
    """True if these descriptors of two processes share one open file description, as by inheritance.

    False if the user, sandbox or kernel cannot compare them.
    """
    number = _KCMP.get(os.uname().machine)
    if number is None:
        return False
    words = (number, one, other, _KCMP_FILE, descriptor, other_descriptor)
    return bool(_libc.syscall(*map(ctypes.c_long, words)) == 0)


def _prctl(option: int, value: int) -> None:
    zero = ctypes.c_ulong(0)
    _checked(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
