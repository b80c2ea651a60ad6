"""The queue in a PostgreSQL database, for many machines.

A store has one connection for statements and notifications. Behind a connection pooler it polls for changes, since
notifications would reach whichever client has the server connection.
"""

import contextlib
import functools
import logging
import os
import re
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from stoker.errors import QueueAwayError, StokerError
from stoker.masking import without_passwords
from stoker.queue.driver import (
    EVERYTHING,
    VERSION,
    Address,
    ChangeListener,
    Changes,
    CollisionError,
    Parameters,
    Row,
    Statements,
    schema,
)

if TYPE_CHECKING:
    import psycopg

# PostgreSQL ends a deadlock by aborting one of the transactions.
MOST_TRIES: Final = 10
CONNECTION: Final[dict[str, Any]] = {
    "connect_timeout": 10,
    # By default it takes a quarter of an hour to notice a lost network.
    "tcp_user_timeout": 20_000,
    # An idle connection sends nothing, so keepalives detect a lost network.
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "application_name": "stoker",
}
# A listening loop must not block for long.
LISTENING: Final[dict[str, Any]] = {**CONNECTION, "connect_timeout": 2}

# The interval of a listener's tries to reconnect.
SECONDS_BETWEEN_TRIES: Final = 1.0
# The interval of polls behind a connection pooler.
POLLS: Final = 2.0
# A command retries for this long when the server is out of connections, which others free all the time.
PATIENCE: Final = 3.0
_PAUSE: Final = 0.3

T = TypeVar("T")
_PARAMETER = re.compile(r"(?<!:):([a-z_]+)")


@functools.cache
def _statements() -> Statements:
    return Statements("postgres", lambda text: _PARAMETER.sub(r"%(\1)s", text.replace("%", "%%")))


def connect(address: Address, timeout: float | None = None) -> "PostgresDriver":
    return PostgresDriver(address, timeout)


# Messages for the limits of the server, of a role or database, and of PgBouncer.
_FULL: Final = (
    "too many clients",
    "connection slots are reserved",
    "too many connections",
    "no more connections allowed",
)


class TooManyConnectionsError(QueueAwayError):
    """The server takes no more connections now."""


_SILENT: Final = logging.NullHandler()


