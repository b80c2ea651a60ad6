"""Processes by pid and start time: who descends from whom, who is still there, and a signal that hits nobody else.

A pid alone is a number that the kernel gives away again; with the start time it is one process for ever.
"""

import errno
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final, NamedTuple, TypeVar

from stoker.procfs import GROUP, PARENT, SESSION, STARTED, STATE, THREADS, read_stat_fields

# Two walks that agree end a census at once. A tree that forks without rest never lets them agree: it is called
# unsettled after this many, and whoever needs certainty asks again.
_MOST_WALKS: Final = 20
# Never worth counting: in a container, or on a small machine.
_FEW_THREADS: Final = 64
# Ancestors can die while they are climbed; the next try sees who adopted the process.
_CLIMBS: Final = 5

_STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "blocked in the kernel",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "zombie",
    "X": "dead",
    "I": "idle",
    "P": "parked",
}
_NOBODY: Final[frozenset[int]] = frozenset()
# Want of these says nothing of the process that was asked about: it is asked again, and then said.
_SHORTAGES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_TRIES: Final = 5
_BETWEEN_TRIES: Final = 0.01
T = TypeVar("T")


class Identity(NamedTuple):
    """One process for ever."""

    pid: int
    started: int
    """Clock ticks since boot, as in field 22 of /proc/PID/stat. Another process could share both only if the kernel
    gave away every other pid within one tick, which is 10 ms."""


class Stat(NamedTuple):
    """What /proc/PID/stat says, as far as it matters here."""

    identity: Identity
    name: str
    state: str
    parent: int
    group: int
    session: int
    threads: int

    @property
    def over(self) -> bool:
        """Whether it has ended and only waits to be collected.

        The first thread of a process can end before the others: it then looks like a zombie, and is none.
        """
        return self.state in "ZXx" and self.threads <= 1


class Description(NamedTuple):
    """One process, for a person who reads a report."""

    identity: Identity
    parent: int
    name: str
    state: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.identity.pid}, {self.state})"


class ProcessScan(NamedTuple):
    """Who is there. Unsettled: the tree changed faster than it could be read, so someone may be missing."""

    processes: list[Identity]
    settled: bool


def stat(pid: int) -> Stat | None:
    """None when there is no such process. Raises OSError when this process lacks descriptors or memory to see that."""
    try:
        name, fields = _patiently(lambda: read_stat_fields(f"/proc/{pid}/stat"))
    except ValueError:
        return None
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise
        return None
    return Stat(
        Identity(pid, int(fields[STARTED])),
        name,
        fields[STATE].decode(),
        int(fields[PARENT]),
        int(fields[GROUP]),
        int(fields[SESSION]),
        int(fields[THREADS]),
    )


def identify(pid: int) -> Identity | None:
    """The process that has this pid now."""
    found = stat(pid)
    return found.identity if found else None


def is_alive(who: Identity) -> bool:
    """Whether it is there and not a zombie."""
    found = stat(who.pid)
    return found is not None and found.identity == who and not found.over


def is_gone(who: Identity) -> bool:
    """Whether it is certain that it has ended: want of descriptors or memory to see that proves nothing."""
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


def descends(pid: int, ancestor: int) -> bool:
    """Whether this process came from that one. It climbs from the process, so its cost is the depth of the tree."""
    for _ in range(_CLIMBS):
        current = pid
        while current > 1:
            found = stat(current)
            if found is None:
                break
            if found.parent == ancestor:
                return True
            current = found.parent
        else:
            return False
        if current == pid:
            return False
    return False


def descendants(of: int, exclude: Collection[int] = _NOBODY) -> list[Identity]:
    """All that came from this process and live, without those of `exclude` and what came from them.

    An orphan no longer shows where it came from, unless it is still in the session of one of `exclude`.
    """
    return scan_processes([of], exclude).processes


def scan_processes(roots: Iterable[int], exclude: Collection[int] = _NOBODY) -> ProcessScan:
    """All that came from these processes and live. Two walks must agree, as orphans move up while one is walking."""
    roots = list(roots)
    before: dict[int, Stat | None] = {}
    for attempt in range(_MOST_WALKS):
        try:
            now = _walk(roots, exclude)
        except OSError:
            return ProcessScan(_living(before), settled=False)
        if attempt and _same(before, now):
            return ProcessScan(_living(now), settled=True)
        before = now
    return ProcessScan(_living(before), settled=False)


def send(who: Identity, signum: int) -> bool:
    """Sends the signal to exactly this process; False when it is gone or may not be signalled."""
    try:
        descriptor = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return False
    # No pidfds in this kernel, sandbox or Python, or none left: the check just before the kill is all there is.
    except (OSError, AttributeError):
        return _send_by_number(who, signum)
    try:
        # The descriptor holds whoever has the pid now; only then is it asked who that is.
        if identify(who.pid) != who:
            return False
        signal.pidfd_send_signal(descriptor, signum)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def describe(who: Identity) -> Description | None:
    """None when it is gone. Answers at once: the command line of a hung process can block whoever reads it."""
    found = stat(who.pid)
    if found is None or found.identity != who:
        return None
    return Description(who, found.parent, found.name, _STATES.get(found.state, f"in state {found.state}"))


