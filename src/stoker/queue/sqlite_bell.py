"""The bell of a SQLite queue: whoever commits news touches the file, and inotify tells.

The time stamp is set after the commit, so that who wakes sees what woke them. SQLite's own writes to its files come
before a commit can be seen, and would also wake everybody for each heartbeat.
"""

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stoker.errors import StokerError

IN_ATTRIB: Final = 0x004
IN_DELETE_SELF: Final = 0x400
IN_MOVE_SELF: Final = 0x800
IN_IGNORED: Final = 0x8000
# struct inotify_event without its name: a watch on a file has none.
EVENT_SIZE: Final = 16
# The number of watchers of one user is limited; when it is used up, another may end at any time.
SECONDS_BETWEEN_TRIES: Final = 1.0


class SqliteBell:
    """Listens at the file. `data_version` is SQLite's own: it differs when another connection has committed."""

    def __init__(self, path: Path, data_version: Callable[[], int]) -> None:
        self._path = path
        self._data_version = data_version
        self._watch = _watched(path)
        self._tried = time.monotonic()
        self._seen = self._version()

    def fileno(self) -> int:
        return self._watch

    def heard(self) -> bool:
        self._drain()
        if self._watch < 0 and time.monotonic() - self._tried >= SECONDS_BETWEEN_TRIES:
            self._tried = time.monotonic()
            self._watch = _watched(self._path)
        before, self._seen = self._seen, self._version()
        return self._seen is None or self._seen != before

    def close(self) -> None:
        if self._watch >= 0:
            os.close(self._watch)
            self._watch = -1

    def _drain(self) -> None:
        while self._watch >= 0:
            try:
                events = os.read(self._watch, 64 * EVENT_SIZE)
            except BlockingIOError:
                return
            masks = [int.from_bytes(events[at + 4 : at + 8], "little") for at in range(0, len(events), EVENT_SIZE)]
            if any(mask & (IN_DELETE_SELF | IN_MOVE_SELF | IN_IGNORED) for mask in masks):
                self.close()

    def _version(self) -> int | None:
        try:
            return self._data_version()
        except StokerError:
            return None


def _watched(path: Path) -> int:
    """A descriptor that is readable after somebody touched it; -1 when there is none to be had."""
    libc = ctypes.CDLL(None)
    watch: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if watch >= 0 and libc.inotify_add_watch(watch, os.fsencode(path), IN_ATTRIB | IN_DELETE_SELF | IN_MOVE_SELF) < 0:
        os.close(watch)
        return -1
    return watch
