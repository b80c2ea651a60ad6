"""`/queue`: whether anything is started at all."""

from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.queue.steering import PAUSE, RESUME, Direction, already
from stoker.queue.store import Store
from stoker.web.api.described import described
from stoker.web.app_state import app_state_of
from stoker.web.pagination import Done, Undo, answer

router = APIRouter(tags=["queue"])

_MODEL: Final = described(Done)
_DONE: Final = "What became of it, and how it is taken back."


@router.post(
    "/queue/pause",
    operation_id="pause_queue",
    summary="Start nothing more anywhere",
    response_model=_MODEL,
    response_description=_DONE,
)
async def pause_queue(request: Request) -> Response:
    """What runs goes on."""
    return await _turned(request, PAUSE)


@router.post(
    "/queue/resume",
    operation_id="resume_queue",
    summary="Go on after a pause",
    response_model=_MODEL,
    response_description=_DONE,
)
async def resume_queue(request: Request) -> Response:
    """Workers that are paused themselves stay so."""
    return await _turned(request, RESUME)


async def _turned(request: Request, direction: Direction) -> Response:
    app_state = app_state_of(request)

    def turn(store: Store) -> Done:
        if store.paused() == direction.paused:
            return Done(changed=False, sentence=f"the queue was not {direction.done}: {already(direction)}")
        direction.queue(store)
        path = request.url.path.removesuffix(direction.verb) + direction.opposite
        return Done(changed=True, sentence=f"the queue is {direction.done}", undo=Undo(method="POST", path=path))

    done = await app_state.pool.ask(turn)
    app_state.snapshot_cache.look_now()
    return answer(done)
