"""Finds the processes of a job by descent, by cgroup and by an environment variable, and signals them."""

import functools
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, NamedTuple

from stoker.procfs import SHORTAGES, Identity, KeptFiles, Stat, identify, parse_stat, pread_proc, retry_shortage, stat
from stoker.runs.processes.cgroup import Cgroup

# A scan ends when two walks agree. In a tree that forks constantly they never agree, so after this many walks the scan
# counts as unsettled.
_MOST_WALKS: Final = 20
# Below this number of threads, the cheaper kind of walk need not be determined.
_FEW_THREADS: Final = 64
# Ancestors may die during the climb; the next try finds the process that adopted the child.
_CLIMBS: Final = 5

_STATES: Final = {
    "R": "running",
    "S": "sleeping",
    "D": "blocked in the kernel",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "zombie",
    "X": "dead",
    "I": "idle in the kernel",
    "P": "parked",
}
_NONE: Final[frozenset[int]] = frozenset()
# The limit of kills of a tree that forks during the kill.
_MOST_SWEEPS: Final = 100
# A killed process remains visible for some milliseconds.
_BETWEEN_SWEEPS: Final = 0.01
# Large enough to read nearly every environment at once.
_ENVIRONMENT: Final = 2**17
# In the middle of an exec a process has no environment. That takes microseconds, unless the machine is overloaded.
_LONGEST_EXEC: Final = 0.5
_BETWEEN_READS: Final = 0.001


class ProcessScan(NamedTuple):
    """The processes found. If unsettled, the tree changed faster than it could be read, and some may be missing."""

    processes: list[Identity]
    settled: bool


def descends(pid: int, ancestor: int) -> bool:
    """True if a process descends from another. The cost is proportional to the depth of the tree."""
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


def scan_processes(roots: Iterable[int], exclude: Collection[int] = _NONE) -> ProcessScan:
    """All live descendants of these processes, except `exclude` and their descendants.

    Two walks must agree, because orphans move up during a walk. An orphan of `exclude` is recognized only while it is
    in that session.
    """
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


def walk_processes(root: int, files: KeptFiles) -> list[Stat]:
    """The live descendants of a single-threaded process, by one walk that may miss some.

    For statistics, not for signals.
    """
    try:
        found = _walk([root], _NONE, files)
    except OSError:
        return []
    return [one for one in found.values() if one is not None and not one.is_zombie]


def send(who: Identity, signum: int) -> bool:
    """Signals exactly this process. False if it has ended or may not be signalled."""
    try:
        descriptor = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return False
    # Without pidfds in this kernel, sandbox or Python, or without descriptors: check just before the kill.
    except (OSError, AttributeError):
        return _send_by_number(who, signum)
    try:
        # Checked with the descriptor open, which pins the process.
        if identify(who.pid) != who:
            return False
        signal.pidfd_send_signal(descriptor, signum)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def state_in_words(state: str) -> str:
    """The meaning of a state letter in /proc."""
    return _STATES.get(state, f"in state {state}")


def describe(who: Identity) -> str | None:
    """`python (pid 7, sleeping)`; None if it has ended. Never blocks, unlike reading a command line."""
    found = stat(who.pid)
    if found is None or found.identity != who:
        return None
    return f"{found.name} (pid {who.pid}, {state_in_words(found.state)})"


def children(pid: int) -> list[int]:
    """The children of this process, zombies included."""
    if _kernel_lists_children():
        return _listed_children(pid, _thread_ids(pid), _read)
    return [child for child, found in _all_processes().items() if found.parent == pid]


