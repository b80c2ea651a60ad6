"""`/jobs/bulk`: one action for many jobs, in one transaction, with one undo."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import BadInputError, InvalidFieldsError
from stoker.queue.field_kinds import ID
from stoker.queue.model import Job
from stoker.queue.search import parse_query
from stoker.queue.steering import CANCEL, HOLD, REINSTATE, RELEASE, RETRY, Verb, moving, tagging
from stoker.queue.store import Store
from stoker.status.job_text import job_title
from stoker.web.answers import Undo, answer
from stoker.web.api.bodies import BulkBody, body_of
from stoker.web.api.openapi import operation
from stoker.web.app_state import app_state_of

router = APIRouter(tags=["steering"])

# Maximum number of ids in the request that undoes it.
_MOST_UNDONE: Final = 10_000
_MOST_NAMED: Final = 20


class BulkResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an action. `unchanged` has the first twenty reasons; `undo` is null if nothing can be undone."""

    changed: int
    message: str
    unchanged: list[str] = []
    undo: Undo | None = None


@operation(router, "POST", "/jobs/bulk", BulkResult, 413, body=BulkBody)
async def change_jobs(request: Request) -> Response:
    """Cancel, retry, hold, release, move or tag many jobs, by id or search."""
    body = await body_of(request, BulkBody)
    verbs = _verbs(body)
    path = request.url.path
    app_state = app_state_of(request)

    def work(store: Store) -> BulkResult:
        now, result = store.clock(), list[BulkResult]()
        for verb, names in verbs:
            jobs = _chosen(store, body, verb, names)
            obstacles = {job.id: verb.obstacle(job, now) for job in jobs}
            able = [job for job in jobs if obstacles[job.id] is None]
            if body.get("dry_run"):
                became = {job.id: verb.expected(job) for job in able}
            else:
                became = verb.apply(store, [job.id for job in able]) if able else {}
            why_not = [
                f"{job_title(job)}: {obstacles[job.id] or 'it changed meanwhile'}"
                for job in jobs
                if job.id not in became
            ]
            changed = [job for job in able if job.id in became]
            undo = None if body.get("dry_run") else _undo(path, body, changed)
            counts = Counter(became.values())
            would = "would be " if body.get("dry_run") else ""
            words = [f"{count:,} {'job' if count == 1 else 'jobs'} {would}{what}" for what, count in counts.items()]
            words += [f"{len(why_not):,} left as they are"] if why_not else []
            result.append(
                BulkResult(changed=len(changed), message=", ".join(words), unchanged=why_not[:_MOST_NAMED], undo=undo)
            )
        return BulkResult(
            changed=sum(one.changed for one in result),
            message=", ".join(one.message for one in result if one.message) or "No job was changed: none matches",
            unchanged=[why for one in result for why in one.unchanged][:_MOST_NAMED],
            undo=next((one.undo for one in result if one.undo is not None), None) if len(result) == 1 else None,
        )

    done = await app_state.pool.run(work)
    app_state.snapshot_cache.refresh()
    return answer(done)


def _verbs(body: dict[str, Any]) -> list[tuple[Verb, Sequence[str] | None]]:
    """Each with the ids to which it applies; None: all that match."""
    named = [name for name in ("q", "jobs", "held", "positions") if body.get(name) is not None]
    if not named or ("q" in named and len(named) > 1):
        raise InvalidFieldsError({"": "give q, or the ids of jobs"})
    action = body["action"]
    if (action in {"tag", "untag"}) != (body.get("tag") is not None):
        raise InvalidFieldsError({"tag": f"{action} takes {'a' if action in {'tag', 'untag'} else 'no'} tag"})
    if action == "move" and (body.get("place") is None) == (body.get("positions") is None):
        raise InvalidFieldsError({"place": "give either place or positions"})
    if (body.get("place") or body.get("positions")) and action != "move":
        raise InvalidFieldsError({"place": "only move takes it"})
    if body.get("held") is not None and action != "retry":
        raise InvalidFieldsError({"held": "only retry takes it"})
    if body.get("positions") is not None:
        positions = body["positions"]
        back = msgspec.structs.replace(
            moving("first"),
            effect="put back",
            apply=lambda store, ids: dict.fromkeys(
                store.jobs.put_back({name: positions[name] for name in ids}), "put back"
            ),
        )
        return [(back, list(positions))]
    verb = _verb(action, body)
    if action == "retry" and body.get("held") is not None:
        return [(verb, body.get("jobs") or []), (REINSTATE, body["held"])]
    return [(verb, body.get("jobs"))]


def _verb(action: str, body: dict[str, Any]) -> Verb:
    match action:
        case "tag" | "untag":
            try:
                return tagging(body["tag"], remove=action == "untag")
            except BadInputError as error:
                raise InvalidFieldsError({"tag": str(error)}) from None
        case "move":
            return moving(body["place"])
    return {"cancel": CANCEL, "retry": RETRY, "hold": HOLD, "release": RELEASE}[action]


def _chosen(store: Store, body: dict[str, Any], verb: Verb, names: Sequence[str] | None) -> list[Job]:
    if names is None:
        try:
            query = parse_query(body["q"])
        except BadInputError as error:
            raise InvalidFieldsError({"q": str(error)}) from None
        return store.jobs.matching(query if query.states else query.narrowed(verb.among))
    return store.jobs.with_ids([name for name in dict.fromkeys(names) if ID.fullmatch(name)])


def _undo(path: str, body: dict[str, Any], before: Sequence[Job]) -> Undo | None:
    """Stop requests to running jobs and outcomes of retried jobs cannot be undone."""
    ids = [job.id for job in before]
    undone: dict[str, Any]
    match body["action"]:
        case "cancel":
            waited = [job.id for job in before if job.state == "queued"]
            held = [job.id for job in before if job.state == "held"]
            ids = [*waited, *held]
            undone = {"action": "retry", "jobs": waited} | ({"held": held} if held else {})
        case "retry":
            ids = [job.id for job in before if job.state != "queued"]
            undone = {"action": "cancel", "jobs": ids}
        case "move":
            undone = {"action": "move", "positions": {job.id: job.position for job in before}}
        case "tag" | "untag" as action:
            undone = {"action": "untag" if action == "tag" else "tag", "tag": body["tag"], "jobs": ids}
        case action:
            undone = {"action": "release" if action == "hold" else "hold", "jobs": ids}
    return Undo(method="POST", path=path, body=undone) if 0 < len(ids) <= _MOST_UNDONE else None
