"""Several live answers in one: a browser has six connections to one server, and all its pages share one of them.

Each part is asked of the application as if by a request of its own, and told apart in the answer by its number.
"""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, Final

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

Told = tuple[int, str, str, str]
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

    async def receive() -> Message:
        # It is cancelled when the browser leaves.
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def send(message: Message) -> None:
        nonlocal status, rest
        if message["type"] == "http.response.start":
            status = message["status"]
        elif status == 200:
            *whole, rest = (rest + message.get("body", b"")).split(b"\n\n")
            for name, data, mark in _events(whole):
                await told.put((number, name, data, mark))

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


def _events(blocks: list[bytes]) -> Iterator[tuple[str, str, str]]:
    for block in blocks:
        fields: dict[str, Any] = {"data": []}
        for line in block.decode().split("\n"):
            name, _, value = line.partition(": ")
            if name == "data":
                fields["data"].append(value)
            else:
                fields[name] = value
        if "event" in fields:
            yield fields["event"], "\n".join(fields["data"]), fields.get("id", "")
