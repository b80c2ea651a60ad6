"""Finds the processes with a GPU's device node open, by a scan of the open files of all processes.

Nodes are identified by device number, so those of a container count under any name. A scan misses processes that keep
only a mapping of the node (no GPU library does that), and threads with a separate table of open files.
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
# The value of a kernel without accounting of run times.
_NO_ACCOUNT: Final = b"0 0 0\n"
_NOTHING: Final[frozenset[str]] = frozenset()
# The process has just ended.
_GONE: Final = (FileNotFoundError, ProcessLookupError)
# Replaces the number of a file system; the other number is then a device number.
_DEVICE: Final = -1
# Local file systems. stat on others can block while their server is away, even through /proc, and their usual mounts
# allow no device nodes anyway.
LOCAL: Final = frozenset(
    {
        "bcachefs", "btrfs", "devtmpfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "rootfs",
        "squashfs", "tmpfs", "xfs", "zfs",
    }
)  # fmt: skip


NodeId: TypeAlias = tuple[int, int]


class Mounts:
    """The mounts that can hold device nodes, for one scan, which must not wait for a dead network file system."""

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._can_hold_nodes: dict[bytes, bool] = {}

    def can_hold_nodes(self, pid: int, path: str) -> bool:
        """True if this /proc/PID/fd/N is on a mount that can hold device nodes. Does not touch the file."""
        try:
            mount = _mount_of(path.replace("/fd/", "/fdinfo/"))
            if mount not in self._can_hold_nodes:
                # Mount ids are unique, but a process sees only those of its namespace.
                self._can_hold_nodes |= _read_mounts(f"{self._proc}/{pid}/mountinfo")
        except OSError:
            return False
        # A mount without any process is internal to the kernel, or was detached.
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
    """A process with a GPU's device node open, identified by pid and start time."""

    pid: int
    started: int
    """Start time in clock ticks since boot."""
    name: str
    """The kernel's name, of at most 15 characters."""
    executable: str | None
    """The name of the executable, or of the called program; None if neither is readable."""
    user: str


class Scan(NamedTuple):
    """The holders of each GPU, and the number of unreadable processes."""

    by_gpu: dict[str, tuple[DeviceHolder, ...]]
    """All GPUs with nodes; holders are sorted by pid."""
    unseen: int
    """Processes with unreadable files, any of which may hold any GPU."""


class HolderScanner:
    """Scans for holders. A scan checks only files that are new since the previous one."""

    def __init__(self, nodes: Mapping[str, Sequence[Path]], root: Path = Path("/")) -> None:
        self.out_of_sight: str | None = OUTSIDE if inside_pid_namespace(root) else None
        """Why there may be processes beyond `unseen`, if so."""
        self._nodes = {uuid: tuple(map(str, paths)) for uuid, paths in nodes.items()}
        self._names = frozenset(os.path.basename(path) for paths in self._nodes.values() for path in paths)
        self._proc = str(root / "proc")
        self._wanted: dict[NodeId, frozenset[str]] = {}
        self._other_files: dict[int, set[str]] = {}
        """Links of open files that do not belong to a GPU, by pid."""
        self._sleeping: dict[int, bytes] = {}
        """Total run time of single-threaded processes without a GPU, by pid."""
        self._kernel_threads: set[int] = set()
        self._holders: dict[tuple[int, int, str], DeviceHolder] = {}
        """Holders by pid, start time and name, which changes with an exec."""

    def scan(self) -> Scan:
        self._refresh_wanted()
        mounts = Mounts(self._proc)
        by_gpu: dict[str, list[DeviceHolder]] = {uuid: [] for uuid in self._nodes}
        pids = self._pids()
        # A /proc that does not list other users' processes hides init as well.
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
        """Examines the nodes at each scan, since they appear late and are recreated."""
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
        """Skips processes that have not run since the last scan, and so have opened nothing."""
        # Read before its files, so that the next scan notices if it runs in between.
        ran = _run_time(f"{self._proc}/{pid}/schedstat")
        if ran is not None and self._sleeping.get(pid) == ran:
            return _NOTHING
        self._sleeping.pop(pid, None)
        held = self._held(pid, mounts)
        # The time covers the first thread only. The directory has one link per thread, plus two.
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
        """The directory of a process's open files, which its threads share, and its entries."""
        directory = f"{self._proc}/{pid}/fd"
        links = _read_links(directory)
        if not links and self._outlives_first_thread(pid):
            tasks = f"{self._proc}/{pid}/task"
            for thread in os.listdir(tasks):
                if links := _read_links(f"{tasks}/{thread}/fd"):
                    return f"{tasks}/{thread}/fd", links
        return directory, links

    def _gpus_behind(self, pid: int, path: str, link: str, mounts: Mounts) -> frozenset[str] | None:
        """The GPUs of an open file; None if it was just closed and may be reopened."""
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
        """True if a process without open files has lost its first thread while others continue."""
        if pid in self._kernel_threads:
            return False
        found = self._stat(pid)
        if found.is_kernel_thread:
            self._kernel_threads.add(pid)
        return found.state in _DEAD and not found.is_zombie

    def _is_program(self, pid: int) -> bool:
        """True if an unreadable process may hold a GPU, unlike kernel threads and zombies."""
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
        """Its user. The owner of /proc/PID is root if a program protects its memory."""
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
    """The targets of the links in a /proc/PID/fd, each with its (last) number."""
    links: dict[str, str] = {}
    table = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for descriptor in os.listdir(table):
            try:
                links[os.readlink(descriptor, dir_fd=table)] = descriptor
            except FileNotFoundError:
                continue  # it has just been closed
    finally:
        os.close(table)
    return links


def _run_time(path: str) -> bytes | None:
    """The process's schedstat: run time, wait time and time slices; None if it is missing."""
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