def exit_code(status: int) -> int:
    """A shell's exit code for this wait status: 128 + n after signal n."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


class ProcessTree:
    """All descendants of one process, and all processes in the cgroup of the job."""

    def __init__(
        self,
        ancestor: int,
        cgroup: Cgroup | None,
        *,
        since: int = 0,
        exclude: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        """Excludes `exclude()` with descendants, and processes that started before `since`."""
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
        # A reaper inside the cgroup must not be killed with its job.
        if self._ancestor in self._cgroup.pids() and not self._cgroup.evict(self._ancestor):
            return False
        return self._cgroup.kill()


def find_tagged(name: str, value: str) -> list[Identity]:
    """All processes with this variable in a readable environment. Raises OSError."""
    mark = f"{name}={value}".encode(errors="surrogateescape")
    return [who for who, environment in environments(mark) if mark in environment]


def kill_all(find: Callable[[], list[Identity]]) -> bool:
    """Kills the processes that `find` returns, until it returns none. False if some are left. Raises OSError."""
    for _ in range(_MOST_SWEEPS):
        left = find()
        if not left:
            return True
        for who in left:
            send(who, signal.SIGKILL)
        time.sleep(_BETWEEN_SWEEPS)
    return False


def environments(mark: bytes = b"=") -> Iterator[tuple[Identity, list[bytes]]]:
    """All processes with this text in a readable environment.

    Raises OSError for lack of descriptors or memory, since an empty result would prove nothing.
    """
    for name in os.listdir("/proc"):  # noqa: PTH208 - one call
        if name.isdigit():
            environment = _environment(int(name))
            if mark in environment and (who := identify(int(name))) is not None:
                yield who, environment.split(b"\0")


def find_orphans(place: str, *supervisors: str) -> Iterator[tuple[Identity, str]]:
    """The processes of runs with records in this directory and without a supervisor among their ancestors.

    Each comes with the directory of its record. Raises OSError.
    """
    tag = b"STOKER_RUN_DIR="
    here = tag + os.fsencode(place) + b"/"
    for who, environment in environments(here):
        for variable in environment:
            if variable.startswith(here) and not has_ancestor_named(who, *supervisors):
                yield who, os.fsdecode(variable.removeprefix(tag))


def has_ancestor_named(who: Identity, *names: str) -> bool:
    """True if an ancestor has one of these names, or if that cannot be determined."""
    current = who.pid
    while current > 1:
        found = stat(current)
        if found is None:
            return True  # an ancestor has just ended
        if found.name in names:
            return True
        current = found.parent
    return False


def _environment(pid: int) -> bytes:
    """Empty if it has none, has ended, or belongs to another user."""
    until = math.inf
    while (found := _read_environment(pid)) == b"":
        process = stat(pid)
        if process is None or process.is_kernel_thread or process.state in "ZX":
            break
        start, end = process.environment_ends
        now = time.monotonic()
        until = min(until, now + _LONGEST_EXEC)
        if 0 < start == end or now > until:
            break
        time.sleep(_BETWEEN_READS)
    return found or b""


def _read_environment(pid: int) -> bytes | None:
    """None if it has ended, or belongs to another user."""
    try:
        descriptor = os.open(f"/proc/{pid}/environ", os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = b""
            while piece := os.read(descriptor, _ENVIRONMENT):
                found += piece
            return found
        finally:
            os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


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
    """True if two walks found the same processes. A process that vanished during a walk may have left children."""
    if before.keys() != now.keys():
        return False
    for pid, one in now.items():
        other = before[pid]
        if one is None or other is None or one.identity != other.identity or one.is_zombie != other.is_zombie:
            return False
    return True


def _walk(roots: list[int], exclude: Collection[int], files: KeptFiles | None = None) -> dict[int, Stat | None]:
    """One walk of the tree. `files`: cached files for single-threaded processes, including the roots."""
    read = _read if files is None else files.read
    if not _kernel_lists_children():
        return _walk_machine(roots, exclude)
    found: dict[int, Stat | None] = {}
    waiting = [(root, _thread_ids(root) if files is None else [str(root)]) for root in roots]
    threads = 0
    while waiting:
        pid, of_process = waiting.pop()
        for child in _listed_children(pid, of_process, read if len(of_process) == 1 else _read):
            if child in found or child in exclude:
                continue
            one = stat(child) if files is None else _parsed(files.read(f"/proc/{child}/stat"))
            if one is not None and one.session in exclude:
                continue
            found[child] = one
            if one is not None and not one.is_zombie:
                threads += one.threads
                if threads > _FEW_THREADS and threads > _worthwhile_threads():
                    return _walk_machine(roots, exclude)
                waiting.append((child, [str(child)] if one.threads == 1 else _thread_ids(child)))
    return found


def _worthwhile_threads() -> int:
    """The number of threads from which reading all processes of the machine is cheaper than asking each for children.

    A thread costs about as much as a process. The link count of /proc is the number of processes.
    """
    return os.stat("/proc").st_nlink  # noqa: PTH116 - called in every walk


def _walk_machine(roots: list[int], exclude: Collection[int]) -> dict[int, Stat | None]:
    everything = _all_processes()
    children_of: dict[int, list[int]] = {}
    for pid, one in everything.items():
        children_of.setdefault(one.parent, []).append(pid)
    found: dict[int, Stat | None] = {}
    waiting = list(roots)
    while waiting:
        for child in children_of.get(waiting.pop(), ()):
            if child not in found and child not in exclude and everything[child].session not in exclude:
                found[child] = everything[child]
                waiting.append(child)
    return found


def _all_processes() -> dict[int, Stat]:
    found = {}
    for name in _names("/proc"):
        if name.isdigit() and (one := stat(int(name))):
            found[one.identity.pid] = one
    return found


@functools.cache
def _kernel_lists_children() -> bool:
    """True if the kernel was built with CONFIG_PROC_CHILDREN."""
    return os.access(f"/proc/self/task/{os.getpid()}/children", os.R_OK)


def _thread_ids(pid: int) -> list[str]:
    return _names(f"/proc/{pid}/task")


def _listed_children(pid: int, threads: Iterable[str], read: Callable[[str], bytes]) -> list[int]:
    return [int(child) for thread in threads for child in read(f"/proc/{pid}/task/{thread}/children").split()]


def _parsed(line: bytes) -> Stat | None:
    try:
        return parse_stat(line, "/proc/PID/stat") if line else None
    except ValueError:
        return None


def _names(directory: str) -> list[str]:
    """The entries of a directory; none if it or its process does not exist."""
    try:
        with retry_shortage(lambda: os.scandir(directory)) as entries:
            return [entry.name for entry in entries]
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        return []


def _read(path: str) -> bytes:
    """The whole file; empty if it or its process does not exist."""
    try:
        descriptor = retry_shortage(lambda: os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in SHORTAGES:
            raise
        return b""
    try:
        return pread_proc(descriptor)
    except OSError:
        return b""  # the process has just ended
    finally:
        os.close(descriptor)
