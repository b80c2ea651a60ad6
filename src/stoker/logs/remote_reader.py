"""Reads the output of an attempt that is not here: the whole as its machine lends it, or else the end in the queue."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from stoker.errors import StokerError
from stoker.logs.remote_file import Mirror, may_be_lent
from stoker.logs.tail_reader import TailReader, unknown
from stoker.queue.driver import QueueAwayError
from stoker.queue.model import Attempt
from stoker.queue.rows import clean_text
from stoker.runs.output_reader import OutputReader, Piece, has_output

if TYPE_CHECKING:
    from stoker.queue import Store

# A worker answers within a second or two; one that does not know of loans, or has not got the output, never does.
_PATIENCE: Final = 3.0
# A worker that is upgraded or busy in the middle of it goes on within this; nobody wants to wait longer for no news.
_STALLED: Final = 10.0
_LOOK_EVERY: Final = 0.1
# A machine that was held up for longer, or asleep, has not waited for an answer meanwhile.
_LONGEST_LOOK: Final = 0.5
# By this much of its end, what was told is found again in another edition, and in the end that the queue keeps.
_REMEMBERED: Final = 128 * 1024


class BorrowedReader:
    """One reader of one attempt's output. The first read waits until all of it is here, the others for nothing.

    As long as nothing was told, what tells the most is looked for anew: a job that has just started has no output yet.
    """

    def __init__(self, store: "Store", attempt: Attempt, here: Path) -> None:
        """`here` is where the output is if the attempt runs on this machine after all."""
        self._store = store
        self._attempt = attempt
        self._here = here
        self._mirror = Mirror(attempt.id)
        self._reader: OutputReader | TailReader | None = None
        """Of the file here, of the mirror, or of the end; None before the first of them, and between two editions."""
        self._edition = ""
        """Which one of the mirror is read, if one is."""
        self._is_settled = False
        """Whether the reader stays what it is."""
        self._has_begun = False
        self._is_there = True
        """Whether somebody may lend it."""
        self._lent_last = 0.0
        self._progressed = 0.0
        """When more of it came last, in monotonic seconds."""
        self._brought = ("", 0)
        self._told = 0
        """How many bytes of finished lines."""
        self._memory = b""
        """The last of them."""
        self._unfinished = b""

    @property
    def is_here(self) -> bool:
        return self._reader is not None and not self._edition and self._reader.is_here

    @property
    def is_whole(self) -> bool:
        return self._reader is None or self._reader.is_whole

    @property
    def is_late(self) -> bool:
        return self._is_there and not self._is_settled and not self._mirror.is_complete

    def read(self) -> Piece:
        if self._has_begun:
            self._look()
            self._lose_patience(_PATIENCE)
        else:
            self._begin()
            self._has_begun = True
        finished, unfinished = self._next()
        # The end that the queue keeps may be older than what was lent: then that line is still the last.
        is_older = self._is_settled and isinstance(self._reader, TailReader) and not finished
        self._unfinished = unfinished or (self._unfinished if is_older else b"")
        self._told += len(finished)
        self._memory = (self._memory + finished[-_REMEMBERED:])[-_REMEMBERED:]
        if isinstance(self._reader, TailReader) and not self._is_silent():
            self._settle()
        return Piece(finished, self._unfinished)

    def give_up(self) -> None:
        if self.is_late and time.monotonic() - self._progressed >= _STALLED:
            self._settle_for_the_end()

    def close(self) -> None:
        self._mirror.close()
        if self._reader is not None:
            self._reader.close()

    def _begin(self) -> None:
        """Waits until the loan has begun, and then as long as it comes nearer to the end."""
        self._is_there = may_be_lent(self._store, self._attempt)
        self._lent_last = time.monotonic()
        self._look()
        edition, progress, waited = "", ("", 0), 0.0
        while not self._is_settled and not self._has_caught_up():
            begun = time.monotonic()
            if edition and self._mirror.edition != edition:
                break  # it grows faster than it is lent, or its worker was started anew
            edition = self._mirror.edition
            if (found := self._progress()) != progress:
                progress, waited = found, 0.0
            elif not self._is_there or waited >= (_STALLED if self._mirror.is_behind else _PATIENCE):
                break
            else:
                time.sleep(_LOOK_EVERY)
            self._look()
            waited += min(time.monotonic() - begun, _LONGEST_LOOK)
        self._lose_patience(0.0)
        if self._mirror.is_behind:
            self._settle_for_the_end()

    def _has_caught_up(self) -> bool:
        if self._attempt.outcome is not None:
            return self._mirror.is_complete
        return bool(self._mirror.edition) and not self._mirror.is_behind

    def _progress(self) -> tuple[str, int]:
        directory = self._mirror.directory
        return self._mirror.edition, 0 if directory is None else (directory / "output").stat().st_size

    def _look(self) -> None:
        """What there is now; raises StokerError when the queue is away."""
        if self._is_settled:
            return
        if self._is_silent() and has_output(self._here):
            self._read_from(OutputReader(self._here))
            self._settle()
            return
        try:
            self._mirror.update(self._store)
        except QueueAwayError:
            raise
        except (OSError, StokerError):  # there is no room for it here, or the database has something against it
            self._settle_for_the_end()
            return
        if self._mirror.directory is not None:
            self._lent_last = time.monotonic()
            if self._brought != (brought := (self._mirror.edition, self._mirror.size)):
                self._brought, self._progressed = brought, time.monotonic()

    def _lose_patience(self, patience: float) -> None:
        """The end has to do, when the whole has not been lent for so long."""
        is_over = self._mirror.directory is None and time.monotonic() - self._lent_last >= patience
        if is_over and not self._is_settled and not isinstance(self._reader, TailReader):
            self._read_from(self._end())

    def _next(self) -> Piece:
        directory = self._mirror.directory
        if self._is_settled or directory is None:
            if self._edition or self._reader is None:  # it was taken back, and may be lent anew
                return Piece(b"", self._unfinished)
            return self._reader.read()
        if self._mirror.edition == self._edition and self._reader is not None:
            return self._reader.read()
        if self._mirror.is_behind:
            return Piece(b"", self._unfinished)
        self._read_from(reader := OutputReader(directory), self._mirror.edition)
        finished, unfinished = reader.read()
        return Piece(self._untold(finished), unfinished)

    def _untold(self, lines: bytes) -> bytes:
        """What of another edition is new. It may begin later than the one before: the writer keeps only so much."""
        start = self._told - len(self._memory)
        at = start if lines.startswith(self._memory, start) else lines.rfind(self._memory)
        return lines[at + len(self._memory) :] if at >= 0 else unknown(self._memory, lines)

    def _settle_for_the_end(self) -> None:
        self._read_from(self._end())
        self._settle()

    def _end(self) -> TailReader:
        # As the queue has it: text, and no other bytes.
        told = clean_text(self._memory.decode(errors="replace")).encode()
        return TailReader(lambda: self._store.log(self._attempt.id), told)

    def _read_from(self, reader: OutputReader | TailReader, edition: str = "") -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader, self._edition = reader, edition

    def _settle(self) -> None:
        self._is_settled = True
        self._mirror.close()

    def _is_silent(self) -> bool:
        return not self._told and not self._unfinished
