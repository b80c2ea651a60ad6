"""Where the page's questions to the queue are asked: a few threads, each with a connection of its own.

A store belongs to one thread, and a database that is slow must not stop the loop that serves everybody. A connection
that failed is thrown away, and the next question opens another.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from stoker.errors import BadInputError, StokerError
from stoker.queue import Store, open_queue
from stoker.web.config import PATIENCE

# Enough that one slow question does not delay the next; PostgreSQL gives each connection a process.
_THREADS: Final = 4
# More than this means that the database does not keep up: whoever comes then is told so instead of waiting in line.
_MOST_WAITING: Final = 200

# Who is still asking then closes without the others.
_SECONDS_TO_LEAVE: Final = 5.0

T = TypeVar("T")


class CrowdedError(StokerError):
    """Too many questions wait already."""


class ConnectionPool:
    """Asks the queue on behalf of coroutines."""

    def __init__(self, queue: str | None) -> None:
        self._queue = queue
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="queue-connection")
        self._own = threading.local()
        self._waiting = 0

    async def ask(self, question: Callable[[Store], T]) -> T:
        """The answer; StokerError when there is none."""
        if self._waiting >= _MOST_WAITING:
            raise CrowdedError("the queue does not answer as fast as it is asked: try again in a moment")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._answer, question)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        # SQLite lets only the thread that opened a connection close it: each of them comes to this once.
        everyone = threading.Barrier(_THREADS)
        for _thread in range(_THREADS):
            self._threads.submit(self._leave, everyone)
        self._threads.shutdown(wait=True)

    def _leave(self, everyone: threading.Barrier) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            everyone.wait(_SECONDS_TO_LEAVE)
        store: Store | None = getattr(self._own, "store", None)
        if store is not None:
            with contextlib.suppress(StokerError):
                store.close()

    def _answer(self, question: Callable[[Store], T]) -> T:
        store: Store | None = getattr(self._own, "store", None)
        if store is None:
            store = self._own.store = open_queue(self._queue, PATIENCE)
        try:
            return question(store)
        except BadInputError:
            raise
        except StokerError:
            # Whatever it was, the connection is not trusted any more.
            self._own.store = None
            with contextlib.suppress(StokerError):
                store.close()
            raise
