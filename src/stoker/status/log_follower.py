"""Follows the log of one attempt on any machine: for `stoker logs`, the page, the API and downloads."""

import math
import os
import re
import shutil
import tempfile
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeVar

from stoker.errors import QueueAwayError, StokerError
from stoker.logs.reader import (
    STEP,
    LogChunk,
    LogFileReader,
    LogReader,
    LogUpdate,
    TailReader,
    attempt_directory,
    has_log,
    log_directory,
    new_lines,
    read_tail,
)
from stoker.paths import private_directory, private_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stoker.queue import Attempt, Store

T = TypeVar("T")
LogOrigin = Literal["", "file", "stream", "tail"]

# A live worker starts to stream within this time; then the tail in the queue is read.
STREAM_STARTS_WITHIN: Final = 3.0
# A stream that is behind and delivers nothing for this long is given up.
STREAM_STALLS_AFTER: Final = 10.0
# The rest of a stream arrives within this time after the end of its attempt, or the worker is lost.
STREAM_ENDS_WITHIN: Final = 10.0
# The same for the tail in the queue.
TAIL_ENDS_WITHIN: Final = 3.0
# A tail written this long after the end of its attempt is final.
_TAIL_IS_FINAL_AFTER: Final = 10.0
CHECK_END_EVERY: Final = 1.0
# Fast enough for smooth progress bars; a database is read less often.
POLL_FILE: Final = 0.2
POLL_QUEUE: Final = 0.5
_POLL_ARRIVING: Final = 0.1
_LONGEST_GAP: Final = 60.0
# More than the queue stores, to find its tail.
_LONGEST_TAIL: Final = 256 * 1024
# The last returned lines, used to continue from another source.
_REMEMBERED: Final = 128 * 1024
# A request is valid for this long and renewed while the log is read.
_REQUEST_SECONDS: Final = 30.0
_RENEW_EVERY: Final = 10.0
# An edition becomes the name of a directory.
_EDITION: Final = re.compile(r"[0-9a-f]{1,64}")


class RunQuery(Protocol):
    """Runs a query on a connection to the queue: the caller's, or one of a pool."""

    def __call__(self, query: "Callable[[Store], T]", /) -> T: ...


def queries_on(store: "Store") -> RunQuery:
    def run(query: "Callable[[Store], T]", /) -> T:
        return query(store)

    return run


def is_streamable(store: "Store", attempt: "Attempt") -> bool:
    """Whether a worker is alive on the attempt's machine: no other machine has its log."""
    home, now = _home(attempt.worker), store.clock()
    return any(_home(worker.id) == home and worker.is_there(now) for worker in store.workers.all())


def _home(worker: str) -> str:
    """The common part of the ids of one machine's workers, which survives restarts."""
    return worker.partition("-")[0]


class RemoteLog:
    """The copy of one log; used by one thread at a time."""

    def __init__(self, attempt: str) -> None:
        self._attempt = attempt
        self._remover: weakref.finalize[[str, bool], RemoteLog] | None = None
        self._requested: float | None = None
        self._place: Path | None = None
        self.size = 0
        """Bytes of finished lines in the copy."""
        self.edition = ""
        """Changes with each stream, which may have different lines. Empty until a worker streams the log."""
        self.is_behind = False
        """Whether more is available at once."""
        self.is_complete = False
        """Whether the attempt has ended and the copy has all of its log."""

    @property
    def directory(self) -> Path | None:
        """The copy of this edition; None until a worker streams the log."""
        return self._place / self.edition if self._place is not None and self.edition else None

    def update(self, run: RunQuery) -> None:
        """Fetches new output. Raises StokerError if the queue is unreachable, OSError if the disk fails."""
        if self._requested is None or time.monotonic() - self._requested >= _RENEW_EVERY:
            run(lambda store: store.logs.request_stream(self._attempt, _REQUEST_SECONDS))
            self._requested = time.monotonic()
        chunk = run(lambda store: store.logs.read_chunk(self._attempt, self.edition, self.size))
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


