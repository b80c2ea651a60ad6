"""The bell of a PostgreSQL queue: LISTEN on a connection of its own."""

import contextlib
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from stoker.errors import StokerError
from stoker.queue.driver import Row

if TYPE_CHECKING:
    import psycopg
    from psycopg.pq.abc import PGconn

# A server that is away is asked again soon, yet not by every turn of somebody's loop.
SECONDS_BETWEEN_TRIES: Final = 1.0


class PostgresChanges:
    """`connect` gives a connection that listens; `own` is the process id of the server's end of the store's own one."""

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
            # What happened in the meantime is not known, nor what happens while nobody listens.
            self._listen()
            return True
        import psycopg

        try:
            tellers = _drained(self._connection.pgconn)
        except psycopg.Error:
            self.close()
            return True
        own = self._own()
        return any(teller != own for teller in tellers)

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
    """Who told the news that have arrived."""
    connection.consume_input()
    tellers = []
    while (one := connection.notifies()) is not None:
        tellers.append(one.be_pid)
    return tellers
