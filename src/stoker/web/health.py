"""`/healthz`: whether the page can read the queue, for whoever restarts it. It is public, so it says no more."""

import time
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from stoker.web.app_state import house_of

router = APIRouter()

# The board looks every few seconds; a database that restarts is away for some more.
_LATELY: Final = 30.0


@router.get("/healthz", include_in_schema=False)
async def healthz(request: Request) -> Response:
    board = house_of(request).board
    if board.latest is None:
        return PlainTextResponse("starting\n", 503)
    if time.monotonic() - board.reached > _LATELY:
        return PlainTextResponse("away\n", 503)
    return PlainTextResponse("ok\n")
