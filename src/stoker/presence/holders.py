"""Which processes have a GPU's device node open, by a scan of the open files of all processes.

A node is identified by its device number, so the nodes of a container count under any name. Not seen: a process that
closed the node and kept only a mapping of it (no GPU library does), and a thread with its own table of open files.
"""

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from stoker.procfs import (
    OUTSIDE,
    Stat,
    inside_pid_namespace,
    read_stat,
    user_name,
)

# Files that nearly every process has open and that are never a GPU.
_NEVER: Final = ("/dev/null", "/dev/pts/", "/dev/shm/")  # noqa: S108 - nothing is written there
_DEAD: Final = ("Z", "X")
_DELETED: Final = " (deleted)"
_ONE_THREAD: Final = 3
# From a kernel without accounting of run times.
_NO_ACCOUNT: Final = b"0 0 0\n"
_NOTHING: Final[frozenset[str]] = frozenset()
# The process ended just now.
_GONE: Final = (FileNotFoundError, ProcessLookupError)
# In the place of a file system's number: what stands beside it is a device number.
_DEVICE: Final = -1
# Local file systems. stat on any other can block while its server is away, even through /proc; usual mounts of those
# allow no device nodes anyway.
LOCAL: Final = frozenset(
    {
        "bcachefs", "btrfs", "devtmpfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "rootfs",
        "squashfs", "tmpfs", "xfs", "zfs",
    }
)  # fmt: skip


NodeId: TypeAlias = tuple[int, int]


class Mounts:
    """The mounts that can hold device nodes, so that no scan waits for a dead network file system. For one scan."""

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._can_hold_nodes: dict[bytes, bool] = {}

    def can_hold_nodes(self, pid: int, path: str) -> bool:
        """Whether this /proc/PID/fd/N is on a mount that can hold device nodes, without touching the file."""
        try:
            mount = _mount_of(path.replace("/fd/", "/fdinfo/"))
            if mount not in self._can_hold_nodes:
                # Mount ids are unique, but each process sees only those of its namespace.
                self._can_hold_nodes |= _read_mounts(f"{self._proc}/{pid}/mountinfo")
        except OSError:
            return False
        # A mount that no process has is internal to the kernel, or was detached.
        return self._can_hold_nodes.setdefault(mount, False)


