"""A cgroup for the job, where this user may create one: no fork escapes it, and one write kills all of it."""

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Final

from stoker.procfs import Identity, identify

_OURS: Final = re.compile(r"stoker-(\d+)-(\d+)-\d+")
# A cgroup whose last process just ended can be busy for a moment.
_REMOVAL_PATIENCE: Final = 0.5
# Microseconds, the kernel's own default.
_PERIOD: Final = 100_000
# Where `DelegateSubgroup=` of a systemd unit puts the worker. Jobs get their cgroups beside it: the kernel limits them
# only if the cgroup around them has no processes of its own.
_WORKERS: Final = "stoker-worker"


class NoCgroupError(Exception):
    """Why there is none. The message fits after "no cgroup: "."""


class Cgroup:
    """One directory of the cgroup v2 tree, created for one job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, within: Path | None = None, *, tidy: bool = True) -> "Cgroup":
        """A new one, inside that of this process or beside a worker's. Raises `NoCgroupError`.

        `tidy`: removes abandoned ones there.
        """
        parent = within or _cgroup_of_jobs()
        try:
            if tidy:
                remove_abandoned(parent)
            cgroup = cls(_make(parent))
        except OSError as error:
            raise NoCgroupError(os.strerror(error.errno or 0).lower()) from error
        # Without it, a cgroup adds nothing to tracking by descent.
        if not (cgroup.path / "cgroup.kill").exists():
            cgroup.remove()
            raise NoCgroupError("the kernel is older than cgroup.kill (Linux 5.14)")
        return cgroup

    def add(self, pid: int) -> None:
        """Moves a process here; its later children start here."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def evict(self, pid: int) -> bool:
        """Moves a process to the worker's cgroup, or to the parent of this one; False when that failed."""
        workers = self.path.parent / _WORKERS
        try:
            ((workers if workers.is_dir() else self.path.parent) / "cgroup.procs").write_text(str(pid))
        except OSError:
            return False
        return True

    def pids(self) -> list[int]:
        """The processes here and in cgroups that the job created below."""
        found: list[int] = []
        for directory in _from_below(self.path):
            try:
                found += map(int, (directory / "cgroup.procs").read_text().split())
            except OSError:
                continue  # It was removed just now.
        # Zero stands for a process outside this pid namespace.
        return [pid for pid in found if pid > 0]

    def limit(self, cpus: int, ram: int) -> bool:
        """Sets how many CPUs and how much RAM the processes here get together, 0 for no limit; whether that holds.

        The kernel ends the job's processes when they need more RAM. Limits are there only where the controllers are
        delegated to this user, and where no process is in the cgroup above.
        """
        quota = f"{cpus * _PERIOD} {_PERIOD}" if cpus else f"max {_PERIOD}"
        cpus_hold = self._set("cpu", "cpu.max", quota, asked=cpus > 0)
        ram_holds = self._set("memory", "memory.max", str(ram) if ram else "max", asked=ram > 0)
        # Otherwise a job that needs more would be slow instead. There is no such file without swap.
        self._set("memory", "memory.swap.max", "0" if ram else "max", asked=False)
        return cpus_hold and ram_holds

    def _set(self, controller: str, name: str, value: str, *, asked: bool) -> bool:
        """Writes a file of a controller, if it is there or `asked` for; whether it is as asked."""
        path = self.path / name
        if asked and not path.exists():
            # One at a time: users often have `memory` and not `cpu`.
            with contextlib.suppress(OSError):
                (self.path.parent / "cgroup.subtree_control").write_text(f"+{controller}")
        try:
            # Not created where it is missing.
            with path.open("r+") as file:
                file.write(value)
        except OSError:
            return not asked
        return True

    def kill(self) -> bool:
        """Kills everything here and below, also children that are being forked. False when that failed."""
        try:
            (self.path / "cgroup.kill").write_text("1")
        except OSError:
            return False
        return True

    def remove(self) -> bool:
        """False when processes are still in it."""
        ends = time.monotonic() + _REMOVAL_PATIENCE
        while not _remove(self.path):
            if self.pids() or time.monotonic() > ends:
                return False
            time.sleep(0.005)
        return True


def own_cgroup() -> Path:
    """The directory of the v2 cgroup that this process is in. Raises `NoCgroupError`."""
    try:
        memberships = Path("/proc/self/cgroup").read_text(errors="surrogateescape")
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError as error:
        raise NoCgroupError(os.strerror(error.errno or 0).lower()) from error
    return locate(memberships, mounts)


def _cgroup_of_jobs() -> Path:
    """The directory in which jobs of this process get theirs. Raises `NoCgroupError`."""
    own = own_cgroup()
    return own.parent if own.name == _WORKERS else own


def cpus_here() -> int:
    """How many CPUs this process may use."""
    allowed = len(os.sched_getaffinity(0))
    for quota in _limits("cpu.max"):
        amount, _, period = quota.partition(" ")
        if amount.isdecimal() and period.isdecimal() and int(period):
            allowed = min(allowed, max(1, int(amount) // int(period)))
    return allowed


def ram_here() -> int:
    """How many bytes of RAM this process may use, with everything else that runs here."""
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([pages, *(int(limit) for limit in _limits("memory.max") if limit.isdecimal())])


def _limits(name: str) -> list[str]:
    """The limits of this process's cgroup and of those around it."""
    found: list[str] = []
    with contextlib.suppress(NoCgroupError):
        directory = own_cgroup()
        while (directory / "cgroup.procs").exists():
            with contextlib.suppress(OSError):
                found.append((directory / name).read_text().strip())
            directory = directory.parent
    return found


def locate(memberships: str, mounts: str) -> Path:
    """The same, from the contents of /proc/self/cgroup and /proc/self/mountinfo.

    In the hybrid layout v2 is mounted below the v1 controllers, so the usual path is not reliable.
    """
    inside = next((line[3:] for line in memberships.splitlines() if line.startswith("0::")), None)
    mounted = [place for line in mounts.splitlines() if (place := _cgroup2_mount(line))]
    if inside is None or not mounted:
        raise NoCgroupError("cgroup v2 is not mounted here")
    for root, point in mounted:
        # In a container the mount can begin further down than the paths do.
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
            number += 1  # This process has several jobs.
        else:
            return path


def remove_abandoned(within: Path | None = None) -> None:
    """Removes the cgroups of supervisors that were killed together with their reapers, if they are empty.

    Raises OSError and `NoCgroupError`.
    """
    parent = within or _cgroup_of_jobs()
    for directory in parent.iterdir():
        match = _OURS.fullmatch(directory.name)
        if match and identify(int(match[1])) != Identity(int(match[1]), int(match[2])):
            _remove(directory)


def _from_below(path: Path) -> list[Path]:
    """This directory and every one below it, the deepest first."""
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
