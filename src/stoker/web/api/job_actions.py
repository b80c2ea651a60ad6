"""`/jobs/{job}/…`: changes of one job. Each returns what was done and how to undo it."""

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from msgspec import to_builtins
from starlette.requests import Request
from starlette.responses import Response

from stoker.engines.admission import check_edits
from stoker.errors import BadInputError, InvalidFieldsError
from stoker.masking import MASK, masked_environment, masked_notify
from stoker.queue.fields import editable
from stoker.queue.jobs import check_changes
from stoker.queue.model import Job
from stoker.queue.steering import (
    CANCEL,
    HOLD,
    REINSTATE,
    RELEASE,
    RETRY,
    Verb,
    moving,
    moving_beside,
    why_not_any_more,
)
from stoker.queue.store import Store
from stoker.status.job_text import job_title
from stoker.units import format_duration
from stoker.web.answers import Done, Undo, carry_out, found
from stoker.web.api.bodies import ChangeBody, MoveBody, RetryBody, SnoozeBody, body_of
from stoker.web.api.jobs import JobId
from stoker.web.api.openapi import operation
from stoker.web.app_state import user_of
from stoker.web.problems import ConflictError
from stoker.web.submission import changes_of, seconds_of

router = APIRouter(tags=["steering"])

Plan = Callable[[Store, Job], tuple[Verb, Undo | None]]


async def _steer(request: Request, name: str, plan: Plan) -> Response:
    """Applies the verb of a plan to one job. The plan gets the job's previous state."""

    def work(store: Store) -> Done:
        job = found(store, name)
        verb, undo = plan(store, job)
        why_not = verb.obstacle(job, store.clock())
        try:
            done = {} if why_not else verb.apply(store, [job.id])
        except BadInputError as error:
            why_not, done = str(error), {}
        if job.id not in done:
            reason = why_not or why_not_any_more(store, job.id, verb)
            raise ConflictError(f"job {job_title(job)} was not {verb.done}: {reason}")
        return Done(changed=True, message=f"{job_title(job)}: {done[job.id]}", undo=undo)

    return await carry_out(request, work)


def _post(request: Request, job: Job, verb: str, body: dict[str, Any] | None = None) -> Undo:
    return Undo(method="POST", path=f"{_path(request, job)}/{verb}", body=body)


def _path(request: Request, job: Job) -> str:
    before, _, _ = request.url.path.partition("/jobs/")
    return f"{before}/jobs/{job.id}"


@operation(router, "PATCH", "/jobs/{job}", Done, 404, 409, 413, body=ChangeBody)
async def change_job(request: Request, job: JobId) -> Response:
    """Change a job. Omitted fields stay unchanged; a running job accepts only `notify`."""
    fields = await body_of(request, ChangeBody)

    def change(store: Store) -> Done:
        before = found(store, job)
        who = job_title(before)
        if before.state == "running" and not fields.keys() <= set(editable("running")):
            raise ConflictError(f"job {who} was not edited: it is running; edit it when it has ended")
        changes = changes_of(store, fields, before)
        if not changes:
            return Done(changed=False, message=f"{who}: nothing differs")
        try:
            check_edits(store, [(before, check_changes(before, changes))])
            store.jobs.edit(before.id, changes)
        except BadInputError as error:
            raise ConflictError(f"job {who} was not edited: {error}") from None
        message = f"{who}: edited ({', '.join(changes).replace('_', ' ')})"
        return Done(changed=True, message=message, undo=_unchange(request, before, changes))

    return await carry_out(request, change)


def _unchange(request: Request, before: Job, changes: dict[str, Any]) -> Undo | None:
    """None if a request cannot restore the value: details of a fit, or a secret, which no response contains."""
    if "fit" in changes and before.fit:
        return None
    body: dict[str, Any] = {field: to_builtins(getattr(before, field)) for field in changes}
    if "environment" in body:
        shown = masked_environment(before.environment)
        if any(before.environment[name] != changes["environment"].get(name) for name in shown if shown[name] == MASK):
            return None
        body["environment"] = shown
    if "notify" in body:
        # A removed URL is in no response.
        if any("://" in entry and entry not in changes["notify"] for entry in before.notify):
            return None
        body["notify"] = masked_notify(before.notify)
    if "fit" in body:
        body["fit"] = False
    return Undo(method="PATCH", path=_path(request, before), body=body)


