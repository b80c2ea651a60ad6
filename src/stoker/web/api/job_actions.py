"""`/jobs/{job}/…`: what can be done to a job. Each answer says what was done, and how to undo it."""

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
from stoker.web.answers import Done, Undo, found, names_of
from stoker.web.api.actions import action, carry_out
from stoker.web.api.bodies import ChangeBody, MoveBody, RetryBody, SnoozeBody, said
from stoker.web.api.jobs import JobId
from stoker.web.app_state import user_of
from stoker.web.problems import ConflictError, InvalidFieldsError
from stoker.web.submission import changes_of, seconds_of

router = APIRouter()

_TAG: Final = "steering"

VerbOf = Callable[[Store], Verb]
UndoOf = Callable[[Store, Job], Undo | None]


async def _steer(request: Request, name: str, verb_of: VerbOf, undo_of: UndoOf) -> Response:
    """Applies a verb to one job. `undo_of` gets the job as it was before."""

    def work(store: Store) -> Done:
        job = found(store, name)
        undo = undo_of(store, job)
        verb = verb_of(store)
        why_not = verb.obstacle(job, store.clock())
        try:
            done = {} if why_not else verb.apply(store, [job.id])
        except BadInputError as error:
            why_not, done = str(error), {}
        if job.id not in done:
            reason = why_not or why_not_any_more(store, job.id, verb)
            raise ConflictError(f"job {label(job.id, job.name)} was not {verb.done}: {reason}")
        return Done(changed=True, message=f"{label(job.id, job.name)}: {done[job.id]}", undo=undo)

    return await carry_out(request, work)


def _post(request: Request, job: Job, verb: str, body: dict[str, Any] | None = None) -> Undo:
    return Undo(method="POST", path=f"{_path(request, job)}/{verb}", body=body)


def _path(request: Request, job: Job) -> str:
    before, _, _ = request.url.path.partition("/jobs/")
    return f"{before}/jobs/{job.id}"


@action(router, "/jobs/{job}", _TAG, "Change what a job asks for", 404, 409, 413, method="PATCH")
async def change_job(request: Request, job: JobId, body: ChangeBody) -> Response:
    """Fields that are left out stay as they are. A running job can be changed when it has ended."""
    fields = said(body)

    def change(store: Store) -> Done:
        before = found(store, job)
        who = label(before.id, before.name)
        if before.state == "running":
            raise ConflictError(f"job {who} was not edited: it is running: it can be edited when it has ended")
        changes = changes_of(store, fields, before)
        if not changes:
            return Done(changed=False, message=f"{who}: nothing differs")
        try:
            check_changes(before, changes)
            store.jobs.edit(before.id, changes)
        except BadInputError as error:
            raise ConflictError(f"job {who} was not edited: {error}") from None
        message = f"{who}: edited ({names_of(list(changes))})"
        return Done(changed=True, message=message, undo=_unchange(request, before, changes))

    return await carry_out(request, change)


def _unchange(request: Request, before: Job, changes: dict[str, Any]) -> Undo | None:
    """None where a request cannot express what was there: the details of a fit, or a secret, which no answer holds."""
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


@action(router, "/jobs/{job}/cancel", _TAG, "Cancel a job", 404, 409)
async def cancel_job(request: Request, job: JobId) -> Response:
    """A waiting job is cancelled, which can be undone; a running job is asked to stop, which cannot."""

    def undo(_store: Store, before: Job) -> Undo | None:
        if before.state == "running":
            return None
        return _post(request, before, "retry", {"held": True} if before.state == "held" else None)

    return await _steer(request, job, lambda _store: CANCEL, undo)


@action(router, "/jobs/{job}/retry", _TAG, "Run a job again that has ended", 404, 409, 413)
async def retry_job(request: Request, job: JobId, body: RetryBody | None = None) -> Response:
    """With all its retries. A job that waits for its next attempt starts at once. The undo cancels it."""
    verb = REINSTATE if body is not None and body.held else RETRY

    def undo(_store: Store, before: Job) -> Undo | None:
        return None if before.state == "queued" else _post(request, before, "cancel")

    return await _steer(request, job, lambda _store: verb, undo)


@action(router, "/jobs/{job}/hold", _TAG, "Keep a waiting job from starting", 404, 409)
async def hold_job(request: Request, job: JobId) -> Response:
    """Until it is released."""
    return await _steer(request, job, lambda _store: HOLD, lambda _store, before: _post(request, before, "release"))


@action(router, "/jobs/{job}/release", _TAG, "Let a held job start", 404, 409)
async def release_job(request: Request, job: JobId) -> Response:
    """When its turn comes."""
    return await _steer(request, job, lambda _store: RELEASE, lambda _store, before: _post(request, before, "hold"))


@action(router, "/jobs/{job}/move", _TAG, "Move a waiting job within the queue", 404, 409, 413)
async def move_job(request: Request, job: JobId, body: MoveBody) -> Response:
    """To a place among the jobs of its priority, or right before or after another job, whose priority it takes."""
    return await _steer(
        request, job, lambda store: _moving(store, body), lambda store, before: _back(request, store, before)
    )


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


@action(router, "/jobs/{job}/snooze", _TAG, "Leave a running job alone for a while", 404, 409, 413)
async def snooze_job(request: Request, job: JobId, body: SnoozeBody) -> Response:
    """No rule stops it until then, and the rule's window starts again after that. 0 seconds end the snooze."""
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
        return Done(changed=bool(seconds or left), message=f"{called}: {what}", undo=undo)

    return await carry_out(request, snooze)


def _seconds(body: SnoozeBody) -> float:
    try:
        return seconds_of(body.seconds)
    except BadInputError as error:
        raise InvalidFieldsError({"seconds": str(error)}) from None


def _snoozed_for(store: Store, job: Job) -> float:
    until = store.attempts.snoozes().get(job.attempt or "")
    return 0.0 if until is None else max(0.0, round(until - store.clock(), 1))
