"""Several event streams over one connection: browsers open at most six to one server, for all pages together.

Each stream is an internal request to the application. Its events carry its number.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Scope

from stoker.web.problems import ParameterError

router = APIRouter(include_in_schema=False)

_LOGGER: Final = logging.getLogger("stoker.web")

# More windows than anybody has open; a browser with more uses a second connection.
MAX_STREAMS: Final = 32
_LIVE: Final = re.compile(r"(/live(?:/jobs(?:/[0-9a-f]{8})?)?|/jobs/[0-9a-f]{8}/attempts/\d{1,9}/log/live)(?:\?(.*))?")
_COPIED: Final = ("type", "asgi", "http_version", "scheme", "server", "client", "root_path", "extensions")

NumberedEvent = tuple[int, str, str, str]
"""The number of the stream, the name of the event, its data and its id. The name is empty when the stream ends."""


@router.get("/live/many")
async def many(request: Request, on: Annotated[list[str] | None, Query()] = None) -> StreamingResponse:
    """The events of each of the addresses `on`."""
    addresses = on or []
    if not 1 <= len(addresses) <= MAX_STREAMS:
        raise ParameterError("on", f"must be given 1 to {MAX_STREAMS} times")
    # X-Accel-Buffering: proxies must not buffer the stream.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_merge(request, addresses), media_type="text/event-stream", headers=headers)


async def _merge(request: Request, addresses: list[str]) -> AsyncIterator[bytes]:
    # Of length 1: for a slow client all streams wait, and then send their newest state.
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
