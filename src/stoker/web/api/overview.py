"""`GET /overview`: everything at one moment, as the page shows it."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.overview.model import Overview
from stoker.queue.driver import QueueAwayError
from stoker.web.api.answers import answer_with_jobs
from stoker.web.api.described import described
from stoker.web.house import house_of

router = APIRouter(tags=["overview"])


@router.get(
    "/overview",
    operation_id="get_overview",
    summary="Everything at one moment",
    response_model=described(Overview),
    response_description="Machines and GPUs, what runs, waits and ended, and whether all is well.",
)
async def overview(request: Request) -> Response:
    """The newest look at the queue, which is at most a few seconds old. It costs no query."""
    board = house_of(request).board
    if board.latest is None or board.problem is not None:
        raise QueueAwayError(board.problem or "the queue has not been read yet")
    return answer_with_jobs(request, board.latest)
