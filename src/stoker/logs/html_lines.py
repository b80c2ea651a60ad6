"""The output of an attempt as numbered lines of HTML, from any line on, in steps that need little memory."""

import os
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

from stoker.engines.attempt import is_output_of
from stoker.logs.ansi import REACH, Line, Terminal, as_html
from stoker.logs.readers import OutputReader, Reader, directory_of
from stoker.queue.model import Attempt

# What is read in one step: a few milliseconds of work.
STEP: Final = 256 * 1024
# The last lines of an output are looked for in so much of its end, should they be very long.
_LONGEST_END: Final = 4 * 2**20
# A line that is not finished is shown from its beginning on, and cut long before that.
_LONGEST_UNFINISHED: Final = 64 * 1024


class Row(NamedTuple):
    """One line for a page."""

    number: int
    html: str


class News(NamedTuple):
    """What one look brought."""

    settled: list[Row]
    """Lines that will not change any more, after those told before."""
    open: tuple[Row, ...]
    """The lines after them as they are now; all of them each time."""
    is_behind: bool
    """Whether there is more to be read at once."""


def place_of(home: Path, attempt: Attempt) -> Path | None:
    """The directory of the attempt's output, when it is on this machine and nobody else's."""
    directory = directory_of(home, attempt)
    return directory if is_output_of(directory, attempt.id) else None


def first_file(directory: Path) -> str:
    """Names the file in which the lines begin to count: another one makes other numbers."""
    for name in ("output.1", "output"):
        try:
            found = (directory / name).stat()
        except OSError:
            continue
        return f"{found.st_dev:x}{found.st_ino:x}"
    return os.urandom(8).hex()


class LogLines:
    """Reads on and on; one thread at a time may use it."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._number = 0
        """Of the first line that the terminal has not got."""
        self._terminal = Terminal()
        self._settled: list[Line] = []
        self._unfinished = b""
        self._open: tuple[Row, ...] = ()
        self._has_changed = False

    def begin_with_last(self, count: int) -> None:
        """Leaves out all but the last so many lines of what is there now."""
        blocks: deque[bytes] = deque()
        lines = size = 0
        is_behind = True
        while is_behind:
            block, is_behind = self._read()
            blocks.append(block)
            lines += block.count(b"\n")
            size += len(block)
            while len(blocks) > 1 and (size > _LONGEST_END or lines - blocks[0].count(b"\n") >= count):
                left = blocks.popleft()
                lines -= left.count(b"\n")
                size -= len(left)
                self._number += left.count(b"\n")
        self._begin(b"".join(blocks), max(0, lines - count))

    def begin_with_line(self, number: int) -> None:
        """Leaves out what is before this line, but for what may still be rewritten from there."""
        first = max(0, number - REACH)
        is_behind = True
        while is_behind:
            block, is_behind = self._read()
            lines = block.count(b"\n")
            if self._number + lines > first or not is_behind:
                self._begin(block, max(0, first - self._number))
                return
            self._number += lines

    def _begin(self, data: bytes, skipped: int) -> None:
        self._number += skipped
        self._terminal = Terminal(self._number)
        self._feed(data.split(b"\n", skipped)[-1] if skipped else data)

    def read(self) -> News:
        """What is new since the last call, or a step of it."""
        block, is_behind = self._read()
        self._feed(block)
        if self._has_changed:
            lines = self._terminal.preview(self._unfinished[:_LONGEST_UNFINISHED])
            self._open, self._has_changed = tuple(map(_row, lines)), False
        settled, self._settled = self._settled, []
        return News([_row(line) for line in settled], self._open, is_behind)

    def close(self) -> None:
        self._reader.close()

    def _feed(self, data: bytes) -> None:
        if data:
            self._settled += self._terminal.feed(data)
            self._has_changed = True

    def _read(self) -> tuple[bytes, bool]:
        reader = self._reader
        piece = reader.read(STEP) if isinstance(reader, OutputReader) else reader.read()
        self._has_changed |= piece.unfinished != self._unfinished
        self._unfinished = piece.unfinished
        return piece.finished, isinstance(reader, OutputReader) and reader.is_behind


def _row(line: Line) -> Row:
    return Row(line.number, as_html(line.spans))