def children(pid: int) -> list[int]:
    """The processes whose parent is this one, zombies included."""
    if _kernel_lists_children():
        return _listed_children(pid, _thread_ids(pid))
    return [child for child, found in _everyone().items() if found.parent == pid]


def exit_code(status: int) -> int:
    """The exit code that a shell gives for this wait status: the program's own, or 128 + n if signal n ended it."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _send_by_number(who: Identity, signum: int) -> bool:
    if identify(who.pid) != who:
        return False
    try:
        os.kill(who.pid, signum)
    except OSError:
        return False
    return True


def _living(found: dict[int, Stat | None]) -> list[Identity]:
    return [one.identity for one in found.values() if one and not one.over]


def _same(before: dict[int, Stat | None], now: dict[int, Stat | None]) -> bool:
    """Whether two walks met the same processes. One that vanished under the walk may have left children behind."""
    if before.keys() != now.keys():
        return False
    for pid, one in now.items():
        other = before[pid]
        if one is None or other is None or one.identity != other.identity or one.over != other.over:
            return False
    return True


def _walk(roots: list[int], exclude: Collection[int]) -> dict[int, Stat | None]:
    if not _kernel_lists_children():
        return _walk_everyone(roots, exclude)
    found: dict[int, Stat | None] = {}
    waiting = [(root, _thread_ids(root)) for root in roots]
    threads_left = _worthwhile_threads()
    while waiting:
        pid, threads = waiting.pop()
        for child in _listed_children(pid, threads):
            if child in found or child in exclude:
                continue
            one = stat(child)
            if one is not None and one.session in exclude:
                continue
            found[child] = one
            if one is not None and not one.over:
                threads_left -= one.threads
                if threads_left < 0:
                    return _walk_everyone(roots, exclude)
                waiting.append((child, [str(child)] if one.threads == 1 else _thread_ids(child)))
    return found


def _worthwhile_threads() -> int:
    """How many threads may be asked for their children before it is cheaper to look at every process there is.

    One costs about as much as the other. A training can have thousands of threads, a machine thousands of processes;
    the kernel counts the latter in the links of /proc.
    """
    return max(os.stat("/proc").st_nlink, _FEW_THREADS)  # noqa: PTH116 - asked for with every walk


def _walk_everyone(roots: list[int], exclude: Collection[int]) -> dict[int, Stat | None]:
    everyone = _everyone()
    offspring: dict[int, list[int]] = {}
    for pid, one in everyone.items():
        offspring.setdefault(one.parent, []).append(pid)
    found: dict[int, Stat | None] = {}
    waiting = list(roots)
    while waiting:
        for child in offspring.get(waiting.pop(), ()):
            if child not in found and child not in exclude and everyone[child].session not in exclude:
                found[child] = everyone[child]
                waiting.append(child)
    return found


def _everyone() -> dict[int, Stat]:
    found = {}
    for name in _names("/proc"):
        if name.isdigit() and (one := stat(int(name))):
            found[one.identity.pid] = one
    return found


def _kernel_lists_children() -> bool:
    """Whether it was built with CONFIG_PROC_CHILDREN."""
    return os.access(f"/proc/self/task/{os.getpid()}/children", os.R_OK)


def _thread_ids(pid: int) -> list[str]:
    return _names(f"/proc/{pid}/task")


def _listed_children(pid: int, threads: Iterable[str]) -> list[int]:
    return [int(child) for thread in threads for child in _read(f"/proc/{pid}/task/{thread}/children").split()]


def _names(directory: str) -> list[str]:
    """What is in it; nothing when it, or its process, is not there."""
    try:
        with _patiently(lambda: os.scandir(directory)) as entries:
            return [entry.name for entry in entries]
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise
        return []


def _read(path: str) -> bytes:
    """The whole file; nothing when it, or its process, is not there."""
    try:
        descriptor = _patiently(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in _SHORTAGES:
            raise
        return b""
    try:
        parts = []
        while part := os.read(descriptor, 65536):
            parts.append(part)
        return b"".join(parts)
    except OSError:
        return b""  # it ended while it was read
    finally:
        os.close(descriptor)


def _patiently(act: Callable[[], T]) -> T:
    """Does it again, should descriptors or memory be short for a moment."""
    for _ in range(_TRIES - 1):
        try:
            return act()
        except OSError as error:
            if error.errno not in _SHORTAGES:
                raise
            time.sleep(_BETWEEN_TRIES)
    return act()
