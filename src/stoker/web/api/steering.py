"""`/jobs/{job}/…`: what can be done to a job. Each answer says what became of it, and how to take it back."""

from collections.abc import Callable
from typing import Any, Final

from fastapi import APIRouter
from msgspec import to_builtins
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import BadInputError
from stoker.masking import MASK, masked_environment
from stoker.queue.jobs import check_changes
from stoker.queue.model import Job
from stoker.queue.steering import (
    CANCEL,
    HOLD,
    REINSTATE,
    RELEASE,
    RETRY,
    Verb,
    label,
    moving,
    moving_beside,
    why_not_any_more,
)
from stoker.queue.store import Store
from stoker.units import format_duration
from stoker.web.api.bodies import ChangeBody, MoveBody, RetryBody, SnoozeBody, said
from stoker.web.api.described import described
from stoker.web.api.jobs import JobId
from stoker.web.app_state import app_state_of, user_of
from stoker.web.pagination import Done, Undo, answer, found, names_of, problems_listed
from stoker.web.problems import ConflictError, InvalidFieldsError
from stoker.web.submission import changes_of, seconds_of

router = APIRouter(tags=["steering"])

_MODEL: Final = described(Done)
_PROBLEMS: Final = problems_listed(404, 409)
_BODY_PROBLEMS: Final = problems_listed(404, 409, 413)
_DONE: Final = "What became of it, and how it is taken back."


async def _done(request: Request, work: Callable[[Store], Done]) -> Response:
    app_state = app_state_of(request)
    done = await app_state.pool.ask(work)
    app_state.snapshot_cache.look_now()
    return answer(done)


def _steered(store: Store, name: str, verb: Verb) -> tuple[Job, str]:
    """The job as it was before, and what became of it."""
    job = found(store, name)
    why_not = verb.obstacle(job, store.clock())
    try:
        became = {} if why_not else verb.apply(store, [job.id])
    except BadInputError as error:
        raise ConflictError(f"job {label(job.id, job.name)} was not {verb.done}: {error}") from None
    if job.id not in became:
        reason = why_not or why_not_any_more(store, job.id, verb)
        raise ConflictError(f"job {label(job.id, job.name)} was not {verb.done}: {reason}")
    return job, f"{label(job.id, job.name)}: {became[job.id]}"


def _post(request: Request, job: Job, verb: str, body: dict[str, Any] | None = None) -> Undo:
    return Undo(method="POST", path=f"{_path(request, job)}/{verb}", body=body)


def _path(request: Request, job: Job) -> str:
    before, _, _ = request.url.path.partition("/jobs/")
    return f"{before}/jobs/{job.id}"


@router.patch(
    "/jobs/{job}",
    operation_id="change_job",
    summary="Change what a job asks for",
    response_model=_MODEL,
    response_description=_DONE,
    responses=_BODY_PROBLEMS,
)
async def change_job(request: Request, job: JobId, body: ChangeBody) -> Response:
    """What is left out stays as it is. A job that runs can be changed when it has ended."""
    wanted = said(body)

    def change(store: Store) -> Done:
        before = found(store, job)
        who = label(before.id, before.name)
        if before.state == "running":
            raise ConflictError(f"job {who} was not edited: it is running: it can be edited when it has ended")
        changes = changes_of(store, wanted, before)
        if not changes:
            return Done(changed=False, sentence=f"{who}: it is so already")
        try:
            check_changes(before, changes)
            store.jobs.edit(before.id, changes)
        except BadInputError as error:
            raise ConflictError(f"job {who} was not edited: {error}") from None
        return Done(
            changed=True,
            sentence=f"{who}: edited ({names_of(list(changes))})",
            undo=_unchange(request, before, changes),
        )

    return await _done(request, change)


def _unchange(request: Request, before: Job, changes: dict[str, Any]) -> Undo | None:
    """How a job was fitted is kept in other words than it is asked for: that is not taken back by a request.

    Nor is the change of a secret, which no answer holds.
    """
    if "fit" in changes and before.fit:
        return None
    body: dict[str, Any] = {field: to_builtins(getattr(before, field)) for field in changes}
    if "environment" in body:
        shown = masked_environment(before.environment)
        if any(before.environment[name] != changes["environment"].get(name) for name in shown if shown[name] == MASK):
            return None
        body["environment"] = shown
    if "fit" in body:
        body["fit"] = False
    return Undo(method="PATCH", path=_path(request, before), body=body)


@router.post(
    "/jobs/{job}/cancel",
    operation_id="cancel_job",
    summary="Cancel a job",
    response_model=_MODEL,
    response_description=_DONE,
    responses=_PROBLEMS,
)
async def cancel_job(request: Request, job: JobId) -> Response:
    """One that waits is cancelled, which can be taken back; one that runs is asked to stop, which cannot."""

    def cancel(store: Store) -> Done:
        before, sentence = _steered(store, job, CANCEL)
        undo = None
        if before.state != "running":
            undo = _post(request, before, "retry", {"held": True} if before.state == "held" else None)
        return Done(changed=True, sentence=sentence, undo=undo)

    return await _done(request, cancel)


