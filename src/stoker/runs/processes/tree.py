"""The processes of a job, found by descent, by cgroup and by a variable in their environment; and signals to them."""

import functools
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final, NamedTuple

from stoker.procfs import SHORTAGES, Identity, KeptFiles, Stat, identify, parse_stat, pread_proc, retry_shortage, stat
from stoker.runs.processes.cgroup import Cgroup

# Two walks that agree end a scan at once. Two walks of a tree that forks without rest never agree: after this many,
# the scan counts as unsettled.
_MOST_WALKS: Final = 20
# On a small machine or in a container, counting is not worth it.
_FEW_THREADS: Final = 64
# Ancestors can die during the climb; the next try sees which process adopted the child.
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
# A tree that forks while it is killed is killed again, this many times.
_MOST_SWEEPS: Final = 100
# A killed process is visible for some milliseconds.
_BETWEEN_SWEEPS: Final = 0.01
# Nearly every environment in one read.
_ENVIRONMENT: Final = 2**17


class ProcessScan(NamedTuple):
    """The processes found. Unsettled: the tree changed faster than it could be read, so some may be missing."""

    processes: list[Identity]
    settled: bool


def descends(pid: int, ancestor: int) -> bool:
    """Whether this process descends from that one. The cost is the depth of the tree."""
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
    """All living descendants of these processes, without `exclude` and their descendants.

    Two walks must agree, because orphans move up during a walk. An orphan of `exclude` is recognised only while it is
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
    """The living descendants of a process with one thread, by one walk that may miss some.

    For figures, not for signals.
    """
    try:
        found = _walk([root], _NONE, files)
    except OSError:
        return []
    return [one for one in found.values() if one is not None and not one.is_zombie]


def send(who: Identity, signum: int) -> bool:
    """Sends the signal to exactly this process; False when it is gone or may not be signalled."""
    try:
        descriptor = os.pidfd_open(who.pid)
    except ProcessLookupError:
        return False
    # No pidfds in this kernel, sandbox or Python, or no descriptor left: check just before the kill.
    except (OSError, AttributeError):
        return _send_by_number(who, signum)
    try:
        # Checked after the descriptor is open: it cannot be reused from then on.
        if identify(who.pid) != who:
            return False
        signal.pidfd_send_signal(descriptor, signum)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def state_in_words(state: str) -> str:
    """What the letter of a state in /proc means."""
    return _STATES.get(state, f"in state {state}")


def describe(who: Identity) -> str | None:
    """`python (pid 7, sleeping)`; None when it is gone. Never blocks, unlike reading a command line."""
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
    """The exit code that a shell gives for this wait status: 128 + n if signal n ended the program."""
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
        """Leaves out `exclude()` with its descendants, and processes that started before `since`."""
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
        # A reaper that is in the cgroup of its job must not be killed with it.
        if self._ancestor in self._cgroup.pids() and not self._cgroup.evict(self._ancestor):
            return False
        return self._cgroup.kill()


def find_tagged(name: str, value: str) -> list[Identity]:
    """All processes with this variable in their environment, as far as it may be read. Raises OSError."""
    mark = f"{name}={value}".encode(errors="surrogateescape")
    return [who for who, environment in environments(mark) if mark in environment]


def kill_all(find: Callable[[], list[Identity]]) -> bool:
    """Kills what `find` finds until it finds nothing; False when processes are left. Raises OSError."""
    for _ in range(_MOST_SWEEPS):
        left = find()
        if not left:
            return True
        for who in left:
            send(who, signal.SIGKILL)
        time.sleep(_BETWEEN_SWEEPS)
    return False


def environments(mark: bytes = b"=") -> Iterator[tuple[Identity, list[bytes]]]:
    """Every process that has this in its environment, as far as that may be read.

    Raises OSError when descriptors or memory are short: finding nothing then proves nothing.
    """
    for name in os.listdir("/proc"):  # noqa: PTH208 - one call
        if name.isdigit():
            environment = _environment(int(name))
            if mark in environment and (who := identify(int(name))) is not None:
                yield who, environment.split(b"\0")


def find_orphans(place: str, *supervisors: str) -> Iterator[tuple[Identity, str]]:
    """The processes of runs that have their records in this directory, if none of their ancestors has such a name.

    Each with the directory of its record. Raises OSError.
    """
    tag = b"STOKER_RUN_DIR="
    here = tag + os.fsencode(place) + b"/"
    for who, environment in environments(here):
        for variable in environment:
            if variable.startswith(here) and not has_ancestor_named(who, *supervisors):
                yield who, os.fsdecode(variable.removeprefix(tag))


def has_ancestor_named(who: Identity, *names: str) -> bool:
    """Whether one of its ancestors has such a name. True also if that cannot be determined."""
    current = who.pid
    while current > 1:
        found = stat(current)
        if found is None:
            return True  # an ancestor ended just now
        if found.name in names:
            return True
        current = found.parent
    return False


def _environment(pid: int) -> bytes:
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
        return b""  # gone, or of another user


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
    """Whether two walks found the same processes. One that vanished during a walk may have left children."""
    if before.keys() != now.keys():
        return False
    for pid, one in now.items():
        other = before[pid]
        if one is None or other is None or one.identity != other.identity or one.is_zombie != other.is_zombie:
            return False
    return True


def _walk(roots: list[int], exclude: Collection[int], files: KeptFiles | None = None) -> dict[int, Stat | None]:
    """`files`: read the processes of one thread by these, of which the roots are."""
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
    """How many threads to ask for their children before it is cheaper to read every process of the machine.

    One thread costs about as much as one process. The links of /proc count the processes.
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
    """Whether it was built with CONFIG_PROC_CHILDREN."""
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
        return pread_proc(descriptor)
    except OSError:
        return b""  # it ended while it was read
    finally:
        os.close(descriptor)
