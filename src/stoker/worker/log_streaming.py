"""Streams logs of this machine's attempts through the queue while a reader on another machine requests them."""

import math
import os
import time
from pathlib import Path
from typing import Final

from stoker.engines.attempt import AttemptRecord
from stoker.engines.identity import WorkerIdentity
from stoker.errors import StokerError
from stoker.logs.reader import LogChunk, LogFileReader, is_log_of
from stoker.queue import QueueAwayError, Store
from stoker.queue.driver import CollisionError
from stoker.queue.logs import KEPT
from stoker.queue.model import LogRequest

# The shortest interval of checks for requests, however often the queue changes.
_CHECK_EVERY: Final = 1.0
# Until a retry, readers have the tail in the queue. The stream itself may have filled the disk.
_RETRY_WHEN_AWAY: Final = 5.0
_RETRY_AFTER_ERROR: Final = 60.0
# Other workers remove the streams of dead machines.
_EXPIRE_EVERY: Final = 600.0
# As fast as people read; each chunk is a row.
_SEND_EVERY: Final = 0.5
# The size of a chunk. Between chunks the worker does its other work.
_STEP: Final = 256 * 1024
# The limit of open streams, each of which has an open file. Further requests wait.
_MAX_OPEN: Final = 32
# The limit for all streams in the queue, including complete ones.
_MAX_STORED: Final = 512 * 2**20
# A longer log is not streamed: readers get its tail.
_MAX_LOG: Final = 128 * 2**20
# The limit of a line, which is sent as a whole, and again with each change while it is unfinished.
_MAX_LINE: Final = 4 * 2**20
_MAX_UNFINISHED: Final = 64 * 1024


