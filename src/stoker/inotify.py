"""inotify: events that wake a loop when a file changes."""

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
REMOVED: Final = 0x400
MOVED_AWAY: Final = 0x800
OVERFLOWED: Final = 0x4000
NO_LONGER_WATCHED: Final = 0x8000

# The fields before the name in an event: watch, mask, cookie, length of the name.
_HEAD: Final = struct.Struct("iIII")
# The queue holds 16384 events by default, which this many reads empty.
_MOST_READS: Final = 64


class FileEvent(NamedTuple):
    """An event: watch, mask, and file name if the watch is on a directory."""

    watch: int
    mask: int
    name: str


class Inotify:
    """Readable after an event. The descriptor is -1 if the kernel has no inotify instances left; users poll as well."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        # IN_NONBLOCK and IN_CLOEXEC are by definition the flags of open(2).
        self._descriptor: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def watch(self, path: Path, events: int) -> bool:
        """Watches the file; returns whether it is watched. A second call for the same file changes nothing."""
        return bool(self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), events) >= 0)

    def add(self, path: Path, events: int) -> int:
        """The number of the watch on this file, stable per file. Raises OSError if it cannot be watched."""
        watch: int = self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), events)
        if watch < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(path))
        return watch

    def read(self) -> list[FileEvent]:
        """The events since the last call."""
        events: list[FileEvent] = []
        with contextlib.suppress(BlockingIOError):
            for _ in range(_MOST_READS if self._descriptor >= 0 else 0):
                events += _split(os.read(self._descriptor, 16 * 1024))
        return events

    def drain(self) -> None:
        """Discards all events."""
        with contextlib.suppress(BlockingIOError):
            while self._descriptor >= 0 and os.read(self._descriptor, 16 * 1024):
                pass

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _split(data: bytes) -> list[FileEvent]:
    events = []
    at = 0
    while at < len(data):
        watch, mask, _cookie, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        events.append(FileEvent(watch, mask, os.fsdecode(data[at : at + length].rstrip(b"\0"))))
        at += length
    return events
