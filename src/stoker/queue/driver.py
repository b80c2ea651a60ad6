"""The seam between the store and a database: `Driver`, change notifications, the registry of databases, the SQL."""

import functools
import importlib
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import msgspec

from stoker.errors import BadInputError
from stoker.masking import without_passwords
from stoker.paths import state_home

T = TypeVar("T")
Parameters = Mapping[str, str | int | float | bytes | None]
Row = tuple[Any, ...]

VERSION: Final = 17
"""The schema version. A queue with another version is refused."""

# Every NOTIFY takes a server-wide lock of PostgreSQL and wakes every listener. Nobody notices this delay.
SECONDS_BETWEEN_NOTIFICATIONS: Final = 0.02
# The limit for all workers together if only people need to know; as in `people_were_notified` of the SQL.
SECONDS_BETWEEN_PEOPLES: Final = 0.2

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+]*):(//)?", re.IGNORECASE)
_HEADER: Final = re.compile(r"^-- (.+) --$", re.MULTILINE)
_MACRO: Final = re.compile(r"\{(\w+)(?: ([\w.:]+))?\}")


class CollisionError(Exception):
    """Another process has taken a unique value. The transaction was rolled back and can be retried."""


class Ready(NamedTuple):
    """Jobs of one shape that became ready."""

    priority: int
    """The highest priority among them."""
    number: int


class Changes(msgspec.Struct, frozen=True):
    """Possible changes in the queue that concern workers. Every change concerns people."""

    everything: bool = False
    ready: Mapping[str, Ready] = {}
    """Jobs that may start now, by shape."""
    workers: frozenset[str] = frozenset()
    """Workers with new requests."""

    def __or__(self, other: "Changes") -> "Changes":
        if self.everything or other.everything:
            return EVERYTHING
        ready = dict(self.ready)
        for shape, (priority, number) in other.ready.items():
            before = ready.get(shape, Ready(priority, 0))
            ready[shape] = Ready(max(priority, before.priority), number + before.number)
        return Changes(False, ready, self.workers | other.workers)

    @property
    def concerns_workers(self) -> bool:
        return self.everything or bool(self.ready) or bool(self.workers)

    def encode(self) -> str:
        """A line of text for `decode`; empty if everything may have changed, or too much for a line."""
        words = [
            *(f"{shape}:{priority}:{number}" for shape, (priority, number) in self.ready.items()),
            *(f"@{worker}" for worker in self.workers),
        ]
        text = "" if self.everything or any(" " in word for word in words) else " ".join(words)
        return text if len(text.encode()) <= _LONGEST_LINE else ""

    @staticmethod
    def decode(text: str) -> "Changes":
        """The changes in a line; everything if the line is invalid."""
        ready: dict[str, Ready] = {}
        workers: set[str] = set()
        try:
            for word in text.split(" "):
                if word.startswith("@"):
                    workers.add(word[1:])
                else:
                    shape, priority, number = word.split(":")
                    ready[shape] = Ready(int(priority), int(number))
        except ValueError:
            return EVERYTHING
        return Changes(False, ready, frozenset(workers))


# PostgreSQL takes less than 8000 bytes.
_LONGEST_LINE: Final = 7000
EVERYTHING: Final = Changes(everything=True)
FOR_PEOPLE: Final = Changes()
"""A change that concerns no worker, such as an outcome."""


class ChangeListener(Protocol):
    """Signals changes. It may wake spuriously, and rarely late, so every user also polls slowly.

    It ignores changes by the store that created it, and must be closed before that store.
    """

    def fileno(self) -> int:
        """A descriptor that becomes readable on a change; -1 while it cannot listen."""

    def poll(self) -> Changes | None:
        """Possible changes since the last call; None without any. Never raises; reconnects a lost listener."""

    def close(self) -> None: ...


class NotifyThrottle:
    """Limits the rate of notifications: the first after a pause is sent at once, later ones are deferred."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = -math.inf
        self._deferred: Changes | None = None
        self._deferred_at = -math.inf
        self._refused_at: float | None = None

    def may_send(self) -> bool:
        """True if a notification may be sent now."""
        return self._clock() - self._last >= SECONDS_BETWEEN_NOTIFICATIONS

    def with_deferred(self, changes: Changes) -> Changes:
        """These changes together with deferred ones."""
        return changes if self._deferred is None else self._deferred | changes

    def sent(self) -> None:
        """Call it after sending a notification, which covers all deferred changes."""
        self._last = self._clock()
        self._deferred = self._refused_at = None

    def defer(self, changes: Changes) -> None:
        self._deferred = self.with_deferred(changes)
        self._deferred_at = self._clock()

    def refused(self) -> None:
        """Call it if a notification was suppressed because another process has just notified people.

        That notification also covers a change from long ago; for a recent change, sending is retried.
        """
        if self._clock() - self._deferred_at >= SECONDS_BETWEEN_PEOPLES:
            self.sent()
        else:
            self._refused_at = self._clock()

    def flush_due(self) -> float | None:
        """Seconds until a deferred notification may be sent; None without one."""
        if self._deferred is None:
            return None
        due = self._last + SECONDS_BETWEEN_NOTIFICATIONS
        if self._refused_at is not None and not self._deferred.concerns_workers:
            due = self._refused_at + SECONDS_BETWEEN_PEOPLES
        return max(0.0, due - self._clock())


class Driver(Protocol):
    """One connection to one database, for one thread."""

    @property
    def place(self) -> str:
        """The queue's address, without a password."""

    def shared_address(self) -> str | None:
        """The complete address with its password, for other machines; None for a local file."""

    def transaction(self, work: Callable[[], T]) -> T:
        """Runs `work` in one transaction. It may be called again after a deadlock."""

    def fetch(self, statement: str, parameters: Parameters) -> list[Row]:
        """Runs a named statement, as its own transaction unless inside `transaction`."""

    def fetch_text(self, sql: str, parameters: Parameters) -> list[Row]:
        """Runs SQL composed of named statements."""

    def at_once(self, statement: str, parameters: Parameters) -> list[Row]:
        """Runs a named change of several tables in one transaction and as few round trips as possible.

        If the parameter `ring` is 1 and something changed, it notifies people. The column `rung` is NULL if another
        process has just done so.
        """

    def many(self, statement: str, rows: Sequence[Parameters]) -> None: ...

    def sql(self, statement: str) -> str:
        """The text of a named statement, in this dialect."""

    def positions(self, count: int) -> list[float]:
        """New positions after all that were ever assigned, in order."""

    def notify(self, changes: Changes, *, limited: bool = False) -> bool:
        """Wakes listeners on commit; workers only if the changes concern them.

        `limited`: returns False, without notifying people, if another process has just done so.
        """

    def listen(self, *, as_worker: bool = False) -> ChangeListener:
        """`as_worker`: only to changes that concern workers, if the database can tell."""

    def damage(self) -> list[str]:
        """Damage that the database finds in its file."""

    def version(self) -> int | None:
        """The version of the queue; None if there is no queue."""

    def create(self) -> None:
        """Creates the tables, unless another process has just done so."""

    def close(self) -> None: ...


class DriverType(NamedTuple):
    """A database for queues. Its module exports `connect(address, timeout)`, which returns a `Driver`."""

    name: str
    module: str
    is_file: bool
    """It is a local file, which the first submission creates."""


DRIVERS: Final[dict[str, DriverType]] = {
    "sqlite": DriverType("SQLite", "stoker.queue.sqlite", is_file=True),
    "postgresql": DriverType("PostgreSQL", "stoker.queue.postgres", is_file=False),
}
"""Databases by URL scheme. A new one needs a module and a line here."""
_ALIASES: Final = {"postgres": "postgresql"}


class Address(msgspec.Struct, frozen=True):
    """The address of a queue."""

    scheme: str
    location: str
    """The path of a file, or the whole URL."""

    def __str__(self) -> str:
        """The address without its password, for people."""
        return without_passwords(self.location)

    def __repr__(self) -> str:
        return f"Address({self.scheme!r}, {str(self)!r})"

    @property
    def database(self) -> DriverType:
        return DRIVERS[self.scheme]

    @property
    def path(self) -> Path | None:
        """The path, if the queue is a file."""
        return Path(self.location) if self.database.is_file else None

    @property
    def whole(self) -> str:
        """The location, with an absolute path for a file."""
        return str(Path(self.location).absolute()) if self.database.is_file else self.location

    def connect(self, timeout: float | None = None) -> Driver:
        """Connects. Statements that take longer than `timeout` seconds raise QueueAwayError."""
        driver: Driver = importlib.import_module(self.database.module).connect(self, timeout)
        return driver


def queue_address(url: str | None = None, environment: Mapping[str, str] = os.environ) -> Address:
    """The address in `url`, in `STOKER_QUEUE`, or by default of a file in the state directory."""
    text = url or environment.get("STOKER_QUEUE")
    if not text:
        return Address("sqlite", str(state_home(environment) / "queue.db"))
    found = _SCHEME.match(text)
    if found is None:
        return Address("sqlite", str(Path(text).expanduser()))
    scheme = found[1].lower()
    scheme = _ALIASES.get(scheme, scheme)
    if scheme in DRIVERS and found[2]:
        if not DRIVERS[scheme].is_file:
            return Address(scheme, text)
        if text[found.end() :].startswith("/"):
            return Address(scheme, "/" + text[found.end() :].lstrip("/"))
    raise BadInputError(
        f"{without_passwords(text)} is not the address of a queue: "
        "a path, sqlite:///the/path or postgresql://user@host/database is"
    )


# SQL


@functools.cache
def sections(file: str) -> Mapping[str, str]:
    """The text under each `-- name --`, read once, since an upgrade may replace the file of a running program."""
    _preamble, *parts = _HEADER.split(_sql(file))
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


class Statements(dict[str, str]):
    """Statements by name, expanded on first use, since a short command needs few.

    A `{macro}` or `{macro argument}` is replaced by the statement of that name, recursively. `form` converts the result
    to a database's dialect.
    """

    def __init__(self, dialect: str, form: Callable[[str], str] = str) -> None:
        super().__init__()
        self._pieces = {**sections(f"{dialect}.sql"), **sections("queries.sql")}
        self._form = form

    def __missing__(self, name: str) -> str:
        self[name] = text = self._form(self.written_out(self._pieces[name]))
        return text

    def written_out(self, text: str) -> str:
        return _MACRO.sub(lambda found: self.written_out(self._pieces[found[1]].replace("$", found[2] or "")), text)


def schema(dialect: str) -> list[str]:
    """The statements that create the tables."""
    return [Statements(dialect).written_out(statement) for statement in script(_sql(f"schema_{dialect}.sql"))]


def script(text: str) -> list[str]:
    """Splits a script into statements. Bodies of functions and triggers are indented."""
    return [statement.strip() for statement in re.split(r";\s*(?:\n(?=\S)|$)", text) if statement.strip()]


def _sql(file: str) -> str:
    return (Path(__file__).parent / "sql" / file).read_text(encoding="utf-8")
