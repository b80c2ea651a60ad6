"""`GET /status`: everything at one moment, as the page shows it."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import QueueAwayError
from stoker.queue.store import Store
from stoker.status.model import Snapshot
from stoker.web.api.bodies import DismissBody
from stoker.web.api.described import described
from stoker.web.app_state import app_state_of
from stoker.web.pagination import Done, Undo, answer, answer_with_jobs

router = APIRouter(tags=["status"])


@router.get(
    "/status",
    operation_id="get_status",
    summary="Everything at one moment",
    response_model=described(Snapshot),
    response_description="Machines and GPUs, what runs, waits and ended, and whether all is well.",
)
async def get_status(request: Request) -> Response:
    """The newest look at the queue, which is at most a few seconds old. It costs no query."""
    snapshot_cache = app_state_of(request).snapshot_cache
    if snapshot_cache.latest is None or snapshot_cache.problem is not None:
        raise QueueAwayError(snapshot_cache.problem or "the queue has not been read yet")
    return answer_with_jobs(request, snapshot_cache.latest)


@router.post(
    "/status/dismiss",
    operation_id="dismiss_failures",
    summary="Tell no more of failures that somebody has seen",
    response_model=described(Done),
    response_description="What became of it, and how it is taken back.",
)
async def dismiss(request: Request, body: DismissBody) -> Response:
    """For everybody, on the page and in `stoker top`; the jobs themselves stay as they are."""
    app_state = app_state_of(request)

    def work(store: Store) -> Done:
        before = store.jobs.dismiss_failures(body.failure, body.until)
        return Done(
            changed=before != body.until,
            sentence="the overview tells no more of them",
            undo=Undo(method="POST", path=request.url.path, body={"failure": body.failure, "until": before}),
        )

    done = await app_state.pool.ask(work)
    app_state.snapshot_cache.look_now()
    return answer(done)
