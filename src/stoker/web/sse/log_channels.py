"""Live logs of attempts, each read once for all pages that follow it, and whole logs for downloads. Each page reads
older lines from the file at its own pace.
"""

import asyncio
import contextlib
import html
import re
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from stoker.errors import StokerError
from stoker.logs.metrics import CurveReader, LogCurve, curves_of
from stoker.logs.reader import STEP, LastLines, LogFileReader, LogUpdate, log_directory
from stoker.logs.search import LineFinder, LogIndex, LogMatch, LogView
from stoker.logs.terminal import REACH, HtmlLine, LogLines, lines_from
from stoker.queue import Store
from stoker.queue.model import ENDED, Attempt
from stoker.status.log_follower import POLL_QUEUE, LogFollower, RunQuery
from stoker.web.pool import ConnectionPool

# Initial lines of a page: more than a person scrolls through on a phone.
FIRST_LINES: Final = 1000
# A hung file system must not block the threads of other requests.
_THREADS: Final = 4
# An empty page shows the tail after this, while a long log is still being streamed.
_TAIL_AFTER: Final = 8.0
# Copies of logs of other machines for downloads: each may have a hundred megabytes.
_MAX_COPIES: Final = 4
# A phone that loses its connection for a moment finds the same reader.
_LINGER: Final = 30.0
# The same for a copy of another machine's log, which takes long to fetch again.
_LINGER_WITH_COPY: Final = 180.0
# Time limit to locate a log.
_FIRST_READ_WITHIN: Final = 15.0
# Concurrent searches: each takes a thread for a second per gigabyte, and pages must stay responsive.
_MAX_SEARCHES: Final = 2
_TAG: Final = re.compile(r"<[^>]*>")
# The lines kept in memory for pages that are a little behind.
_MAX_LINES: Final = 2000
_MAX_LETTERS: Final = 1 << 20
T = TypeVar("T")


# Reading in threads


class _Steps:
    """A reader used step by step in threads and closed after the last step. For the event loop's thread."""

    def __init__(self, threads: ThreadPoolExecutor, close: Callable[[], None]) -> None:
        self._threads = threads
        self._close = close
        self._last: Future[Any] | None = None

    async def do(self, work: Callable[[], T]) -> T:
        """One step; the previous one must be over."""
        step = self._last = self._threads.submit(work)
        return await asyncio.wrap_future(step)

    def close(self) -> None:
        if self._last is not None and not self._last.done():
            self._last.add_done_callback(lambda _step: self._close())
            return
        try:
            self._threads.submit(self._close)
        except RuntimeError:  # The server stops.
            self._close()


def _queries_in(pool: ConnectionPool, loop: asyncio.AbstractEventLoop) -> RunQuery:
    """Runs queries of log-reading threads through the connection pool."""

    def run(query: Callable[[Store], T], /) -> T:
        return asyncio.run_coroutine_threadsafe(pool.run(query), loop).result()

    return run


# One attempt


class LogEnd(msgspec.Struct, frozen=True):
    """How the attempt ended, for the page."""

    outcome: str
    reason: str
    again: bool
    """Whether the job may be tried again: there may be another attempt to follow."""


class LogPart(msgspec.Struct, frozen=True):
    """Some lines of a log for the page."""

    epoch: str
    """Within one epoch, line numbers are stable."""
    first: int
    """The number of the first line, from 0."""
    lines: list[str]
    """Safe HTML."""
    total: int
    """How many lines the log has."""
    whole: bool
    """Whether that is the whole log, not only its tail in the queue."""


class LogMatches(msgspec.Struct, frozen=True, kw_only=True):
    """The lines that were found, in their order."""

    matches: list[LogMatch]
    more: bool
    """Whether there are more beyond them."""
    lines: int
    """How many lines the log has."""
    whole: bool
    """Whether the whole log was searched. If not, lines are counted in the part that the queue keeps."""
    epoch: str
    """Line numbers of two answers mean the same if this is the same."""


class LogCurves(msgspec.Struct, frozen=True, kw_only=True):
    """What a job printed of its training, as curves. `whole`: whether the whole log was there, not only its end."""

    curves: list[LogCurve]
    whole: bool


