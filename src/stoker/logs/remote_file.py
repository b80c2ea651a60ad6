"""The output of an attempt on another machine, kept here as a file for as long as somebody reads it.

It is asked for through the queue, and comes from the worker of the machine that has it. Whoever reads the file need not
know that it is not the original.
"""

import re
import shutil
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stoker.paths import private_directory, private_file
from stoker.queue.model import Attempt, LogChunk

if TYPE_CHECKING:
    from stoker.queue import Store

# For so long nobody need ask again; and so long a worker goes on that is not told to end.
_WANTED_FOR: Final = 30.0
_ASK_EVERY: Final = 10.0
# It becomes the name of a directory here.
_EDITION: Final = re.compile(r"[0-9a-f]{1,64}")


def may_be_lent(store: "Store", attempt: Attempt) -> bool:
    """Whether a worker has lately been heard of on the machine that ran it: nobody else has its output."""
    home, now = _home(attempt.worker), store.clock()
    return any(_home(worker.id) == home and worker.is_there(now) for worker in store.workers())


def _home(worker: str) -> str:
    """What the ids of one machine's workers have in common, from start to start."""
    return worker.partition("-")[0]


class Mirror:
    """One output. Whoever made it closes it, from whatever thread; one at a time may do the rest."""

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt
        self._in_use = threading.Lock()
        self._closed = False
        self._remover: weakref.finalize[[str, bool], Mirror] | None = None
        self._asked: float | None = None
        self._place: Path | None = None
        self.size = 0
        """Of the finished lines that are here, in bytes."""
        self.edition = ""
        """Another one is another file, and may have other lines. Empty as long as nobody lends it."""
        self.is_behind = False
        """Whether there is more to be had at once."""
        self.is_complete = False
        """Whether the attempt has ended and all of it is here."""

    @property
    def directory(self) -> Path | None:
        """Where the output of this edition is; None as long as nobody lends it."""
        return self._place / self.edition if self._place is not None and self.edition else None

    def update(self, store: "Store") -> None:
        """Brings what is new. Raises StokerError when the queue is away, and OSError when it cannot be kept here."""
        with self._in_use:
            if not self._closed:
                self._update(store)

    def close(self) -> None:
        """Removes what is here."""
        with self._in_use:
            self._closed = True
            self._remove()

    def _update(self, store: "Store") -> None:
        if self._asked is None or time.monotonic() - self._asked >= _ASK_EVERY:
            store.request_log_stream(self._attempt, _WANTED_FOR)
            self._asked = time.monotonic()
        lent = store.log_chunk(self._attempt, self.edition, self.size)
        if lent is not None and _EDITION.fullmatch(lent.edition):
            self._keep(lent)
        elif self.edition:
            self._remove()

    def _remove(self) -> None:
        if self._remover is not None:
            self._remover()
        self._place = None
        self.edition, self.size = "", 0
        self.is_behind = self.is_complete = False

    def _keep(self, lent: "LogChunk") -> None:
        if self._place is None:
            # For nobody else: what jobs print is their owner's.
            self._place = Path(tempfile.mkdtemp(prefix="stoker-log-"))
            self._remover = weakref.finalize(self, shutil.rmtree, str(self._place), True)
        if self.edition and self.edition != lent.edition:
            shutil.rmtree(self._place / self.edition, ignore_errors=True)
        directory = self._place / lent.edition
        private_directory(directory)
        with private_file(directory / "output", "ab") as file:
            # The unfinished line is written over, as its writer does.
            file.truncate(lent.start)
            file.write(lent.finished + lent.unfinished)
        self.edition, self.size = lent.edition, lent.size
        self.is_behind, self.is_complete = lent.is_behind, lent.is_complete
