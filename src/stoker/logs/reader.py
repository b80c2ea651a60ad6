"""Readers of one log: the files on this machine, and the tail in the queue.

The writer moves a full `output` to `output.1` and may carry the unfinished line over to the new file. It may also
rewrite that line in place: only finished lines are final. The writer keeps some earlier states of a line before the
last one, which is all that readers show.
"""

import contextlib
import math
import os
import re
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from stoker.errors import StokerError

# One step of reading: a few milliseconds of work.
STEP: Final = 256 * 1024

_FILES: Final = ("output", "output.1")
_BLOCK: Final = 1 << 20
# The writer cuts longer lines instead of carrying them over.
_MAX_CARRIED: Final = 64 * 1024
# The last lines are searched for in this much of the end, even if they are very long.
MAX_TAIL: Final = 4 * 2**20
# The first search for an overlap: longer than most lines, so few wrong places match.
_PROBE: Final = 256
_EARLIER_STATES: Final = re.compile(rb"[^\n]*\r(?=[^\r\n])")
_MISSING: Final = b"[stoker: lines are missing here: they came faster than the queue gets them]\n"


def settled(data: bytes) -> bytes:
    """Only the last state of each line."""
    return _EARLIER_STATES.sub(b"", data) if b"\r" in data else data


class LogUpdate(NamedTuple):
    """New output: whole lines, and the unfinished line after them, which replaces the previous one."""

    finished: bytes
    unfinished: bytes


class LogChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of a log that a worker streams through the queue."""

    edition: str
    """Identifies one stream. Another edition starts from the beginning and may have different lines."""
    start: int
    """Offset among all finished lines, in bytes."""
    finished: bytes = b""
    unfinished: bytes = b""
    """The current unfinished line after them."""
    is_behind: bool = False
    """Whether more is available at once."""
    is_complete: bool = False
    """Whether the attempt has ended and this is the last chunk."""

    @property
    def size(self) -> int:
        return self.start + len(self.finished)


class LogReader(Protocol):
    """Reads one log from its beginning."""

    @property
    def is_behind(self) -> bool:
        """Whether the last call left something for the next."""

    def read(self, limit: int | None = None) -> LogUpdate:
        """The new output since the last call: all of it, or about `limit` bytes but at least one line."""

    def close(self) -> None: ...


# Location


class LoggedAttempt(Protocol):
    """The fields of an attempt that locate its log."""

    @property
    def id(self) -> str: ...
    @property
    def job(self) -> str: ...
    @property
    def number(self) -> int: ...


def attempt_directory(home: Path, attempt: LoggedAttempt) -> Path:
    """The attempt's record, on the machine that ran it."""
    return home / "attempts" / f"{attempt.job}-{attempt.number}"


def has_log(directory: Path) -> bool:
    return any((directory / name).exists() for name in _FILES)


def node_directory(directory: Path, node: int) -> Path:
    """The log's directory for this node in an attempt's directory; for the first node, the attempt's directory."""
    return directory / f"node{node}" if node else directory


def log_directory(home: Path, attempt: LoggedAttempt, node: int = 0) -> Path | None:
    """The directory of the attempt's log, if it ran on this machine and the files belong to it. `node`: rank in a job
    over several nodes.
    """
    directory = attempt_directory(home, attempt)
    return node_directory(directory, node) if is_log_of(directory, attempt.id, node) else None


def is_log_of(directory: Path, attempt: str, node: int = 0) -> bool:
    """Whether the directory contains the log of this attempt. Links are not followed: they may lead to any file. Ids of
    attempts are unique only within a queue, so the record must not name another attempt.
    """
    place = node_directory(directory, node)
    if not stat.S_ISDIR(_mode(directory)) or not stat.S_ISDIR(_mode(place)):
        return False
    modes = [_mode(place / name) for name in _FILES]
    if not any(modes) or not all(stat.S_ISREG(mode) for mode in modes if mode):
        return False
    return _owner(directory) in {None, attempt}


class _Nodes(msgspec.Struct):
    names: tuple[str, ...] = ()


def node_names(directory: Path) -> tuple[str, ...]:
    """The nodes of a job over several, by rank; empty if unknown here."""
    try:
        return msgspec.json.decode((directory / "nodes.json").read_bytes(), type=_Nodes).names
    except (OSError, msgspec.DecodeError):
        return ()


class _Owner(msgspec.Struct):
    attempt: str


def _owner(directory: Path) -> str | None:
    for name in ("attempt.json", "delivered.json"):
        try:
            return msgspec.json.decode((directory / name).read_bytes(), type=_Owner).attempt
        except (OSError, msgspec.DecodeError):
            continue
    return None


def _mode(path: Path) -> int:
    """0 when there is no such file."""
    try:
        return path.lstat().st_mode
    except OSError:
        return 0


# The whole log


