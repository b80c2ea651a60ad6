"""Reads any line of a log of any size, and finds lines with a text or an error.

One mark per MiB stores its line number, so a page in the middle of gigabytes is read within milliseconds and in bounded
memory. Line numbers count from 0 here; people and the API count from 1.
"""

import contextlib
import os
import re
import threading
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

import msgspec

from stoker.errors import BadInputError
from stoker.logs.reader import open_log_files, settled

_BLOCK: Final = 1 << 20
# Longer lines are cut: a page shows less, and a search need not go further.
LONGEST_LINE: Final = 32 * 1024
# Maximum size of one page: fewer lines are returned if they are long.
_LONGEST_PAGE: Final = 4 << 20
# Maximum length of a matching line, for a list on a phone.
_SHOWN: Final = 240
MOST_MATCHES: Final = 1000
LONGEST_TEXT: Final = 200

# Error output of programs. Shared by the postmortem, the batch-size search and the jump to errors.
FAILURE: Final = r"Traceback \(most recent call last\)|\b\w*(?:Error|Exception)\b|\berror:|\bfatal\b"
OUT_OF_MEMORY: Final = r"out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED"
FULL_DISK: Final = r"no space left on device|disk quota exceeded"
NO_SHARED_MEMORY: Final = r"bus error|unable to open shared memory|insufficient shared memory"
COLLECTIVE_ERROR: Final = r"NCCL (?:WARN|error)|collective operation timeout|NCCL.*timed? ?out"
GPU_ERROR: Final = r"\bXid\b|uncorrectable ECC|CUDA error|illegal memory access|fallen off the bus"
_CRASH: Final = r"segmentation fault|core dumped|^Killed$|\bpanicked at\b"
_ERROR: Final = re.compile(
    "|".join((FAILURE, OUT_OF_MEMORY, FULL_DISK, NO_SHARED_MEMORY, COLLECTIVE_ERROR, GPU_ERROR, _CRASH)), re.IGNORECASE
)
# A figure of that name, or a report of no errors: `val_error=0.12`, `0 errors`. `ValueError: 0.5` is an error.
_HARMLESS: Final = re.compile(
    r"\b[a-z_]*error(?:s|_rate)?[\"']?\s*(?:[:=|]\s*[-+]?\d*\.\d|=\s*[-+]?\d)"
    r"|\b(?:0|no|without) (?:errors?|exceptions?)\b"
)
# Every matching line contains one of these in lower case: finding them is faster than the pattern.
_ERROR_WORDS: Final = (
    b"error", b"traceback", b"exception", b"fatal", b" memory", b"alloc_failed", b"no space", b"quota", b"nccl",
    b"timeout", b"xid", b"uncorrectable", b"fallen off", b"segmentation", b"core dumped", b"killed", b"panicked",
)  # fmt: skip
_ESCAPE: Final = re.compile(rb"\x1b(?:\[[0-?]{0,64}[ -/]{0,4}[@-~]|\][^\x07\x1b\n]{0,1000}(?:\x07|\x1b\\)?)")


class LogMatch(msgspec.Struct, frozen=True):
    """A line that was found."""

    line: int
    """Its number, from 1."""
    text: str
    """Its beginning, without colours."""


class LineFinder:
    """Finds lines with a text, ignoring case, or lines that report an error."""

    def __init__(self, text: str | None, longest: int = _SHOWN) -> None:
        """`text`: None for errors. `longest`: how much of a line is returned."""
        if text is not None and not 0 < len(text) <= LONGEST_TEXT:
            raise BadInputError(f"search for 1 to {LONGEST_TEXT} characters")
        if text is not None and "\n" in text:
            raise BadInputError("search for text within one line")
        self._words = _ERROR_WORDS if text is None else (text.lower().encode(errors="replace"),)
        self._finds_errors = text is None
        self._longest = longest
        self._pattern = None if text is None or text.isascii() else _any_case(text)

    def matches(self, block: bytes, first: int = 0) -> Iterator[LogMatch]:
        """Matches in a block of whole lines; `first`: the number of its first line, from 0."""
        block = settled(block)
        if b"\x1b" in block:
            block = _ESCAPE.sub(b"", block)
        number, counted = first + 1, 0
        for begin in self._beginnings(block):
            end = block.find(b"\n", begin)
            line = block[begin : end if end >= 0 else len(block)][:LONGEST_LINE].decode(errors="replace")
            if self._finds_errors and not is_error(line):
                continue
            number, counted = number + block.count(b"\n", counted, begin), begin
            yield LogMatch(number, line.strip()[: self._longest])

    def _beginnings(self, block: bytes) -> list[int]:
        """The offsets of lines that may match."""
        found: set[int] = set()
        lower = block.lower() if self._pattern is None else block
        for word in self._words:
            at = 0
            while (at := self._find(lower, word, at)) >= 0:
                found.add(block.rfind(b"\n", 0, at) + 1)
                at = block.find(b"\n", at) + 1
                if not at:
                    break
        return sorted(found)

    def _find(self, block: bytes, word: bytes, at: int) -> int:
        if self._pattern is None:
            return block.find(word, at)
        match = self._pattern.search(block, at)
        return -1 if match is None else match.start()


def is_error(line: str) -> bool:
    """Whether a line of a log reports an error."""
    return _ERROR.search(line) is not None and (
        _HARMLESS.search(line) is None or _ERROR.search(_HARMLESS.sub("", line)) is not None
    )


