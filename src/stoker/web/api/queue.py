"""`/queue` and `/workers`: who runs jobs, and whether more are started; `/status` and `/session`."""

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Path
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import QueueAwayError
from stoker.queue.model import Worker
from stoker.queue.steering import already
from stoker.queue.store import Store
from stoker.status.model import Snapshot
from stoker.web.answers import Done, Undo, answer, answer_with_jobs
from stoker.web.api.actions import action, carry_out
from stoker.web.api.bodies import DismissBody
from stoker.web.api.described import described
from stoker.web.app_state import app_state_of, user_of
from stoker.web.problems import NotFoundError

router = APIRouter()

WorkerId = Annotated[str, Path(max_length=200, description="The id of a worker.")]


class WorkerSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as last reported."""

    worker: Worker
    is_there: bool
    """Whether it has sent a heartbeat lately."""


class WorkerList(msgspec.Struct, frozen=True, kw_only=True):
    """All workers that the queue knows."""

    items: list[WorkerSeen]


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who sent the request."""

    role: Literal["viewer", "operator"]
    """A viewer may look, an operator may also change things."""
    name: str
    """The name of the token."""


@router.get(
    "/session",
    tags=["session"],
    operation_id="get_session",
    summary="The user of this token",
    response_model=described(SessionInfo),
    response_description="The role and the name of the token.",
)
async def get_session(request: Request) -> Response:
    """Whose token the request came with, and what it allows."""
    user = user_of(request)
    return answer(SessionInfo(role=user.role, name=user.name))


@router.get(
    "/status",
    tags=["status"],
    operation_id="get_status",
    summary="Everything at one moment",
    response_model=described(Snapshot),
    response_description="Machines and GPUs, what runs, waits and ended, and whether all is well.",
)
async def get_status(request: Request) -> Response:
    """The newest snapshot, at most a few seconds old. It costs no query."""
    snapshot_cache = app_state_of(request).snapshot_cache
    if snapshot_cache.latest is None or snapshot_cache.problem is not None:
        raise QueueAwayError(snapshot_cache.problem or "the queue has not been read yet")
    return answer_with_jobs(request, snapshot_cache.latest)


@action(router, "/status/dismiss", "status", "Dismiss failures that somebody has seen")
async def dismiss_failures(request: Request, body: DismissBody) -> Response:
    """For everybody, on the page and in `stoker top`. The jobs themselves stay as they are."""

    def dismiss(store: Store) -> Done:
        before = store.jobs.dismiss_failures(body.failure, body.until)
        return Done(
            changed=before != body.until,
            message="dismissed: the overview no longer shows these failures",
            undo=Undo(method="POST", path=request.url.path, body={"failure": body.failure, "until": before}),
        )

    return await carry_out(request, dismiss)


@router.get(
    "/workers",
    tags=["workers"],
    operation_id="list_workers",
    summary="The workers and their GPUs",
    response_model=described(WorkerList),
    response_description="Also those that have left, until they are forgotten.",
)
async def list_workers(request: Request) -> Response:
    """Each start of `stoker work` is one worker, which owns the GPUs of one machine."""

    def workers(store: Store) -> WorkerList:
        now = store.clock()
        return WorkerList(items=[WorkerSeen(worker=one, is_there=one.is_there(now)) for one in store.workers.all()])

    return answer(await app_state_of(request).pool.run(workers))


@action(router, "/queue/pause", "queue", "Start nothing more anywhere")
async def pause_queue(request: Request) -> Response:
    """Running jobs go on."""
    return await _pause_queue(request, True)


@action(router, "/queue/resume", "queue", "Start jobs again after a pause")
async def resume_queue(request: Request) -> Response:
    """Workers that are paused themselves stay paused."""
    return await _pause_queue(request, False)


@action(router, "/workers/{worker}/pause", "workers", "Let a worker start nothing more", 404)
async def pause_worker(request: Request, worker: WorkerId) -> Response:
    """Running jobs go on. A worker that is restarted is not paused."""
    return await _pause_worker(request, worker, True)


@action(router, "/workers/{worker}/resume", "workers", "Let a worker start jobs again", 404)
async def resume_worker(request: Request, worker: WorkerId) -> Response:
    """A worker's own pause outlasts the queue's."""
    return await _pause_worker(request, worker, False)


async def _pause_queue(request: Request, paused: bool) -> Response:
    def pause(store: Store) -> Done:
        if changed := store.paused() != paused:
            store.pause(paused)
        return _done(request, "the queue", paused, changed)

    return await carry_out(request, pause)


async def _pause_worker(request: Request, name: str, paused: bool) -> Response:
    def pause(store: Store) -> Done:
        worker = next((one for one in store.workers.all() if one.id == name), None)
        if worker is None:
            raise NotFoundError(f"there is no worker {name[:60]!a}")
        what = f"worker {worker.id} on {worker.host}"
        changed = worker.paused != paused
        if changed and not store.workers.pause(worker.id, paused):
            raise NotFoundError(f"{what} has just been deleted")
        return _done(request, what, paused, changed)

    return await carry_out(request, pause)


def _done(request: Request, what: str, paused: bool, changed: bool) -> Done:
    done = "paused" if paused else "resumed"
    if not changed:
        return Done(changed=False, message=f"{what} was not {done}: {already(paused)}")
    before, _, _ = request.url.path.rpartition("/")
    undo = Undo(method="POST", path=f"{before}/{'resume' if paused else 'pause'}")
    return Done(changed=True, message=f"{what} is {done}", undo=undo)