class LogStreaming:
    """The logs that this machine streams. A failure never affects a job."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._streams: dict[str, _LogStream] = {}
        """Streams by attempt, least recently sent first."""
        self._refused: set[str] = set()
        """Requested attempts whose log cannot be streamed."""
        self._checked = -math.inf
        self._check_at = 0.0
        self._expire_at = 0.0
        """When to remove streams without readers."""

    def note_change(self) -> None:
        """Schedules a check for requests after a change of the queue."""
        self._check_at = min(self._check_at, self._checked + _CHECK_EVERY)

    def due(self) -> float:
        return min([self._check_at, self._expire_at, *(stream.due for stream in self._streams.values())])

    def step(self, store: Store) -> None:
        """Performs one due step. Raises QueueAwayError; streams then start over later."""
        try:
            self._step(store, time.monotonic())
        except QueueAwayError:
            self._back_off(_RETRY_WHEN_AWAY)
            raise
        except StokerError:
            self._back_off(_RETRY_AFTER_ERROR)

    def close(self) -> None:
        for attempt in list(self._streams):
            self._forget(attempt)

    def _back_off(self, seconds: float) -> None:
        self.close()
        self._check_at = time.monotonic() + seconds
        # A change of the queue does not shorten it.
        self._checked = self._check_at - _CHECK_EVERY
        self._expire_at = self._check_at + _EXPIRE_EVERY

    def _step(self, store: Store, now: float) -> None:
        if now >= self._check_at:
            self._check(store)
        if now >= self._expire_at:
            self._expire_at = now + (_EXPIRE_EVERY if store.logs.expire_streams() else _SEND_EVERY)
        for attempt, stream in self._streams.items():
            if now >= stream.due:
                goes_on = stream.send(store)
                self._streams[attempt] = self._streams.pop(attempt)
                if not goes_on:
                    self._forget(attempt)
                    if stream.is_refused:
                        self._refused.add(attempt)
                return

    def _check(self, store: Store) -> None:
        requests = {
            request.attempt: request
            for request in store.logs.stream_requests()
            if self._identity.is_own(request.worker)
        }
        self._checked = time.monotonic()
        self._refused &= requests.keys()
        for attempt in self._streams.keys() - requests.keys():
            self._forget(attempt)
            self._expire_at = min(self._expire_at, self._checked + KEPT + 1.0)
        for attempt, request in requests.items():
            if attempt in self._streams and not self._streams[attempt].is_read_as(request.edition):
                # The request had ended for a moment, so the new reader starts over.
                self._forget(attempt)
            if attempt in self._streams or attempt in self._refused or not self._has_room():
                continue
            directory = self._identity.directory_of(request.job, request.number)
            if is_log_of(directory, attempt):
                self._streams[attempt] = _LogStream(request, directory)
        # New requests change the queue; only their end needs polling.
        self._check_at = self._checked + _CHECK_EVERY if requests else math.inf

    def _has_room(self) -> bool:
        streams = self._streams.values()
        is_open = sum(not stream.is_done for stream in streams) < _MAX_OPEN
        return is_open and sum(stream.size for stream in streams) < _MAX_STORED

    def _forget(self, attempt: str) -> None:
        self._streams.pop(attempt).close()


class _LogStream:
    """The stream of one log."""

    def __init__(self, request: LogRequest, directory: Path) -> None:
        self._attempt = request.attempt
        self._record = AttemptRecord(directory)
        self._reader = LogFileReader(directory, with_states=True)
        self._edition = os.urandom(8).hex()
        self._sent: LogChunk | None = None
        self.due = 0.0
        self.is_refused = False
        """Another try cannot succeed."""

    @property
    def size(self) -> int:
        """Its bytes in the queue."""
        return 0 if self._sent is None else self._sent.size

    def is_read_as(self, edition: str) -> bool:
        """True if readers have this edition."""
        return self._sent is None or edition == self._edition

    @property
    def is_done(self) -> bool:
        return self._sent is not None and self._sent.is_complete

    def send(self, store: Store) -> bool:
        """Sends one chunk. False if the stream ends: no reader is left, or the log cannot be streamed."""
        try:
            chunk = self._next()
        except (StokerError, OSError):
            chunk = None
        if chunk is None or chunk.size > _MAX_LOG:
            # A log that has grown too long starts over: its file is shorter, since the writer rotates it.
            self.is_refused = chunk is None
            store.logs.drop_stream(self._attempt)
            return False
        self.due = time.monotonic() + (0.0 if chunk.is_behind else _SEND_EVERY)
        if self._has_changed(chunk):
            try:
                if not store.logs.write_chunk(self._attempt, chunk):
                    return False
            except CollisionError:  # The job is being cleaned, or another worker streams it.
                return False
            self._sent = chunk
        if self.is_done:
            self._reader.close()
            self.due = math.inf
        return True

    def close(self) -> None:
        self._reader.close()

    def _next(self) -> LogChunk | None:
        """The next chunk; None if the log is too long. Raises StokerError or OSError if it cannot be read."""
        if self._sent is None and _size_of(self._record.directory) > _MAX_LOG:
            return None
        # Checked before reading, since a read after the end gets everything.
        has_ended = not self._record.has_attempt()
        finished, unfinished = self._reader.read(_STEP)
        is_complete = has_ended and not self._reader.is_behind
        if len(finished) > _STEP + _MAX_LINE or len(unfinished) > _MAX_LINE:
            return None
        return LogChunk(
            edition=self._edition,
            start=self.size,
            finished=finished,
            unfinished=unfinished if is_complete else unfinished[:_MAX_UNFINISHED],
            is_behind=self._reader.is_behind,
            is_complete=is_complete,
        )

    def _has_changed(self, chunk: LogChunk) -> bool:
        return self._sent is None or bool(chunk.finished) or _state_of(self._sent) != _state_of(chunk)


def _size_of(directory: Path) -> int:
    return sum(path.stat().st_size for name in ("output", "output.1") if (path := directory / name).exists())


def _state_of(chunk: LogChunk) -> tuple[object, ...]:
    """The state that may change without a new finished line."""
    return chunk.unfinished, chunk.is_behind, chunk.is_complete
