"""Resource usage of a job's processes: CPU time, I/O, and the files that they write.

All values come from /proc, which never waits for a disk or a network. Unreadable values are left out.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from stoker.procfs import Identity, Stat, pread_proc, read_stat

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_CORES: Final = float(os.cpu_count() or 1)
# The fields utime, stime, cutime and cstime, counted after the name in the stat file.
_TIMES: Final = slice(11, 15)
# The limits of one scan. A process with a data loader of many workers has tens of descriptors.
_MOST_PROCESSES: Final = 1024
_MOST_DESCRIPTORS: Final = 8192
# Local file systems without a block device.
_LOCAL: Final = frozenset({"btrfs", "zfs", "bcachefs", "overlay", "tmpfs", "ramfs"})


class ProcessUsage(NamedTuple):
    """Usage since the previous measurement; None for unreadable values."""

    cpu: float | None = None
    """Busy cores."""
    io: float | None = None
    """Bytes read and written per second."""


class UsageMeter:
    """Measures all processes of a job together, including those that end between two measurements."""

    def __init__(self, read: Callable[[str], bytes] | None = None) -> None:
        """`read`: reads a file of /proc; it may return nothing or raise OSError."""
        self._read = _read if read is None else read
        self._at: float | None = None
        self._known: list[Identity] = []
        self._ticks = 0
        self._moved: tuple[int, int] | None = None
        """Bytes by system calls, which miss mapped files, and bytes of disk I/O, which miss cached ones."""
        self._written: dict[Identity, tuple[int, int] | None] = {}
        self.may_have_written = True
        """Files may have been written between the last two measurements."""

    def measure(self, at: float, processes: Iterable[Identity | Stat]) -> ProcessUsage:
        """The usage since the last measurement. `processes`: a `Stat` must be current."""
        # A zombie keeps its counters until its parent waits for it, which then includes them.
        wanted = {one.identity if isinstance(one, Stat) else one: one for one in (*self._known, *processes)}
        found = [one for who in list(wanted.values())[:_MOST_PROCESSES] if (one := _stat(who)) is not None]
        ticks = sum(sum(map(int, one.fields[_TIMES])) for one in found)
        counts = [_transferred(one.pid, self._read) for one in found]
        written = {one.identity: count and count.written for one, count in zip(found, counts, strict=True)}
        self.may_have_written = written != self._written or None in written.values() or len(found) >= _MOST_PROCESSES
        self._written = written
        moved = _added([count.moved for count in counts if count is not None])
        before, ticks_before, moved_before = self._at, self._ticks, self._moved
        self._at, self._known, self._ticks, self._moved = at, [one.identity for one in found], ticks, moved
        if before is None or at <= before or not found:
            return ProcessUsage()
        passed = at - before
        cpu = min(max(ticks - ticks_before, 0) / _TICKS / passed, _CORES)
        if moved is None or moved_before is None:
            return ProcessUsage(cpu)
        return ProcessUsage(cpu, max(0, moved[0] - moved_before[0], moved[1] - moved_before[1]) / passed)


def _stat(who: Identity | Stat) -> Stat | None:
    if isinstance(who, Stat):
        return who
    try:
        found = read_stat(f"/proc/{who.pid}/stat")
    except (OSError, ValueError):
        return None
    return found if found.identity == who else None


class _Transferred(NamedTuple):
    """Total I/O of a process in bytes."""

    moved: tuple[int, int]
    """Bytes read and written by system calls, and by disk I/O."""
    written: tuple[int, int]
    """Bytes written by system calls, and to disks, which includes mapped files."""


def _transferred(pid: int, read_file: Callable[[str], bytes]) -> _Transferred | None:
    try:
        words = read_file(f"/proc/{pid}/io").split()
        read, written, fetched, stored = (int(words[place]) for place in (1, 3, 9, 11))
    except (OSError, ValueError, IndexError):
        return None
    return _Transferred((read + written, fetched + stored), (written, stored))


def _added(moved: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    return (sum(one[0] for one in moved), sum(one[1] for one in moved)) if moved else None


class WrittenFile(NamedTuple):
    """A file that a process has open for writing."""

    path: str
    pid: int
    descriptor: int
    position: int
    """The file offset, which grows with the file and can be read without touching the file system."""
    mount: bytes

    @property
    def opened(self) -> str:
        """A path that opens this file even if it was renamed or deleted."""
        return f"/proc/{self.pid}/fd/{self.descriptor}"

    def is_on(self, device: int | None) -> bool:
        """True if it is on a local file system or on this device, so that reading it depends on no other machine."""
        try:
            mounts = _read(f"/proc/{self.pid}/mountinfo")
        except OSError:
            return False
        # See proc_pid_mountinfo(5): `36 35 98:0 / /data rw,noatime - ext4 /dev/sda rw`.
        for line in mounts.splitlines():
            words = line.split()
            if words[0] == self.mount:
                number, kind = words[2].decode(), words[words.index(b"-") + 1].decode()
                same = device is not None and number == f"{os.major(device)}:{os.minor(device)}"
                return same or not number.startswith("0:") or kind in _LOCAL
        return False


def written_files(processes: Iterable[Stat], wanted: Callable[[str, int], bool]) -> Iterator[WrittenFile]:
    """The files that these processes write. `wanted` gets the path and the number of a descriptor."""
    left = _MOST_DESCRIPTORS
    for process in processes:
        directory = f"/proc/{process.pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(directory)[:left]:  # noqa: PTH208 - one call
                left -= 1
                with contextlib.suppress(OSError, ValueError, KeyError):
                    path = os.readlink(f"{directory}/{name}")  # noqa: PTH115
                    # Skips pipes and sockets, which have no path, and devices.
                    if path.startswith("/") and not path.startswith("/dev/") and wanted(path, int(name)):
                        yield from _written(process.pid, int(name), path)


def _written(pid: int, descriptor: int, path: str) -> Iterator[WrittenFile]:
    words = _read(f"/proc/{pid}/fdinfo/{descriptor}").split()
    facts = dict(zip(words[:6:2], words[1:6:2], strict=True))
    if int(facts[b"flags:"], 8) & os.O_ACCMODE != os.O_RDONLY:
        yield WrittenFile(path, pid, descriptor, int(facts[b"pos:"]), facts[b"mnt_id:"])


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return pread_proc(descriptor)
    finally:
        os.close(descriptor)
