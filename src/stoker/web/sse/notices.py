"""Events for browsers that asked to be notified: one thread detects them for all, while at least one of them listens.

Unlike messages, they are not claimed: each browser shows them all, and knows by their keys what it has shown.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

import msgspec

from stoker.errors import StokerError
from stoker.notifications.events import EventDetector
from stoker.notifications.senders import compose
from stoker.notifications.throttle import Batch, Throttle
from stoker.notifications.watch import QueueWatch
from stoker.queue import open_queue
from stoker.web.config import QUEUE_TIMEOUT, Config

_LOGGER: Final = logging.getLogger("stoker.web")
# What a person who looks at something else wants to know; jobs and groups with `--notify` are added.
KINDS: Final = ("failed", "stopped", "group-done")
# A browser that lost its connection gets what it missed, if that is not longer ago than this.
_KEPT_FOR: Final = 60.0
_RETRY_INTERVAL: Final = 5.0
# Events without a URL go to those of the settings: the browsers stand for one.
_BROWSERS: Final = "browsers://"


class BrowserNotice(msgspec.Struct, frozen=True, kw_only=True):
    """One notification, as browsers show it."""

    key: str
    at: float
    """By the queue's clock."""
    title: str
    body: str
    path: str


class _NothingIsClaimed:
    """In place of the queue's record of sent events."""

    def note_once(self, _key: str) -> bool:
        return True

    def forget_note(self, _key: str) -> bool:
        return True


class NoticeFeed:
    """For the event loop's thread, except `_run` and what it calls."""

    def __init__(self, config: Config) -> None:
        self._queue = config.queue
        self._notices: deque[tuple[int, float, BrowserNotice]] = deque()
        """Those of the last minute: their number, when they were found in monotonic seconds, and what they say."""
        self._count = 0
        self._changed = asyncio.Event()
        self._listeners = 0
        self._stop: threading.Event | None = None
        self.is_stopping = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Finds events while this is open."""
        self._listeners += 1
        if self._stop is None:
            self._stop = threading.Event()
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._run, args=(self._stop, loop), name="notice-feed", daemon=True).start()
        try:
            yield
        finally:
            self._listeners -= 1
            # Not at once: a browser whose windows change opens its connection again, and must miss nothing.
            with contextlib.suppress(RuntimeError):  # the loop is closed
                asyncio.get_running_loop().call_later(_KEPT_FOR, self._rest)

    def _rest(self) -> None:
        if not self._listeners and self._stop is not None:
            self._stop.set()
            self._stop = None

    def stop(self) -> None:
        self.is_stopping = True
        if self._stop is not None:
            self._stop.set()
        self._changed.set()

    async def after(self, number: int, timeout: float) -> tuple[int, list[BrowserNotice]]:
        """The notices with a higher number, as soon as there are any or after the timeout; and the highest number."""
        if self._count <= number and not self.is_stopping:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout)
        oldest = time.monotonic() - _KEPT_FOR
        return self._count, [notice for at, found, notice in self._notices if at > number and found > oldest]

    def _add(self, notices: list[BrowserNotice]) -> None:
        for notice in notices:
            self._count += 1
            self._notices.append((self._count, time.monotonic(), notice))
        while self._notices and time.monotonic() - self._notices[0][1] > _KEPT_FOR:
            self._notices.popleft()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # Its thread

    def _run(self, stop: threading.Event, loop: asyncio.AbstractEventLoop) -> None:
        detector, watch, throttle = EventDetector(KINDS, 0.0, [_BROWSERS]), QueueWatch(with_successes=False), Throttle()
        started = time.monotonic()
        begun: float | None = None
        while not stop.is_set():
            try:
                with open_queue(self._queue, QUEUE_TIMEOUT) as store, contextlib.closing(store.listen()) as changes:
                    while not stop.is_set():
                        state = watch.read(store)
                        # What was there before anybody listened is no news.
                        begun = state.now - (time.monotonic() - started) if begun is None else begun
                        found = [one for one in detector.detect(state) if not one.to and one.at >= begun]
                        throttle.add(found)
                        notices = [_notice(one, state.now) for one in throttle.due(state.now, _NothingIsClaimed())]
                        if notices:
                            with contextlib.suppress(RuntimeError):  # the loop is closed
                                loop.call_soon_threadsafe(self._add, notices)
                        watch.wait(changes, stop)
            except StokerError:
                stop.wait(_RETRY_INTERVAL)  # the pages say that the queue is away
            except Exception:  # a browser that is never notified again would be worse
                _LOGGER.exception("finding events for browsers failed")
                stop.wait(_RETRY_INTERVAL)


def _notice(batch: Batch, now: float) -> BrowserNotice:
    message = compose(batch.kind, batch.events, "", prefix=batch.prefix)
    single = len(batch.events) == 1
    return BrowserNotice(
        key=batch.events[0].key if single else f"{batch.events[0].key}+{len(batch.events)}",
        at=now,
        title=message.title,
        # Without its last line, which names a command.
        body=message.body.rpartition("\n")[0],
        path=batch.events[0].path if single else "/jobs",
    )
