"""Queries of coroutines in a few threads, each with its own connection to the queue."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from stoker.errors import BadInputError, StokerError
from stoker.queue import Store, open_queue
from stoker.web.config import QUEUE_TIMEOUT

# Enough that one slow query does not delay the next; PostgreSQL has a process for each connection.
_THREADS: Final = 4
# With more queries waiting the database does not keep up: further ones fail at once.
_MAX_WAITING: Final = 200
# How long closing waits for running queries.
_CLOSE_TIMEOUT: Final = 5.0

T = TypeVar("T")


class CrowdedError(StokerError):
    """Too many queries are waiting."""


class ConnectionPool:
    """A connection that failed is closed, and the next query opens another."""

    def __init__(self, queue: str | None) -> None:
        self._queue = queue
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="queue-connection")
        self._local = threading.local()
        self._waiting = 0

    async def run(self, query: Callable[[Store], T]) -> T:
        if self._waiting >= _MAX_WAITING:
            raise CrowdedError("too many requests are waiting for the queue: try again in a moment")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, query)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        # SQLite connections can only be closed by the thread that opened them: the barrier gives each thread one task.
        barrier = threading.Barrier(_THREADS)
        for _thread in range(_THREADS):
            self._threads.submit(self._close_connection, barrier)
        self._threads.shutdown(wait=True)

    def _close_connection(self, barrier: threading.Barrier) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(_CLOSE_TIMEOUT)
        store: Store | None = getattr(self._local, "store", None)
        if store is not None:
            with contextlib.suppress(StokerError):
                store.close()

    def _run(self, query: Callable[[Store], T]) -> T:
        store: Store | None = getattr(self._local, "store", None)
        if store is None:
            store = self._local.store = open_queue(self._queue, QUEUE_TIMEOUT)
        try:
            return query(store)
        except BadInputError:
            raise
        except StokerError:
            self._local.store = None
            with contextlib.suppress(StokerError):
                store.close()
            raise