def _mount_of(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # It is the third of a few short lines.
        text = os.read(descriptor, 4096)
    finally:
        os.close(descriptor)
    return text.partition(b"mnt_id:")[2].split(maxsplit=1)[0] if b"mnt_id:" in text else b""


def _read_mounts(path: str) -> dict[bytes, bool]:
    mounts = {}
    for line in Path(path).read_bytes().splitlines():
        own, _, of_file_system = line.partition(b" - ")
        fields, kind = own.split(), of_file_system.partition(b" ")[0]
        if len(fields) > 5:
            mounts[fields[0]] = kind.decode(errors="replace") in LOCAL and b"nodev" not in fields[5].split(b",")
    return mounts


def identity(found: os.stat_result) -> NodeId:
    """The identity of a device node: its device number, since containers have their own nodes."""
    if stat.S_ISCHR(found.st_mode):
        return (_DEVICE, found.st_rdev)
    return (found.st_dev, found.st_ino)


class DeviceHolder(NamedTuple):
    """A process that has a GPU's device node open. Its identity is pid plus start time."""

    pid: int
    started: int
    """Start time in clock ticks since boot."""
    name: str
    """As the kernel calls it: at most fifteen letters."""
    executable: str | None
    """The name of the program's file, or else of what it was called with; None when neither may be read."""
    user: str


class Scan(NamedTuple):
    """The holders of each GPU, and how many processes could not be read."""

    by_gpu: dict[str, tuple[DeviceHolder, ...]]
    """All GPUs that there are nodes for, in the order of pids."""
    unseen: int
    """Processes whose open files may not be read: any of them may hold any GPU."""


class HolderScanner:
    """Scans for holders. One scan asks only about open files that are new since the one before."""

    def __init__(self, nodes: Mapping[str, Sequence[Path]], root: Path = Path("/")) -> None:
        self.out_of_sight: str | None = OUTSIDE if inside_pid_namespace(root) else None
        """Why there are processes that not even `unseen` counts, if there are."""
        self._nodes = {uuid: tuple(map(str, paths)) for uuid, paths in nodes.items()}
        self._names = frozenset(os.path.basename(path) for paths in self._nodes.values() for path in paths)
        self._proc = str(root / "proc")
        self._wanted: dict[NodeId, frozenset[str]] = {}
        self._other_files: dict[int, set[str]] = {}
        """By pid, the links of open files that turned out to be no GPU's."""
        self._sleeping: dict[int, bytes] = {}
        """By pid, how long a process of one thread that holds no GPU has run in its life."""
        self._kernel_threads: set[int] = set()
        self._holders: dict[tuple[int, int, str], DeviceHolder] = {}
        """By pid, start and name, which changes when the process executes another program."""

    def scan(self) -> Scan:
        self._refresh_wanted()
        mounts = Mounts(self._proc)
        by_gpu: dict[str, list[DeviceHolder]] = {uuid: [] for uuid in self._nodes}
        pids = self._pids()
        # A /proc that does not even list the processes of others hides init as well.
        unseen = int(1 not in pids)
        met: dict[tuple[int, int, str], DeviceHolder] = {}
        for pid in pids:
            try:
                if held := self._held_unless_sleeping(pid, mounts):
                    holder = self._meet(pid, met)
                    for uuid in held:
                        by_gpu[uuid].append(holder)
            except _GONE:
                continue
            except OSError:
                unseen += self._is_program(pid)
        self._holders = met
        self._forget_all_but(pids)
        return Scan({uuid: tuple(holders) for uuid, holders in by_gpu.items()}, unseen)

    def _refresh_wanted(self) -> None:
        """Nodes appear late and are recreated, so they are examined at each scan."""
        wanted: dict[NodeId, frozenset[str]] = {}
        for uuid, paths in self._nodes.items():
            for path in paths:
                try:
                    node = identity(os.stat(path))
                except OSError:
                    continue
                wanted[node] = wanted.get(node, _NOTHING) | {uuid}
        if wanted != self._wanted:
            self._wanted = wanted
            self._other_files.clear()
            self._sleeping.clear()

    def _pids(self) -> list[int]:
        try:
            return sorted(int(name) for name in os.listdir(self._proc) if name.isdecimal())
        except OSError:
            return []

    def _held_unless_sleeping(self, pid: int, mounts: Mounts) -> frozenset[str]:
        """Skips processes that have not run since the last scan: they have opened nothing."""
        # Read before its files: if it runs meanwhile, the next scan notices.
        ran = _run_time(f"{self._proc}/{pid}/schedstat")
        if ran is not None and self._sleeping.get(pid) == ran:
            return _NOTHING
        self._sleeping.pop(pid, None)
        held = self._held(pid, mounts)
        # The time is that of the first thread only. The directory has one link per thread, and two more.
        if not held and ran is not None and os.stat(f"{self._proc}/{pid}/task").st_nlink == _ONE_THREAD:
            self._sleeping[pid] = ran
        return held

    def _held(self, pid: int, mounts: Mounts) -> frozenset[str]:
        directory, links = self._open_files(pid)
        # Only files that are new since the last scan are examined.
        unknown = links.keys() - self._other_files.get(pid, _NOTHING)
        if not unknown:
            return _NOTHING
        held = _NOTHING
        to_ask_again = set()
        for link in unknown:
            found = self._gpus_behind(pid, f"{directory}/{links[link]}", link, mounts)
            held |= found or _NOTHING
            # A name under /dev can change its meaning; other files stay the same while they are open.
            if found or found is None or (link.startswith("/dev/") and not link.startswith(_NEVER)):
                to_ask_again.add(link)
        self._other_files[pid] = links.keys() - to_ask_again
        return held

    def _open_files(self, pid: int) -> tuple[str, dict[str, str]]:
        """The directory of a process's open files, and what is in it. Its threads have them in common."""
        directory = f"{self._proc}/{pid}/fd"
        links = _read_links(directory)
        if not links and self._outlives_first_thread(pid):
            tasks = f"{self._proc}/{pid}/task"
            for thread in os.listdir(tasks):
                if links := _read_links(f"{tasks}/{thread}/fd"):
                    return f"{tasks}/{thread}/fd", links
        return directory, links

    def _gpus_behind(self, pid: int, path: str, link: str, mounts: Mounts) -> frozenset[str] | None:
        """The GPUs of an open file; None when it was closed just now and may be opened again."""
        # Sockets, pipes and the like have no path.
        if not link.startswith("/") or link.startswith(_NEVER):
            return _NOTHING
        name = link.removesuffix(_DELETED).rpartition("/")[2]
        # stat cannot block under /dev or on a node's name; elsewhere the mount is checked first.
        try:
            if not (link.startswith("/dev/") or name in self._names or mounts.can_hold_nodes(pid, path)):
                return _NOTHING if os.path.lexists(path) else None
            return self._wanted.get(identity(os.stat(path)), _NOTHING)
        except FileNotFoundError:
            return None

    def _outlives_first_thread(self, pid: int) -> bool:
        """Whether a process without open files is one whose first thread ended while others go on."""
        if pid in self._kernel_threads:
            return False
        found = self._stat(pid)
        if found.is_kernel_thread:
            self._kernel_threads.add(pid)
        return found.state in _DEAD and not found.is_zombie

    def _is_program(self, pid: int) -> bool:
        """Whether an unreadable process could hold a GPU: kernel threads and zombies cannot."""
        if pid in self._kernel_threads:
            return False
        try:
            found = self._stat(pid)
        except _GONE:
            return False
        except OSError:
            return True
        if found.is_kernel_thread:
            self._kernel_threads.add(pid)
            return False
        return not found.is_zombie

    def _meet(self, pid: int, met: dict[tuple[int, int, str], DeviceHolder]) -> DeviceHolder:
        found = self._stat(pid)
        key = (pid, found.started, found.name)
        met[key] = self._holders.get(key) or DeviceHolder(*key, self._executable(pid), self._user(pid))
        return met[key]

    def _stat(self, pid: int) -> Stat:
        try:
            return read_stat(f"{self._proc}/{pid}/stat")
        except ValueError:
            raise ProcessLookupError(pid) from None

    def _executable(self, pid: int) -> str | None:
        try:
            path = os.readlink(f"{self._proc}/{pid}/exe").removesuffix(_DELETED)
        except OSError:
            try:
                path = _contents(f"{self._proc}/{pid}/cmdline").partition("\0")[0]
            except OSError:
                return None
        return path.rpartition("/")[2] or None

    def _user(self, pid: int) -> str:
        """Who started it. The owner of /proc/PID would be root for a program that protects its memory."""
        for line in _contents(f"{self._proc}/{pid}/status").splitlines():
            if line.startswith("Uid:"):
                return user_name(int(line.split()[1]))
        raise ProcessLookupError(pid)

    def _forget_all_but(self, pids: Sequence[int]) -> None:
        alive = set(pids)
        self._kernel_threads &= alive
        for pid in self._other_files.keys() - alive:
            del self._other_files[pid]
        for pid in self._sleeping.keys() - alive:
            del self._sleeping[pid]


def _read_links(directory: str) -> dict[str, str]:
    """What the files in a /proc/PID/fd are links to, each with its number; the last one where several are alike."""
    links: dict[str, str] = {}
    table = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for descriptor in os.listdir(table):
            try:
                links[os.readlink(descriptor, dir_fd=table)] = descriptor
            except FileNotFoundError:
                continue  # It was closed just now.
    finally:
        os.close(table)
    return links


def _run_time(path: str) -> bytes | None:
    """The process's schedstat: run time, wait time and time slices; None where it is missing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.read(descriptor, 100)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return text if text not in (b"", _NO_ACCOUNT) else None


def _contents(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
