"""Events of files, told by the kernel: what wakes a loop that waits for a file to change."""

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Final

MODIFIED: Final = 0x002
CLOSED_AFTER_WRITING: Final = 0x008
MOVED_HERE: Final = 0x080
CREATED: Final = 0x100
DELETED: Final = 0x200


class Inotify:
    """Readable after an event. Its descriptor is -1 where the kernel has none left: whoever uses it polls as well."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        # IN_NONBLOCK and IN_CLOEXEC are by definition the flags of open(2).
        self._descriptor: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)

    def fileno(self) -> int:
        return self._descriptor

    def watch(self, path: Path, events: int) -> bool:
        """Whether it is watched now. Asked again for the same file it changes nothing; a new one is watched as well."""
        return bool(self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), events) >= 0)

    def drain(self) -> None:
        """What happened is of no interest here, only that something did."""
        with contextlib.suppress(BlockingIOError):
            while self._descriptor >= 0 and os.read(self._descriptor, 16 * 1024):
                pass

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
