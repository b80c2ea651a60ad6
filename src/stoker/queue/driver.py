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
"""Of the tables. A queue of another version is refused."""

# Every NOTIFY takes a lock of the whole PostgreSQL server and wakes every listener. Nobody notices this delay.
SECONDS_BETWEEN_NOTIFICATIONS: Final = 0.02
# Of all workers together, when only people are concerned; as in `people_were_notified` of the SQL.
SECONDS_BETWEEN_PEOPLES: Final = 0.2

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+]*):(//)?", re.IGNORECASE)
_HEADER: Final = re.compile(r"^-- (.+) --$", re.MULTILINE)
_MACRO: Final = re.compile(r"\{(\w+)(?: ([\w.:]+))?\}")


class CollisionError(Exception):
    """Another process has taken what must be unique; the transaction was rolled back and may be tried again."""


class Ready(NamedTuple):
    """Jobs of one shape that became ready."""

    priority: int
    """The highest of them."""
    number: int


class Changes(msgspec.Struct, frozen=True):
    """What may have changed in the queue, as far as workers are concerned; people are concerned by every change."""

    everything: bool = False
    ready: Mapping[str, Ready] = {}
    """Jobs that may start now, by their shape."""
    workers: frozenset[str] = frozenset()
    """The workers that somebody wants something of."""

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
        """A line of text that `decode` reads; empty when everything may have changed, or too much for a line."""
        words = [
            *(f"{shape}:{priority}:{number}" for shape, (priority, number) in self.ready.items()),
            *(f"@{worker}" for worker in self.workers),
        ]
        text = "" if self.everything or any(" " in word for word in words) else " ".join(words)
        return text if len(text.encode()) <= _LONGEST_LINE else ""

    @staticmethod
    def decode(text: str) -> "Changes":
        """Of a line that is not understood: everything."""
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
"""A change that no worker needs to know of, such as an outcome."""


class ChangeListener(Protocol):
    """May wake for nothing, and rarely late, so every user also polls slowly.

    It ignores changes by the store that created it, and is closed before that store.
    """

    def fileno(self) -> int:
        """Readable when something may have changed; -1 while it cannot listen."""

    def poll(self) -> Changes | None:
        """What may have changed since the last call; None if nothing. Never raises; reconnects a lost listener."""

    def close(self) -> None: ...


class NotifyThrottle:
    """The first notification after a pause is sent at once; one too soon after it is deferred."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = -math.inf
        self._deferred: Changes | None = None
        self._deferred_at = -math.inf
        self._refused_at: float | None = None

    def may_send(self) -> bool:
        """Whether a notification may be sent now."""
        return self._clock() - self._last >= SECONDS_BETWEEN_NOTIFICATIONS

    def with_deferred(self, changes: Changes) -> Changes:
        """What a notification of these changes has to say."""
        return changes if self._deferred is None else self._deferred | changes

    def sent(self) -> None:
        """Call it after sending: it covers everything that was deferred."""
        self._last = self._clock()
        self._deferred = self._refused_at = None

    def defer(self, changes: Changes) -> None:
        self._deferred = self.with_deferred(changes)
        self._deferred_at = self._clock()

    def refused(self) -> None:
        """What is deferred was not sent, because another process notified people a moment ago.

        That was after the last change if that is long ago; if not, the notification is tried again.
        """
        if self._clock() - self._deferred_at >= SECONDS_BETWEEN_PEOPLES:
            self.sent()
        else:
            self._refused_at = self._clock()

    def flush_due(self) -> float | None:
        """In how many seconds a deferred notification may be sent; None when there is none."""
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
        """Where the queue is, without a password."""

    def shared_address(self) -> str | None:
        """The whole address, with its password, as other machines can use it; None for a file of this machine."""

    def transaction(self, work: Callable[[], T]) -> T:
        """All that `work` does, or nothing. `work` may be called again after a deadlock."""

    def fetch(self, statement: str, parameters: Parameters) -> list[Row]:
        """Runs a named statement; outside `transaction` it is a transaction by itself."""

    def fetch_text(self, sql: str, parameters: Parameters) -> list[Row]:
        """Runs a statement composed of named ones."""

    def at_once(self, statement: str, parameters: Parameters) -> list[Row]:
        """Runs a named change of several tables in one transaction and as few round trips as possible.

        It notifies people when `ring` among the parameters is 1 and something was changed; the column `rung` is then
        NULL if others have done so a moment ago.
        """

    def many(self, statement: str, rows: Sequence[Parameters]) -> None: ...

    def sql(self, statement: str) -> str:
        """The text of a named statement, in this dialect."""

    def positions(self, count: int) -> list[float]:
        """This many positions after all that were ever assigned, in order."""

    def notify(self, changes: Changes, *, limited: bool = False) -> bool:
        """Wakes listeners when the transaction is committed; workers only if it concerns them.

        `limited`: people only if nobody has notified them a moment ago. False when that was so.
        """

    def listen(self, *, as_worker: bool = False) -> ChangeListener:
        """`as_worker`: only to what concerns workers, where the database can tell."""

    def damage(self) -> list[str]:
        """Damage to the file, as far as the database can tell."""

    def version(self) -> int | None:
        """The version of the queue there; None where there is none."""

    def create(self) -> None:
        """Creates the tables, unless another process has just done so."""

    def close(self) -> None: ...


class DriverType(NamedTuple):
    """A database that can hold a queue. Its module has `connect(address, timeout)`, which gives a `Driver`."""

    name: str
    module: str
    is_file: bool
    """Whether it is a file of this machine, which is created when something is submitted."""


DRIVERS: Final[dict[str, DriverType]] = {
    "sqlite": DriverType("SQLite", "stoker.queue.sqlite", is_file=True),
    "postgresql": DriverType("PostgreSQL", "stoker.queue.postgres", is_file=False),
}
"""By the scheme of the queue's URL. A new database is one module and one line here."""
_ALIASES: Final = {"postgres": "postgresql"}


class Address(msgspec.Struct, frozen=True):
    """Where a queue is."""

    scheme: str
    location: str
    """A path for a file, else the whole URL."""

    def __str__(self) -> str:
        """For people: without a password."""
        return without_passwords(self.location)

    def __repr__(self) -> str:
        return f"Address({self.scheme!r}, {str(self)!r})"

    @property
    def database(self) -> DriverType:
        return DRIVERS[self.scheme]

    @property
    def path(self) -> Path | None:
        """The file, where it is one."""
        return Path(self.location) if self.database.is_file else None

    @property
    def whole(self) -> str:
        """The location with an absolute path, valid in every directory."""
        return str(Path(self.location).absolute()) if self.database.is_file else self.location

    def connect(self, timeout: float | None = None) -> Driver:
        """A statement that takes longer than `timeout` seconds raises QueueAwayError."""
        driver: Driver = importlib.import_module(self.database.module).connect(self, timeout)
        return driver


def queue_address(url: str | None = None, environment: Mapping[str, str] = os.environ) -> Address:
    """The queue at `url`, or else at `STOKER_QUEUE`, or else in a file of the state directory."""
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
    """The text under each `-- name --`. Read once: an upgrade may replace the file while this program runs."""
    _preamble, *parts = _HEADER.split(_sql(file))
    return {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}


class Statements(dict[str, str]):
    """Statements by name, each written out when it is first used: a short command needs few of them.

    A `{macro}` or `{macro argument}` is the text of that name, which may have others. `form` turns all of it into
    what a database takes.
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
    """The single statements of a script. The body of a function or trigger is indented."""
    return [statement.strip() for statement in re.split(r";\s*(?:\n(?=\S)|$)", text) if statement.strip()]


def _sql(file: str) -> str:
    return (Path(__file__).parent / "sql" / file).read_text(encoding="utf-8")