class PostgresDriver:
    """One connection to the database, which reconnects after a loss."""

    def __init__(self, address: Address, timeout: float | None = None) -> None:
        """`timeout`: the limit for one statement in seconds."""
        try:
            import psycopg
        except ImportError:
            raise StokerError(
                f"the queue {address} needs PostgreSQL's driver: `pip install 'stoker[postgres]'` brings it"
            ) from None
        # It prints the loss of a connection in several lines, and raises it as well: that is said in one sentence.
        logging.getLogger("psycopg").addHandler(_SILENT)
        self._psycopg = psycopg
        self._address = address
        self._timeout = timeout
        self._statements = _statements()
        self._connection: psycopg.Connection[Row] | None = None
        self._listeners: list[PostgresChanges] = []
        self.pooled = False
        """The last connection was to a pooler."""
        self._lost_by_worker = False

    @property
    def place(self) -> str:
        return str(self._address)

    def shared_address(self) -> str:
        """The address completed from ~/.pgpass, PG* variables and the user name, as libpq does."""
        from urllib.parse import quote

        from psycopg.conninfo import conninfo_to_dict

        url, info = self._address.location, self._connected().info
        given = conninfo_to_dict(url)
        found = {
            "user": info.user,
            "password": info.password,
            "host": info.host,
            "port": info.port,
            "dbname": info.dbname,
        }
        # Without a host, the connection uses a local socket.
        has_host = bool(info.host) and not info.host.startswith("/")
        missing = {
            name: str(value)
            for name, value in found.items()
            if value and name not in given and (has_host or name not in ("host", "port"))
        }
        added = "&".join(f"{name}={quote(value, safe='')}" for name, value in missing.items())
        return f"{url}{'&' if '?' in url else '?'}{added}" if added else url

    def transaction(self, work: Callable[[], T]) -> T:
        def whole() -> T:
            with self._explained(), self._connected().transaction():
                return work()

        return self._retried(whole)

    def fetch(self, statement: str, parameters: Parameters) -> list[Row]:
        return self._fetched(self._statements[statement], parameters, True)

    def fetch_text(self, sql: str, parameters: Parameters) -> list[Row]:
        return self._fetched(sql, parameters, None)

    def at_once(self, statement: str, parameters: Parameters) -> list[Row]:
        return self.fetch(statement, parameters)

    def _fetched(self, sql: str, parameters: Parameters, prepare: bool | None) -> list[Row]:
        def once() -> list[Row]:
            with self._explained():
                cursor = self._connected().execute(sql.encode(), parameters, prepare=prepare)
                # `cursor.description` has the same information, but is rebuilt at each call.
                return cursor.fetchall() if cursor.pgresult and cursor.pgresult.nfields else []

        # Inside a transaction, only the whole transaction can be retried.
        return once() if self._in_transaction() else self._retried(once)

    def _in_transaction(self) -> bool:
        status = self._psycopg.pq.TransactionStatus
        return self._connection is not None and self._connection.info.transaction_status != status.IDLE

    def _retried(self, work: Callable[[], T]) -> T:
        errors = self._psycopg.errors
        for tries_left in reversed(range(MOST_TRIES)):
            try:
                return work()
            except (errors.DeadlockDetected, errors.SerializationFailure) as error:
                if not tries_left:
                    raise QueueAwayError(f"the queue {self._address} is too busy: try again") from error
        raise AssertionError("unreachable")

    def many(self, statement: str, rows: Sequence[Parameters]) -> None:
        if len(rows) <= 1:
            # The pipeline of `executemany` costs a round trip even without rows, and is slower for one row.
            for row in rows:
                self._fetched(self._statements[statement], row, True)
            return
        with self._explained(), self._connected().cursor() as cursor:
            cursor.executemany(self._statements[statement].encode(), rows)

    def sql(self, statement: str) -> str:
        return self._statements[statement]

    def positions(self, count: int) -> list[float]:
        return sorted(place for (place,) in self.fetch("positions", {"count": count}))

    def notify(self, changes: Changes, *, limited: bool = False) -> bool:
        parameters: Parameters = {
            "concerns_workers": int(changes.concerns_workers),
            "changes": changes.encode(),
            "limited": int(limited),
        }
        ((notified, _workers),) = self.fetch("notify", parameters)
        return notified is not None

    def listen(self, *, as_worker: bool = False) -> ChangeListener:
        statement = self._statements["listen as worker" if as_worker else "listen"].encode()
        listener = PostgresChanges(self, statement, as_worker=as_worker)
        self._listeners.append(listener)
        if self._connection is not None:
            with contextlib.suppress(self._psycopg.Error):
                self._listen(self._connection)
        return listener

    def _listen(self, connection: "psycopg.Connection[Row]") -> None:
        if self.pooled or not self._listeners:
            return
        with contextlib.suppress(ValueError):
            connection.remove_notify_handler(self._notified)
        connection.add_notify_handler(self._notified)
        for listener in self._listeners:
            connection.execute(listener.statement)
            listener.attach(connection.fileno())

    def _notified(self, notification: "psycopg.Notify") -> None:
        """Called during any statement of this connection, and by `drain`."""
        if self._connection is None or notification.pid == self._connection.info.backend_pid:
            return
        for listener in self._listeners:
            listener.note(Changes.decode(notification.payload))

    def drain(self) -> bool:
        """Processes received notifications. False if the connection is lost."""
        if self._connection is None:
            return False
        connection = self._connection.pgconn
        try:
            connection.consume_input()
            while (one := connection.notifies()) is not None:
                if connection.notify_handler is not None:
                    connection.notify_handler(one)
        except self._psycopg.Error:
            self.close()
            # All workers lose their connections at once, so each waits a random time before it reconnects.
            self._lost_by_worker = any(listener.as_worker for listener in self._listeners)
            return False
        return True

    def workers_changes(self) -> int | None:
        """The count of notifications to workers; None if it cannot be read now."""
        try:
            return int(self.fetch("changes", {})[0][0])
        except StokerError:
            return None

    def reconnect(self) -> None:
        """Tries to reconnect and listen, without blocking for long."""
        with contextlib.suppress(StokerError, self._psycopg.Error):
            self._connection = self._connect(LISTENING)

    def listens(self) -> bool:
        return self._connection is not None and not self.pooled

    def forget(self, listener: "PostgresChanges") -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def damage(self) -> list[str]:
        """PostgreSQL checks its files itself."""
        return []

    def version(self) -> int | None:
        if not self.fetch("is there a queue", {})[0][0]:
            return None
        try:
            return int(self.fetch("read version", {})[0][0])
        except (self._psycopg.errors.UndefinedColumn, IndexError, TypeError, ValueError):
            raise StokerError(
                f"the table stoker_queue in {self._address} is not a queue of Stoker: use another database"
            ) from None

    def create(self) -> None:
        self.transaction(self._create_tables)

    def _create_tables(self) -> None:
        self.fetch("alone", {})
        # Checked under the lock, since another process may have created it.
        if self.version() is None:
            for statement in schema("postgres"):
                self._connected().execute(statement.encode())
            self.fetch("write version", {"version": VERSION})

    def close(self) -> None:
        if self._connection is not None:
            for listener in self._listeners:
                listener.detach()
            self._connection.close()
            self._connection = None

    def _connected(self) -> "psycopg.Connection[Row]":
        if self._lost_by_worker:
            self._lost_by_worker = False
            raise QueueAwayError(f"the queue {self._address} went away: the connection was closed")
        if self._connection is None:
            # A listener's loop retries itself.
            self._connection = self._connect() if self._listeners else self._patiently_connected()
        return self._connection

    def _patiently_connected(self) -> "psycopg.Connection[Row]":
        ends = time.monotonic() + PATIENCE
        while True:
            try:
                return self._connect()
            except TooManyConnectionsError:
                if time.monotonic() > ends:
                    raise
                time.sleep(_PAUSE)

    def _connect(self, settings: Mapping[str, Any] = CONNECTION) -> "psycopg.Connection[Row]":
        from psycopg.conninfo import conninfo_to_dict

        try:
            wanted = {**settings, **conninfo_to_dict(self._address.location)}
        except self._psycopg.ProgrammingError as error:
            raise StokerError(
                f"{self._address} is not the address of a database: {without_passwords(_last_line(error))}"
            ) from None
        try:
            connection = self._psycopg.connect(**wanted, autocommit=True)
        except self._psycopg.Error as error:
            raise self._why_not_connected(str(error)) from None
        try:
            self._prepare(connection)
        except self._psycopg.Error as error:
            connection.close()
            raise self._why_not_connected(str(error)) from None
        return connection

    def _prepare(self, connection: "psycopg.Connection[Row]") -> None:
        # A statement that waits for a locked row must see its new version, regardless of the server's default.
        connection.isolation_level = self._psycopg.IsolationLevel.READ_COMMITTED
        ((process,),) = connection.execute(b"SELECT pg_backend_pid()", prepare=False).fetchall()
        # A pooler invents its own pids. Behind it, the next statement may run in another session.
        self.pooled = process != connection.info.backend_pid
        if self.pooled:
            connection.prepare_threshold = None
        elif self._timeout is not None:
            connection.execute(f"SET statement_timeout = {round(self._timeout * 1000):d}".encode())
        self._listen(connection)

    def _why_not_connected(self, message: str) -> StokerError:
        if "password" in message:
            return StokerError(
                f"the queue {self._address} refused the password: write the right one into STOKER_QUEUE, or ~/.pgpass"
            )
        if any(sign in message for sign in _FULL):
            return TooManyConnectionsError(
                f"the queue {self._address} has no connection left ({_last_line(message)}): "
                "raise max_connections of PostgreSQL, or connect through PgBouncer"
            )
        if "does not exist" in message:
            return StokerError(f"the queue {self._address} cannot be opened: {_last_line(message)}")
        return QueueAwayError(f"the queue {self._address} cannot be reached: {_last_line(message)}")

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        errors = self._psycopg.errors
        try:
            yield
        except errors.IntegrityError as error:
            raise CollisionError(str(error)) from error
        except errors.InsufficientPrivilege as error:
            raise StokerError(f"the queue {self._address} may not be changed by this user: {error}") from error
        except errors.UndefinedTable as error:
            raise StokerError(f"{self._address} has no queue any more: `stoker queue init` creates it") from error
        except (errors.DataError, errors.NotSupportedError) as error:
            raise StokerError(f"the queue {self._address} refused that: {str(error).partition(chr(10))[0]}") from error
        except errors.DiskFull as error:
            raise QueueAwayError(f"the queue {self._address} cannot be written: its disk is full") from error
        except (self._psycopg.OperationalError, self._psycopg.InterfaceError) as error:
            if isinstance(error, (errors.DeadlockDetected, errors.SerializationFailure)):
                raise
            self.close()
            raise QueueAwayError(f"the queue {self._address} went away: {_last_line(error)}") from error