class LogFileReader:
    """Reads both files from their beginning while they are written: rotation neither loses nor duplicates lines."""

    def __init__(self, directory: Path, *, with_states: bool = False) -> None:
        """`with_states`: lines with the earlier states that are in the file."""
        self._with_states = with_states
        self._newer = directory / "output"
        self._older = directory / "output.1"
        self._file = -1
        self._done = 0
        """Bytes read of finished lines of the open file."""
        self._rest = b""
        """The unfinished line of the open file."""
        self._cut = b""
        """The beginning of a line too long for the previous file."""
        self._stamp = (-1, -1)
        """Size and time of the open file when it was last read."""
        self.is_behind = False
        self.first_file = ""
        """Identifies the file in which line numbers begin; empty until it exists."""

    def read(self, limit: int | None = None) -> LogUpdate:
        finished = []
        if self.open():
            finished.append(self._advance(limit))
            while not self.is_behind and (following := self._next_file()) >= 0:
                lines, moved = self._move_on(following)
                finished.append(lines)
                if not moved:
                    break
                finished.append(self._advance(limit))
        update = LogUpdate(b"".join(finished), b"" if self.is_behind else self._cut + self._rest)
        return update if self._with_states else LogUpdate(*map(settled, update))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def open(self) -> bool:
        """Whether a file exists; opens the first one unless one is open."""
        while self._file < 0:
            self._file = _open(self._older)
            if self._file < 0:
                self._file = _open(self._newer)
                if self._file >= 0 and self._older.exists():
                    # Rotated just now: the log begins in the older file.
                    self.close()
                    continue
            if self._file < 0:
                return False
            self.first_file = _name_of(self._file)
        return True

    def _advance(self, limit: int | None = None) -> bytes:
        """The unread finished lines."""
        self.is_behind = False
        found = os.fstat(self._file)
        before, self._stamp = self._stamp, (found.st_size, found.st_mtime_ns)
        # Time stamps are coarse: an unchanged file is skipped only if reading it again is expensive.
        if before == self._stamp and len(self._rest) > _MAX_CARRIED:
            return b""
        if found.st_size < self._done:  # It was truncated: its content is new.
            self._done = 0
        data = _read_from(self._file, self._done, limit)
        end = data.rfind(b"\n") + 1
        self.is_behind = self._done + len(data) < found.st_size
        if self.is_behind and not end:
            self._stamp = (-1, -1)  # It was not read completely.
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
            # After two rotations since the last read, the next file is the older one.
            path = self._newer if older in {own, None} else self._older
            found = _open(path)
            if found < 0:
                continue
            if _identity(found) == (newer if path is self._newer else older) and _identity(self._older) == older:
                return found
            os.close(found)

    def _move_on(self, following: int) -> tuple[bytes, bool]:
        """The last lines of the open file, and whether it was rotated away: its unfinished line may still be moved."""
        # The order matters: the writer writes the carried line to the new file before removing it from the old one.
        head = os.pread(following, _BLOCK, 0)
        lines = self._advance()
        rest = self._rest
        could_be_carried = self._done > 0 and len(rest) <= _MAX_CARRIED
        is_carried = could_be_carried and head.startswith(rest)
        if could_be_carried and not is_carried and rest.startswith(head):
            os.close(following)
            return lines, False
        self.close()
        self._file, self._done, self._rest, self._stamp = following, 0, b"", (-1, -1)
        if not is_carried:
            self._cut += rest
        return lines, True


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    except OSError as error:
        raise StokerError(f"cannot read the log {path}: {error.strerror}") from None


def _identity(file: int | Path) -> tuple[int, int] | None:
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(file)  # noqa: PTH116 - of a descriptor too
        return found.st_dev, found.st_ino
    return None


def _read_from(file: int, offset: int, limit: int | None) -> bytes:
    parts = []
    end = math.inf if limit is None else offset + limit
    while offset < end and (part := os.pread(file, int(min(_BLOCK, end - offset)), offset)):
        parts.append(part)
        offset += len(part)
    return b"".join(parts)


def open_log_files(directory: Path) -> tuple[list[tuple[int, int]], str]:
    """Descriptors and lengths of both files, the older first, and the identity of the first; the caller closes them.
    Together they contain the whole log, even while the writer rotates it. Raises StokerError.
    """
    older_path, newer_path = directory / "output.1", directory / "output"
    while True:
        older, newer = _open(older_path), _open(newer_path)
        first = _identity(older) if older >= 0 else None
        # After a rotation in between, a file is missing or present twice.
        if _identity(older_path) == first and (first is None or newer < 0 or _identity(newer) != first):
            break
        for file in (older, newer):
            if file >= 0:
                os.close(file)
    files = [(file, os.fstat(file).st_size) for file in (older, newer) if file >= 0]
    if len(files) > 1:
        files[0] = (files[0][0], _without_carried(*files[0], files[1][0]))
    return files, _name_of(files[0][0]) if files else ""


def _name_of(file: int) -> str:
    device, inode = _identity(file) or (0, 0)
    return f"{device:x}{inode:x}"


def _without_carried(older: int, size: int, newer: int) -> int:
    """The size of the older file without its unfinished line, if the newer one has it too: for a moment both have
    it."""
    begin = max(0, size - _MAX_CARRIED)
    end = os.pread(older, size - begin, begin)
    rest = end[end.rfind(b"\n") + 1 :]
    is_carried = bool(rest) and len(rest) < size and os.pread(newer, len(rest), 0) == rest
    return size - len(rest) if is_carried else size


