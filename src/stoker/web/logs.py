"""Live logs of attempts by server-sent events. A page gets the changes since the last event when it can take more, so a
slow phone skips states of a progress bar. Files are located by ids from the queue, never by text from a request.
"""

import time
from collections.abc import AsyncIterator, Iterator
from itertools import takewhile
from typing import Annotated, Final, NamedTuple

import msgspec
from fastapi import APIRouter, Header, Query, Request
from starlette.responses import Response, StreamingResponse

from stoker.logs.terminal import HtmlLine
from stoker.queue.model import Attempt
from stoker.web.answers import MOST_NODES, answer, found_attempt
from stoker.web.app_state import app_state_of, user_of
from stoker.web.sse.log_channels import FIRST_LINES, LogChannel
from stoker.web.sse.section_cache import STREAM_HEADERS

# Of one event, so that a phone processes it without a pause.
_MAX_EVENT_LINES: Final = 500
_MAX_EVENT_LETTERS: Final = 128 * 1024
# Of one step back.
_MAX_PART: Final = 1000
# A page reconnects after a few missed beats; proxies close connections that are silent for a minute.
_BEAT_EVERY: Final = 15.0
# How often a stream checks that the server is not stopping and that the user is still authorized.
_CHECK_EVERY: Final = 1.0


class Position(NamedTuple):
    """The position of a page; the id of an event."""

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
    """One page that follows a log. An event `lines` replaces all lines from its number on."""

    def __init__(self, channel: LogChannel, position: Position | None, from_the_beginning: bool) -> None:
        self._channel = channel
        self._position = position
        self._from_the_beginning = from_the_beginning
        self._epoch = ""
        self._next = 0
        self._sent: tuple[HtmlLine, ...] = ()
        """The lines that it has and that may have changed."""

    async def events(self) -> AsyncIterator[str]:
        """The lines that the page does not have yet."""
        channel = self._channel
        if channel.epoch != self._epoch:
            for text in self._begin():
                yield text
        if self._next < channel.first:
            async for lines in channel.earlier_lines(self._next):
                self._next = lines[-1].number + 1
                for text in self._events(lines):
                    yield text
            self._next, self._sent = max(self._next, channel.first), ()
        for text in self._difference():
            yield text

    def _begin(self) -> Iterator[str]:
        """Continues at the page's position if it is known; otherwise the page starts over."""
        channel, position = self._channel, self._position
        self._epoch, self._sent, self._position = channel.epoch, (), None
        if position is not None and position.epoch == channel.epoch and position.number <= channel.first_open:
            self._next = position.number
            return
        whole = self._from_the_beginning and channel.is_whole
        self._next = 0 if whole else channel.last_lines(FIRST_LINES)
        yield event("begin", {"from": self._next, "whole": channel.is_whole})

    def _difference(self) -> list[str]:
        """Created once for all pages with the same lines: there may be hundreds."""
        shared, key = self._channel.shared, (id(self._sent), self._next)
        if key not in shared:
            shared[key] = list(self._compare())
        self._next, self._sent = self._channel.first_open, self._channel.open
        return shared[key]

    def _compare(self) -> Iterator[str]:
        sent, now = self._sent, self._channel.lines_from(self._sent[0].number if self._sent else self._next)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(sent, now, strict=False)))
        if same < len(now):
            yield from self._events(now[same:])
        elif same < len(sent):
            yield self._event(sent[same].number, [])

    def _events(self, lines: list[HtmlLine]) -> Iterator[str]:
        """The lines of one event have consecutive numbers."""
        part: list[str] = []
        begin = size = 0
        for number, html in lines:
            is_full = len(part) >= _MAX_EVENT_LINES or size >= _MAX_EVENT_LETTERS
            if part and (number != begin + len(part) or is_full):
                yield self._event(begin, part)
                part = []
            if not part:
                begin, size = number, 0
            part.append(html)
            size += len(html)
        yield self._event(begin, part)

    def _event(self, begin: int, part: list[str]) -> str:
        position = Position(self._epoch, min(begin + len(part), self._channel.first_open))
        return f"id: {position}\n" + event("lines", {"from": begin, "lines": part})


def event(name: str, value: object) -> str:
    """JSON contains no line ends, so no output can end the event."""
    return f"event: {name}\ndata: {msgspec.json.encode(value).decode()}\n\n"


router = APIRouter(include_in_schema=False)


@router.get("/jobs/{job}/attempts/{number}/log/lines")
async def lines(
    request: Request,
    job: str,
    number: int,
    first: Annotated[int, Query(alias="from", ge=0, lt=2**53)] = 0,
    count: Annotated[int, Query(ge=1, le=_MAX_PART)] = _MAX_PART,
    node: Annotated[int, Query(ge=0, lt=MOST_NODES)] = 0,
) -> Response:
    """Lines of any part of the log, for scrolling back and jumping."""
    app_state = app_state_of(request)
    attempt = await app_state.pool.run(lambda store: found_attempt(store, job, number, node))
    with app_state.log_channels.joined(attempt, node) as channel:
        return answer(await channel.part(first, count))


@router.get("/jobs/{job}/attempts/{number}/log/live")
async def follow(
    request: Request,
    job: str,
    number: int,
    last_event_id: Annotated[str, Header()] = "",
    after: str = "",
    node: Annotated[int, Query(ge=0, lt=MOST_NODES)] = 0,
    whole: Annotated[str, Query(alias="all")] = "",
) -> StreamingResponse:
    """The last lines, all lines, or those after a position; then new ones until the attempt has ended."""
    attempt = await app_state_of(request).pool.run(lambda store: found_attempt(store, job, number, node))
    # A browser that reconnects uses the old address: the header is newer.
    position = Position.parse(last_event_id or after)
    events = _events(request, attempt, node, position, from_the_beginning=whole == "1")
    return StreamingResponse(events, media_type="text/event-stream", headers=STREAM_HEADERS)


async def _events(
    request: Request, attempt: Attempt, node: int, position: Position | None, from_the_beginning: bool
) -> AsyncIterator[str]:
    app_state, user = app_state_of(request), user_of(request)
    channel = app_state.log_channels.join(attempt, node)
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
        app_state.log_channels.leave(channel)
