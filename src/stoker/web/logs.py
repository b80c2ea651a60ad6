"""Logs and reports of attempts: followed live by server-sent events, and as downloads.

A page remembers what it was sent and gets the difference when it can take more: a slow phone skips states of a progress
bar. Output is made safe for a page here only. Files are located by ids that the queue knows, never by text from a
request.
"""

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import takewhile
from typing import Annotated, Final, NamedTuple

import msgspec
from fastapi import APIRouter, FastAPI, Header, HTTPException, Query, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from stoker.errors import BadInputError
from stoker.logs.terminal import HtmlLine
from stoker.queue.fields import ID
from stoker.queue.model import ENDED, Attempt, Job
from stoker.web.app_state import AppState, app_state_of, user_of
from stoker.web.sse.log_channels import FIRST_LINES, LogChannel, LogChannels

# One event: a message that a phone takes in without a pause.
_MAX_EVENT_LINES: Final = 500
_MAX_EVENT_LETTERS: Final = 128 * 1024
# A page reconnects after a few missed beats; proxies close connections that are silent for a minute.
_BEAT_EVERY: Final = 15.0
# How often a page checks that the server runs on and that the user is still authorized.
_CHECK_EVERY: Final = 1.0


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
        while not app_state.snapshot_cache.is_stopping and app_state.keys.still_valid(user):
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
        text = await app_state.pool.run(lambda store: store.logs.read(attempt.id))
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
    details = await app_state.pool.run(lambda store: store.attempts.details(attempt.id))
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
        return await app_state.pool.run(lambda store: (store.jobs.get(job), store.attempts.of(job)))
    except BadInputError as error:
        raise HTTPException(404, str(error)) from None
