"""The overview: what one sees first."""

import time
from typing import TYPE_CHECKING, Final

from fastapi import APIRouter, Request
from starlette.responses import Response

from stoker.web.app_state import house_of, visitor_of
from stoker.web.pages.sections import OVERVIEW, trusted
from stoker.web.snapshot_cache import SnapshotCache
from stoker.web.templating import page

if TYPE_CHECKING:
    from stoker.web.rendered_sections import RenderedSections

router = APIRouter()

# A server that has just started reads the queue within this; after that the page comes without it, and fills itself.
_PATIENCE: Final = 1.5


@router.get("/")
async def overview(request: Request) -> Response:
    board = house_of(request).board
    if board.latest is None:
        await board.changed(0, _PATIENCE)
    latest, sections = board.latest, trusted(dict.fromkeys(OVERVIEW, ""))
    if latest is not None:
        showcase: RenderedSections = request.app.state.showcase
        sections = (await showcase.shown(latest, board.version, visitor_of(request).role)).sections
    return page(
        request,
        "overview.html",
        sections=sections,
        is_empty=latest is None,
        problem=board.problem,
        here="overview",
        live="/live",
        now=now_of(board),
    )


def now_of(board: SnapshotCache) -> float | None:
    """What the queue's clock says now, as far as we know."""
    return None if board.latest is None else board.latest.now + time.monotonic() - board.reached
