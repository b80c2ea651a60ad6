"""inotify events for opening and closing the device nodes of GPUs.

An event does not name the process, and a container's own nodes cause no events here. So an event triggers a scan for
holders, and a slow periodic scan covers nodes without events.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from stoker.inotify import CLOSED, CREATED, MOVED_HERE, NO_LONGER_WATCHED, OPENED, OVERFLOWED, Inotify

_NOTHING: Final[frozenset[str]] = frozenset()


class DeviceEvents:
    """A watch on device nodes, including nodes that appear later or are recreated."""

    def __init__(self, nodes: Mapping[str, Sequence[Path]]) -> None:
        self._gpus: dict[Path, frozenset[str]] = {}
        for uuid, paths in nodes.items():
            for path in paths:
                self._gpus[path] = self._gpus.get(path, _NOTHING) | {uuid}
        self._events = Inotify()
        self._watched: dict[int, frozenset[str]] = {}
        """The GPUs behind each watch of a node."""
        self._directories: dict[int, Path] = {}
        """The directory of each watch on a directory, in which nodes may appear."""
        self._unwatched: dict[Path, str] = {}
        """Nodes without a watch, with reasons."""
        if self._events.fileno() >= 0:
            # Directories come first: a node that appears in between is either found now or causes an event.
            for directory in {path.parent for path in self._gpus}:
                self._watch_directory(directory)
            for path in self._gpus:
                self._watch_node(path)

    @property
    def why_not(self) -> str | None:
        """Why some or all nodes cause no events, as part of a sentence; None if all do."""
        if self._events.fileno() < 0:
            return "the kernel has no inotify left for this user (fs.inotify.max_user_instances)"
        if not self._gpus:
            return "no GPU here has a device node that is known"
        return "; ".join(f"{path} {reason}" for path, reason in self._unwatched.items()) or None

    def fileno(self) -> int:
        """The descriptor of inotify; -1 without possible events."""
        return self._events.fileno() if self._watched or self._directories else -1

    def changed(self) -> frozenset[str]:
        """The GPUs whose nodes were opened, closed or created since the last call."""
        changed = _NOTHING
        for event in self._events.read():
            if event.mask & OVERFLOWED:
                # Events were lost, so any GPU may have changed.
                changed = changed.union(*self._gpus.values())
            elif event.watch in self._directories:
                changed |= self._appeared(self._directories[event.watch] / event.name)
            else:
                changed |= self._watched.get(event.watch, _NOTHING)
            if event.mask & NO_LONGER_WATCHED:
                self._watched.pop(event.watch, None)
                self._directories.pop(event.watch, None)
        return changed

    def close(self) -> None:
        self._events.close()
        self._watched.clear()
        self._directories.clear()

    def _appeared(self, path: Path) -> frozenset[str]:
        gpus = self._gpus.get(path, _NOTHING)
        if gpus:
            # Its creation counts as a change, since it may have been opened before the watch.
            self._watch_node(path)
        return gpus

    def _watch_node(self, path: Path) -> None:
        self._unwatched.pop(path, None)
        try:
            watch = self._events.add(path, OPENED | CLOSED)
        except OSError as error:
            self._unwatched[path] = _complaint(error)
            return
        # Two names of one file share a watch.
        self._watched[watch] = self._watched.get(watch, _NOTHING) | self._gpus[path]

    def _watch_directory(self, directory: Path) -> None:
        # Missing nodes are reported separately.
        with contextlib.suppress(OSError):
            self._directories[self._events.add(directory, CREATED | MOVED_HERE)] = directory


def _complaint(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "is not there"
    if isinstance(error, PermissionError):
        return "may not be read by this user"
    return f"cannot be watched: {os.strerror(error.errno or 0)}"
