"""Live logs: one reader for everybody who follows the same attempt, and no more of its lines in memory than a page has.

A follower remembers what it has told, and takes what differs when it can send again: a slow phone skips states of a
progress bar, and reads lines that are not in memory any more from the file, at its own pace. An output on another
machine is lent by its worker and kept in a file meanwhile; where nobody lends it, its end is read from the queue.
"""

import asyncio
import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from stoker.errors import StokerError
from stoker.logs.html_lines import LogLines, News, Row, first_file, place_of
from stoker.logs.readers import LAST_WITHIN, OutputReader, TailReader
from stoker.logs.remote_file import Mirror, may_be_lent
from stoker.queue import QueueAwayError, Store
from stoker.queue.model import ENDED, Attempt
from stoker.queue.rows import clean_text
from stoker.runs.output import read_tail
from stoker.web.connection_pool import ConnectionPool
from stoker.web.log_steps import Steps

# What a page begins with: more than anybody scrolls through on a phone.
FIRST_LINES: Final = 1000
# Reading is a matter of milliseconds; a file system that hangs shall not take the other requests' threads with it.
_THREADS: Final = 4
# As quick as a progress bar looks smooth; a database should not be asked for the same text so often.
_LOOK_AT_FILE: Final = 0.2
_LOOK_AT_QUEUE: Final = 0.5
_ASK_FOR_END: Final = 1.0
# A worker that is there begins to lend within this; after that the page shows what the queue has.
_LENT_WITHIN: Final = 3.0
_LOOK_FOR_LOAN: Final = 0.1
# The last of an output is brought within this after its end, or its worker is gone.
_LAST_LENT_WITHIN: Final = 10.0
# The same of the end that the queue keeps.
_LAST_KEPT_WITHIN: Final = 3.0
# More than the queue keeps, so that what it keeps is found there.
_LONGEST_TAIL: Final = 256 * 1024
# Before so many seconds are over a page that is empty waits for an output that is long; then it shows the end.
_EMPTY_FOR: Final = 8.0
# So many outputs of other machines are brought here for downloads at the same time: each may have a hundred megabytes.
_MOST_BORROWED: Final = 4
# A phone that loses its connection for a moment finds the same reader again.
_LINGER: Final = 30.0
# Both bounds hold for what is kept for followers that are a little behind.
_MOST_ROWS: Final = 2000
_MOST_LETTERS: Final = 1 << 20

T = TypeVar("T")


class Ending(msgspec.Struct, frozen=True):
    """How the attempt ended, as a page is told."""

    outcome: str
    reason: str
    again: bool
    """Whether the job may be tried again: there may be another attempt to follow."""