@router.post(
    "/jobs/{job}/retry",
    operation_id="retry_job",
    summary="Let a job that ended run again",
    response_model=_MODEL,
    response_description=_DONE,
    responses=_BODY_PROBLEMS,
)
async def retry_job(request: Request, job: JobId, body: RetryBody | None = None) -> Response:
    """With all its retries. One that waits for its next try starts at once. Taking it back cancels it."""
    verb = REINSTATE if body is not None and body.held else RETRY

    def retry(store: Store) -> Done:
        before, sentence = _steered(store, job, verb)
        undo = None if before.state == "queued" else _post(request, before, "cancel")
        return Done(changed=True, sentence=sentence, undo=undo)

    return await _done(request, retry)


@router.post(
    "/jobs/{job}/hold",
    operation_id="hold_job",
    summary="Keep a job that waits from starting",
    response_model=_MODEL,
    response_description=_DONE,
    responses=_PROBLEMS,
)
async def hold_job(request: Request, job: JobId) -> Response:
    """Until it is released."""

    def hold(store: Store) -> Done:
        before, sentence = _steered(store, job, HOLD)
        return Done(changed=True, sentence=sentence, undo=_post(request, before, "release"))

    return await _done(request, hold)


@router.post(
    "/jobs/{job}/release",
    operation_id="release_job",
    summary="Let a job that is held start",
    response_model=_MODEL,
    response_description=_DONE,
    responses=_PROBLEMS,
)
async def release_job(request: Request, job: JobId) -> Response:
    """When it is its turn."""

    def release(store: Store) -> Done:
        before, sentence = _steered(store, job, RELEASE)
        return Done(changed=True, sentence=sentence, undo=_post(request, before, "hold"))

    return await _done(request, release)


@router.post(
    "/jobs/{job}/move",
    operation_id="move_job",
    summary="Move a job that waits within the queue",
    response_model=_MODEL,
    response_description=_DONE,
    responses=_BODY_PROBLEMS,
)
async def move_job(request: Request, job: JobId, body: MoveBody) -> Response:
    """To a place among those of its priority, or right before or after another job, whose priority it takes."""

    def move(store: Store) -> Done:
        undo = _back(request, store, found(store, job))
        _before, sentence = _steered(store, job, _moving(store, body))
        return Done(changed=True, sentence=sentence, undo=undo)

    return await _done(request, move)


def _moving(store: Store, body: MoveBody) -> Verb:
    if body.place is not None:
        return moving(body.place)
    field, name = ("before", body.before) if body.before is not None else ("after", body.after)
    try:
        neighbour = found(store, name or "")
    except BadInputError as error:
        raise InvalidFieldsError({field: str(error)}) from None
    return moving_beside(neighbour.id, "before" if field == "before" else "after")


def _back(request: Request, store: Store, job: Job) -> Undo:
    """Beside the neighbour that it had among those of its priority; where it had none, only that matters."""
    before, behind = store.jobs.neighbours(job)
    if behind is not None:
        return _post(request, job, "move", {"before": behind})
    if before is not None:
        return _post(request, job, "move", {"after": before})
    return Undo(method="PATCH", path=_path(request, job), body={"priority": job.priority})


@router.post(
    "/jobs/{job}/snooze",
    operation_id="snooze_job",
    summary="Leave a job that runs alone for a while",
    response_model=_MODEL,
    response_description=_DONE,
    responses=_BODY_PROBLEMS,
)
async def snooze_job(request: Request, job: JobId, body: SnoozeBody) -> Response:
    """It is not stopped for idleness until then, and its window begins anew after that. 0 seconds end it."""
    who = user_of(request).name

    def snooze(store: Store) -> Done:
        seconds = _seconds(body)
        running = found(store, job)
        called = label(running.id, running.name)
        left = _snoozed_for(store, running)
        if (
            running.state != "running"
            or running.attempt is None
            or not store.attempts.snooze(running.attempt, seconds, who)
        ):
            raise ConflictError(f"job {called} was not snoozed: it is not running, so there is nothing to snooze")
        what = f"left alone for {format_duration(seconds)}" if seconds else "watched again"
        undo = _post(request, running, "snooze", {"seconds": left})
        return Done(changed=bool(seconds or left), sentence=f"{called}: {what}", undo=undo)

    return await _done(request, snooze)


def _seconds(body: SnoozeBody) -> float:
    try:
        return seconds_of(body.seconds)
    except BadInputError as error:
        raise InvalidFieldsError({"seconds": str(error)}) from None


def _snoozed_for(store: Store, job: Job) -> float:
    until = store.attempts.snoozes().get(job.attempt or "")
    return 0.0 if until is None else max(0.0, round(until - store.clock(), 1))
