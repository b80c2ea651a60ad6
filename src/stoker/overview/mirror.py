"""The output of an attempt on another machine, kept here as a file for as long as somebody reads it.

It is asked for through the queue, and comes from the worker of the machine that has it. Whoever reads the file need not
know that it is not the original.
"""

import re
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stoker.queue import Store
    from stoker.queue.model import Lent

# For so long nobody need ask again; and so long a worker goes on that is not told to end.
_WANTED_FOR: Final = 30.0
_ASK_EVERY: Final = 10.0
# It becomes the name of a directory here.
_EDITION: Final = re.compile(r"[0-9a-f]{1,64}")


class Mirror:
    """One output. Whoever made it closes it; one thread at a time may use it."""

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt
        self._asked: float | None = None
        self._place: Path | None = None
        self._size = 0
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
        if self._asked is None or time.monotonic() - self._asked >= _ASK_EVERY:
            store.want_output(self._attempt, _WANTED_FOR)
            self._asked = time.monotonic()
        lent = store.lent_output(self._attempt, self.edition, self._size)
        if lent is not None and _EDITION.fullmatch(lent.edition):
            self._keep(lent)
        elif self.edition:
            self.close()

    def close(self) -> None:
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
            self._place = None
        self.edition, self._size = "", 0
        self.is_behind = self.is_complete = False

    def _keep(self, lent: "Lent") -> None:
        if self._place is None:
            # For nobody else: what jobs print is their owner's.
            self._place = Path(tempfile.mkdtemp(prefix="stoker-log-"))
        directory = self._place / lent.edition
        directory.mkdir(exist_ok=True)
        with (directory / "output").open("ab") as file:
            # The unfinished line is written over, as its writer does.
            file.truncate(lent.start)
            file.write(lent.finished + lent.unfinished)
        self.edition, self._size = lent.edition, lent.size
        self.is_behind, self.is_complete = lent.is_behind, lent.is_complete
