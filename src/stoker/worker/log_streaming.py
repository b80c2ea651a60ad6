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

# Requests are checked no more often than this, however often the queue changes.
_CHECK_EVERY: Final = 1.0
# Meanwhile readers have the tail in the queue. The stream itself may have filled the disk.
_RETRY_WHEN_AWAY: Final = 5.0
_RETRY_AFTER_ERROR: Final = 60.0
# Other workers remove the streams of machines that are gone.
_EXPIRE_EVERY: Final = 600.0
# As fast as people read; each chunk is a row.
_SEND_EVERY: Final = 0.5
# One chunk: between two of them the worker does its other work.
_STEP: Final = 256 * 1024
# Further requests wait: each stream has a file open.
_MAX_OPEN: Final = 32
# Of all streams in the queue, complete ones too.
_MAX_STORED: Final = 512 * 2**20
# A longer log is not streamed: readers get its tail.
_MAX_LOG: Final = 128 * 2**20
# The same for one line: it is sent as a whole, and an unfinished one again with each change.
_MAX_LINE: Final = 4 * 2**20
_MAX_UNFINISHED: Final = 64 * 1024


class LogStreaming:
    """All logs that this machine streams now. A failure here never affects a job."""

    def __init__(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._streams: dict[str, _LogStream] = {}
        """By attempt, least recently sent first."""
        self._refused: set[str] = set()
        """Attempts whose log cannot be streamed, until their requests end."""
        self._checked = -math.inf
        self._check_at = 0.0
        self._expire_at = 0.0
        """When to remove streams without readers."""

    def note_change(self) -> None:
        """The queue has changed: there may be a new request."""
        self._check_at = min(self._check_at, self._checked + _CHECK_EVERY)

    def due(self) -> float:
        return min([self._check_at, self._expire_at, *(stream.due for stream in self._streams.values())])

    def step(self, store: Store) -> None:
        """One step of what is due. Raises QueueAwayError; streams then start over later."""
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
                # The request had ended for a moment, and the new reader starts over.
                self._forget(attempt)
            if attempt in self._streams or attempt in self._refused or not self._has_room():
                continue
            directory = self._identity.directory_of(request.job, request.number)
            if is_log_of(directory, attempt):
                self._streams[attempt] = _LogStream(request, directory)
        # New requests change the queue; only the end of one must be polled for.
        self._check_at = self._checked + _CHECK_EVERY if requests else math.inf

    def _has_room(self) -> bool:
        streams = self._streams.values()
        is_open = sum(not stream.is_done for stream in streams) < _MAX_OPEN
        return is_open and sum(stream.size for stream in streams) < _MAX_STORED

    def _forget(self, attempt: str) -> None:
        self._streams.pop(attempt).close()


class _LogStream:
    """One log, from its beginning."""

    def __init__(self, request: LogRequest, directory: Path) -> None:
        self._attempt = request.attempt
        self._record = AttemptRecord(directory)
        self._reader = LogFileReader(directory, with_states=True)
        self._edition = os.urandom(8).hex()
        self._sent: LogChunk | None = None
        self.due = 0.0
        self.is_refused = False
        """Whether another try cannot succeed."""

    @property
    def size(self) -> int:
        """Bytes of it in the queue."""
        return 0 if self._sent is None else self._sent.size

    def is_read_as(self, edition: str) -> bool:
        """Whether readers have this stream."""
        return self._sent is None or edition == self._edition

    @property
    def is_done(self) -> bool:
        return self._sent is not None and self._sent.is_complete

    def send(self, store: Store) -> bool:
        """Sends one chunk. False when the stream is over: no reader is left, or the log cannot be streamed."""
        try:
            chunk = self._next()
        except (StokerError, OSError):
            chunk = None
        if chunk is None or chunk.size > _MAX_LOG:
            # A log that has grown too long starts over: its file is shorter, since the writer limits its size.
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
        """The next chunk; None when the log is too long. Raises StokerError or OSError when it cannot be read."""
        if self._sent is None and _size_of(self._record.directory) > _MAX_LOG:
            return None
        # Before reading: what is read after the end is all.
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
    """What may change although no line was finished."""
    return chunk.unfinished, chunk.is_behind, chunk.is_complete
