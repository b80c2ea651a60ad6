"""What the store needs of a database: the seam between it and SQLite or PostgreSQL."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from stoker.errors import StokerError
from stoker.queue.changes import ChangeListener

T = TypeVar("T")
Parameters = Mapping[str, str | int | float | bytes | None]
Row = tuple[Any, ...]


class QueueAwayError(StokerError):
    """The database does not answer now; later it may. What was asked may or may not have been done."""


class CollisionError(Exception):
    """Another one has taken what should be unique; the transaction was rolled back and may be tried again."""


class Driver(Protocol):
    """One connection to one database, for one thread."""

    @property
    def place(self) -> str:
        """Where the queue is, for people."""

    def transaction(self, work: Callable[[], T]) -> T:
        """All that `work` does, or nothing. It may be called again when the database asks for that."""

    def fetch(self, statement: str, parameters: Parameters) -> list[Row]:
        """Runs a named statement; outside `transaction`, in one of its own."""

    def fetch_text(self, sql: str, parameters: Parameters) -> list[Row]:
        """Runs a statement that the store put together from named ones."""

    def at_once(self, statement: str, parameters: Parameters) -> list[Row]:
        """Runs a named change of several tables, in a transaction of its own and as few round trips as there can be.

        Who waits is woken by it when `ring` among the parameters is 1 and something was changed.
        """

    def many(self, statement: str, rows: Sequence[Parameters]) -> None: ...

    def sql(self, statement: str) -> str:
        """The text of a named statement, in this dialect."""

    def positions(self, count: int) -> list[float]:
        """So many places behind all that were ever given, in order."""

    def announce(self) -> None:
        """Wakes who waits for a change, when the transaction is committed."""

    def listen(self) -> ChangeListener:
        """Rings when somebody else has announced something."""

    def damage(self) -> list[str]:
        """What is broken below the tables, as far as the database can tell; nothing when all is well."""

    def version(self) -> int | None:
        """The version of the queue there; None where there is nothing yet."""

    def oldest(self) -> int:
        """The oldest Stoker that may open the queue there, by the version that it makes of one."""

    def create(self) -> None:
        """Makes the place for a queue, so that it can be migrated from nothing."""

    def migrate(self) -> None: ...

    def close(self) -> None: ...
