"""The output of a job on disk: each line as a terminal would have left it, and never more of it than a limit.

The file is complete at every moment, with the line that is not finished yet: whoever writes it may be killed. The older
part is beside it, as `output.1`.
"""

import contextlib
import os
from pathlib import Path
from typing import Final

from stoker.paths import open_privately

# A line that is longer than this is cut where the file is full, rather than taken along to the next file.
_LONGEST_LINE: Final = 64 * 1024
_BLOCK: Final = 64 * 1024


class LogWriter:
    """Writes what a job says, in pieces as they come. A disk that is full or gone costs output, never an error."""

    def __init__(self, path: str | os.PathLike[str], limit: int) -> None:
        """Goes on where another process left off, should the file be there. `limit`: bytes in both files together."""
        self._path = Path(path)
        self._most = max(1, limit // 2)
        self._descriptor = -1
        self._size = 0
        # Where the unfinished line begins: at the end of the file when there is none.
        self._line = 0
        # A carriage return came last: what follows overwrites the line, unless it is the end of the line.
        self._returned = False
        # Bytes that were to be written and are not.
        self._missing = 0
        self.failure: str | None = None
        try:
            self._open()
        except OSError as error:
            self._fail(error)

    def write(self, data: bytes) -> None:
        """When this returns, everything is with the kernel, or `failure` says why it is not."""
        if (self._missing or self._descriptor < 0) and not self._recovers():
            self._missing += len(data)
            return
        begin = self._size
        if self._returned or b"\r" in data:
            begin, data = self._obey_returns(data)
        self._missing = len(data)
        try:
            if begin + len(data) <= self._most:
                self._put(data, begin)
            else:
                self._put_in_parts(data, begin)
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    # Carriage returns

    def _obey_returns(self, data: bytes) -> tuple[int, bytes]:
        """What is left of the data, and where in the file it begins: at the unfinished line, if it overwrites that."""
        if self._returned:
            data = b"\r" + data
        data = data.replace(b"\r\n", b"\n")
        if b"\r" not in data:
            self._returned = False
            return self._size, data
        lines = data.split(b"\n")
        # A return at the very end says nothing yet: next may be a line end, or another state of the line.
        self._returned = lines[-1].endswith(b"\r")
        overwrites = b"\r" in lines[0].rstrip(b"\r")
        settled = [line.rstrip(b"\r").rpartition(b"\r")[2] if b"\r" in line else line for line in lines]
        return self._line if overwrites else self._size, b"\n".join(settled)

    # The file

    def _open(self) -> None:
        descriptor = open_privately(self._path, os.O_RDWR | os.O_CREAT)
        try:
            size = os.fstat(descriptor).st_size
            line = _beginning_of_last_line(descriptor, size)
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor, self._size, self._line = descriptor, size, line

    def _put(self, data: bytes | memoryview, begin: int) -> None:
        """Writes at this place, which is the end of the file or the beginning of its last line, and ends it there."""
        end, left = begin, memoryview(data)
        try:
            while left:
                written = os.pwrite(self._descriptor, left, end)
                end += written
                left = left[written:]
        finally:
            # All that came to the disk counts, also when the disk was full halfway.
            self._missing -= end - begin
            last = bytes(data).rfind(b"\n", 0, end - begin)
            if last >= 0:
                self._line = begin + last + 1
            self._end_at(end)

    def _end_at(self, end: int) -> None:
        before, self._size = self._size, end
        if end < before:
            os.ftruncate(self._descriptor, end)

    def _put_in_parts(self, data: bytes, begin: int) -> None:
        """Fills the file up to the last line that fits, moves it aside and goes on in a new one, as often as needed."""
        self._end_at(begin)
        whole = memoryview(data)
        done = 0
        while self._size + len(data) - done > self._most:
            done = self._fill(data, whole, done)
        self._put(whole[done:], self._size)

    def _fill(self, data: bytes, whole: memoryview, done: int) -> int:
        """One file's worth of the data from `done` on; returns how far it came."""
        room = max(0, self._most - self._size)
        fits = data.rfind(b"\n", done, done + room) + 1
        unfinished = self._size - self._line
        if not fits and self._line and unfinished <= _LONGEST_LINE:
            self._begin_anew(os.pread(self._descriptor, unfinished, self._line))
            return done
        fits = fits or done + room
        self._put(whole[done:fits], self._size)
        self._begin_anew(b"")
        return fits

    def _begin_anew(self, carried: bytes) -> None:
        """Moves the file aside and opens a new one, which begins with what was the unfinished line."""
        older, descriptor, line = Path(f"{self._path}.1"), self._descriptor, self._line
        with contextlib.suppress(FileNotFoundError):  # Somebody deleted it: then there is nothing to move.
            self._path.replace(older)
        try:
            self._open()
        except OSError:
            with contextlib.suppress(OSError):
                older.replace(self._path)
            raise
        try:
            # The line is in both files for a moment, but never in none.
            self._missing += len(carried)
            self._put(carried, self._size)
            if carried:
                os.ftruncate(descriptor, line)
        finally:
            os.close(descriptor)

    # A disk that is full or gone

    def _recovers(self) -> bool:
        """Tries again, and leaves a line where output is missing."""
        try:
            if self._descriptor < 0:
                self._open()
            if self._missing:
                self._own_up()
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _own_up(self) -> None:
        missing, begin, line = self._missing, self._size, self._line
        note = f"[{missing} bytes of output are missing here: {self.failure}]\n".encode()
        try:
            self._put(note if begin == line else b"\n" + note, begin)
        except OSError:
            # Half a note is worse than none.
            self._missing, self._line = missing, line
            self._end_at(begin)
            raise
        self._missing = 0
        self._returned = False

    def _fail(self, error: OSError) -> None:
        self.failure = f"{self._path} cannot be written: {(error.strerror or 'no reason given').lower()}"


def _beginning_of_last_line(descriptor: int, size: int) -> int:
    """The end of the file, when its last line is finished."""
    end = size
    while end > 0:
        begin = max(0, end - _BLOCK)
        found = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0