# The tail


def read_tail(path: str | os.PathLike[str], size: int) -> str:
    """The last bytes of both files together, from the beginning of a line if there is one in them."""
    name = os.fspath(path)
    while True:
        with contextlib.ExitStack() as files:
            newer, older = _open_end(files, name), _open_end(files, f"{name}.1")
            if newer is not None and older is not None and os.path.sameopenfile(newer, older):
                continue  # Rotated in between.
            # One more byte shows whether a line begins exactly there.
            tail = _end_of(newer, size + 1)
            tail = _end_of(older, size + 1 - len(tail)) + tail
            if len(tail) > size:
                tail = tail.partition(b"\n")[2] or tail[1:]
            return settled(tail).decode(errors="replace")


def _open_end(files: contextlib.ExitStack, path: str) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    files.callback(os.close, descriptor)
    return descriptor


def _end_of(descriptor: int | None, size: int) -> bytes:
    if descriptor is None or size <= 0:
        return b""
    try:
        return os.pread(descriptor, size, max(0, os.fstat(descriptor).st_size - size))
    except OSError:
        return b""


def local_tail(home: Path, attempt: LoggedAttempt, size: int) -> str | None:
    """The last bytes of the attempt's log; None if it is not on this machine."""
    directory = attempt_directory(home, attempt)
    return read_tail(directory / "output", size) if has_log(directory) else None


class TailReader:
    """Reads new lines from a tail that is replaced as a whole, by recognizing lines of the previous tail."""

    is_behind: Final = False

    def __init__(self, tail: Callable[[], str], known: bytes = b"") -> None:
        """`known`: the last lines that another reader returned. The tail may be older than they are."""
        self._tail = tail
        self._known = known
        self._may_lag = bool(known)

    def read(self, limit: int | None = None) -> LogUpdate:  # noqa: ARG002 - a tail is short
        text = self._tail().encode()
        end = text.rfind(b"\n") + 1
        lines = text[:end]
        if self._may_lag and lines in self._known:
            return LogUpdate(b"", text[end:] if self._known.endswith(lines) else b"")
        self._may_lag = False
        if fresh := new_lines(self._known, lines):
            self._known = lines
        return LogUpdate(fresh, text[end:])

    def close(self) -> None:
        """Nothing is open."""


def new_lines(known: bytes, lines: bytes) -> bytes:
    """The lines after the known ones; without an overlap, all of them after a note."""
    common = overlap(known, lines)
    fresh = lines[common:]
    return _MISSING + fresh if fresh and known and not common else fresh


def overlap(before: bytes, after: bytes) -> int:
    """The length of the longest prefix of `after` that is a suffix of `before`."""
    probe = after[:_PROBE]
    at = before.find(probe[: len(before)]) if probe else -1
    while at >= 0:
        if after.startswith(before[at:]):
            return len(before) - at
        at = before.find(probe, at + 1)
    # The overlap is shorter than the probe.
    longest = min(len(before), len(after), _PROBE)
    return next((size for size in range(longest, 0, -1) if before.endswith(after[:size])), 0)


# Lines


def last_lines(update: LogUpdate, count: int | None) -> LogUpdate:
    """The last `count` lines; all of them for None. An unfinished line counts."""
    if count is None:
        return update
    lines = update.finished.split(b"\n")[:-1]
    wanted = max(0, count - bool(update.unfinished))
    kept = lines[len(lines) - min(wanted, len(lines)) :]
    return LogUpdate(b"".join(line + b"\n" for line in kept), update.unfinished if count else b"")


class LastLines:
    """Keeps the last `count` finished lines of a log read in steps, up to about 4 MiB."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._blocks: deque[bytes] = deque()
        self._lines = self._size = self._dropped = 0
        self._unfinished = b""

    def add(self, update: LogUpdate) -> None:
        block, self._unfinished = update
        self._blocks.append(block)
        self._lines += block.count(b"\n")
        self._size += len(block)
        while len(self._blocks) > 1:
            lines, size = self._blocks[0].count(b"\n"), len(self._blocks[0])
            if self._lines - lines < self._count and self._size - size < MAX_TAIL:
                break
            self._blocks.popleft()
            self._lines, self._size, self._dropped = self._lines - lines, self._size - size, self._dropped + lines

    @property
    def skipped(self) -> int:
        """The number of lines before them."""
        return self._dropped + max(0, self._lines - self._count)

    def update(self) -> LogUpdate:
        data, surplus = b"".join(self._blocks), max(0, self._lines - self._count)
        return LogUpdate(data.split(b"\n", surplus)[-1] if surplus else data, self._unfinished)


def stored_lines(tail: str, count: int) -> LogUpdate | None:
    """The last `count` lines from the tail in the queue, if it has that many and nothing need be streamed."""
    update = TailReader(lambda: tail).read()
    # One more line than requested: the first one may be incomplete.
    has_enough = update.finished.count(b"\n") + bool(update.unfinished) > count
    return last_lines(update, count) if has_enough else None
