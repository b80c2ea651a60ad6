"""Reading of a file that takes several steps, each in a thread; who leaves in the middle of one leaves nothing open."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

T = TypeVar("T")


class Steps:
    """The steps of one reader. For the thread of the event loop."""

    def __init__(self, threads: Executor, close: Callable[[], None]) -> None:
        self._threads = threads
        self._close = close
        self._last: Future[Any] | None = None

    async def do(self, work: Callable[[], T]) -> T:
        """One step; the one before it must be over."""
        step = self._last = self._threads.submit(work)
        return await asyncio.wrap_future(step)

    def close(self) -> None:
        """A step cannot be called back: when it was not waited for, the reader is closed by its thread, after it."""
        if self._last is None:
            self._close()
        else:
            self._last.add_done_callback(lambda _step: self._close())