def _last_line(error: object) -> str:
    """The last line of a message: libpq lists every address it tried, and the reason last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "Multiple connection" not in line]
    return lines[-1].rsplit("FATAL:", 1)[-1].strip() if lines else "no reason given"


class PostgresChanges:
    """Changes by other connections of the queue.

    A notification may arrive with the answer to a statement and leave the socket unreadable, so an eventfd signals it.
    """

    def __init__(self, driver: PostgresDriver, statement: bytes, *, as_worker: bool) -> None:
        self.statement = statement
        self.as_worker = as_worker
        self._driver = driver
        self._changes: Changes | None = None
        self._arrived = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events = select.epoll()
        self._events.register(self._arrived, select.EPOLLIN)
        self._socket = -1
        self._tried = time.monotonic()
        self._polled = time.monotonic()
        self._count: int | None = None
        self._is_recent = False

    def attach(self, socket: int) -> None:
        self.detach()
        self._socket = socket
        self._events.register(socket, select.EPOLLIN)

    def detach(self) -> None:
        """Call it when the connection closes."""
        if self._socket >= 0:
            with contextlib.suppress(OSError):
                self._events.unregister(self._socket)
            self._socket = -1
            self.note(EVERYTHING)

    def note(self, changes: Changes) -> None:
        self._changes = changes if self._changes is None else self._changes | changes
        if not self._events.closed:
            os.eventfd_write(self._arrived, 1)

    def fileno(self) -> int:
        return self._events.fileno() if self._driver.listens() else -1

    def poll(self) -> Changes | None:
        if not self._driver.drain():
            # Changes may have been missed.
            if not self.as_worker:
                self._reconnect()
            self._take()
            return EVERYTHING
        if self._driver.pooled and time.monotonic() >= self._polled + POLLS:
            self._polled = time.monotonic()
            return EVERYTHING if not self.as_worker or self._has_changed() else None
        return self._take()

    def _has_changed(self) -> bool:
        """True if workers were notified since the last poll or the one before.

        The count may be ahead of the change, which is visible only after its commit.
        """
        before, was_recent = self._count, self._is_recent
        self._count = self._driver.workers_changes()
        self._is_recent = self._count is None or self._count != before
        return self._is_recent or was_recent

    def _take(self) -> Changes | None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._arrived)
        changes, self._changes = self._changes, None
        return changes

    def close(self) -> None:
        self._driver.forget(self)
        if not self._events.closed:
            self._events.close()
            os.close(self._arrived)

    def _reconnect(self) -> None:
        if time.monotonic() >= self._tried + SECONDS_BETWEEN_TRIES:
            self._driver.reconnect()
            self._tried = time.monotonic()
