"""The queue as a whole, its workers and their GPUs, and the user of the token."""

from typing import Annotated, Final, Literal

import msgspec
from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import QueueAwayError
from stoker.queue.model import GpuUse, Worker
from stoker.queue.steering import already
from stoker.queue.store import Store
from stoker.status.model import Snapshot
from stoker.status.usage import History, read_history, read_job_history
from stoker.web.answers import Done, Undo, answer, answer_with_jobs, carry_out, found
from stoker.web.api.bodies import DismissBody, body_of
from stoker.web.api.jobs import JobId
from stoker.web.api.openapi import operation
from stoker.web.app_state import app_state_of, user_of
from stoker.web.problems import NotFoundError, ParameterError

router = APIRouter(tags=["queue"])

# The minutes of a day.
_MOST_POINTS: Final = 1440
_LONGEST_HISTORY: Final = 7 * 1440
Points = Annotated[int, Query(ge=2, le=_MOST_POINTS, description="At most this many.")]
WorkerId = Annotated[str, Path(max_length=200, description="The id of a worker.")]


class WorkerSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as last reported. `is_there`: whether it sent a recent heartbeat."""

    worker: Worker
    is_there: bool


class WorkerList(msgspec.Struct, frozen=True, kw_only=True):
    """All workers, including recent ones that have left."""

    items: list[WorkerSeen]


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The role and the name of the token. Viewers read, operators also make changes."""

    role: Literal["viewer", "operator"]
    name: str


class UsageTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of single GPUs by use. Time without readings is not counted."""

    since: float
    seconds: dict[GpuUse, float]


@operation(router, "GET", "/session", SessionInfo)
async def get_session(request: Request) -> Response:
    """Get the name and the role of the token."""
    user = user_of(request)
    return answer(SessionInfo(role=user.role, name=user.name))


@operation(router, "GET", "/status", Snapshot)
async def get_status(request: Request) -> Response:
    """Get the state of queue, machines and GPUs. It is at most a few seconds old and runs no query."""
    snapshot_cache = app_state_of(request).snapshot_cache
    if snapshot_cache.latest is None or snapshot_cache.problem is not None:
        raise QueueAwayError(snapshot_cache.problem or "the queue has not been read yet")
    return answer_with_jobs(request, snapshot_cache.latest)


@operation(router, "POST", "/status/dismiss", Done, body=DismissBody)
async def dismiss_failures(request: Request) -> Response:
    """Dismiss failures from the overview of all users. The jobs do not change."""
    body = await body_of(request, DismissBody)
    failure, until = body["failure"], body["until"]

    def dismiss(store: Store) -> Done:
        before = store.jobs.dismiss_failures(failure, until)
        return Done(
            changed=before != until,
            message="dismissed: the overview no longer shows these failures",
            undo=Undo(method="POST", path=request.url.path, body={"failure": failure, "until": before}),
        )

    return await carry_out(request, dismiss)


@operation(router, "GET", "/workers", WorkerList)
async def list_workers(request: Request) -> Response:
    """List the workers and their GPUs. Each start of `stoker work` is one worker."""

    def workers(store: Store) -> WorkerList:
        now = store.clock()
        return WorkerList(items=[WorkerSeen(worker=one, is_there=one.is_there(now)) for one in store.workers.all()])

    return answer(await app_state_of(request).pool.run(workers))


@operation(router, "GET", "/history", History)
async def get_history(
    request: Request,
    host: Annotated[str | None, Query(max_length=300, description="Only the GPUs of this machine.")] = None,
    gpu: Annotated[str | None, Query(max_length=100, description="Only the GPU with this uuid.")] = None,
    minutes: Annotated[int, Query(ge=1, le=_LONGEST_HISTORY, description="More than a day needs a host.")] = 60,
    points: Points = _MOST_POINTS,
) -> Response:
    """Get utilization, memory, power and use of each GPU. Null means no readings. Each point is a minute, or the mean
    and the peaks of several minutes if there would be more than `points`. With host and gpu, also the jobs that had the
    GPU.
    """
    if minutes > _MOST_POINTS and host is None:
        raise ParameterError("minutes", "give the host as well: more than a day is read of one machine at a time")
    return answer(await app_state_of(request).pool.run(lambda store: read_history(store, minutes, points, host, gpu)))


@operation(router, "GET", "/jobs/{job}/history", History, 404)
async def get_job_history(
    request: Request,
    job: JobId,
    minutes: Annotated[
        int | None, Query(ge=1, le=_LONGEST_HISTORY, description="Only the last minutes of its run.")
    ] = None,
    points: Points = _MOST_POINTS,
) -> Response:
    """Get utilization, memory and power of a job's GPUs during its attempts, over at most a month. `jobs` are its
    attempts. A shared GPU is shown as a whole.
    """
    return answer(
        await app_state_of(request).pool.run(lambda store: read_job_history(store, found(store, job), minutes, points))
    )


@operation(router, "GET", "/usage", UsageTotals)
async def get_usage(
    request: Request, hours: Annotated[int, Query(ge=1, le=31 * 24, description="At most a month.")] = 24
) -> Response:
    """Get the GPU time of the last hours by use."""

    def usage(store: Store) -> UsageTotals:
        first = int(store.clock() // 60) - hours * 60
        return UsageTotals(since=first * 60.0, seconds=store.usage.totals(first))

    return answer(await app_state_of(request).pool.run(usage))


@operation(router, "POST", "/queue/pause", Done)
async def pause_queue(request: Request) -> Response:
    """Pause the queue: no worker starts jobs. Running jobs continue."""
    return await _pause_queue(request, True)


@operation(router, "POST", "/queue/resume", Done)
async def resume_queue(request: Request) -> Response:
    """Resume the queue. Workers that are paused themselves stay paused."""
    return await _pause_queue(request, False)


@operation(router, "POST", "/workers/{worker}/pause", Done, 404)
async def pause_worker(request: Request, worker: WorkerId) -> Response:
    """Pause a worker: it starts no jobs until it is resumed or restarted. Running jobs continue."""
    return await _pause_worker(request, worker, True)


@operation(router, "POST", "/workers/{worker}/resume", Done, 404)
async def resume_worker(request: Request, worker: WorkerId) -> Response:
    """Resume a worker. It starts nothing while the queue is paused."""
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
