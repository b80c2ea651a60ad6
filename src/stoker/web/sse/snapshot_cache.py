"""The newest snapshot of the queue, built by one thread for all pages whenever the queue changes.

Pages wait for the next version number and take the newest snapshot: a slow page skips versions, but always reaches
the last one.
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
from stoker.queue.driver import ChangeListener
from stoker.status.model import Snapshot
from stoker.status.snapshot import SnapshotBuilder
from stoker.web.config import QUEUE_TIMEOUT, Config

_LOGGER: Final = logging.getLogger("stoker.web")

# Changes within this time are shown together, because each update goes to every page.
_MIN_INTERVAL: Final = 0.5
# For changes without a notification, such as GPU readings and job output.
_MAX_INTERVAL: Final = 1.0
# Without open pages, only for notifications and metrics.
_MAX_INTERVAL_UNSEEN: Final = 5.0
# By then several reads should have finished, and the current one has exceeded QUEUE_TIMEOUT.
_STALE_AFTER: Final = 30.0
# A database restart takes a few seconds.
_RETRY_INTERVAL: Final = 1.0


class SnapshotCache:
    """For the event loop's thread, except `_run` and what it calls."""

    def __init__(self, config: Config) -> None:
        self._queue = config.queue
        self._builder = SnapshotBuilder(config.home)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="snapshot-cache", daemon=True)
        self._stopping = threading.Event()
        self._wake_read: socket.socket | None = None
        self._wake_write: socket.socket | None = None
        self.viewers = 0
        """The number of open pages."""
        self.latest: Snapshot | None = None
        self.version = 0
        self._problem: str | None = None
        self.read_at = 0.0
        """When `latest` was read, in monotonic seconds."""

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self.refresh()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        self._changed.set()
        for end in (self._wake_read, self._wake_write):
            if end is not None:
                end.close()

    async def changed(self, after: int, timeout: float) -> int:
        """The newest version, as soon as it is above `after`, or after the timeout."""
        deadline = time.monotonic() + timeout
        while self.version <= after and not self._stopping.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            changed = self._changed
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), left)
        return self.version

    @property
    def problem(self) -> str | None:
        """Why the queue cannot be read now, so that `latest` is stale."""
        if self._problem is None and self.latest is not None and time.monotonic() - self.read_at > _STALE_AFTER:
            return "the queue does not answer"
        return self._problem

    @property
    def is_stopping(self) -> bool:
        """Whether the server stops: open streams end then."""
        return self._stopping.is_set()

    def refresh(self) -> None:
        """Reads the queue soon, because a user changed something or opened a page."""
        if self._wake_write is not None:
            with contextlib.suppress(OSError):
                self._wake_write.send(b".")

    # Its thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with open_queue(self._queue, QUEUE_TIMEOUT) as store:
                    self._watch(store)
            except StokerError as error:
                self._fail(str(error))
            except Exception:  # pages that silently stop updating would be worse
                _LOGGER.exception("reading the queue failed")
                self._fail("the queue cannot be read: page.log in the state directory has details")

    def _fail(self, problem: str) -> None:
        self._publish(None, problem)
        self._stopping.wait(_RETRY_INTERVAL)

    def _watch(self, store: Store) -> None:
        with contextlib.closing(store.listen()) as changes:
            while not self._stopping.is_set():
                self._publish(self._builder.observe(store), None)
                self._pause(changes)

    def _pause(self, changes: ChangeListener) -> None:
        """Waits for a change, at least for the minimum interval."""
        started = time.monotonic()
        timeout = _MAX_INTERVAL if self.viewers else _MAX_INTERVAL_UNSEEN
        poll = select.poll()
        wake = self._wake_read
        for number in (-1 if wake is None else wake.fileno(), changes.fileno()):
            if number >= 0:
                poll.register(number, select.POLLIN)
        poll.poll(timeout * 1000)
        changes.poll()
        if wake is not None:
            with contextlib.suppress(BlockingIOError):
                wake.recv(4096)
        self._stopping.wait(max(0.0, started + _MIN_INTERVAL - time.monotonic()))

    def _publish(self, snapshot: Snapshot | None, problem: str | None) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._take, snapshot, problem)

    def _take(self, snapshot: Snapshot | None, problem: str | None) -> None:
        if snapshot is not None:
            self.latest = snapshot
            self.read_at = time.monotonic()
        self._problem = problem
        self.version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
