"""The queue in a SQLite file, for one machine."""

import contextlib
import functools
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from stoker.errors import QueueAwayError, StokerError
from stoker.paths import open_privately, private_directory
from stoker.procfs import boot_id
from stoker.queue.driver import (
    EVERYTHING,
    FOR_PEOPLE,
    VERSION,
    Address,
    ChangeListener,
    Changes,
    CollisionError,
    Parameters,
    Row,
    Statements,
    schema,
    script,
)

if TYPE_CHECKING:
    from stoker.inotify import Inotify

# Transactions take milliseconds; a lock held this long belongs to a stuck process.
BUSY_SECONDS: Final = 30.0
# One statement in PostgreSQL, several in SQLite. The number of leading steps that must return rows.
SCRIPTS: Final = {"claim": 3, "claim head": 3, "keep": 1, "succeed": 2, "succeed and claim": 2}
# The parameter with the clock of leases.
LEASE_CLOCK: Final = "lease_now"

# inotify watches are limited per user; one may become free later.
SECONDS_BETWEEN_TRIES: Final = 1.0

T = TypeVar("T")


@functools.cache
def _statements() -> Statements:
    return Statements("sqlite")


_script: Final = functools.cache(script)


def connect(address: Address, _timeout: float | None = None) -> "SqliteDriver":
    """Connects. A timeout is not needed: SQLite itself waits for locks, and no statement takes long."""
    return SqliteDriver(Path(address.location))


