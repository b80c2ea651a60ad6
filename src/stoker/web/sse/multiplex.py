"""Several live answers in one: a browser has six connections to one server, and all its pages share one of them.

Each part is asked of the application as if by a request of its own, and told apart in the answer by its number.
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

# More windows than anybody looks at; a browser with more of them takes a second connection.
MOST_PARTS: Final = 32
_LIVE: Final = re.compile(r"(/live(?:/jobs(?:/[0-9a-f]{8})?)?|/jobs/[0-9a-f]{8}/attempts/\d{1,9}/log/live)(?:\?(.*))?")
_COMMON: Final = ("type", "asgi", "http_version", "scheme", "server", "client", "root_path", "extensions")

Change = list[tuple[int, str]]
"""The lines of a section that are not as they were, by their numbers from 0."""
Told = tuple[int, str, str | Change, str]
"""The number of the part, the name of the event, its data and its id. Without a name: it is over, and how."""


@router.get("/live/many")
async def many(request: Request, on: Annotated[list[str] | None, Query()] = None) -> StreamingResponse:
    """What each of the addresses `on` tells."""
    wanted = on or []
    if not 1 <= len(wanted) <= MOST_PARTS:
        raise ParameterError("on", f"between 1 and {MOST_PARTS} live addresses are meant")
    # Proxies that collect what they pass on are asked not to.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_together(request, wanted), media_type="text/event-stream", headers=headers)


async def _together(request: Request, wanted: list[str]) -> AsyncIterator[bytes]:
    # Short: who is slow with one part is so with all, and each part then tells its newest state.
    told: asyncio.Queue[Told] = asyncio.Queue(1)
    parts = [asyncio.create_task(_part(request, number, address, told)) for number, address in enumerate(wanted)]
    left = len(parts)
    try:
        yield b"retry: 2000\n\n"
        while left:
            one = await told.get()
            left -= not one[1]
            yield b"data: " + msgspec.json.encode(one) + b"\n\n"
    finally:
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)


async def _part(request: Request, number: int, address: str, told: "asyncio.Queue[Told]") -> None:
    found = _LIVE.fullmatch(address)
    status, rest = 404, b""
    sent: dict[str, list[str]] = {}

    async def receive() -> Message:
        # It is cancelled when the browser leaves.
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: Message) -> None:
        nonlocal status, rest
        if message["type"] == "http.response.start":
            status = message["status"]
        elif status == 200:
            *whole, rest = (rest + message.get("body", b"")).split(b"\n\n")
            for name, lines, mark in _events(whole):
                change = _change(sent.get(name), lines)
                if len(lines) > 1:
                    sent[name] = lines
                await told.put((number, name, "\n".join(lines) if change is None else change, mark))

    if found is not None:
        try:
            await request.app(_scope(request.scope, found[1], found[2] or ""), receive, send)
        except Exception:
            _LOGGER.exception("a live answer broke off")
            status = 500
    await told.put((number, "", "over" if status == 200 else str(status), ""))


def _scope(outer: Scope, path: str, query: str) -> Scope:
    """A request of the same visitor for this path."""
    return {
        **{name: outer[name] for name in _COMMON if name in outer},
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(b"host", b"-"), (b"accept", b"text/event-stream")],
        "state": dict(outer["state"]),
    }


def _change(before: list[str] | None, now: list[str]) -> Change | None:
    """What to send in place of the whole: of a list of jobs with bars mostly the bars; None when that is no less."""
    if before is None or len(before) != len(now):
        return None
    changed = [(number, line) for number, line in enumerate(now) if line != before[number]]
    return changed if 2 * len(changed) <= len(now) else None


def _events(blocks: list[bytes]) -> Iterator[tuple[str, list[str], str]]:
    """Of each its name, the lines of its data, and its id."""
    for block in blocks:
        name = mark = ""
        lines = []
        for line in block.decode().split("\n"):
            field, _, value = line.partition(": ")
            if field == "data":
                lines.append(value)
            elif field == "event":
                name = value
            elif field == "id":
                mark = value
        if name:
            yield name, lines, mark
