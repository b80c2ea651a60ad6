"""A cgroup for the job, if this user may create one: no fork escapes it, and one write kills all its processes."""

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Final

from stoker.procfs import Identity, identify

_OURS: Final = re.compile(r"stoker-(\d+)-(\d+)-\d+")
# A cgroup can be busy for a moment after its last process.
_REMOVAL_PATIENCE: Final = 0.5
# Microseconds, the kernel's default.
_PERIOD: Final = 100_000
# The worker's cgroup by `DelegateSubgroup=` of its systemd unit. Jobs get sibling cgroups, since the kernel enforces
# limits only if the parent has no processes of its own.
_WORKERS: Final = "stoker-worker"


class NoCgroupError(Exception):
    """No cgroup is available. The message fits after "no cgroup: "."""


class Cgroup:
    """A cgroup v2 directory for one job."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._limits = (0, 0)

    @classmethod
    def create(cls, within: Path | None = None, *, tidy: bool = True) -> "Cgroup":
        """Creates a cgroup inside this process's, or beside a worker's. Raises `NoCgroupError`.

        `tidy`: also removes abandoned ones.
        """
        parent = within or _cgroup_of_jobs()
        try:
            if tidy:
                remove_abandoned(parent)
            cgroup = cls(_make(parent))
        except OSError as error:
            raise NoCgroupError(os.strerror(error.errno or 0).lower()) from error
        # Without this file, a cgroup adds nothing to tracking by descent.
        if not (cgroup.path / "cgroup.kill").exists():
            cgroup.remove()
            raise NoCgroupError("the kernel is older than cgroup.kill (Linux 5.14)")
        return cgroup

    def add(self, pid: int) -> None:
        """Moves a process into the cgroup, where its later children start."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def evict(self, pid: int) -> bool:
        """Moves a process to the worker's cgroup or to the parent. False on failure."""
        workers = self.path.parent / _WORKERS
        try:
            ((workers if workers.is_dir() else self.path.parent) / "cgroup.procs").write_text(str(pid))
        except OSError:
            return False
        return True

    def pids(self) -> list[int]:
        """The processes in this cgroup and in those that the job has created below."""
        found: list[int] = []
        for directory in _from_below(self.path):
            try:
                found += map(int, (directory / "cgroup.procs").read_text().split())
            except OSError:
                continue  # it has just been removed
        # 0 stands for a process outside this pid namespace.
        return [pid for pid in found if pid > 0]

    def limit(self, cpus: int, ram: int) -> bool:
        """Limits the CPUs and RAM of all processes together; 0 for no limit. True if the limits hold.

        The kernel kills processes that need more RAM. Limits need controllers that are delegated to this user, and a
        parent cgroup without processes.
        """
        if (cpus, ram) == self._limits == (0, 0):
            return True
        self._limits = (cpus, ram)
        quota = f"{cpus * _PERIOD} {_PERIOD}" if cpus else f"max {_PERIOD}"
        cpus_hold = self._set("cpu", "cpu.max", quota, asked=cpus > 0)
        ram_holds = self._set("memory", "memory.max", str(ram) if ram else "max", asked=ram > 0)
        # Swap would make such a job slow instead. Without swap the file does not exist.
        self._set("memory", "memory.swap.max", "0" if ram else "max", asked=False)
        return cpus_hold and ram_holds

    def _set(self, controller: str, name: str, value: str, *, asked: bool) -> bool:
        """Writes a controller's file, enabling the controller if `asked`. False if an asked-for value does not hold."""
        path = self.path / name
        if asked and not path.exists():
            # Enabled one at a time: users often have `memory` but not `cpu`.
            with contextlib.suppress(OSError):
                (self.path.parent / "cgroup.subtree_control").write_text(f"+{controller}")
        try:
            # Must not create a missing file.
            with path.open("r+") as file:
                file.write(value)
        except OSError:
            return not asked
        return True

    def kill(self) -> bool:
        """Kills all processes in the cgroup and below, including children being forked. False on failure."""
        try:
            (self.path / "cgroup.kill").write_text("1")
        except OSError:
            return False
        return True

    def remove(self) -> bool:
        """Removes the cgroup. False if it still has processes."""
        ends = time.monotonic() + _REMOVAL_PATIENCE
        while not _remove(self.path):
            if self.pids() or time.monotonic() > ends:
                return False
            time.sleep(0.005)
        return True


