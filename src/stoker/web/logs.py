"""Logs and reports of attempts: followed live by server-sent events, and as downloads.

One reader serves all pages that follow an attempt. A page remembers what it was sent and gets the difference when it
can take more: a slow phone skips states of a progress bar, and reads lines that are no longer in memory from the file.
Output is made safe for a page here only. Files are located by ids that the queue knows, never by text from a request.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI, Header, HTTPException, Query, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from stoker.errors import BadInputError, StokerError
from stoker.logs.follow import POLL_QUEUE, LogFollower
from stoker.logs.lines import HtmlLine, LogLines, lines_from
from stoker.logs.model import LogChunk, LogUpdate
from stoker.logs.reader import STEP, LogFileReader, log_directory, skip_to_last
from stoker.queue import Store
from stoker.queue.fields import ID
from stoker.queue.model import ENDED, Attempt, Job, Worker
from stoker.web.app_state import AppState, app_state_of, user_of
from stoker.web.connection_pool import ConnectionPool

# What a page begins with: more than a person scrolls through on a phone.
FIRST_LINES: Final = 1000
# A file system that hangs must not take the threads of other requests.
_THREADS: Final = 4
# An empty page shows the tail after this, while a long log is still being streamed.
_TAIL_AFTER: Final = 8.0
# Copies of logs of other machines for downloads: each may have a hundred megabytes.
_MAX_COPIES: Final = 4
# A phone that loses its connection for a moment finds the same reader.
_LINGER: Final = 30.0
# The lines kept in memory for pages that are a little behind.
_MAX_LINES: Final = 2000
_MAX_LETTERS: Final = 1 << 20
# One event: a message that a phone takes in without a pause.
_MAX_EVENT_LINES: Final = 500
_MAX_EVENT_LETTERS: Final = 128 * 1024
# A page reconnects after a few missed beats; proxies close connections that are silent for a minute.
_BEAT_EVERY: Final = 15.0
# How often a page checks that the server runs on and that the user is still authorized.
_CHECK_EVERY: Final = 1.0

T = TypeVar("T")


# Reading in threads


class _Steps:
    """A reader that is used step by step in threads, and closed after the last step. For the event loop's thread."""

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


class _PooledStore:
    """The queue for threads that read logs: every call goes through the connection pool."""

    def __init__(self, pool: ConnectionPool, loop: asyncio.AbstractEventLoop) -> None:
        self._pool = pool
        self._loop = loop
        self.workers = self.attempts = self.logs = self

    def clock(self) -> float:
        return self._ask(lambda store: store.clock())

    def all(self) -> Sequence[Worker]:
        return self._ask(lambda store: store.workers.all())

    def get(self, attempt: str) -> Attempt | None:
        return self._ask(lambda store: store.attempts.get(attempt))

    def read(self, attempt: str) -> str:
        return self._ask(lambda store: store.logs.read(attempt))

    def request_stream(self, attempt: str, seconds: float) -> bool:
        return self._ask(lambda store: store.logs.request_stream(attempt, seconds))

    def read_chunk(self, attempt: str, edition: str = "", start: int = 0) -> LogChunk | None:
        return self._ask(lambda store: store.logs.read_chunk(attempt, edition, start))

    def _ask(self, question: Callable[[Store], T]) -> T:
        return asyncio.run_coroutine_threadsafe(self._pool.ask(question), self._loop).result()


# One attempt


class LogEnd(msgspec.Struct, frozen=True):
    """How the attempt ended, for the page."""

    outcome: str
    reason: str
    again: bool
    """Whether the job may be tried again: there may be another attempt to follow."""


