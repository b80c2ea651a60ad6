"""Live pages: server-sent events with the sections that changed.

A connection remembers the last version of each section it sent, and sends the sections that differ in a new snapshot,
so a slow or sleeping page is at most one message behind. Authentication is checked again before every message.

Browsers open at most six connections to one server, so their pages share one: `/live/many` merges several streams, each
an internal request to the application, and numbers their events.
"""

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Mapping
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Scope

from stoker.errors import BadInputError, StokerError
from stoker.status import detail
from stoker.web.app_state import app_state_of, user_of
from stoker.web.pages.sections import render_job
from stoker.web.pages.views import OVERVIEW_KEY, Listing, render_overview
from stoker.web.problems import ParameterError
from stoker.web.sse.section_cache import STREAM_HEADERS, event

router = APIRouter(include_in_schema=False)

_LOGGER: Final = logging.getLogger("stoker.web")

# Pages reconnect after a few missing heartbeats, and proxies close connections that are silent for a minute.
_HEARTBEAT: Final = 15.0


@router.get("/live")
async def overview_events(request: Request) -> StreamingResponse:
    app_state, role = app_state_of(request), user_of(request).role
    return _response(request, OVERVIEW_KEY, lambda: render_overview(app_state, role))


@router.get("/live/jobs")
async def list_events(
    request: Request, q: str = "", state: str = "", tag: str = "", sort: str = "", cursor: str = "", unseen: str = ""
) -> StreamingResponse:
    app_state, role = app_state_of(request), user_of(request).role
    listing = Listing.parse(q, state, tag, sort, cursor, unseen)

    async def render() -> Mapping[str, str]:
        return listing.sections(await app_state.pool.run(listing.read), role)

    return _response(request, listing, render)


@router.get("/live/jobs/{job}")
async def job_events(request: Request, job: str) -> StreamingResponse:
    app_state, role = app_state_of(request), user_of(request).role

    async def render() -> Mapping[str, str]:
        job_detail = await app_state.pool.run(lambda store: detail.read_detail(store, job, app_state.config.home))
        return render_job(job_detail, role)

    return _response(request, job, render)


def _response(
    request: Request, which: Hashable, render: Callable[[], Awaitable[Mapping[str, str]]]
) -> StreamingResponse:
    """The sections of `render`, which is shared by all users of a role with the same `which`."""
    app_state, user = app_state_of(request), user_of(request)
    snapshots = app_state.snapshot_cache

    async def current() -> dict[str, str]:
        try:
            return (await app_state.section_cache.get(snapshots.version, (which, user.role), render)).events
        except BadInputError:
            return {"gone": event("gone", "")}  # the job was removed by `stoker clean`
        except StokerError:
            return {}

    async def stream() -> AsyncIterator[str]:
        yield "retry: 2000\n\n"
        snapshots.refresh()
        sent: dict[str, str] = {}
        version, problem, sent_at = -1, None, time.monotonic()
        while app_state.keys.still_valid(user):
            version = await snapshots.changed(version, _HEARTBEAT)
            if snapshots.is_stopping:
                return
            events = await current()
            due = [text for name, text in events.items() if sent.get(name) != text]
            sent = events or sent
            if problem != snapshots.problem:
                problem = snapshots.problem
                due.append(event("problem", problem or ""))
            if not due and time.monotonic() - sent_at >= _HEARTBEAT:
                due.append(event("beat", ""))
            if due:
                sent_at = time.monotonic()
                yield "".join(due)

    async def counted() -> AsyncIterator[str]:
        snapshots.viewers += 1
        try:
            async for text in stream():
                yield text
        finally:
            snapshots.viewers -= 1

    return StreamingResponse(counted(), media_type="text/event-stream", headers=STREAM_HEADERS)


@router.get("/live/notices")
async def notices(request: Request) -> StreamingResponse:
    """The events for browser notifications, beginning with those of the last minute."""
    app_state, user = app_state_of(request), user_of(request)
    feed = app_state.notice_feed

    async def stream() -> AsyncIterator[str]:
        yield "retry: 2000\n\n"
        number = 0
        with feed.listening():
            while app_state.keys.still_valid(user) and not feed.is_stopping:
                number, found = await feed.after(number, _HEARTBEAT)
                yield "".join(event("notice", msgspec.json.encode(one).decode()) for one in found) or event("beat", "")

    return StreamingResponse(stream(), media_type="text/event-stream", headers=STREAM_HEADERS)


# Several streams over one connection

# More windows than anybody opens; a browser with more uses a second connection.
MAX_STREAMS: Final = 32
_LIVE: Final = re.compile(
    r"(/live(?:/notices|/jobs(?:/[0-9a-f]{8})?)?|/jobs/[0-9a-f]{8}/attempts/\d{1,9}/log/live)(?:\?(.*))?"
)
_COPIED: Final = ("type", "asgi", "http_version", "scheme", "server", "client", "root_path", "extensions")

NumberedEvent = tuple[int, str, str, str]
"""The number of the stream, the name of the event, its data and its id. The name is empty when the stream ends."""


@router.get("/live/many")
async def many(request: Request, on: Annotated[list[str] | None, Query()] = None) -> StreamingResponse:
    """The events of each of the addresses `on`."""
    addresses = on or []
    if not 1 <= len(addresses) <= MAX_STREAMS:
        raise ParameterError("on", f"must be given 1 to {MAX_STREAMS} times")
    return StreamingResponse(_merge(request, addresses), media_type="text/event-stream", headers=STREAM_HEADERS)


async def _merge(request: Request, addresses: list[str]) -> AsyncIterator[bytes]:
    # Length 1: for a slow client all streams wait and then send their newest state.
    events: asyncio.Queue[NumberedEvent] = asyncio.Queue(1)
    tasks = [
        asyncio.create_task(_forward(request, number, address, events)) for number, address in enumerate(addresses)
    ]
    left = len(tasks)
    try:
        yield b"retry: 2000\n\n"
        while left:
            one = await events.get()
            left -= not one[1]
            yield b"data: " + msgspec.json.encode(one) + b"\n\n"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(request: Request, number: int, address: str, events: "asyncio.Queue[NumberedEvent]") -> None:
    match = _LIVE.fullmatch(address)
    status, rest = 404, b""

    async def receive() -> Message:
        # Cancelled when the browser disconnects.
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: Message) -> None:
        nonlocal status, rest
        if message["type"] == "http.response.start":
            status = message["status"]
        elif status == 200:
            *whole, rest = (rest + message.get("body", b"")).split(b"\n\n")
            for name, lines, event_id in _parse(whole):
                await events.put((number, name, "\n".join(lines), event_id))

    if match is not None:
        try:
            await request.app(_scope(request.scope, match[1], match[2] or ""), receive, send)
        except Exception:
            _LOGGER.exception("an event stream failed")
            status = 500
    await events.put((number, "", "over" if status == 200 else str(status), ""))


def _scope(outer: Scope, path: str, query: str) -> Scope:
    """A request of the same user for this path."""
    return {
        **{name: outer[name] for name in _COPIED if name in outer},
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(b"host", b"-"), (b"accept", b"text/event-stream")],
        "state": dict(outer["state"]),
    }


def _parse(blocks: list[bytes]) -> Iterator[tuple[str, list[str], str]]:
    """The name, the lines of data and the id of each event."""
    for block in blocks:
        name = event_id = ""
        lines = []
        for line in block.decode().split("\n"):
            field, _, value = line.partition(": ")
            if field == "data":
                lines.append(value)
            elif field == "event":
                name = value
            elif field == "id":
                event_id = value
        if name:
            yield name, lines, event_id
