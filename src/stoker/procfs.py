"""Processes in /proc: the stat file, identity by pid and start time, and the boot id.

The kernel reuses pids; pid and start time identify a process for ever.
"""

import contextlib
import errno
import functools
import os
import pwd
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

# Fields after the name (the second field), counted from the state: see proc_pid_stat(5).
_LAST_USED: Final = 21
# PF_KTHREAD: a kernel thread, without program and open files.
_KERNEL_THREAD: Final = 0x00200000

# The inode of the first pid namespace is fixed in the kernel (PROC_PID_INIT_INO): any other is a container's.
INITIAL_PID_NAMESPACE = "pid:[4026531836]"
OUTSIDE = "processes outside this container cannot be seen"

_PAGE: Final = 4096
# Three for each process: enough for most jobs.
_MOST_KEPT: Final = 48
# A shortage of these proves nothing about the process, and may be temporary.
SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_TRIES: Final = 5
_BETWEEN_TRIES: Final = 0.01
T = TypeVar("T")


class Identity(NamedTuple):
    """The permanent identity of a process."""

    pid: int
    started: int
    """Clock ticks since boot, as in field 22 of /proc/PID/stat. Another process could share both only if the kernel
    used every other pid within one tick of 10 ms."""


class Stat:
    """The stat file of a process or thread. Numbers are parsed on access."""

    __slots__ = ("fields", "name", "pid")

    def __init__(self, pid: int, name: str, fields: list[bytes]) -> None:
        self.pid = pid
        self.name = name
        """With `?` for unprintable characters."""
        self.fields = fields
        """The fields after the name, from the state on."""

    @property
    def state(self) -> str:
        """The kernel's letter: R, S, D, T, Z and so on."""
        return self.fields[0].decode()

    @property
    def parent(self) -> int:
        return int(self.fields[1])

    @property
    def group(self) -> int:
        return int(self.fields[2])

    @property
    def session(self) -> int:
        return int(self.fields[3])

    @property
    def is_kernel_thread(self) -> bool:
        return bool(int(self.fields[6]) & _KERNEL_THREAD)

    @property
    def cpu_ticks(self) -> int:
        """Processor time so far, user and system."""
        return int(self.fields[11]) + int(self.fields[12])

    @property
    def threads(self) -> int:
        return int(self.fields[17])

    @property
    def started(self) -> int:
        """Clock ticks since boot."""
        return int(self.fields[19])

    @property
    def resident_pages(self) -> int:
        return int(self.fields[21])

    @property
    def environment_ends(self) -> tuple[int, int]:
        """Where its environment begins and ends in its memory: both 0 in the middle of an exec, and for a process of
        another user.
        """
        return int(self.fields[47]), int(self.fields[48])

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.started)

    @property
    def is_zombie(self) -> bool:
        """Whether it has ended and waits to be reaped. If the first thread of a process ends before the others, the
        process looks like a zombie but is none.
        """
        return self.fields[0] in (b"Z", b"X", b"x") and self.threads <= 1


def read_stat(path: str) -> Stat:
    """Raises OSError if the process is gone, ValueError if the file is not a stat file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # A short name and fifty numbers: one read suffices.
        line = os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
    return parse_stat(line, path)


def parse_stat(line: bytes, path: str) -> Stat:
    """The content of a stat file. Raises ValueError."""
    # The name may contain spaces and brackets; nothing after it does.
    before, bracket, after = line.rpartition(b")")
    fields = after.split()
    if not bracket or len(fields) <= _LAST_USED:
        raise ValueError(f"{path} is not the stat file of a process")
    pid, _, name = before.partition(b"(")
    shown = name.decode(errors="replace")
    if not shown.isprintable():
        shown = "".join(letter if letter.isprintable() else "?" for letter in shown)
    return Stat(int(pid), shown, fields)


class KeptFiles:
    """Files of /proc kept open between readings: each takes one system call instead of three. A descriptor belongs to
    one process for ever: after its end nothing can be read, even if its pid is reused.
    """

    def __init__(self) -> None:
        self._before: dict[str, int] = {}
        self._now: dict[str, int] = {}

    def read(self, path: str) -> bytes:
        """The file's content; empty if its process is gone or it is unreadable."""
        descriptor = self._now.get(path)
        try:
            if descriptor is None:
                descriptor = self._before.pop(path, None)
                if descriptor is None:
                    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                if len(self._now) >= _MOST_KEPT:
                    try:
                        return pread_proc(descriptor)
                    finally:
                        os.close(descriptor)
                self._now[path] = descriptor
            return pread_proc(descriptor)
        except OSError:
            return b""

    def end_round(self) -> None:
        """Closes files that were not read since the last call."""
        for descriptor in self._before.values():
            os.close(descriptor)
        self._before, self._now = self._now, {}

    def close(self) -> None:
        self.end_round()
        self.end_round()


def pread_proc(descriptor: int) -> bytes:
    """A file of /proc from its beginning. Raises OSError if its process is gone."""
    data = part = os.pread(descriptor, _PAGE, 0)
    # The kernel fills pages with whole records, which are short: half a page is the end.
    while len(part) > _PAGE // 2:
        part = os.pread(descriptor, _PAGE, len(data))
        data += part
    return data


def stat(pid: int) -> Stat | None:
    """None if there is no such process. Raises OSError if this process lacks descriptors or memory to find out."""
    try:
        return retry_shortage(lambda: read_stat(f"/proc/{pid}/stat"))
    except ValueError:
        return None
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        return None


def identify(pid: int) -> Identity | None:
    """The process that currently has this pid."""
    found = stat(pid)
    return found.identity if found else None


def is_alive(who: Identity) -> bool:
    """Whether it exists and is not a zombie."""
    found = stat(who.pid)
    return found is not None and found.identity == who and not found.is_zombie


def is_gone(who: Identity) -> bool:
    """Whether it has certainly ended: a shortage of descriptors or memory proves nothing."""
    try:
        os.kill(who.pid, 0)  # needs neither
    except ProcessLookupError:
        return True
    except OSError:
        pass
    try:
        return not is_alive(who)
    except OSError:
        return False


def retry_shortage(act: Callable[[], T]) -> T:
    """Tries again for a moment while descriptors or memory are short."""
    for _ in range(_TRIES - 1):
        try:
            return act()
        except OSError as error:
            if error.errno not in SHORTAGES:
                raise
            time.sleep(_BETWEEN_TRIES)
    return act()


def boot_id() -> str:
    """Monotonic times and pids are valid only within one boot. Empty if unreadable."""
    try:
        return _boot_id()
    except OSError:
        return ""


@functools.cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def inside_pid_namespace(root: Path = Path("/")) -> bool:
    """Whether this is another pid namespace than the machine's."""
    try:
        return str((root / "proc/self/ns/pid").readlink()) != INITIAL_PID_NAMESPACE
    except OSError:
        return False  # A kernel without pid namespaces has no such file.


def user_name(uid: int) -> str:
    """The name of a user, or the number if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def close_inherited_descriptors(keep: Iterable[int] = ()) -> None:
    """Closes all descriptors except standard input, output, error and these, so pipes reach their end."""
    # Listed, not counted: in containers the limit of open files can be a billion.
    with os.scandir("/proc/self/fd") as entries:
        opened = {int(entry.name) for entry in entries}
    for descriptor in opened - {0, 1, 2, *keep}:
        with contextlib.suppress(OSError):
            os.close(descriptor)  # One was the descriptor of the listing.


def has_pending(pid: int, signum: int) -> bool:
    """Whether a blocked signal is pending for this process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (signum - 1) & 1 for mask in masks)
