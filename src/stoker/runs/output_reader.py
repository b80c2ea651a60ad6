"""Reads the output of an attempt while it is written: nothing lost and nothing doubled when the file is rotated.

The writer moves `output` to `output.1` when it is full, and may carry the unfinished line over to the new file. That
line may also be rewritten in place: only finished lines are final.
"""

import contextlib
import math
import os
from pathlib import Path
from typing import Final, NamedTuple

from stoker.errors import StokerError

_BLOCK: Final = 1 << 20
# The writer carries no longer line over to a new file: it cuts it.
_LONGEST_CARRIED: Final = 64 * 1024


class Piece(NamedTuple):
    """What is new: whole lines, and the state of the line after them, which replaces the one told before."""

    finished: bytes
    unfinished: bytes


def has_output(directory: Path) -> bool:
    """Whether the attempt with this directory ran on this machine, and its output is still here."""
    return any((directory / name).exists() for name in ("output", "output.1"))


class OutputReader:
    """One reader of one attempt's output, from its beginning."""

    is_here: Final = True
    is_whole: Final = True
    is_late: Final = False

    def __init__(self, directory: Path) -> None:
        self._newer = directory / "output"
        self._older = directory / "output.1"
        self._file = -1
        self._done = 0
        """Finished lines of the open file that have been told, in bytes."""
        self._rest = b""
        """The unfinished line of the open file."""
        self._cut = b""
        """The beginning of a line that was too long for the file before."""
        self._stamp = (-1, -1)
        """Size and time of the open file when it was last read."""
        self.is_behind = False
        """Whether the last call left something for the next: only after one that wanted no more than so much."""

    def read(self, most: int | None = None) -> Piece:
        """All there is since the last call; or of a long output about so many bytes, at least a line of it."""
        finished = []
        if self._file >= 0 or self._open_first():
            finished.append(self._advance(most))
            while not self.is_behind and (following := self._next_file()) >= 0:
                lines, moved = self._move_on(following)
                finished.append(lines)
                if not moved:
                    break
                finished.append(self._advance(most))
        return Piece(b"".join(finished), b"" if self.is_behind else self._cut + self._rest)

    def give_up(self) -> None:
        """Nothing is late."""

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open_first(self) -> bool:
        while True:
            self._file = _opened(self._older)
            if self._file >= 0:
                return True
            self._file = _opened(self._newer)
            if self._file < 0 or not self._older.exists():
                return self._file >= 0
            # It was rotated just now: what it began with is in the older file.
            self.close()

    def _advance(self, most: int | None = None) -> bytes:
        """The finished lines behind those that were told."""
        self.is_behind = False
        found = os.fstat(self._file)
        before, self._stamp = self._stamp, (found.st_size, found.st_mtime_ns)
        # Only what would cost something is not read again: time stamps are too coarse to be relied on.
        if before == self._stamp and len(self._rest) > _LONGEST_CARRIED:
            return b""
        if found.st_size < self._done:  # Somebody emptied it: what is there now is new.
            self._done = 0
        data = _from(self._file, self._done, most)
        end = data.rfind(b"\n") + 1
        self.is_behind = self._done + len(data) < found.st_size
        if self.is_behind and not end:
            self._stamp = (-1, -1)  # It was not read to its end.
            return self._advance(2 * len(data))
        self._done += end
        self._rest = b"" if self.is_behind else data[end:]
        lines = data[:end]
        if lines and self._cut:
            lines, self._cut = self._cut + lines, b""
        return lines

    def _next_file(self) -> int:
        """The file after the open one, opened; -1 while there is none."""
        own = _identity(self._file)
        while True:
            newer, older = _identity(self._newer), _identity(self._older)
            if newer is None or newer == own:
                return -1
            # When it was rotated twice since the last look, the one between is the older one now.
            path = self._newer if older in {own, None} else self._older
            found = _opened(path)
            if found < 0:
                continue
            if _identity(found) == (newer if path is self._newer else older) and _identity(self._older) == older:
                return found
            os.close(found)

    def _move_on(self, following: int) -> tuple[bytes, bool]:
        """The last lines of the open file, and whether it was left: its unfinished line may still be on its way."""
        # In this order: the writer puts the carried line into the new file before it takes it from the old one.
        head = os.pread(following, _BLOCK, 0)
        lines = self._advance()
        rest = self._rest
        could_be_carried = self._done > 0 and len(rest) <= _LONGEST_CARRIED
        is_carried = could_be_carried and head.startswith(rest)
        if could_be_carried and not is_carried and rest.startswith(head):
            os.close(following)
            return lines, False
        self.close()
        self._file, self._done, self._rest, self._stamp = following, 0, b"", (-1, -1)
        if not is_carried:
            self._cut += rest
        return lines, True


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    except OSError as error:
        raise StokerError(f"the output {path} cannot be read: {error.strerror}") from None


def _identity(file: int | Path) -> tuple[int, int] | None:
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(file)  # noqa: PTH116 - of a descriptor too
        return found.st_dev, found.st_ino
    return None


def _from(file: int, offset: int, most: int | None = None) -> bytes:
    parts = []
    end = math.inf if most is None else offset + most
    while offset < end and (part := os.pread(file, int(min(_BLOCK, end - offset)), offset)):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)
