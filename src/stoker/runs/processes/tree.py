"""The processes of a job, found by descent, by cgroup and by a variable in their environment; and signals to them."""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from stoker.procfs import SHORTAGES, Identity, Stat, identify, retry_shortage, stat
from stoker.runs.processes.cgroup import Cgroup

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
# A tree that forks while it is being killed is killed again; one that outruns this many is not caught so.
_MOST_SWEEPS: Final = 100
# A killed process is taken apart in milliseconds, and can be seen until then.
_BETWEEN_SWEEPS: Final = 0.01


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


class ProcessTree:
    """All that came from one process, and all that is in the job's cgroup."""

    def __init__(
        self,
        ancestor: int,
        cgroup: Cgroup | None,
        *,
        since: int = 0,
        exclude: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        """Leaves out what `exclude` says and what came from it, and whatever started before `since`."""
        self._ancestor = ancestor
        self._cgroup = cgroup
        self._since = since
        self._exclude = exclude

    def scan_processes(self) -> ProcessScan:
        found = scan_processes([self._ancestor], self._exclude())
        processes = [process for process in found.processes if process.started >= self._since]
        if self._cgroup is not None:
            known = {process.pid for process in found.processes} | {self._ancestor}
            others = [stat(pid) for pid in self._cgroup.pids() if pid not in known]
            processes += [other.identity for other in others if other and not other.is_zombie]
        return ProcessScan(processes, found.settled)

    def kill(self) -> bool:
        if self._cgroup is None:
            return False
        # A reaper that lives in its job's cgroup, so that the job is born there, must not die of the blow.
        if self._ancestor in self._cgroup.pids() and not self._cgroup.evict(self._ancestor):
            return False
        return self._cgroup.kill()


def find_tagged(name: str, value: str) -> list[Identity]:
    """All that live with this variable in their environment, as far as that may be read. Raises OSError."""
    mark = f"{name}={value}".encode(errors="surrogateescape")
    return [who for who, environment in environments() if mark in environment]


def kill_all(find: Callable[[], list[Identity]]) -> bool:
    """Kills whom `find` finds, and what they start meanwhile; False when somebody is still there. Raises OSError."""
    for _ in range(_MOST_SWEEPS):
        left = find()
        if not left:
            return True
        for who in left:
            send(who, signal.SIGKILL)
        time.sleep(_BETWEEN_SWEEPS)
    return False


def environments() -> Iterator[tuple[Identity, list[bytes]]]:
    """Every process with its environment, as far as that may be read.

    Raises OSError when there is no descriptor or memory to look: nobody found then does not mean that nobody is there.
    """
    for name in os.listdir("/proc"):  # noqa: PTH208 - one call
        if name.isdigit():
            environment = _environment(int(name))
            if environment and (who := identify(int(name))) is not None:
                yield who, environment


def has_ancestor_named(who: Identity, *names: str) -> bool:
    """Whether one of its ancestors has such a name; also when that could not be told."""
    current = who.pid
    while current > 1:
        found = stat(current)
        if found is None:
            return True  # somebody ended just now: the next look will tell
        if found.name in names:
            return True
        current = found.parent
    return False


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []  # gone, or somebody else's


def _send_by_number(who: Identity, signum: int) -> bool:
    if identify(who.pid) != who:
        return False
    try:
        os.kill(who.pid, signum)
    except OSError:
        return False
    return True


def _living(found: dict[int, Stat | None]) -> list[Identity]:
    return [one.identity for one in found.values() if one and not one.is_zombie]


def _same(before: dict[int, Stat | None], now: dict[int, Stat | None]) -> bool:
    """Whether two walks met the same processes. One that vanished under the walk may have left children behind."""
    if before.keys() != now.keys():
        return False
    for pid, one in now.items():
        other = before[pid]
        if one is None or other is None or one.identity != other.identity or one.is_zombie != other.is_zombie:
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
            if one is not None and not one.is_zombie:
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
        with retry_shortage(lambda: os.scandir(directory)) as entries:
            return [entry.name for entry in entries]
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        return []


def _read(path: str) -> bytes:
    """The whole file; nothing when it, or its process, is not there."""
    try:
        descriptor = retry_shortage(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in SHORTAGES:
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
