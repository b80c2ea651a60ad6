"""The output of an attempt, wherever it is: the whole of it in the file here, or as it is brought from elsewhere."""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from stoker.logs.remote_reader import BorrowedReader
from stoker.logs.tail_reader import TailReader
from stoker.queue.model import Attempt
from stoker.queue.store import LAST_WITHIN
from stoker.runs.output_reader import OutputReader, Piece, has_output

if TYPE_CHECKING:
    from stoker.queue import Store

__all__ = [
    "LAST_WITHIN",
    "OutputReader",
    "Piece",
    "Reader",
    "TailReader",
    "directory_of",
    "has_output",
    "last_lines",
    "reader_of",
]


class Reader(Protocol):
    """Tells an attempt's output piece by piece."""

    @property
    def is_here(self) -> bool:
        """Whether it reads a file that is written here, which may be looked at often."""

    @property
    def is_whole(self) -> bool:
        """Whether what was told so far is all of the output, and not only its end."""

    @property
    def is_late(self) -> bool:
        """Whether the last of an attempt that has ended may still be on its way."""

    def read(self) -> Piece:
        """What is new."""

    def give_up(self) -> None:
        """Waits no more for what is late: the end that the queue keeps has to do."""

    def close(self) -> None: ...


def directory_of(home: Path, attempt: Attempt) -> Path:
    """Where its record is, on the machine that ran it."""
    return home / "attempts" / f"{attempt.job}-{attempt.number}"


def reader_of(store: "Store", home: Path, attempt: Attempt) -> Reader:
    """Of the whole output, here or as it is lent; or else of its end."""
    directory = directory_of(home, attempt)
    return OutputReader(directory) if has_output(directory) else BorrowedReader(store, attempt, directory)


def last_lines(piece: Piece, count: int | None) -> Piece:
    """The last so many lines of it; all of them for None."""
    if count is None:
        return piece
    lines = piece.finished.split(b"\n")[:-1]
    wanted = max(0, count - bool(piece.unfinished))
    kept = lines[len(lines) - min(wanted, len(lines)) :]
    return Piece(b"".join(line + b"\n" for line in kept), piece.unfinished if count else b"")
