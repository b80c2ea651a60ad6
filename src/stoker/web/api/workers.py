"""`/workers`: the processes that own the machines' GPUs, and whether they start more."""

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from stoker.queue.model import Worker
from stoker.queue.steering import PAUSE, RESUME, Direction, already
from stoker.queue.store import Store
from stoker.web.api.described import described
from stoker.web.app_state import app_state_of
from stoker.web.pagination import Done, Undo, answer, problems_listed
from stoker.web.problems import NotFoundError

router = APIRouter(tags=["workers"])

_MODEL: Final = described(Done)
_DONE: Final = "What became of it, and how it is taken back."
WorkerId = Annotated[str, Path(max_length=200, description="The id of a worker.")]


class WorkerSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as it was last heard of."""

    worker: Worker
    is_there: bool
    """Whether it was heard of lately."""


class WorkerList(msgspec.Struct, frozen=True, kw_only=True):
    """All workers that the queue remembers."""

    items: list[WorkerSeen]


@router.get(
    "/workers",
    operation_id="list_workers",
    summary="The workers and their GPUs",
    response_model=described(WorkerList),
    response_description="Also those that have left, until they are forgotten.",
)
async def list_workers(request: Request) -> Response:
    """Each start of `stoker work` is a worker of its own, which owns the GPUs of one machine."""

    def workers(store: Store) -> WorkerList:
        now = store.clock()
        return WorkerList(items=[WorkerSeen(worker=one, is_there=one.is_there(now)) for one in store.workers.all()])

    return answer(await app_state_of(request).pool.ask(workers))


@router.post(
    "/workers/{worker}/pause",
    operation_id="pause_worker",
    summary="Let a worker start nothing more",
    response_model=_MODEL,
    response_description=_DONE,
    responses=problems_listed(404),
)
async def pause_worker(request: Request, worker: WorkerId) -> Response:
    """What runs goes on. A worker that is started anew is not paused."""
    return await _turned(request, worker, PAUSE)


@router.post(
    "/workers/{worker}/resume",
    operation_id="resume_worker",
    summary="Let a worker go on",
    response_model=_MODEL,
    response_description=_DONE,
    responses=problems_listed(404),
)
async def resume_worker(request: Request, worker: WorkerId) -> Response:
    """A worker's own pause outlasts the queue's."""
    return await _turned(request, worker, RESUME)


async def _turned(request: Request, name: str, direction: Direction) -> Response:
    app_state = app_state_of(request)

    def turn(store: Store) -> Done:
        worker = next((one for one in store.workers.all() if one.id == name), None)
        if worker is None:
            raise NotFoundError(f"there is no worker {name[:60]!a}")
        who = f"worker {worker.id} on {worker.host}"
        if worker.paused == direction.paused:
            return Done(changed=False, sentence=f"{who} was not {direction.done}: {already(direction)}")
        if not direction.worker(store, worker.id):
            raise NotFoundError(f"{who} has just been forgotten")
        path = request.url.path.removesuffix(direction.verb) + direction.opposite
        return Done(changed=True, sentence=f"{who} is {direction.done}", undo=Undo(method="POST", path=path))

    done = await app_state.pool.ask(turn)
    app_state.snapshot_cache.look_now()
    return answer(done)
