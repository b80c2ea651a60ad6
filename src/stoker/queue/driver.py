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

VERSION: Final = 8
"""Of the tables. A queue of another version is refused."""

# Every NOTIFY takes a lock of the whole PostgreSQL server and wakes every listener. Nobody notices this delay.
SECONDS_BETWEEN_NOTIFICATIONS: Final = 0.02

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+]*):(//)?", re.IGNORECASE)
_HEADER: Final = re.compile(r"^-- (.+) --$", re.MULTILINE)
_MACRO: Final = re.compile(r"\{(\w+)(?: (\w+))?\}")


class CollisionError(Exception):
    """Another process has taken what must be unique; the transaction was rolled back and may be tried again."""


class ChangeListener(Protocol):
    """May wake for nothing, and rarely late, so every user also polls slowly.

    It ignores changes by the store that created it, and is closed before that store.
    """

    def fileno(self) -> int:
        """Readable when something may have changed; -1 while it cannot listen."""

    def poll(self) -> bool:
        """Whether something may have changed since the last call. Never raises; reconnects a lost listener."""

    def close(self) -> None: ...


class NotifyThrottle:
    """The first notification after a pause is sent at once; one too soon after it is deferred."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = -math.inf
        self._deferred = False

    def may_send(self) -> bool:
        """Whether a notification may be sent now."""
        return self._clock() - self._last >= SECONDS_BETWEEN_NOTIFICATIONS

    def sent(self) -> None:
        """Call it after sending: it covers everything that was deferred."""
        self._last = self._clock()
        self._deferred = False

    def defer(self) -> None:
        self._deferred = True

    def flush_due(self) -> float | None:
        """In how many seconds a deferred notification may be sent; None when there is none."""
        return max(0.0, self._last + SECONDS_BETWEEN_NOTIFICATIONS - self._clock()) if self._deferred else None


class Driver(Protocol):
    """One connection to one database, for one thread."""

    @property
    def place(self) -> str:
        """Where the queue is, without a password."""

    def transaction(self, work: Callable[[], T]) -> T:
        """All that `work` does, or nothing. `work` may be called again after a deadlock."""

    def fetch(self, statement: str, parameters: Parameters) -> list[Row]:
        """Runs a named statement; outside `transaction` it is a transaction by itself."""

    def fetch_text(self, sql: str, parameters: Parameters) -> list[Row]:
        """Runs a statement composed of named ones."""

    def at_once(self, statement: str, parameters: Parameters) -> list[Row]:
        """Runs a named change of several tables in one transaction and as few round trips as possible.

        It notifies listeners when `ring` among the parameters is 1 and something was changed.
        """

    def many(self, statement: str, rows: Sequence[Parameters]) -> None: ...

    def sql(self, statement: str) -> str:
        """The text of a named statement, in this dialect."""

    def positions(self, count: int) -> list[float]:
        """This many positions after all that were ever assigned, in order."""

    def notify(self) -> None:
        """Wakes listeners when the transaction is committed."""

    def listen(self) -> ChangeListener: ...

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


@functools.cache
def statements(dialect: str) -> Mapping[str, str]:
    """Every statement by name, each `{macro}` and `{macro argument}` written out; a macro may use others."""
    known = {**sections(f"{dialect}.sql"), **sections("queries.sql")}

    def written_out(text: str) -> str:
        return _MACRO.sub(lambda found: written_out(known[found[1]].replace("$", found[2] or "")), text)

    return {name: written_out(text) for name, text in known.items()}


def schema(dialect: str) -> list[str]:
    """The statements that create the tables."""
    return script(_sql(f"schema_{dialect}.sql"))


def script(text: str) -> list[str]:
    """The single statements of a script."""
    return [statement.strip() for statement in re.split(r";\s*(?:\n|$)", text) if statement.strip()]


def _sql(file: str) -> str:
    return (Path(__file__).parent / "sql" / file).read_text(encoding="utf-8")