class Channel:
    """The output of one attempt as it comes. For the thread of the event loop."""

    def __init__(self, attempt: Attempt, home: Path, pool: ConnectionPool, threads: ThreadPoolExecutor) -> None:
        self._attempt = attempt
        self._home = home
        self._pool = pool
        self._threads = threads
        self._lines: LogLines | None = None
        self._steps: Steps | None = None
        """Those in which the lines are read."""
        self._directory: Path | None = None
        self._is_here = False
        """Whether the output is a file of this machine."""
        self._mirror: Mirror | None = Mirror(attempt.id)
        """Of an output elsewhere; None when nobody lends it any more."""
        self._patience: float | None = None
        """Until when somebody may begin to lend it, in monotonic seconds; None before it was asked for."""
        self._since = time.monotonic()
        self._brought = ("", 0)
        self._brought_at = 0.0
        """How much of which edition the mirror had when something came last, and when that was."""
        self._tail = ""
        self._ended_long_ago = False
        self._rows: deque[Row] = deque()
        self._letters = 0
        self._news = asyncio.Event()
        self.followers = 0
        self.left = 0.0
        """When a follower left it last, in monotonic seconds."""
        self.open: tuple[Row, ...] = ()
        """The lines that may still change."""
        self.shared: dict[tuple[int, int], list[str]] = {}
        """What followers made of this version for each other."""
        self.version = 0
        """0 until there was a first look."""
        self.epoch = ""
        """Within one, numbers of lines mean the same, also for another channel."""
        self.ending: Ending | None = None
        self.problem = ""
        """Why nothing can be read now."""
        self.is_over = False
        """Whether it brings nothing more: who still waits should join another."""

    @property
    def is_whole(self) -> bool:
        """Whether all of the output can be had, not only its end in the queue."""
        return self._directory is not None

    @property
    def first(self) -> int:
        """The number of the first line in memory."""
        return self._rows[0].number if self._rows else self.first_open

    @property
    def first_open(self) -> int:
        """The number of the first line that may still change."""
        if self.open:
            return self.open[0].number
        return self._rows[-1].number + 1 if self._rows else 0

    def rows_from(self, number: int) -> list[Row]:
        """Those in memory, from this number on."""
        settled = list(takewhile(lambda row: row.number >= number, reversed(self._rows)))
        return [*reversed(settled), *(row for row in self.open if row.number >= number)]

    def last_rows(self, count: int) -> int:
        """The number of the first of the last so many lines."""
        settled = max(0, count - len(self.open))
        if not settled or not self._rows:
            return self.first_open
        return self._rows[max(0, len(self._rows) - settled)].number

    async def changed(self, after: int, patience: float) -> int:
        """The number of the newest version, as soon as it is above `after` or when patience is over."""
        if self.version <= after:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), patience)
        return self.version

    async def earlier_rows(self, number: int) -> AsyncIterator[list[Row]]:
        """The lines from this one up to those in memory, from the file, step by step."""
        directory = self._directory
        if directory is None:
            return
        lines = LogLines(OutputReader(directory))
        steps = Steps(self._threads, lines.close)
        try:
            await steps.do(lambda: lines.begin_with_line(number))
            while number < self.first:
                news = await steps.do(lines.read)
                rows = [row for row in news.settled if row.number >= number]
                if rows:
                    number = rows[-1].number + 1
                    yield rows
                elif not news.is_behind:
                    return
        finally:
            steps.close()

    # Its own task

    async def run(self) -> None:
        """Until the attempt has ended and all of it is read, or nobody wants to know any more."""
        try:
            await self._run()
        finally:
            self.is_over = True
            self._publish()
            if self._steps is not None:
                self._steps.close()
            self._stop_borrowing()

    async def _run(self) -> None:
        ending: Ending | None = None
        asked = ended = -math.inf
        while self.followers or time.monotonic() - self.left < _LINGER:
            pause = _LOOK_AT_QUEUE
            try:
                if ending is None and time.monotonic() - asked >= _ASK_FOR_END:
                    # Asked before the output is read: then what is read is all.
                    asked = ended = time.monotonic()
                    ending = await self._ask_for_ending()
                news = await self._look()
                if news is not None:
                    self._take(news, "")
                    if ending is not None and await self._has_all(news, ended):
                        self.ending = ending
                        return
                pause = self._pause(news)
            except (StokerError, OSError) as error:
                self._take(None, str(error))
            await asyncio.sleep(pause)

    async def _has_all(self, news: News, ended: float) -> bool:
        """Whether this is the last of an attempt of whose end we learned then."""
        if news.is_behind:
            return False
        silent_for = time.monotonic() - max(ended, self._brought_at)
        if self._is_here:
            return True
        if self._directory is None or self._mirror is None:
            return not self._is_on_its_way() and (self._ended_long_ago or silent_for > _LAST_KEPT_WITHIN)
        if self._mirror.is_complete:
            return True
        if silent_for > _LAST_LENT_WITHIN:
            output = self._directory / "output"
            tail = await self._pool.ask(lambda store: store.log(self._attempt.id))
            if tail in await self._in_thread(lambda: clean_text(read_tail(output, _LONGEST_TAIL))):
                return True
            self._stop_borrowing()  # its last words are in the queue
        return False

    def _is_on_its_way(self) -> bool:
        """Whether more of an output elsewhere is being brought."""
        is_behind = self._mirror is not None and self._mirror.is_behind
        return is_behind and time.monotonic() - self._brought_at < _LENT_WITHIN

    def _pause(self, news: News | None) -> float:
        """How long to rest before the next look."""
        if news is not None and news.is_behind:
            return 0.0
        if news is None or self._is_on_its_way():
            return 0.0 if time.monotonic() - self._brought_at < _LOOK_FOR_LOAN else _LOOK_FOR_LOAN
        return _LOOK_AT_FILE if self._is_here else _LOOK_AT_QUEUE

    async def _ask_for_ending(self) -> Ending | None:
        """A queue that is away keeps nobody from reading a file that is here."""
        try:
            return await self._pool.ask(self._ending)
        except StokerError:
            return None

    def _ending(self, store: Store) -> Ending | None:
        found = store.attempt(self._attempt.id)
        if found is None:
            return Ending("forgotten", "it was removed from the queue", again=False)
        if found.outcome is None:
            return None
        self._ended_long_ago = found.ended is not None and store.clock() - found.ended > LAST_WITHIN
        return Ending(found.outcome, found.reason, again=store.job(found.job).state not in ENDED)

    async def _look(self) -> News | None:
        """None as long as nobody lends it yet, and may soon."""
        if not self._is_here and not self.open and not self._rows:
            # It may run here, and have printed nothing before.
            directory = await self._in_thread(lambda: place_of(self._home, self._attempt))
            if directory is not None:
                await self._begin(directory, None)
                self._is_here = True
                self._stop_borrowing()
        if not self._is_here and not await self._look_elsewhere():
            return None
        assert self._lines is not None and self._steps is not None  # noqa: S101, PT018 - both were begun above
        return await self._steps.do(self._lines.read)

    async def _look_elsewhere(self) -> bool:
        """Brings what is new of an output on another machine; False when it should be waited for."""
        await self._pool.ask(self._borrow)
        mirror = self._mirror
        if mirror is not None and mirror.directory is not None:
            if mirror.edition == self.epoch:
                return True
            if not mirror.is_behind:
                await self._begin(mirror.directory, mirror.edition)
                return True
            is_empty = self._lines is None
            if self._is_on_its_way() and not (is_empty and time.monotonic() - self._since > _EMPTY_FOR):
                # Not before all of it is here: thousands of lines would pass by.
                return not is_empty
        elif mirror is not None and self._lines is None and time.monotonic() < (self._patience or 0.0):
            return False
        if self._lines is None or self._directory is not None:
            self._begin_with_end()
        return True

    def _borrow(self, store: Store) -> None:
        """For a thread of the desk."""
        mirror = self._mirror
        if mirror is not None:
            try:
                mirror.update(store)
            except QueueAwayError:
                raise
            except (StokerError, OSError):
                # There is no room for it here, or the database has something against it: its end has to do.
                self._stop_borrowing()
            else:
                if self._brought != (brought := (mirror.edition, mirror.size)):
                    self._brought, self._brought_at = brought, time.monotonic()
                if mirror.edition and (mirror.edition == self.epoch or not mirror.is_behind):
                    return
        if self._patience is None:
            self._patience = time.monotonic() + _LENT_WITHIN if may_be_lent(store, self._attempt) else 0.0
        self._tail = store.log(self._attempt.id)

    def _stop_borrowing(self) -> None:
        mirror, self._mirror = self._mirror, None
        if mirror is not None:
            self._threads.submit(mirror.close)

    def _begin_with_end(self) -> None:
        self._leave()
        self._directory, self.epoch = None, os.urandom(8).hex()
        self._lines = LogLines(TailReader(lambda: self._tail))
        self._steps = Steps(self._threads, self._lines.close)

    async def _begin(self, directory: Path, epoch: str | None) -> None:
        """With a file; `epoch` is its own, unless others count its lines too."""
        lines = LogLines(OutputReader(directory))
        steps = Steps(self._threads, lines.close)

        def begin() -> str:
            before = first_file(directory)
            lines.begin_with_last(FIRST_LINES)
            # When the file was moved aside meanwhile, nobody else can count from the same line.
            return before if first_file(directory) == before else os.urandom(8).hex()

        try:
            counted = await steps.do(begin)
        except BaseException:
            steps.close()
            raise
        self._leave()
        self._directory, self.epoch = directory, epoch or counted
        self._lines, self._steps = lines, steps

    def _leave(self) -> None:
        """What was read before is of another epoch."""
        if self._steps is not None:
            self._steps.close()
        self._rows.clear()
        self._letters, self.open = 0, ()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _take(self, news: News | None, problem: str) -> None:
        is_new = not self.version or problem != self.problem
        self.problem = problem
        if news is not None:
            is_new |= bool(news.settled) or news.open != self.open
            if is_new:
                self._keep(news)
        if is_new:
            self._publish()

    def _keep(self, news: News) -> None:
        self._rows += news.settled
        self._letters += sum(len(row.html) for row in news.settled)
        while self._rows and (len(self._rows) > _MOST_ROWS or self._letters > _MOST_LETTERS):
            self._letters -= len(self._rows.popleft().html)
        self.open = news.open

    def _publish(self) -> None:
        self.version += 1
        self.shared = {}
        news, self._news = self._news, asyncio.Event()
        news.set()