class LogChannel:
    """The log of one attempt as it comes, for all pages that follow it. For the event loop's thread."""

    def __init__(self, attempt: Attempt, home: Path, pool: ConnectionPool, threads: ThreadPoolExecutor) -> None:
        self._attempt = attempt
        self._pool = pool
        self._threads = threads
        self._store = _PooledStore(pool, asyncio.get_running_loop())
        self._follower = LogFollower(attempt, home, tail_after=_TAIL_AFTER)
        self._steps = _Steps(threads, self._follower.close)
        self._lines = LogLines()
        self._settled: deque[HtmlLine] = deque()
        self._letters = 0
        self._changed = asyncio.Event()
        self._directory: Path | None = None
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
        """Whether nothing more comes: pages that still wait join another channel."""

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

    # Its task

    async def run(self) -> None:
        """Until the attempt has ended and all of its log is read, or no page follows it."""
        try:
            while self.followers or time.monotonic() - self.left < _LINGER:
                pause = POLL_QUEUE
                try:
                    settled = await self._steps.do(self._read)
                    self._take(settled, "")
                    if self._follower.is_complete:
                        self.end = await self._pool.ask(self._find_end)
                        return
                    pause = self._follower.pause()
                except (StokerError, OSError) as error:
                    self._take([], str(error))
                await asyncio.sleep(pause)
        finally:
            self.is_over = True
            self._publish()
            self._steps.close()

    def _read(self) -> list[HtmlLine]:
        """One step, in a thread; a new epoch begins with the last lines."""
        follower, epoch = self._follower, self._follower.epoch
        update = follower.read(self._store)
        if follower.epoch == epoch:
            return self._lines.feed(update)
        first = [update]

        def step() -> tuple[LogUpdate, bool]:
            return first.pop() if first else follower.read(self._store), follower.is_behind

        skipped, update = skip_to_last(step, FIRST_LINES)
        self._lines = LogLines(skipped)
        return self._lines.feed(update)

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


class LogChannels:
    """The channels that are followed now, by attempt, and the threads that read logs."""

    def __init__(self, home: Path, pool: ConnectionPool) -> None:
        self._home = home
        self._pool = pool
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="logs")
        self._open: dict[str, LogChannel] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._copies = threading.BoundedSemaphore(_MAX_COPIES)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[LogChannel]:
        return iter(self._open.values())

    def join(self, attempt: Attempt) -> LogChannel:
        """The channel of this attempt. Call `leave` afterwards."""
        channel = self._open.get(attempt.id)
        if channel is None or channel.is_over:
            channel = self._open[attempt.id] = self._start(attempt)
        channel.followers += 1
        return channel

    def leave(self, channel: LogChannel) -> None:
        channel.followers -= 1
        channel.left = time.monotonic()

    async def local(self, attempts: Sequence[Attempt], home: Path) -> set[str]:
        """The ids of those whose log is on this machine."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: {one.id for one in attempts if log_directory(home, one) is not None}
        )

    @asynccontextmanager
    async def whole(self, attempt: Attempt, app_state: AppState) -> AsyncIterator[AsyncIterator[LogUpdate] | None]:
        """The whole log in steps, from this machine or streamed from another one; None when it cannot be had."""
        home = app_state.config.home
        is_copy = not await self.local([attempt], home)
        if is_copy and not self._copies.acquire(blocking=False):
            yield None
            return
        follower = LogFollower(attempt, home, complete=True)
        store = _PooledStore(app_state.pool, asyncio.get_running_loop())

        def close() -> None:
            follower.close()
            if is_copy:
                self._copies.release()

        steps = _Steps(self._threads, close)
        try:
            while not await steps.do(lambda: follower.locate(store)):
                await asyncio.sleep(follower.pause())

            async def updates() -> AsyncIterator[LogUpdate]:
                yield await steps.do(lambda: follower.read(store))
                while follower.is_behind:
                    yield await steps.do(lambda: follower.read(store))

            yield None if follower.source == "tail" else updates()
        finally:
            steps.close()

    async def close(self) -> None:
        """Ends all channels. The connection pool must still be open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, attempt: Attempt) -> LogChannel:
        channel = LogChannel(attempt, self._home, self._pool, self._threads)

        def forget(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if self._open.get(attempt.id) is channel:
                del self._open[attempt.id]

        task = asyncio.create_task(channel.run())
        self._tasks.add(task)
        task.add_done_callback(forget)
        return channel


# One page


class Position(NamedTuple):
    """How far a page has come; the id of an event."""

    epoch: str
    number: int
    """The first line that may still change."""

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> "Position | None":
        epoch, _, number = text.partition(".")
        return cls(epoch, int(number)) if number.isascii() and number.isdigit() and len(number) < 16 else None


class LogPage:
    """One page that follows a log. A `lines` event replaces all lines from its number on; `last` only the last one."""

    def __init__(self, channel: LogChannel, position: Position | None, from_the_beginning: bool) -> None:
        self._channel = channel
        self._position = position
        self._from_the_beginning = from_the_beginning
        self._epoch = ""
        self._next = 0
        self._sent: tuple[HtmlLine, ...] = ()
        """The lines that it has and that may have changed since."""

    async def events(self) -> AsyncIterator[str]:
        """What the page does not have yet."""
        channel = self._channel
        if channel.epoch != self._epoch:
            for text in self._begin():
                yield text
        if self._next < channel.first:
            async for lines in channel.earlier_lines(self._next):
                self._next = lines[-1].number + 1
                for text in self._events("lines", lines):
                    yield text
            self._next, self._sent = max(self._next, channel.first), ()
        for text in self._difference():
            yield text

    def _begin(self) -> Iterator[str]:
        """Continues at the page's position if it is known, or makes the page begin anew."""
        channel, position = self._channel, self._position
        self._epoch, self._sent, self._position = channel.epoch, (), None
        if position is not None and position.epoch == channel.epoch and position.number <= channel.first_open:
            self._next = position.number
            return
        whole = self._from_the_beginning and channel.is_whole
        self._next = 0 if whole else channel.last_lines(FIRST_LINES)
        yield event("begin", {"from": self._next, "whole": channel.is_whole})

    def _difference(self) -> list[str]:
        """Made once for all pages that have come as far: there may be hundreds."""
        shared, key = self._channel.shared, (id(self._sent), self._next)
        if key not in shared:
            shared[key] = list(self._compare())
        self._next, self._sent = self._channel.first_open, self._channel.open
        return shared[key]

    def _compare(self) -> Iterator[str]:
        sent, now = self._sent, self._channel.lines_from(self._sent[0].number if self._sent else self._next)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(sent, now, strict=False)))
        if same < len(now):
            is_last = len(sent) == len(now) == same + 1
            yield from self._events("last" if is_last else "lines", now[same:])
        elif same < len(sent):
            yield self._event("lines", sent[same].number, [])

    def _events(self, name: str, lines: list[HtmlLine]) -> Iterator[str]:
        """The lines of one event have consecutive numbers."""
        part: list[str] = []
        begin = size = 0
        for number, html in lines:
            is_full = len(part) >= _MAX_EVENT_LINES or size >= _MAX_EVENT_LETTERS
            if part and (number != begin + len(part) or is_full):
                yield self._event(name, begin, part)
                part = []
            if not part:
                begin, size = number, 0
            part.append(html)
            size += len(html)
        yield self._event(name, begin, part)

    def _event(self, name: str, begin: int, part: list[str]) -> str:
        position = Position(self._epoch, min(begin + len(part), self._channel.first_open))
        return f"id: {position}\n" + event(name, {"from": begin, "lines": part})


