"""The board: what everybody sees, read once for all pages, whenever the queue's bell rings.

One thread looks at the queue, however many pages are open. Pages wait for the number of the next version and take what
is newest then: a page that was slow or asleep misses steps in between, never the state in the end.
"""

import asyncio
import contextlib
import logging
import select
import socket
import threading
import time
from typing import Final

from stoker.errors import StokerError
from stoker.queue import Store, open_queue
from stoker.queue.changes import ChangeListener
from stoker.status.model import Snapshot
from stoker.status.snapshot import SnapshotBuilder
from stoker.web.config import PATIENCE, Config

_LOGGER: Final = logging.getLogger("stoker.web")

# News within this time are shown together: nobody sees more than a few changes a second, and each costs every page.
_BETWEEN_LOOKS: Final = 0.5
# What rings no bell (what GPUs do, what a job prints) is looked for this often; it is also the bell's slow poll.
_AT_LEAST_EVERY: Final = 1.0
# When no page is open, only the notifications and the metrics want to know.
_AT_LEAST_EVERY_UNSEEN: Final = 5.0
# Several looks have failed to come back by then, and the one under way has used up its patience.
_SILENT_AFTER: Final = 30.0
# A database that restarts needs a few seconds.
_BETWEEN_TRIES: Final = 1.0


class SnapshotCache:
    """Keeps the newest overview. Everything but `run` is for the thread of the event loop."""

    def __init__(self, config: Config) -> None:
        self._queue = config.queue
        self._observer = SnapshotBuilder(config.home)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="snapshot-cache", daemon=True)
        self._ending = threading.Event()
        self._wake_read, self._wake_write = _pipe()
        self.viewers = 0
        """How many pages are open."""
        self.latest: Snapshot | None = None
        self.version = 0
        self._problem: str | None = None
        self.reached = 0.0
        """When it was read last, in monotonic seconds."""

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        self._wake()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._news.set()
        self._wake_read.close()
        self._wake_write.close()

    async def changed(self, after: int, patience: float) -> int:
        """The number of the newest version, as soon as it is above `after` or when patience is over."""
        ends = time.monotonic() + patience
        while self.version <= after and not self._ending.is_set():
            left = ends - time.monotonic()
            if left <= 0:
                break
            news = self._news
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), left)
        return self.version

    @property
    def problem(self) -> str | None:
        """Why the queue cannot be read now; `latest` is then as old as that."""
        if self._problem is None and self.latest is not None and time.monotonic() - self.reached > _SILENT_AFTER:
            return "the queue does not answer"
        return self._problem

    @property
    def is_over(self) -> bool:
        """Whether the server ends: then every page is let go."""
        return self._ending.is_set()

    def look_now(self) -> None:
        """Somebody has just done something, or opened a page."""
        self._wake()

    # The board's own thread

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                with open_queue(self._queue, PATIENCE) as store:
                    self._watch(store)
            except StokerError as error:
                self._stumble(str(error))
            except Exception:  # whatever it was, pages that stand still and say nothing would be worse
                _LOGGER.exception("the board stumbled")
                self._stumble("the queue cannot be read: page.log in the state directory has more about it")

    def _stumble(self, problem: str) -> None:
        self._publish(None, problem)
        self._ending.wait(_BETWEEN_TRIES)

    def _watch(self, store: Store) -> None:
        with contextlib.closing(store.listen()) as changes:
            while not self._ending.is_set():
                self._publish(self._observer.observe(store), None)
                self._pause(changes)

    def _pause(self, changes: ChangeListener) -> None:
        """Until there may be something new, but not for less than the shortest time between two looks."""
        looked = time.monotonic()
        patience = _AT_LEAST_EVERY if self.viewers else _AT_LEAST_EVERY_UNSEEN
        poll = select.poll()
        for number in (self._wake_read.fileno(), changes.fileno()):
            if number >= 0:
                poll.register(number, select.POLLIN)
        poll.poll(patience * 1000)
        changes.poll()
        with contextlib.suppress(BlockingIOError):
            self._wake_read.recv(4096)
        self._ending.wait(max(0.0, looked + _BETWEEN_LOOKS - time.monotonic()))

    def _publish(self, snapshot: Snapshot | None, problem: str | None) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._take, snapshot, problem)

    def _take(self, snapshot: Snapshot | None, problem: str | None) -> None:
        if snapshot is not None:
            self.latest = snapshot
            self.reached = time.monotonic()
        self._problem = problem
        self.version += 1
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_write.send(b".")


def _pipe() -> tuple[socket.socket, socket.socket]:
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    return reader, writer