class Channels:
    """Those that are followed now, by attempt."""

    def __init__(self, home: Path, pool: ConnectionPool) -> None:
        self._home = home
        self._pool = pool
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="logs")
        self._open: dict[str, Channel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.borrowing = threading.BoundedSemaphore(_MOST_BORROWED)
        """Held by each download of an output on another machine: it is brought here as a whole."""

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[Channel]:
        return iter(self._open.values())

    def join(self, attempt: Attempt) -> Channel:
        """The channel of this attempt; who joins must leave."""
        channel = self._open.get(attempt.id)
        if channel is None or channel.is_over:
            channel = self._open[attempt.id] = self._opened(attempt)
        channel.followers += 1
        return channel

    async def in_thread(self, work: Callable[[], T]) -> T:
        """For what reads files here."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def later(self, work: Callable[[], None]) -> None:
        """For what only tidies up."""
        with contextlib.suppress(RuntimeError):  # the server ends, and the process takes it along
            self._threads.submit(work)

    def steps(self, close: Callable[[], None]) -> Steps:
        """For what reads a file bit by bit; `close` closes it."""
        return Steps(self._threads, close)

    def leave(self, channel: Channel) -> None:
        channel.followers -= 1
        channel.left = time.monotonic()

    async def close(self) -> None:
        """Lets all followers go. The desk must still be there."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _opened(self, attempt: Attempt) -> Channel:
        channel = Channel(attempt, self._home, self._pool, self._threads)

        def forget(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if self._open.get(attempt.id) is channel:
                del self._open[attempt.id]

        task = asyncio.create_task(channel.run())
        self._tasks.add(task)
        task.add_done_callback(forget)
        return channel
