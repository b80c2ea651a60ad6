"""A copy of a log on another machine, kept as a file on this one while it is read.

The queue passes the request on to the worker of that machine, which streams the log in chunks.
"""

import re
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import Final

from stoker.logs.model import LogChunk, LoggedAttempt, LogStore
from stoker.paths import private_directory, private_file

# A request holds for this long, and is renewed while the log is read.
_REQUEST_SECONDS: Final = 30.0
_RENEW_EVERY: Final = 10.0
# An edition becomes the name of a directory.
_EDITION: Final = re.compile(r"[0-9a-f]{1,64}")


def is_streamable(store: LogStore, attempt: LoggedAttempt) -> bool:
    """Whether a worker is alive on the machine that ran the attempt: no other machine has its log."""
    home, now = _home(attempt.worker), store.clock()
    return any(_home(worker.id) == home and worker.is_there(now) for worker in store.workers.all())


def _home(worker: str) -> str:
    """The common part of the ids of one machine's workers, which stays over restarts."""
    return worker.partition("-")[0]


class RemoteLog:
    """The copy of one log. One thread uses it at a time."""

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt
        self._remover: weakref.finalize[[str, bool], RemoteLog] | None = None
        self._requested: float | None = None
        self._place: Path | None = None
        self.size = 0
        """Bytes of finished lines in the copy."""
        self.edition = ""
        """Changes with each stream, which may have other lines. Empty until a worker streams the log."""
        self.is_behind = False
        """Whether more is available at once."""
        self.is_complete = False
        """Whether the attempt has ended and the copy has all of its log."""

    @property
    def directory(self) -> Path | None:
        """The copy of this edition; None until a worker streams the log."""
        return self._place / self.edition if self._place is not None and self.edition else None

    def update(self, store: LogStore) -> None:
        """Fetches what is new. Raises StokerError when the queue is away, and OSError when the disk fails."""
        if self._requested is None or time.monotonic() - self._requested >= _RENEW_EVERY:
            store.logs.request_stream(self._attempt, _REQUEST_SECONDS)
            self._requested = time.monotonic()
        chunk = store.logs.read_chunk(self._attempt, self.edition, self.size)
        if chunk is not None and _EDITION.fullmatch(chunk.edition):
            self._append(chunk)
        elif self.edition:
            self.close()

    def close(self) -> None:
        """Removes the copy."""
        if self._remover is not None:
            self._remover()
        self._place = None
        self.edition, self.size = "", 0
        self.is_behind = self.is_complete = False

    def _append(self, chunk: LogChunk) -> None:
        if self._place is None:
            self._place = Path(tempfile.mkdtemp(prefix="stoker-log-"))
            self._remover = weakref.finalize(self, shutil.rmtree, str(self._place), True)
        if self.edition and self.edition != chunk.edition:
            shutil.rmtree(self._place / self.edition, ignore_errors=True)
        directory = self._place / chunk.edition
        private_directory(directory)
        with private_file(directory / "output", "ab") as file:
            # The unfinished line is overwritten, as in the original.
            file.truncate(chunk.start)
            file.write(chunk.finished + chunk.unfinished)
        self.edition, self.size = chunk.edition, chunk.size
        self.is_behind, self.is_complete = chunk.is_behind, chunk.is_complete