class LogChannel:
    """The log of one attempt as it comes, for all pages that follow it. For the event loop's thread."""

    def __init__(
        self, attempt: Attempt, home: Path, pool: ConnectionPool, threads: ThreadPoolExecutor, node: int = 0
    ) -> None:
        self._attempt = attempt
        self._pool = pool
        self._threads = threads
        self._run_query = _queries_in(pool, asyncio.get_running_loop())
        self._follower = LogFollower(attempt, home, tail_after=_TAIL_AFTER, node=node)
        self._steps = _Steps(threads, self._follower.close)
        self._lines = LogLines()
        self._settled: deque[HtmlLine] = deque()
        self._letters = 0
        self._changed = asyncio.Event()
        self._directory: Path | None = None
        self._index: tuple[Path, LogIndex] | None = None
        self.followers = 0
        self.left = 0.0
        """When a page left it last, in monotonic seconds."""
        self.open: tuple[HtmlLine, ...] = ()
        """The lines that may still change."""
        self.shared: dict[tuple[int, int], list[str]] = {}
        """Events of this version, made once for all pages that have the same lines."""
        self.version = 0
        """0 until the first read."""
        self.epoch = ""
        """Within one, line numbers mean the same, also in another channel."""
        self.end: LogEnd | None = None
        self.problem = ""
        """Why nothing can be read now."""
        self.is_over = False
        """Whether nothing more comes."""
        self.is_closed = False
        """Whether its files may be gone: who comes now joins another channel."""

    @property
    def is_whole(self) -> bool:
        """Whether the whole log is available, not only its tail in the queue."""
        return self._directory is not None

    @property
    def first(self) -> int:
        """The number of the first line in memory."""
        return self._settled[0].number if self._settled else self.first_open

    @property
    def first_open(self) -> int:
        """The number of the first line that may still change."""
        if self.open:
            return self.open[0].number
        return self._settled[-1].number + 1 if self._settled else 0

    def lines_from(self, number: int) -> list[HtmlLine]:
        """The lines in memory from this number on."""
        settled = list(takewhile(lambda line: line.number >= number, reversed(self._settled)))
        return [*reversed(settled), *(line for line in self.open if line.number >= number)]

    def last_lines(self, count: int) -> int:
        """The number of the first of the last `count` lines."""
        settled = max(0, count - len(self.open))
        if not settled or not self._settled:
            return self.first_open
        return self._settled[max(0, len(self._settled) - settled)].number

    async def changed(self, after: int, timeout: float) -> int:
        """The newest version, as soon as it is above `after`, or after the timeout."""
        if self.version <= after:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout)
        return self.version

    async def earlier_lines(self, number: int) -> AsyncIterator[list[HtmlLine]]:
        """The lines from this one up to those in memory, from the file, step by step."""
        if self._directory is None:
            return
        reader = LogFileReader(self._directory)
        steps = _Steps(self._threads, reader.close)

        def step() -> tuple[LogUpdate, bool]:
            return reader.read(STEP), reader.is_behind

        try:
            lines, settled, is_behind = await steps.do(lambda: lines_from(step, number))
            while number < self.first:
                if found := [line for line in settled if line.number >= number]:
                    number = found[-1].number + 1
                    yield found
                elif not is_behind:
                    return
                update, is_behind = await steps.do(step)
                settled = lines.feed(update)
        finally:
            steps.close()

    # Any part of it

    async def part(self, first: int, count: int) -> LogPart:
        """The lines from this number on, from 0; fewer than `count` if they are long."""
        index = await self._when_read()
        if index is None:
            lines = [line.html for line in self.lines_from(first)[:count] if line.number >= first]
            return LogPart(self.epoch, first, lines, self._count_in_memory(), whole=False)

        def read() -> LogPart:
            with index.open() as view:
                # Lines above may have set a colour, or are rewritten from there.
                begin = max(0, first - REACH)
                wanted = LogLines(begin)
                data = b"".join(line + b"\n" for line in view.lines(begin, count + first - begin))
                found = [*wanted.feed(LogUpdate(data, b"")), *wanted.open]
                shown = [line.html for line in found if first <= line.number < first + count]
                return LogPart(self._epoch_of(view), first, shown, view.count_of_lines, whole=True)

        return await self._in_thread(read)

    async def text(self, first: int, count: int) -> tuple[bytes, bool]:
        """The lines from this number on, from 0, as they were printed, and whether they are of the whole log."""
        index = await self._when_read()
        if index is None:
            lines = [_text_of(line) for line in self.lines_from(first)[:count]]
            return "".join(f"{line}\n" for line in lines).encode(), False

        def read() -> bytes:
            with index.open() as view:
                return b"".join(line + b"\n" for line in view.lines(first, count))

        return await self._in_thread(read), True

    async def search(self, finder: LineFinder, before: int | None, after: int | None, limit: int) -> LogMatches:
        """The matches after a line or before one, from 1; the last ones if neither is given."""
        index = await self._when_read()
        if index is None:
            found = [
                match
                for line in self.lines_from(0)
                for match in finder.matches(_text_of(line).encode(), line.number)
                if match.line > (after or 0) and (before is None or match.line < before)
            ]
            kept = found[:limit] if after is not None else found[-limit:]
            return LogMatches(
                matches=kept, more=len(found) > limit, lines=self._count_in_memory(), whole=False, epoch=self.epoch
            )

        def read() -> LogMatches:
            with index.open() as view:
                found, more = view.before(finder, before, limit) if after is None else view.after(finder, after, limit)
                return LogMatches(
                    matches=found, more=more, lines=view.count_of_lines, whole=True, epoch=self._epoch_of(view)
                )

        return await self._in_thread(read)

    async def curves(self, names: Sequence[str]) -> LogCurves:
        """The figures that the log has, as curves."""
        index = await self._when_read()
        if index is None:
            reader = CurveReader(names)
            reader.feed("\n".join(_text_of(line) for line in self.lines_from(0)))
            return LogCurves(curves=reader.curves(), whole=False)

        def read() -> LogCurves:
            with index.open() as view:
                return LogCurves(curves=curves_of(view, names), whole=True)

        return await self._in_thread(read)

    async def _when_read(self) -> LogIndex | None:
        """The index of the whole log, once it is known what there is of it; None if only the tail is here."""
        await self.changed(0, _FIRST_READ_WITHIN)
        if self._directory is None:
            return None
        if self._index is None or self._index[0] != self._directory:
            self._index = (self._directory, LogIndex(self._directory))
        return self._index[1]

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _epoch_of(self, view: LogView) -> str:
        return view.first_file if self._follower.source == "file" else self.epoch

    def _count_in_memory(self) -> int:
        return self.open[-1].number + 1 if self.open else self.first_open

    # Its task

    async def run(self) -> None:
        """Until the attempt has ended and all of its log is read, or no page follows it."""
        try:
            await self._follow()
            self.is_over = True
            self._publish()
            while self._follower.source == "stream" and self._is_wanted(_LINGER_WITH_COPY):
                await asyncio.sleep(POLL_QUEUE)
        finally:
            self.is_over = self.is_closed = True
            self._publish()
            self._steps.close()

    def _is_wanted(self, linger: float) -> bool:
        return bool(self.followers) or time.monotonic() - self.left < linger

    async def _follow(self) -> None:
        while self._is_wanted(_LINGER_WITH_COPY if self._follower.source == "stream" else _LINGER):
            pause = POLL_QUEUE
            try:
                settled = await self._steps.do(self._read)
                self._take(settled, "")
                if self._follower.is_complete:
                    self.end = await self._pool.run(self._find_end)
                    return
                pause = self._follower.pause()
            except (StokerError, OSError) as error:
                self._take([], str(error))
            await asyncio.sleep(pause)

    def _read(self) -> list[HtmlLine]:
        """One step, in a thread; a new epoch begins with the last lines."""
        follower, epoch = self._follower, self._follower.epoch
        update = follower.read(self._run_query)
        if follower.epoch == epoch:
            return self._lines.feed(update)
        last = LastLines(FIRST_LINES)
        last.add(update)
        while follower.is_behind:
            last.add(follower.read(self._run_query))
        self._lines = LogLines(last.skipped)
        return self._lines.feed(last.update())

    def _find_end(self, store: Store) -> LogEnd:
        found = store.attempts.get(self._attempt.id)
        if found is None or found.outcome is None:
            return LogEnd("forgotten", "it was removed from the queue", again=False)
        return LogEnd(found.outcome, found.reason, again=store.jobs.get(found.job).state not in ENDED)

    def _take(self, settled: list[HtmlLine], problem: str) -> None:
        is_new = not self.version and (bool(self._follower.source) or bool(problem))
        if self.epoch != self._follower.epoch:
            self._settled.clear()
            self._letters, self.open, self.epoch, is_new = 0, (), self._follower.epoch, True
        self._directory = self._follower.directory
        is_new |= bool(settled) or self.open != self._lines.open or problem != self.problem
        self.problem, self.open = problem, self._lines.open
        self._settled += settled
        self._letters += sum(len(line.html) for line in settled)
        while self._settled and (len(self._settled) > _MAX_LINES or self._letters > _MAX_LETTERS):
            self._letters -= len(self._settled.popleft().html)
        if is_new:
            self._publish()

    def _publish(self) -> None:
        self.version += 1
        self.shared = {}
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def _text_of(line: HtmlLine) -> str:
    return html.unescape(_TAG.sub("", line.html))


