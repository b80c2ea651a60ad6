"""The bell of a SQLite queue: whoever commits news touches the file, and inotify tells.

The time stamp is set after the commit, so that who wakes sees what woke them. SQLite's own writes to its files come
before a commit can be seen, and would also wake everybody for each heartbeat.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stoker.errors import StokerError
from stoker.inotify import MOVED_AWAY, NO_LONGER_WATCHED, REMOVED, TOUCHED, Inotify

_GONE: Final = REMOVED | MOVED_AWAY | NO_LONGER_WATCHED
# The number of watchers of one user is limited; when it is used up, another may end at any time.
SECONDS_BETWEEN_TRIES: Final = 1.0


class SqliteChanges:
    """Listens at the file. `data_version` is SQLite's own: it differs when another connection has committed."""

    def __init__(self, path: Path, data_version: Callable[[], int]) -> None:
        self._path = path
        self._data_version = data_version
        self._events = _watched(path)
        self._tried = time.monotonic()
        self._seen = self._version()

    def fileno(self) -> int:
        return -1 if self._events is None else self._events.fileno()

    def poll(self) -> bool:
        self._drain()
        if self._events is None and time.monotonic() - self._tried >= SECONDS_BETWEEN_TRIES:
            self._tried = time.monotonic()
            self._events = _watched(self._path)
        before, self._seen = self._seen, self._version()
        return self._seen is None or self._seen != before

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None

    def _drain(self) -> None:
        if self._events is not None and any(event.mask & _GONE for event in self._events.read()):
            self.close()

    def _version(self) -> int | None:
        try:
            return self._data_version()
        except StokerError:
            return None


def _watched(path: Path) -> Inotify | None:
    """Readable after somebody touched the file; None when that is not to be had."""
    events = Inotify()
    if events.fileno() >= 0 and events.watch(path, TOUCHED | REMOVED | MOVED_AWAY):
        return events
    events.close()
    return None