def event(name: str, value: object) -> str:
    """JSON has no line ends, so no output can end the event."""
    return f"event: {name}\ndata: {msgspec.json.encode(value).decode()}\n\n"


# Routes


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    if hasattr(app.state, "log_channels"):
        await app.state.log_channels.close()


router = APIRouter(include_in_schema=False, lifespan=_lifespan)


def channels_of(request: Request) -> LogChannels:
    """Those of this application, made for the first log."""
    state, app_state = request.app.state, app_state_of(request)
    if not hasattr(state, "log_channels"):
        state.log_channels = LogChannels(app_state.config.home, app_state.pool)
    channels: LogChannels = state.log_channels
    return channels


@router.get("/jobs/{job}/attempts")
async def attempts(request: Request, job: str) -> JSONResponse:
    """For the picker of a page that waits for another attempt."""
    found, tries = await _attempts(app_state_of(request), job)
    listed = [{"number": attempt.number, "outcome": attempt.outcome} for attempt in tries]
    return JSONResponse({"over": found.state in ENDED, "attempts": listed}, headers={"Cache-Control": "no-store"})


@router.get("/jobs/{job}/attempts/{number}/log/live")
async def follow(
    request: Request,
    job: str,
    number: str,
    last_event_id: Annotated[str, Header()] = "",
    after: str = "",
    whole: Annotated[str, Query(alias="all")] = "",
) -> StreamingResponse:
    """The last lines, or all of them, or those after a position; then what comes, until the attempt has ended."""
    attempt = await _attempt(app_state_of(request), job, number)
    # A browser that reconnects uses the old address: the header is newer.
    position = Position.parse(last_event_id or after)
    # Proxies must not buffer.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    events = _events(request, attempt, position, from_the_beginning=whole == "1")
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _events(
    request: Request, attempt: Attempt, position: Position | None, from_the_beginning: bool
) -> AsyncIterator[str]:
    app_state, user, channels = app_state_of(request), user_of(request), channels_of(request)
    channel = channels.join(attempt)
    try:
        yield "retry: 2000\n\n"
        page = LogPage(channel, position, from_the_beginning)
        version, problem, sent = 0, "", time.monotonic()
        while not app_state.snapshot_cache.is_over and app_state.keys.still_valid(user):
            before, version = version, await channel.changed(version, _CHECK_EVERY)
            if version == before:
                if time.monotonic() - sent >= _BEAT_EVERY:
                    sent = time.monotonic()
                    yield event("beat", None)
                continue
            if channel.problem != problem:
                problem = channel.problem
                yield event("problem", problem)
            async for text in page.events():
                sent = time.monotonic()
                yield text
            if channel.is_over and channel.version == version:
                if channel.end is not None:
                    yield event("end", channel.end)
                return
    finally:
        channels.leave(channel)