def own_cgroup() -> Path:
    """The v2 cgroup directory of this process. Raises `NoCgroupError`."""
    try:
        memberships = Path("/proc/self/cgroup").read_text(errors="surrogateescape")
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError as error:
        raise NoCgroupError(os.strerror(error.errno or 0).lower()) from error
    return locate(memberships, mounts)


def _cgroup_of_jobs() -> Path:
    """The parent directory for cgroups of jobs. Raises `NoCgroupError`."""
    own = own_cgroup()
    return own.parent if own.name == _WORKERS else own


def cpus_here() -> int:
    """The number of CPUs that this process may use."""
    allowed = len(os.sched_getaffinity(0))
    for quota in _limits("cpu.max"):
        amount, _, period = quota.partition(" ")
        if amount.isdecimal() and period.isdecimal() and int(period):
            allowed = min(allowed, max(1, int(amount) // int(period)))
    return allowed


def ram_here() -> int:
    """The bytes of RAM that this process and all others here may use."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([pages, *(int(limit) for limit in _limits("memory.max") if limit.isdecimal())])


def _limits(name: str) -> list[str]:
    """The limits of this process's cgroup and its ancestors."""
    found: list[str] = []
    with contextlib.suppress(NoCgroupError):
        directory = own_cgroup()
        while (directory / "cgroup.procs").exists():
            with contextlib.suppress(OSError):
                found.append((directory / name).read_text().strip())
            directory = directory.parent
    return found


def locate(memberships: str, mounts: str) -> Path:
    """The v2 cgroup directory, from the contents of /proc/self/cgroup and /proc/self/mountinfo.

    In the hybrid layout v2 is mounted below the v1 controllers, so the usual path is unreliable.
    """
    inside = next((line[3:] for line in memberships.splitlines() if line.startswith("0::")), None)
    mounted = [place for line in mounts.splitlines() if (place := _cgroup2_mount(line))]
    if inside is None or not mounted:
        raise NoCgroupError("cgroup v2 is not mounted here")
    for root, point in mounted:
        # In a container the mount may start below the root of the paths.
        if root in ("/", inside) or inside.startswith(f"{root}/"):
            return Path(point, inside[len(root.rstrip("/")) :].lstrip("/"))
    raise NoCgroupError("the cgroup of this process is outside what is mounted here")


def _cgroup2_mount(line: str) -> tuple[str, str] | None:
    """Root and mount point of a line of mountinfo, if it is a cgroup v2 hierarchy."""
    before, _, after = line.partition(" - ")
    if after.partition(" ")[0] != "cgroup2":
        return None
    fields = before.split(" ")
    return _unescaped(fields[3]), _unescaped(fields[4])


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)


def _make(parent: Path) -> Path:
    me = identify(os.getpid()) or Identity(os.getpid(), 0)
    number = 0
    while True:
        path = parent / f"stoker-{me.pid}-{me.started}-{number}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1  # this process has several jobs
        else:
            return path


def remove_abandoned(within: Path | None = None) -> None:
    """Removes empty cgroups of supervisors that were killed together with their reapers.

    Raises OSError and `NoCgroupError`.
    """
    parent = within or _cgroup_of_jobs()
    for directory in parent.iterdir():
        match = _OURS.fullmatch(directory.name)
        if match and identify(int(match[1])) != Identity(int(match[1]), int(match[2])):
            _remove(directory)


def _from_below(path: Path) -> list[Path]:
    """This directory and all below it, deepest first."""
    found: list[Path] = []
    try:
        with os.scandir(path) as entries:
            inner = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        inner = []
    for directory in inner:
        found += _from_below(directory)
    return [*found, path]


def _remove(path: Path) -> bool:
    for directory in _from_below(path):
        try:
            directory.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True