class SqliteDriver:
    """One connection to the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._statements = _statements()
        self._connection: sqlite3.Connection | None = None
        self._notifies = False
        self._ahead: float | None = None

    @property
    def place(self) -> str:
        return str(self._path)

    def shared_address(self) -> str | None:
        return None

    def transaction(self, work: Callable[[], T]) -> T:
        with self._explained():
            self._lease_now()  # writes the offset outside the transaction, which may be rolled back
            self._connected().execute("BEGIN IMMEDIATE")
            return self._until_commit(work)

    def fetch(self, statement: str, parameters: Parameters) -> list[Row]:
        return self.fetch_text(self._statements[statement], parameters)

    def fetch_text(self, sql: str, parameters: Parameters) -> list[Row]:
        with self._explained():
            if f":{LEASE_CLOCK}" in sql:
                parameters = {**parameters, LEASE_CLOCK: self._lease_now()}
            return self._connected().execute(sql, parameters).fetchall()

    def _lease_now(self) -> float:
        """The clock of leases and retries. It cannot be set, and keeps running during suspend.

        It is the time since boot plus an offset, which makes it equal to the wall clock at the first use after a boot.
        The offset is stored in the file, so that all processes share the clock and no step of the wall clock ends a
        lease.
        """
        clock = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self._ahead is None:
            boot, ahead = boot_id(), time.time() - clock
            if not boot:
                return clock + ahead
            try:
                self._ahead = self._kept_ahead(boot, ahead)
            except sqlite3.OperationalError:
                # A full disk, or a queue of an older version. Any change of a lease fails then, too.
                return clock + ahead
        return clock + self._ahead

    def _kept_ahead(self, boot: str, ahead: float) -> float:
        connection = self._connected()
        which = {"boot": boot, "ahead": ahead}
        found = connection.execute(self._statements["read clock"], which).fetchone()
        if found is None:
            connection.execute(self._statements["write clock"], which)
            found = connection.execute(self._statements["read clock"], which).fetchone()
        return float(found[0])

    def at_once(self, statement: str, parameters: Parameters) -> list[Row]:
        return self.transaction(lambda: self._steps(statement, dict(parameters)))

    def _steps(self, statement: str, known: dict[str, str | int | float | bytes | None]) -> list[Row]:
        rows: list[Row] = []
        known[LEASE_CLOCK] = self._lease_now()
        steps = _script(self._statements[statement])
        for number, step in enumerate(steps):
            cursor = self._connected().execute(step, known)
            found = cursor.fetchall()
            if not found and number < SCRIPTS[statement]:
                return []
            if not found:
                break
            rows = found
            if number + 1 < len(steps):
                known.update(zip((column[0] for column in cursor.description), rows[0], strict=True))
        if known.get("ring"):
            self.notify(FOR_PEOPLE)
        return rows

    def many(self, statement: str, rows: Sequence[Parameters]) -> None:
        text = self._statements[statement]
        with self._explained():
            if rows and f":{LEASE_CLOCK}" in text:
                moment = self._lease_now()
                rows = [{**row, LEASE_CLOCK: moment} for row in rows]
            self._connected().executemany(text, rows)

    def sql(self, statement: str) -> str:
        return self._statements[statement]

    def positions(self, count: int) -> list[float]:
        places = [place for (place,) in self.fetch("positions", {"count": count})]
        self.fetch("positions taken", {"count": count})
        return places

    def notify(self, changes: Changes, *, limited: bool = False) -> bool:  # noqa: ARG002 - a file can only be touched
        if self._connected().in_transaction:
            self._notifies = True
        else:
            self._touch()
        return True

    def _touch(self) -> None:
        # Listeners watch the file. If it cannot be touched, their slow poll finds the change.
        with contextlib.suppress(OSError):
            os.utime(self._path)

    def listen(self, *, as_worker: bool = False) -> ChangeListener:  # noqa: ARG002 - a file can only be touched
        return SqliteChanges(self._path, self._data_version)

    def _data_version(self) -> int:
        if self._connection is None:
            raise StokerError(f"the queue {self._path} was closed here")
        return int(self.fetch_text("PRAGMA data_version", {})[0][0])

    def damage(self) -> list[str]:
        found = [str(line) for (line,) in self.fetch_text("PRAGMA quick_check", {}) if line != "ok"]
        return found or [
            f"a row of {table} names one that is not there"
            for table, *_ in self.fetch_text("PRAGMA foreign_key_check", {})
        ]

    def version(self) -> int | None:
        if not self._exists():
            return None
        # A single query: another process may create the queue between two.
        ((queues, everything),) = self.fetch("is there a queue", {})
        if not queues:
            if not everything:
                return None
            raise StokerError(f"{self._path} is a database, but not a queue of Stoker's: STOKER_QUEUE names another")
        try:
            return int(self.fetch("read version", {})[0][0])
        except (IndexError, TypeError, ValueError):
            raise StokerError(f"{self._path} has no version, so it is not a queue that Stoker can read") from None

    def _exists(self) -> bool:
        try:
            self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except PermissionError:
            raise self._denied() from None
        except OSError as error:
            raise StokerError(f"the queue {self._path} cannot be used: {(error.strerror or '').lower()}") from None
        return True

    def _denied(self) -> StokerError:
        return StokerError(
            f"the queue {self._path} cannot be used: this user may not write to it or to its directory "
            "(--queue or STOKER_QUEUE names another)"
        )

    def create(self) -> None:
        try:
            private_directory(self._path.parent)
            # The write-ahead log and its index get the mode of this file.
            os.close(open_privately(self._path, os.O_RDWR | os.O_CREAT))
        except OSError as error:
            raise StokerError(f"the queue {self._path} cannot be created: {error.strerror}") from None
        with self._explained():
            self._write_ahead(self._connected("rwc"))
            self._connected().execute("BEGIN EXCLUSIVE")
            self._until_commit(self._create_tables)

    def _create_tables(self) -> None:
        # Checked under the lock, since another process may have created it.
        if self.version() is None:
            for statement in schema("sqlite"):
                self._connected().execute(statement)
            self.fetch("write version", {"version": VERSION})

    def _write_ahead(self, connection: sqlite3.Connection) -> None:
        """Switches to write-ahead logging, where readers and the writer do not wait for each other."""
        ends = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL").fetchone()
            except sqlite3.OperationalError as error:
                # SQLite itself does not wait for this change.
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > ends:
                    raise
                time.sleep(0.01)
            else:
                return

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _until_commit(self, work: Callable[[], T]) -> T:
        connection = self._connected()
        self._notifies = False
        try:
            answer = work()
            connection.execute("COMMIT")
        except BaseException:
            # After a full disk or a read error SQLite has already rolled back.
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        if self._notifies:
            self._touch()
        return answer

    def _connected(self, mode: str = "rw") -> sqlite3.Connection:
        if self._connection is None:
            connection = sqlite3.connect(
                f"{self._path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, timeout=BUSY_SECONDS
            )
            try:
                # A power cut may undo the last commits without damaging the file; a crash of Stoker undoes nothing.
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute("PRAGMA foreign_keys = ON")
                # What a statement with triggers would undo is kept in memory: otherwise SQLite gets 64 KiB for a file
                # each time, which takes longer than a claim.
                connection.execute("PRAGMA temp_store = MEMORY")
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as error:
            raise CollisionError(str(error)) from error
        except sqlite3.Error as error:
            raise self._explanation(error) from error

    def _explanation(self, error: sqlite3.Error) -> StokerError:
        name = getattr(error, "sqlite_errorname", None) or ""
        match name.split("_")[1:2]:
            case ["BUSY" | "LOCKED"]:
                return QueueAwayError(
                    f"the queue {self._path} was locked by another process for {BUSY_SECONDS:g} s: try again"
                )
            case ["NOTADB"]:
                return StokerError(f"{self._path} is not a queue, nor any SQLite file: STOKER_QUEUE names another")
            case ["CORRUPT"]:
                return StokerError(
                    f"the queue {self._path} is damaged ({error}): restore a copy of it, "
                    "or rescue what can be read by `sqlite3 FILE .recover`"
                )
            case ["FULL"]:
                return QueueAwayError(f"the queue {self._path} cannot be written: its disk is full")
            case ["CANTOPEN" | "READONLY" | "PERM"]:
                return self._unopened(error)
        return StokerError(f"the queue {self._path} cannot be used: {error}")

    def _unopened(self, error: sqlite3.Error) -> StokerError:
        if not self._exists():
            return StokerError(f"there is no queue at {self._path}: the first `stoker submit` creates it")
        if not os.access(self._path, os.R_OK | os.W_OK) or not os.access(self._path.parent, os.W_OK):
            return self._denied()
        if not self._path.is_file():
            return StokerError(f"the queue {self._path} cannot be used: {error}")
        # This process or the machine is out of file descriptors.
        return QueueAwayError(f"the queue {self._path} cannot be opened now: {error}")


class SqliteChanges:
    """Watches the file, which every process touches after committing a change.

    SQLite's own writes precede the commit, and would wake listeners for each heartbeat. `data_version` changes when
    another connection commits.
    """

    def __init__(self, path: Path, data_version: Callable[[], int]) -> None:
        self._path = path
        self._data_version = data_version
        self._events = _watched(path)
        self._tried = time.monotonic()
        self._seen = self._version()

    def fileno(self) -> int:
        return -1 if self._events is None else self._events.fileno()

    def poll(self) -> Changes | None:
        if self._events is not None and not self._drain(self._events):
            return None
        if self._events is None and time.monotonic() - self._tried >= SECONDS_BETWEEN_TRIES:
            self._tried = time.monotonic()
            self._events = _watched(self._path)
        before, self._seen = self._seen, self._version()
        return EVERYTHING if self._seen is None or self._seen != before else None

    def close(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None

    def _drain(self, events: "Inotify") -> bool:
        """Whether anything has happened to the file."""
        if not (found := events.read()):
            return False
        from stoker.inotify import MOVED_AWAY, NO_LONGER_WATCHED, REMOVED

        if any(event.mask & (REMOVED | MOVED_AWAY | NO_LONGER_WATCHED) for event in found):
            self.close()
        return True

    def _version(self) -> int | None:
        try:
            return self._data_version()
        except StokerError:
            return None


def _watched(path: Path) -> "Inotify | None":
    """Watches the file for touches; None if that fails."""
    # Imported lazily: ctypes takes milliseconds to load.
    from stoker.inotify import MOVED_AWAY, REMOVED, TOUCHED, Inotify

    events = Inotify()
    if events.fileno() >= 0 and events.watch(path, TOUCHED | REMOVED | MOVED_AWAY):
        return events
    events.close()
    return None