class LogFollower:
    """Returns new output in steps that never block; used by one thread at a time. The source is the file on this
    machine, a copy streamed from another one, or the tail in the queue if no worker streams. A whole log replaces the
    tail when it has arrived. `epoch` then changes, and reading either starts over or, if `continuous`, continues after
    the returned lines.
    """

    def __init__(
        self,
        attempt: "Attempt",
        home: Path,
        *,
        continuous: bool = False,
        complete: bool = False,
        tail_after: float = math.inf,
        node: int = 0,
    ) -> None:
        """`home` is the state directory of this machine. `node`: rank in a job over several nodes. The queue has only
        the log of the first node; others are read from their files. `complete`: read a copy only when it has the whole
        output. `tail_after`: seconds after which the tail is read while the copy is incomplete.
        """
        self.attempt = attempt
        self._home = home
        self._continuous = continuous
        self._needs_complete = complete
        self._tail_after = tail_after
        self._reader: LogReader | None = None
        self._node = node
        self._remote: RemoteLog | None = None if node else RemoteLog(attempt.id)
        """None once streaming is given up or not needed."""
        self._tail = ""
        self._created = self._read_at = time.monotonic()
        self._stream_until: float | None = None
        """Deadline for the start of a stream; None before the request."""
        self._editions: set[str] = set()
        self._arrived = ("", 0)
        self._arrived_at = -math.inf
        """Edition and length at the last arrival, and its time."""
        self._checked = self._end_seen = -math.inf
        self._tail_is_final = False
        self._count = 0
        self._memory = b""
        """The number of returned bytes of finished lines, and the last of them."""
        self._unfinished = b""
        self._skipped = b""
        """New lines found in another source, not returned yet."""
        self.source: LogOrigin = ""
        self.epoch = ""
        """Within one epoch, line numbers are stable, also across followers."""
        self.directory: Path | None = None
        """The files of the whole log; None while only the tail is known."""
        self.ended: Attempt | None = None
        """The ended attempt, when known."""
        self.is_gone = False
        """Whether the attempt was removed from the queue."""
        self.is_complete = False
        """Whether the attempt has ended and all of its log was returned."""

    @property
    def is_behind(self) -> bool:
        return self._reader is not None and self._reader.is_behind

    @property
    def is_caught_up(self) -> bool:
        """Whether all output so far was returned; for an ended attempt, including its last line."""
        if self.attempt.outcome is not None or self.ended is not None:
            return self.is_complete
        return self._reader is not None and not self.is_behind

    def pause(self) -> float:
        """Seconds to wait before the next read."""
        if self.is_behind:
            return 0.0
        if self._reader is None or self._is_arriving():
            return 0.0 if time.monotonic() - self._arrived_at < _POLL_ARRIVING else _POLL_ARRIVING
        return POLL_FILE if self.source == "file" else POLL_QUEUE

    def locate(self, run: RunQuery) -> bool:
        """Whether there is a source; reads nothing."""
        self._forgive_sleep()
        # Checked before reading: a read after the end is complete.
        self._check_end(run)
        return self._choose_source(run)

    def read(self, run: RunQuery) -> LogUpdate:
        """New output. Raises StokerError if the queue is unreachable, unless the log is on this machine."""
        if not (self.is_behind or self.locate(run)):
            return LogUpdate(b"", self._unfinished)
        update = self._remember(self._next())
        self.is_complete = self._has_ended() and self._is_all(run)
        return update

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._stop_streaming()

    def _forgive_sleep(self) -> None:
        """Time during which this machine slept or was blocked does not count as waiting."""
        now = time.monotonic()
        gap, self._read_at = now - self._read_at, now
        if gap > _LONGEST_GAP:
            self._arrived_at += gap
            self._stream_until = None if self._stream_until is None else self._stream_until + gap

    # The end of the attempt

    def _has_ended(self) -> bool:
        return self.ended is not None or self.is_gone

    def _check_end(self, run: RunQuery) -> None:
        now = time.monotonic()
        if self._has_ended() or now - self._checked < CHECK_END_EVERY:
            return
        self._checked = now
        try:
            found = run(lambda store: store.attempts.get(self.attempt.id))
            if found is None:
                self.is_gone = True
            elif found.outcome is not None:
                self.ended = found
                since = 0.0 if found.ended is None else run(lambda store: store.clock()) - found.ended
                self._tail_is_final = since > _TAIL_IS_FINAL_AFTER
        except StokerError:
            return  # Continue with the file on this machine.
        if self._has_ended():
            self._end_seen = now

    def _is_all(self, run: RunQuery) -> bool:
        if self.is_behind:
            return False
        if self.source == "file":
            return True
        silent_for = time.monotonic() - max(self._end_seen, self._arrived_at)
        if self.directory is None or self._remote is None:
            return not self._is_arriving() and (self._tail_is_final or silent_for > TAIL_ENDS_WITHIN)
        if self._remote.is_complete:
            return True
        if silent_for > STREAM_ENDS_WITHIN:
            copy = _as_stored(read_tail(self.directory / "output", _LONGEST_TAIL))
            if run(lambda store: store.logs.read(self.attempt.id)) in copy:
                return True
            self._stop_streaming()  # The queue has the last lines.
        return False

    # The source

    def _choose_source(self, run: RunQuery) -> bool:
        """False while there is none."""
        if self.source == "file":
            return True
        # A job on this machine has no file before its first output.
        if self._is_silent() and (directory := log_directory(self._home, self.attempt, self._node)) is not None:
            self._stop_streaming()
            self._read_files(directory, "file", "")
            return True
        self._fetch(run)
        remote = self._remote
        if remote is not None and remote.directory is not None and self._is_readable(remote):
            if self.source != "stream" or remote.edition != self.epoch:
                self._read_files(remote.directory, "stream", remote.edition)
        elif remote is not None and self._may_stream(remote):
            return self._reader is not None
        elif self.source != "tail":
            self._read_tail()
        return True

    def _may_stream(self, remote: RemoteLog) -> bool:
        """Whether to wait for a stream that has not started or is incomplete."""
        now = time.monotonic()
        if remote.directory is None:
            return now < (self._stream_until or 0.0)
        patience = STREAM_STALLS_AFTER if remote.is_behind else STREAM_STARTS_WITHIN
        return now - self._arrived_at < patience and not self._waits_too_long()

    def _fetch(self, run: RunQuery) -> None:
        if self._node:
            return
        remote = self._remote
        if remote is not None:
            try:
                remote.update(run)
            except QueueAwayError:
                raise
            except (StokerError, OSError):
                # No space for a copy, or the database refuses: use the tail.
                self._stop_streaming()
            else:
                now = time.monotonic()
                if remote.edition:
                    self._editions.add(remote.edition)
                    self._stream_until = now + STREAM_STARTS_WITHIN
                if self._arrived != (arrived := (remote.edition, remote.size)):
                    self._arrived, self._arrived_at = arrived, now
                if remote.edition and self._is_readable(remote):
                    return
        if self._stream_until is None:
            within = STREAM_STARTS_WITHIN if run(lambda store: is_streamable(store, self.attempt)) else 0.0
            self._stream_until = time.monotonic() + within
        self._tail = run(lambda store: store.logs.read(self.attempt.id))

    def _is_readable(self, remote: RemoteLog) -> bool:
        if self.source == "stream" and remote.edition == self.epoch:
            return True
        has_ended = self._has_ended() or self.attempt.outcome is not None
        return remote.is_complete or not (remote.is_behind or (self._needs_complete and has_ended))

    def _is_arriving(self) -> bool:
        """Whether more of a stream is expected."""
        is_behind = self._remote is not None and self._remote.is_behind
        return is_behind and time.monotonic() - self._arrived_at < STREAM_STALLS_AFTER

    def _waits_too_long(self) -> bool:
        """Whether there is still no source although the stream has run for a long time or was restarted."""
        is_late = time.monotonic() - self._created > self._tail_after
        return self._reader is None and (is_late or len(self._editions) > 1)

    def _stop_streaming(self) -> None:
        remote, self._remote = self._remote, None
        if remote is not None:
            remote.close()

    def _read_files(self, directory: Path, source: LogOrigin, epoch: str) -> None:
        reader = LogFileReader(directory)
        reader.open()
        self._skipped = self._after_known(reader) if self._continuous and not self._is_silent() else b""
        self._switch(reader, source, directory, epoch or reader.first_file)

    def _read_tail(self) -> None:
        known = _as_stored(self._memory.decode(errors="replace")).encode() if self._continuous else b""
        self._switch(TailReader(lambda: self._tail, known), "tail", None, os.urandom(8).hex())

    def _switch(self, reader: LogReader, source: LogOrigin, directory: Path | None, epoch: str) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader, self.source, self.directory, self.epoch = reader, source, directory, epoch
        if not self._continuous:
            self._unfinished = b""

    def _after_known(self, reader: LogFileReader) -> bytes:
        """The lines of another copy after the returned ones. Its beginning may be missing: a log has a size limit."""
        lines, _unfinished = reader.read()
        start = self._count - len(self._memory)
        at = start if lines.startswith(self._memory, start) else lines.rfind(self._memory)
        return lines[at + len(self._memory) :] if at >= 0 else new_lines(self._memory, lines)

    def _next(self) -> LogUpdate:
        reader = self._reader
        if reader is None:
            return LogUpdate(b"", b"")
        finished, unfinished = reader.read(STEP)
        skipped, self._skipped = self._skipped, b""
        return LogUpdate(skipped + finished, unfinished)

    def _remember(self, update: LogUpdate) -> LogUpdate:
        finished, unfinished = update
        # A tail may be older than the stream: the unfinished line is then still the last one.
        is_older = self._continuous and self.source == "tail" and not finished
        self._unfinished = unfinished or (self._unfinished if is_older else b"")
        self._count += len(finished)
        self._memory = (self._memory + finished[-_REMEMBERED:])[-_REMEMBERED:]
        return LogUpdate(finished, self._unfinished)

    def _is_silent(self) -> bool:
        return not self._count and not self._unfinished


def _as_stored(text: str) -> str:
    """The text as a database stores it."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def log_updates(store: "Store", attempt: "Attempt", home: Path, node: int = 0) -> "Iterator[tuple[LogUpdate, bool]]":
    """The current log in steps, each with whether it is only the tail. Waits for a log that is expected."""
    if node or has_log(attempt_directory(home, attempt)):
        store.logs.wait(attempt.id)
    follower = LogFollower(attempt, home, continuous=True, complete=True, node=node)
    run = queries_on(store)
    try:
        while True:
            update = follower.read(run)
            yield update, follower.source == "tail" and any(update)
            if follower.is_caught_up:
                return
            time.sleep(follower.pause())
    finally:
        follower.close()
