"""Writes a job's log to disk, within a size limit.

A carriage return overwrites the unfinished line in the file, so that a progress bar does not fill it. Some earlier
states stay before the last one, in even intervals, for curves of the figures in a bar; other readers pass over them.
Everything else is left to the terminal emulation of the readers.

The file is complete at every moment, with its unfinished line: the writer may be killed at any time. When it is full it
becomes `output.1`.
"""

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stoker.paths import open_privately

# A longer line is cut at the end of the file; a shorter one is carried over to the next file.
_MAX_CARRIED: Final = 64 * 1024
_BLOCK: Final = 64 * 1024
# The first states of a line are kept this many seconds apart, later ones of a long bar further: all within some KiB.
_KEEP_EVERY: Final = 2.0
_MAX_STATES: Final = 4096


class LogWriter:
    """Takes output in chunks. A full or missing disk loses output but raises no error."""

    def __init__(self, path: str | os.PathLike[str], limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Continues an existing file. `limit`: maximum bytes of both files together."""
        self._path = Path(path)
        self._clock = clock
        self._max_size = max(1, limit // 2)
        self._max_states = min(_MAX_STATES, self._max_size // 64)
        self._descriptor = -1
        self._size = 0
        # The offset of the unfinished line; the end of the file if there is none.
        self._line = 0
        # The offset of its last state, which the next one overwrites.
        self._state = 0
        # The line whose states are kept, how far apart, and when the next one is.
        self._kept_line, self._keep_every, self._keep_at = -1, _KEEP_EVERY, 0.0
        # The last byte was a carriage return: the next output overwrites the line, unless it is a line end.
        self._returned = False
        # Bytes that could not be written.
        self._missing = 0
        self.failure: str | None = None
        try:
            self._open()
        except OSError as error:
            self._fail(error)

    def write(self, data: bytes) -> None:
        """Passes everything to the kernel; on failure, `failure` has the reason."""
        if (self._missing or self._descriptor < 0) and not self._recover():
            self._missing += len(data)
            return
        begin = self._size
        if self._returned or b"\r" in data:
            begin, data = self._apply_returns(data)
        self._missing = len(data)
        try:
            if begin + len(data) <= self._max_size:
                self._write_at(data, begin)
            else:
                self._write_rotating(data, begin)
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1

    # Carriage returns

    def _apply_returns(self, data: bytes) -> tuple[int, bytes]:
        """The remaining data and its offset, which is that of the unfinished line if it is overwritten."""
        if self._returned:
            data = b"\r" + data
        data = data.replace(b"\r\n", b"\n")
        if b"\r" not in data:
            self._returned = False
            return self._size, data
        lines = data.split(b"\n")
        # A final carriage return is followed by either a line end or the next state of the line.
        self._returned = lines[-1].endswith(b"\r")
        overwrites = b"\r" in lines[0].rstrip(b"\r")
        settled = [line.rstrip(b"\r").rpartition(b"\r")[2] if b"\r" in line else line for line in lines]
        data = b"\n".join(settled)
        return self._overwrite(data) if overwrites else (self._size, data)

    # Earlier states of a line

    def _overwrite(self, data: bytes) -> tuple[int, bytes]:
        """Puts data in place of the last state of the unfinished line, or after it from time to time."""
        now = self._clock()
        if self._kept_line != self._line:
            self._kept_line, self._keep_every, self._keep_at = self._line, _KEEP_EVERY, now + _KEEP_EVERY
        if now < self._keep_at or self._state == self._size:
            return self._state, data
        if self._size - self._line < self._max_states:
            self._keep_at = now + self._keep_every
            return self._size, b"\r" + data
        # Every second one is enough.
        self._keep_every *= 2
        self._keep_at = now + self._keep_every
        line = b""
        with contextlib.suppress(OSError):
            line = os.pread(self._descriptor, min(self._size - self._line, 2 * _MAX_STATES), self._line)
        kept = line.split(b"\r")[:-1][1::2]
        return self._line, b"\r".join([*kept, data])

    # The file

    def _open(self) -> None:
        descriptor = open_privately(self._path, os.O_RDWR | os.O_CREAT)
        try:
            size = os.fstat(descriptor).st_size
            line = _last_line_offset(descriptor, size)
            state = line + os.pread(descriptor, 2 * _MAX_STATES, line).rfind(b"\r") + 1
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor, self._size, self._line, self._state = descriptor, size, line, state

    def _write_at(self, data: bytes | memoryview, begin: int) -> None:
        """Writes at the end of the file, or over its last line, and ends the file there."""
        end, left = begin, memoryview(data)
        try:
            while left:
                written = os.pwrite(self._descriptor, left, end)
                end += written
                left = left[written:]
        finally:
            # Count the part that reached the disk, even if the disk filled up halfway.
            self._missing -= end - begin
            written_data = bytes(data[: end - begin])
            last = written_data.rfind(b"\n")
            if last >= 0:
                self._line = self._state = begin + last + 1
            elif begin == self._line:
                self._state = begin
            if (state := written_data.rfind(b"\r")) > last:
                self._state = begin + state + 1
            self._end_at(end)

    def _end_at(self, end: int) -> None:
        before, self._size = self._size, end
        if end < before:
            os.ftruncate(self._descriptor, end)

    def _write_rotating(self, data: bytes, begin: int) -> None:
        """Fills the file up to the last line that fits and rotates it, as often as needed."""
        self._end_at(begin)
        whole = memoryview(data)
        done = 0
        while self._size + len(data) - done > self._max_size:
            done = self._fill(data, whole, done)
        self._write_at(whole[done:], self._size)

    def _fill(self, data: bytes, whole: memoryview, done: int) -> int:
        """Fills one file with data from `done` on; returns the new position."""
        room = max(0, self._max_size - self._size)
        fits = data.rfind(b"\n", done, done + room) + 1
        unfinished = self._size - self._line
        if not fits and self._line and unfinished <= _MAX_CARRIED:
            self._rotate(os.pread(self._descriptor, unfinished, self._line))
            return done
        fits = fits or done + room
        self._write_at(whole[done:fits], self._size)
        self._rotate(b"")
        return fits

    def _rotate(self, carried: bytes) -> None:
        """Opens a new file that begins with the unfinished line."""
        older, descriptor, line = Path(f"{self._path}.1"), self._descriptor, self._line
        with contextlib.suppress(FileNotFoundError):  # It was deleted.
            self._path.replace(older)
        try:
            self._open()
        except OSError:
            with contextlib.suppress(OSError):
                older.replace(self._path)
            raise
        try:
            # For a moment the line is in both files, but it is always in at least one.
            self._missing += len(carried)
            self._write_at(carried, self._size)
            if carried:
                os.ftruncate(descriptor, line)
        finally:
            os.close(descriptor)

    # A full or missing disk

    def _recover(self) -> bool:
        """Tries again, and notes missing output."""
        try:
            if self._descriptor < 0:
                self._open()
            if self._missing:
                self._note_missing()
        except OSError as error:
            self._fail(error)
            return False
        return True

    def _note_missing(self) -> None:
        missing, begin, line, state = self._missing, self._size, self._line, self._state
        note = f"[{missing} bytes of output are missing here: {self.failure}]\n".encode()
        try:
            self._write_at(note if begin == line else b"\n" + note, begin)
        except OSError:
            self._missing, self._line, self._state = missing, line, state
            self._end_at(begin)
            raise
        self._missing = 0
        self._returned = False

    def _fail(self, error: OSError) -> None:
        self.failure = f"{self._path} cannot be written: {(error.strerror or 'no reason given').lower()}"


def _last_line_offset(descriptor: int, size: int) -> int:
    """The end of the file, when its last line is finished."""
    end = size
    while end > 0:
        begin = max(0, end - _BLOCK)
        found = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0
