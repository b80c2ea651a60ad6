"""The queue in a PostgreSQL database: for many machines."""

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from stoker.errors import QueueAwayError, StokerError
from stoker.masking import without_passwords
from stoker.queue.driver import (
    VERSION,
    Address,
    ChangeListener,
    CollisionError,
    Parameters,
    Row,
    schema,
    statements,
)

if TYPE_CHECKING:
    import psycopg
    from psycopg.pq.abc import PGconn

# PostgreSQL ends a deadlock by aborting one of the transactions.
MOST_TRIES: Final = 10
CONNECTION: Final[dict[str, Any]] = {
    "connect_timeout": 10,
    # The default would be a quarter of an hour to notice a lost network.
    "tcp_user_timeout": 20_000,
    # While a connection only waits, nothing is sent: keepalives notice a lost network.
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "application_name": "stoker",
}
LISTENING: Final[dict[str, Any]] = {
    **CONNECTION,
    # The loop that listens must not block for long.
    "connect_timeout": 2,
}

# A listener tries to reconnect at most this often.
SECONDS_BETWEEN_TRIES: Final = 1.0

T = TypeVar("T")
_PARAMETER = re.compile(r"(?<!:):([a-z_]+)")


def connect(address: Address, timeout: float | None = None) -> "PostgresDriver":
    return PostgresDriver(address, timeout)


class PostgresDriver:
    """One connection to the database, made again when it was lost."""

    def __init__(self, address: Address, timeout: float | None = None) -> None:
        """`timeout`: seconds that one statement may take."""
        try:
            import psycopg
        except ImportError:
            raise StokerError(
                f"the queue {address} needs PostgreSQL's driver: `pip install 'stoker[postgres]'` brings it"
            ) from None
        self._psycopg = psycopg
        self._address = address
        self._timeout = timeout
        self._statements = {
            name: _PARAMETER.sub(r"%(\1)s", text.replace("%", "%%")) for name, text in statements("postgres").items()
        }
        self._connection: psycopg.Connection[Row] | None = None

    @property
    def place(self) -> str:
        return str(self._address)

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
                # `cursor.description` says the same, but is built anew at each call.
                return cursor.fetchall() if cursor.pgresult and cursor.pgresult.nfields else []

        # Inside a transaction only the whole transaction can be retried.
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
        with self._explained(), self._connected().cursor() as cursor:
            cursor.executemany(self._statements[statement].encode(), rows)

    def sql(self, statement: str) -> str:
        return self._statements[statement]

    def positions(self, count: int) -> list[float]:
        return sorted(place for (place,) in self.fetch("positions", {"count": count}))

    def notify(self) -> None:
        self.fetch("notify", {})

    def listen(self) -> ChangeListener:
        return PostgresChanges(self._listening, self._own_process)

    def _listening(self) -> "psycopg.Connection[Row]":
        connection = self._connect(LISTENING)
        try:
            connection.execute(self._statements["listen"].encode())
        except self._psycopg.Error:
            connection.close()
            raise
        return connection

    def _own_process(self) -> int | None:
        """The server process of this connection: its notifications are of our own changes."""
        return None if self._connection is None else self._connection.info.backend_pid

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
        # Checked under the lock: another process may have created it.
        if self.version() is None:
            for statement in schema("postgres"):
                self._connected().execute(statement.encode())
            self.fetch("write version", {"version": VERSION})

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connected(self) -> "psycopg.Connection[Row]":
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

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
        # A statement that waited for a locked row must see its new version, whatever the server's default is.
        connection.isolation_level = self._psycopg.IsolationLevel.READ_COMMITTED
        if self._timeout is not None:
            connection.execute(f"SET statement_timeout = {round(self._timeout * 1000):d}".encode())
        return connection

    def _why_not_connected(self, message: str) -> StokerError:
        if "password" in message:
            return StokerError(
                f"the queue {self._address} refused the password: write the right one into STOKER_QUEUE, or ~/.pgpass"
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
    """libpq lists every address it tried; the last line has the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "Multiple connection" not in line]
    return lines[-1].rsplit("FATAL:", 1)[-1].strip() if lines else "no reason given"


class PostgresChanges:
    """`connect` opens a connection that listens; `own` is the server process of the store's own connection."""

    def __init__(self, connect: Callable[[], "psycopg.Connection[Row]"], own: Callable[[], int | None]) -> None:
        self._connect = connect
        self._own = own
        self._connection: psycopg.Connection[Row] | None = None
        self._tried = -math.inf
        self._listen()

    def fileno(self) -> int:
        return -1 if self._connection is None else self._connection.fileno()

    def poll(self) -> bool:
        if self._connection is None:
            # Changes may have been missed meanwhile.
            self._listen()
            return True
        import psycopg

        try:
            senders = _drained(self._connection.pgconn)
        except psycopg.Error:
            self.close()
            return True
        own = self._own()
        return any(sender != own for sender in senders)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _listen(self) -> None:
        if time.monotonic() - self._tried < SECONDS_BETWEEN_TRIES:
            return
        import psycopg

        with contextlib.suppress(StokerError, psycopg.Error):
            self._connection = self._connect()
        self._tried = time.monotonic()


def _drained(connection: "PGconn") -> list[int]:
    """The server processes that sent the notifications that have arrived."""
    connection.consume_input()
    senders = []
    while (one := connection.notifies()) is not None:
        senders.append(one.be_pid)
    return senders