@router.get("/jobs/{job}/attempts/{number}/log")
async def download(request: Request, job: str, number: str) -> Response:
    """The log as a text file: all of it where it can be had, otherwise the tail in the queue."""
    app_state, channels = app_state_of(request), channels_of(request)
    attempt = await _attempt(app_state, job, number)
    headers = _file_headers(attempt, "log", "text/plain")
    return await log_response(app_state, channels, attempt, headers)


async def log_response(
    app_state: AppState, channels: LogChannels, attempt: Attempt, headers: dict[str, str]
) -> Response:
    """The log in steps, so that only one of them is in memory."""
    stack = contextlib.AsyncExitStack()
    whole = await stack.enter_async_context(channels.whole(attempt, app_state))
    if whole is None:
        await stack.aclose()
        text = await app_state.pool.ask(lambda store: store.logs.read(attempt.id))
        return Response(text.encode(), headers=headers | {"Stoker-Log": "end"})

    async def body() -> AsyncIterator[bytes]:
        async with stack:
            async for update in whole:
                yield update.finished + update.unfinished

    return StreamingResponse(body(), headers=headers | {"Stoker-Log": "whole"})


@router.get("/jobs/{job}/attempts/{number}/report")
async def report(request: Request, job: str, number: str) -> Response:
    """Why the attempt was stopped, in Markdown."""
    app_state = app_state_of(request)
    attempt = await _attempt(app_state, job, number)
    details = await app_state.pool.ask(lambda store: store.attempts.details(attempt.id))
    if details is None or not details.report:
        raise HTTPException(404, f"attempt {attempt.number} of job {attempt.job} has no report: it was not stopped")
    return Response(details.report.encode(), headers=_file_headers(attempt, "md", "text/markdown"))


def _file_headers(attempt: Attempt, suffix: str, kind: str) -> dict[str, str]:
    """For a file to keep, not to show: no browser runs what is in it."""
    return {
        "Content-Type": f"{kind}; charset=utf-8",
        "Content-Disposition": f'attachment; filename="stoker-{attempt.job}-{attempt.number}.{suffix}"',
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }


async def _attempt(app_state: AppState, job: str, number: str) -> Attempt:
    _, attempts = await _attempts(app_state, job)
    for attempt in attempts:
        if str(attempt.number) == number:
            return attempt
    raise HTTPException(404, f"job {job} has no such attempt")


async def _attempts(app_state: AppState, job: str) -> tuple[Job, list[Attempt]]:
    if not ID.fullmatch(job):
        raise HTTPException(404, "there is no such job: an id has eight hexadecimal digits")
    try:
        return await app_state.pool.ask(lambda store: (store.jobs.get(job), store.attempts.of(job)))
    except BadInputError as error:
        raise HTTPException(404, str(error)) from None