def _any_case(text: str) -> re.Pattern[bytes]:
    """Bytes patterns ignore case only for ASCII letters: other letters become alternatives."""
    parts = []
    for letter in text:
        forms = {form.encode(errors="replace") for form in (letter, letter.lower(), letter.upper())}
        parts.append(b"(?:" + b"|".join(re.escape(form) for form in sorted(forms)) + b")")
    return re.compile(b"".join(parts))


class _Marks:
    """Offsets of lines, about one per MiB, and the counted length of the log."""

    def __init__(self, first_file: str) -> None:
        self.first_file = first_file
        self.offsets = [0]
        self.lines = [0]
        self.end = (0, 0)
        """The offset after the last finished line, and its number of lines."""


class LogIndex:
    """The marks of one growing log. Threads may share it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._marks = _Marks("")

    def open(self) -> "LogView":
        """The current log. Raises StokerError if it is unreadable."""
        with self._lock:
            view = LogView(self._directory)
            try:
                marks = self._marks
                if marks.first_file != view.first_file or marks.end[0] > view.size:
                    # The beginning was removed at the size limit: offsets have changed.
                    marks = self._marks = _Marks(view.first_file)
                view.count(marks)
            except BaseException:
                view.close()
                raise
            return view


class LogView:
    """Both files of a log as one sequence of lines, open for reading."""

    def __init__(self, directory: Path) -> None:
        files, self.first_file = open_log_files(directory)
        self._files: list[tuple[int, int, int]] = []
        """Descriptors, and start and end of each file in the log."""
        self.size = 0
        for descriptor, length in files:
            self._files.append((descriptor, self.size, self.size + length))
            self.size += length
        self._offsets: list[int] = [0]
        self._lines: list[int] = [0]
        self._finished = (0, 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        for descriptor, _begin, _end in self._files:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._files = []

    @property
    def count_of_lines(self) -> int:
        """An unfinished line counts."""
        return self._finished[1] + (self._finished[0] < self.size)

    def read(self, offset: int, size: int) -> bytes:
        """At most `size` bytes from this offset; fewer at the end of a file."""
        for descriptor, begin, end in self._files:
            if begin <= offset < end:
                return os.pread(descriptor, min(size, end - offset), offset - begin)
        return b""

    def count(self, marks: _Marks) -> None:
        """Extends the marks to the end of the log and stores them."""
        offset, line = marks.end
        while part := self.read(offset, _BLOCK):
            at, begin = offset, offset
            while (end := part.rfind(b"\n") + 1) == 0:
                at += len(part)
                if not (part := self.read(at, _BLOCK)):
                    break
            if not end:
                break  # The last line is unfinished.
            offset, line = at + end, line + part.count(b"\n")
            marks.end = (offset, line)
            if offset - marks.offsets[-1] >= _BLOCK // 2 and offset > begin:
                marks.offsets.append(offset)
                marks.lines.append(line)
        self._offsets, self._lines, self._finished = marks.offsets[:], marks.lines[:], marks.end

    def lines(self, first: int, count: int) -> list[bytes]:
        """The lines from this number on without line ends, each cut to 32 KiB; fewer than `count` if they are long."""
        found: list[bytes] = []
        size = 0
        for block, line in self._blocks(first):
            for piece in settled(block).split(b"\n")[max(0, first - line) :]:
                if len(found) >= count or size >= _LONGEST_PAGE:
                    return found
                found.append(piece[:LONGEST_LINE])
                size += len(found[-1])
        return found

    def before(self, finder: LineFinder, line: int | None = None, limit: int = 100) -> tuple[list[LogMatch], bool]:
        """The last matches before a line (from 1) in order, and whether there are more before them."""
        found: list[LogMatch] = []
        last = self.count_of_lines if line is None else line - 1
        for mark in range(bisect_right(self._lines, max(0, last - 1)) - 1, -1, -1):
            begin, number = self._offsets[mark], self._lines[mark]
            end = self._offsets[mark + 1] if mark + 1 < len(self._offsets) else self.size
            here = [
                match
                for block, first in self._between(begin, end, number)
                for match in finder.matches(block, first)
                if match.line <= last
            ]
            found = here[-(limit + 1) :] + found
            if len(found) > limit:
                return found[-limit:], True
        return found, False

    def after(self, finder: LineFinder, line: int = 0, limit: int = 100) -> tuple[list[LogMatch], bool]:
        """The first matches after a line (from 1), and whether there are more after them."""
        found: list[LogMatch] = []
        for block, first in self._blocks(line):
            for match in finder.matches(block, first):
                if match.line > line:
                    found.append(match)
                if len(found) > limit:
                    return found[:limit], True
        return found, False

    def _blocks(self, line: int) -> Iterator[tuple[bytes, int]]:
        """Blocks of whole lines from the mark before this line on, each with the number of its first line."""
        mark = bisect_right(self._lines, max(0, line)) - 1
        return self._between(self._offsets[mark], self.size, self._lines[mark])

    def _between(self, offset: int, end: int, line: int) -> Iterator[tuple[bytes, int]]:
        """Blocks without their last line end; of a line longer than a block, only the beginning."""
        while offset < end and (part := self.read(offset, min(_BLOCK, end - offset))):
            cut = part.rfind(b"\n")
            offset += len(part) if cut < 0 else cut + 1
            if cut >= 0:
                yield part[:cut], line
                line += part.count(b"\n")
                continue
            # Skip the rest of a very long line, possibly in the next file.
            head = part
            while offset < end and (more := self.read(offset, min(_BLOCK, end - offset))):
                cut = more.find(b"\n")
                offset += len(more) if cut < 0 else cut + 1
                if len(head) < _BLOCK:
                    head += more if cut < 0 else more[:cut]
                if cut >= 0:
                    break
            yield head, line
            line += 1
