"""Events of files, told by the kernel: what wakes a loop that waits for a file to change."""

import contextlib
import ctypes
import os
import struct
from pathlib import Path
from typing import Final, NamedTuple

MODIFIED: Final = 0x002
TOUCHED: Final = 0x004
CLOSED_AFTER_WRITING: Final = 0x008
CLOSED: Final = 0x018
OPENED: Final = 0x020
MOVED_HERE: Final = 0x080
CREATED: Final = 0x100
DELETED: Final = 0x200
REMOVED: Final = 0x400
MOVED_AWAY: Final = 0x800
OVERFLOWED: Final = 0x4000
NO_LONGER_WATCHED: Final = 0x8000

# What precedes the name in an event: watch, mask, cookie, length of the name.
_HEAD: Final = struct.Struct("iIII")
# The queue holds 16384 events by default: this many reads empty it, whoever fills it meanwhile.
_MOST_READS: Final = 64


class Event(NamedTuple):
    """What happened, to which watch, and to which file in it when the watch is of a directory."""

    watch: int
    mask: int
    name: str


class Inotify:
    """Readable after an event. Its descriptor is -1 where the kernel has none left: whoever uses it polls as well."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        # IN_NONBLOCK and IN_CLOEXEC are by definition the flags of open(2).
        self._descriptor: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def watch(self, path: Path, events: int) -> bool:
        """Whether it is watched now. Asked again for the same file it changes nothing; a new one is watched as well."""
        return bool(self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), events) >= 0)

    def add(self, path: Path, events: int) -> int:
        """The number of the watch on this file, the same for the same file. OSError when it cannot be watched."""
        watch: int = self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), events)
        if watch < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(path))
        return watch

    def read(self) -> list[Event]:
        """The events since the last call."""
        events: list[Event] = []
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_READS if self._descriptor >= 0 else 0):
                events += _split(os.read(self._descriptor, 16 * 1024))
        return events

    def drain(self) -> None:
        """What happened is of no interest here, only that something did."""
        with contextlib.suppress(BlockingIOError):
            while self._descriptor >= 0 and os.read(self._descriptor, 16 * 1024):
                pass

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _split(data: bytes) -> list[Event]:
    events = []
    at = 0
    while at < len(data):
        watch, mask, _cookie, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        events.append(Event(watch, mask, os.fsdecode(data[at : at + length].rstrip(b"\0"))))
        at += length
    return events
