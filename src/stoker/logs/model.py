"""What the log pipeline works with: new text, streamed chunks, and the parts of the queue and its records it needs."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec


class LogUpdate(NamedTuple):
    """What is new: whole lines, and the unfinished line after them, which replaces the previous one."""

    finished: bytes
    unfinished: bytes


class LogChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a log that a worker streams through the queue."""

    edition: str
    """Identifies one stream. Another edition starts from the beginning and may have other lines."""
    start: int
    """Offset among all finished lines, in bytes."""
    finished: bytes = b""
    unfinished: bytes = b""
    """The line after them, as it is now."""
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
        """What is new since the last call: all of it, or about `limit` bytes but at least one line."""

    def close(self) -> None: ...


class LoggedAttempt(Protocol):
    """The fields of an attempt that locate its log."""

    @property
    def id(self) -> str: ...
    @property
    def job(self) -> str: ...
    @property
    def number(self) -> int: ...
    @property
    def worker(self) -> str: ...
    @property
    def outcome(self) -> str | None: ...
    @property
    def ended(self) -> float | None: ...


class LogWorker(Protocol):
    @property
    def id(self) -> str: ...
    def is_there(self, now: float) -> bool: ...


class LogStore(Protocol):
    """The part of the queue that brings logs from other machines; `queue.Store` is one."""

    def clock(self) -> float: ...
    @property
    def workers(self) -> "LogWorkers": ...
    @property
    def attempts(self) -> "LoggedAttempts": ...
    @property
    def logs(self) -> "LogTable": ...


class LogWorkers(Protocol):
    def all(self) -> Sequence[LogWorker]: ...


class LoggedAttempts(Protocol):
    def get(self, attempt: str) -> LoggedAttempt | None: ...


class LogTable(Protocol):
    """The ends of logs, and log streams."""

    def read(self, attempt: str) -> str: ...
    def request_stream(self, attempt: str, seconds: float) -> bool: ...
    def read_chunk(self, attempt: str, edition: str = "", start: int = 0) -> LogChunk | None: ...
