"""Name, user and start time of processes that a driver reports, inside or outside a container."""

import os
import select
from pathlib import Path
from typing import Final, Literal

from stoker.gpus.model import NOT_REPORTED, Maybe, Process, Unknown
from stoker.procfs import inside_pid_namespace, read_stat, user_name

# Far above the usual number of processes on GPUs, far below the usual limit of 1024 open files.
MOST_PIDFDS: Final = 256

NOT_HERE: Final = "no process with this pid is visible here"
OUTSIDE: Final = "this pid is numbered outside this container, so it cannot be matched to a process here"
UNPROVEN: Final = "the open files of this pid cannot be read, so it may be numbered outside this container"
OUTSIDE_NOTE: Final = (
    "The GPU driver numbers processes as the machine outside this container does, so processes on the GPUs "
    "have no name or user here; a container started with --pid=host sees them."
)

# Newer PyTorch renames its process; people know it as python.
_ALSO_CALLED: Final = {"pt_main_thread": "python"}


class _Known:
    """The cached facts of a pid."""

    __slots__ = ("asked", "name", "pidfd", "started", "ticks", "user")

    def __init__(
        self, ticks: int | None, started: Maybe[int], name: Maybe[str], user: Maybe[str], pidfd: int | None
    ) -> None:
        self.ticks = ticks  # the real start time, even of an unidentified process
        self.started = started
        self.name = name
        self.user = user
        self.pidfd = pidfd
        self.asked = 0

    @classmethod
    def unidentified(cls, ticks: int | None, reason: str, pidfd: int | None) -> "_Known":
        why = Unknown(reason)
        return cls(ticks, why, why, why, pidfd)


class ProcessCache:
    """Caches names, users and start times of pids while the processes live.

    A known pid costs a dictionary lookup, and all ends of processes together cost one `poll` per refresh. `pids_from`:
    the source of the pids: a driver, which in a container may use the host's pids, or this /proc, which needs no
    verification.
    """

    def __init__(self, root: Path = Path("/"), *, pids_from: Literal["driver", "proc"] = "driver") -> None:
        self.note: str | None = None
        """Set once a pid turns out to belong to the host's namespace."""
        self._proc = str(root / "proc")
        self._devices = root / "dev"
        # A pid counts only if its process verifiably holds a GPU.
        self.verifies_pids = pids_from == "driver" and inside_pid_namespace(root)
        self._pidfds_mean_proc = root == Path("/") and _proc_is_ours()
        self._proven: set[int] = set()
        """Pids of processes that held a GPU here; once missing, they have ended."""
        self._known: dict[int, _Known] = {}
        self._watched: dict[int, int] = {}
        """The pid of each pidfd."""
        self._unwatched: set[int] = set()
        self._poll = select.poll()
        self._round = 0

    def refresh(self) -> None:
        """Removes ended processes. Call it at the start of each look."""
        for pidfd, _ in self._poll.poll(0):
            self._forget(self._watched[pidfd])
        if self._unwatched:
            self._refresh_unwatched()
        if len(self._watched) >= MOST_PIDFDS:
            self._evict()
        self._round += 1

    def process(
        self,
        pid: int,
        memory: Maybe[int],
        utilization: Maybe[float],
        memory_activity: Maybe[float] = NOT_REPORTED,
    ) -> Process:
        """The process with this pid, with the driver's values."""
        known = self._known.get(pid)
        if known is None:
            known = self._add(pid)
        known.asked = self._round
        return Process(pid, known.started, known.name, known.user, memory, utilization, memory_activity)

    def name(self, pid: int) -> Maybe[str]:
        """The name only."""
        return (self._known.get(pid) or self._add(pid)).name

    def close(self) -> None:
        for pid in list(self._known):
            self._forget(pid)

    def _add(self, pid: int) -> _Known:
        # The pidfd is opened first: if the pid is reused in between, the pidfd's end removes it.
        pidfd = self._pidfd(pid)
        known = self._describe(pid, pidfd)
        self._known[pid] = known
        if pidfd is None:
            self._unwatched.add(pid)
        else:
            self._watched[pidfd] = pid
            self._poll.register(pidfd, select.POLLIN)
        return known

    def _describe(self, pid: int, pidfd: int | None) -> _Known:
        try:
            stat = read_stat(f"{self._proc}/{pid}/stat")
            name, ticks = stat.name, stat.started
            user = user_name(Path(self._proc, str(pid)).stat().st_uid)
        except (OSError, ValueError):
            if not self.verifies_pids or pid in self._proven:
                return _Known.unidentified(None, NOT_HERE, pidfd)
            self.note = OUTSIDE_NOTE
            return _Known.unidentified(None, OUTSIDE, pidfd)
        if self.verifies_pids:
            try:
                holds = holds_nvidia_device(Path(self._proc, str(pid)), self._devices)
            except OSError:
                return _Known.unidentified(ticks, UNPROVEN, pidfd)
            if not holds:
                # Valid while it lives: the driver reported this pid while the process held no GPU.
                self.note = OUTSIDE_NOTE
                return _Known.unidentified(ticks, OUTSIDE, pidfd)
            self._proven.add(pid)
        return _Known(ticks, ticks, _ALSO_CALLED.get(name, name), user, pidfd)

    def _pidfd(self, pid: int) -> int | None:
        if not self._pidfds_mean_proc or len(self._watched) >= MOST_PIDFDS:
            return None
        try:
            return os.pidfd_open(pid)
        # Python built for an old kernel lacks this function.
        except (OSError, AttributeError):
            return None

    def _refresh_unwatched(self) -> None:
        for pid in list(self._unwatched):
            known = self._known[pid]
            if known.asked < self._round or known.ticks != self._ticks_now(pid):
                self._forget(pid)

    def _ticks_now(self, pid: int) -> int | None:
        try:
            return read_stat(f"{self._proc}/{pid}/stat").started
        except (OSError, ValueError):
            return None

    def _evict(self) -> None:
        for pid in list(self._watched.values()):
            if self._known[pid].asked < self._round:
                self._forget(pid)

    def _forget(self, pid: int) -> None:
        known = self._known.pop(pid)
        if known.pidfd is None:
            self._unwatched.discard(pid)
        else:
            self._poll.unregister(known.pidfd)
            del self._watched[known.pidfd]
            os.close(known.pidfd)


def holds_nvidia_device(process: Path, devices: Path) -> bool:
    """True if the process has an NVIDIA device open. Raises OSError if that is unknown."""
    nodes = [devices / "nvidiactl", *devices.glob("nvidia[0-9]*")]
    numbers = {number for node in nodes if (number := _device_number(node))}
    for link in (process / "fd").iterdir():
        try:
            # Checks only files with the name of such a node, since stat can block on a dead network file system.
            nvidia = link.readlink().name.startswith("nvidia")
        except OSError:
            continue  # it has just been closed
        if nvidia and _device_number(link) in numbers:
            return True
    return False


def _device_number(path: Path) -> int:
    try:
        return path.stat().st_rdev
    except OSError:
        return 0


def _proc_is_ours() -> bool:
    """True if /proc uses the pids of `pidfd_open`, unlike a host's /proc inside a container."""
    try:
        return str(Path("/proc/self").readlink()) == str(os.getpid())
    except OSError:
        return False