class LogChannels:
    """The channels that are followed now, by attempt and node, and the threads that read logs."""

    def __init__(self, home: Path, pool: ConnectionPool) -> None:
        self._home = home
        self._pool = pool
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="logs")
        self._open: dict[tuple[str, int], LogChannel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._copies = threading.BoundedSemaphore(_MAX_COPIES)
        self._searches = asyncio.Semaphore(_MAX_SEARCHES)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[LogChannel]:
        return iter(self._open.values())

    def join(self, attempt: Attempt, node: int = 0) -> LogChannel:
        """The channel of this attempt on this node. Call `leave` afterwards."""
        channel = self._open.get((attempt.id, node))
        if channel is None or channel.is_closed:
            channel = self._open[attempt.id, node] = self._start(attempt, node)
        channel.followers += 1
        return channel

    def leave(self, channel: LogChannel) -> None:
        channel.followers -= 1
        channel.left = time.monotonic()

    @contextlib.contextmanager
    def joined(self, attempt: Attempt, node: int = 0) -> Iterator[LogChannel]:
        channel = self.join(attempt, node)
        try:
            yield channel
        finally:
            self.leave(channel)

    async def search(
        self, attempt: Attempt, node: int, finder: LineFinder, before: int | None, after: int | None, limit: int
    ) -> LogMatches:
        with self.joined(attempt, node) as channel:
            async with self._searches:
                return await channel.search(finder, before, after, limit)

    async def curves(self, attempt: Attempt, node: int, names: Sequence[str]) -> LogCurves:
        with self.joined(attempt, node) as channel:
            async with self._searches:
                return await channel.curves(names)

    async def local(self, attempts: Sequence[Attempt], node: int = 0) -> set[str]:
        """The ids of those whose log is on this machine."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: {one.id for one in attempts if log_directory(self._home, one, node) is not None}
        )

    @asynccontextmanager
    async def whole(self, attempt: Attempt, node: int = 0) -> AsyncIterator[AsyncIterator[LogUpdate] | None]:
        """The whole log in steps, from this machine or streamed from another one; None if only the tail is there."""
        is_copy = not await self.local([attempt], node)
        if is_copy and not self._copies.acquire(blocking=False):
            yield None
            return
        follower = LogFollower(attempt, self._home, complete=True, node=node)
        run = _queries_in(self._pool, asyncio.get_running_loop())

        def close() -> None:
            follower.close()
            if is_copy:
                self._copies.release()

        steps = _Steps(self._threads, close)
        try:
            while not await steps.do(lambda: follower.locate(run)):
                await asyncio.sleep(follower.pause())

            async def updates() -> AsyncIterator[LogUpdate]:
                yield await steps.do(lambda: follower.read(run))
                while follower.is_behind:
                    yield await steps.do(lambda: follower.read(run))

            yield None if follower.source == "tail" else updates()
        finally:
            steps.close()

    async def close(self) -> None:
        """Ends all channels. The connection pool must still be open."""
        # Those of another event loop, as tests have several, ended with it.
        loop = asyncio.get_running_loop()
        running = [task for task in self._tasks if task.get_loop() is loop]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, attempt: Attempt, node: int) -> LogChannel:
        channel = LogChannel(attempt, self._home, self._pool, self._threads, node)

        def forget(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if self._open.get((attempt.id, node)) is channel:
                del self._open[attempt.id, node]

        task = asyncio.create_task(channel.run())
        self._tasks.add(task)
        task.add_done_callback(forget)
        return channel