@operation(router, "POST", "/jobs/{job}/cancel", Done, 404, 409)
async def cancel_job(request: Request, job: JobId) -> Response:
    """Cancel a job. A running job is asked to stop, which cannot be undone."""

    def plan(_store: Store, before: Job) -> tuple[Verb, Undo | None]:
        body = {"held": True} if before.state == "held" else None
        return CANCEL, None if before.state == "running" else _post(request, before, "retry", body)

    return await _steer(request, job, plan)


@operation(router, "POST", "/jobs/{job}/retry", Done, 404, 409, 413, body=RetryBody)
async def retry_job(request: Request, job: JobId) -> Response:
    """Queue an ended job again, with all its retries. A job that waits for its next attempt may start at once."""
    verb = REINSTATE if (await body_of(request, RetryBody)).get("held") else RETRY

    def plan(_store: Store, before: Job) -> tuple[Verb, Undo | None]:
        return verb, None if before.state == "queued" else _post(request, before, "cancel")

    return await _steer(request, job, plan)


@operation(router, "POST", "/jobs/{job}/hold", Done, 404, 409)
async def hold_job(request: Request, job: JobId) -> Response:
    """Hold a waiting job: it does not start until it is released."""
    return await _steer(request, job, lambda _store, before: (HOLD, _post(request, before, "release")))


@operation(router, "POST", "/jobs/{job}/release", Done, 404, 409)
async def release_job(request: Request, job: JobId) -> Response:
    """Release a held job, which then starts in its turn."""
    return await _steer(request, job, lambda _store, before: (RELEASE, _post(request, before, "hold")))


@operation(router, "POST", "/jobs/{job}/move", Done, 404, 409, 413, body=MoveBody)
async def move_job(request: Request, job: JobId) -> Response:
    """Move a waiting job: among jobs of its priority, or next to another job, whose priority it gets."""
    body = await body_of(request, MoveBody)
    return await _steer(request, job, lambda store, before: (_moving(store, body), _back(request, store, before)))


def _moving(store: Store, body: dict[str, str | None]) -> Verb:
    given = [(field, value) for field, value in body.items() if value is not None]
    if len(given) != 1:
        raise InvalidFieldsError({"": "give exactly one of place, before and after"})
    match given[0]:
        case "place", ("first" | "last" | "up" | "down") as place:
            return moving(place)
        case ("before" | "after") as side, str(name):
            try:
                return moving_beside(found(store, name).id, side)
            except BadInputError as error:
                raise InvalidFieldsError({side: str(error)}) from None
    raise AssertionError(given)


def _back(request: Request, store: Store, job: Job) -> Undo:
    """Back to its neighbour of the same priority; without one, only the priority matters."""
    before, behind = store.jobs.neighbours(job)
    if behind is not None:
        return _post(request, job, "move", {"before": behind})
    if before is not None:
        return _post(request, job, "move", {"after": before})
    return Undo(method="PATCH", path=_path(request, job), body={"priority": job.priority})


@operation(router, "POST", "/jobs/{job}/snooze", Done, 404, 409, 413, body=SnoozeBody)
async def snooze_job(request: Request, job: JobId) -> Response:
    """Snooze the rules of a running job. Their windows start again afterwards; 0 seconds end the snooze."""
    who, body = user_of(request).name, await body_of(request, SnoozeBody)
    try:
        seconds = seconds_of(body["seconds"])
    except BadInputError as error:
        raise InvalidFieldsError({"seconds": str(error)}) from None

    def snooze(store: Store) -> Done:
        running = found(store, job)
        called = job_title(running)
        until = store.attempts.snoozes().get(running.attempt or "")
        left = 0.0 if until is None else max(0.0, round(until - store.clock(), 1))
        if (
            running.state != "running"
            or running.attempt is None
            or not store.attempts.snooze(running.attempt, seconds, who)
        ):
            raise ConflictError(f"job {called} was not snoozed: it is not running")
        what = f"snoozed for {format_duration(seconds)}" if seconds else "watched again"
        undo = _post(request, running, "snooze", {"seconds": left})
        return Done(changed=bool(seconds or left), message=f"{called}: {what}", undo=undo)

    return await carry_out(request, snooze)
