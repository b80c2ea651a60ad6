"""`/groups`: jobs with one name, and changes of all of them at once."""

from typing import Annotated, Final, Literal

import msgspec
from fastapi import APIRouter, Path, Query
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from stoker.actions.subscription import LONGEST
from stoker.errors import BadInputError, InvalidFieldsError
from stoker.masking import MASK, masked_notify, unmasked_notify
from stoker.queue.field_kinds import NOTIFY, SIZE, JobName, Seconds, Written
from stoker.queue.groups import Group
from stoker.queue.listing import GROUP_PREFIX
from stoker.queue.model import Job
from stoker.queue.steering import CANCEL, HOLD, REINSTATE, RELEASE, RETRY, Verb, moving
from stoker.queue.store import Store
from stoker.units import format_duration
from stoker.web.answers import Done, Undo, answer_with_jobs, carry_out
from stoker.web.api.bodies import body_of
from stoker.web.api.openapi import operation
from stoker.web.app_state import app_state_of, user_of
from stoker.web.problems import ConflictError, NotFoundError
from stoker.web.submission import seconds_of

router = APIRouter(tags=["groups"])

GroupName = Annotated[str, Path(min_length=1, max_length=200, description="The name of a group.")]
# The request that undoes a change contains the jobs; a longer one is omitted.
_MOST_UNDONE: Final = 5000


Entries = Annotated[list[Annotated[str, Meta(max_length=LONGEST)]], Meta(max_length=20)]


class GroupList(msgspec.Struct, frozen=True, kw_only=True):
    """Groups with the newest jobs come first."""

    items: list[Group]


class GroupBody(msgspec.Struct, kw_only=True):
    """Omitted fields stay unchanged."""

    at_most: Annotated[
        Annotated[int, Meta(ge=1, le=2**31 - 1)] | None,
        Meta(description="How many of its jobs may run at once; null: no cap."),
    ] = None
    notify: Annotated[
        Entries,
        Meta(
            description="Who gets a message when all of its jobs have ended: `done`, or `done:` and a URL. `***` in "
            "place of a URL keeps the one that is there.",
            examples=[["done"]],
        ),
    ] = []


class MembersBody(msgspec.Struct, kw_only=True):
    jobs: Annotated[
        Annotated[list[JobName], Meta(max_length=_MOST_UNDONE)] | None,
        Meta(description="Ids of jobs in the group; by default all to which the action applies."),
    ] = None
    held: Annotated[bool, Meta(description="With retry: hold them; only for jobs that were cancelled.")] = False


class GroupMoveBody(msgspec.Struct, kw_only=True):
    place: Literal["first", "last"]


class GroupSnoozeBody(msgspec.Struct, kw_only=True):
    seconds: Annotated[Seconds | Written, Meta(description="Seconds, or text like `30m`; 0 ends the snooze.")]


@operation(router, "GET", "/groups", GroupList)
async def list_groups(request: Request, limit: Annotated[int, Query(ge=1, le=200)] = 50) -> Response:
    """List groups: how many of their jobs are in each state, and how many may run at once."""
    found = await app_state_of(request).pool.run(lambda store: store.groups.newest(limit))
    return answer_with_jobs(request, GroupList(items=found))


@operation(router, "GET", "/groups/{group}", Group, 404)
async def get_group(request: Request, group: GroupName) -> Response:
    """Get a group: how many of its jobs are in each state, and how many may run at once."""
    return answer_with_jobs(request, await app_state_of(request).pool.run(lambda store: _found(store, group)))


@operation(router, "PATCH", "/groups/{group}", Done, 404, 413, body=GroupBody)
async def change_group(request: Request, group: GroupName) -> Response:
    """Change how many jobs of a group may run at once, and the messages when all have ended. Running jobs continue."""
    body = await body_of(request, GroupBody)

    def change(store: Store) -> Done:
        before = _found(store, group)
        done: list[str] = []
        undo: dict[str, object] = {}
        if "at_most" in body:
            at_most = body["at_most"]
            if at_most is not None:
                SIZE.check(at_most)
            done.append("no cap" if at_most is None else f"at most {at_most} at once")
            if before.at_most != at_most and store.groups.cap(group, at_most):
                undo["at_most"] = before.at_most
        entries: tuple[str, ...] = ()
        if "notify" in body:
            entries = _unmasked(body["notify"], before)
            done.append("a message is sent when all are done" if entries else "no message when all are done")
            if before.notify != entries and store.groups.set_notify(group, entries):
                undo["notify"] = masked_notify(before.notify)
        # A removed URL is in no response.
        lost = "notify" in undo and any("://" in entry and entry not in entries for entry in before.notify)
        back = Undo(method="PATCH", path=request.url.path, body=undo) if undo and not lost else None
        return Done(changed=bool(undo), message=f"{group}: {', '.join(done) or 'nothing differs'}", undo=back)

    return await carry_out(request, change)


def _unmasked(said: list[str], before: Group) -> tuple[str, ...]:
    try:
        entries = unmasked_notify(NOTIFY.read(said), before.notify)
        if entries is None:
            raise BadInputError(f"{MASK} stands for a hidden URL: write the URL")
        NOTIFY.check(entries)
    except BadInputError as error:
        raise InvalidFieldsError({"notify": str(error)}) from None
    return entries


@operation(router, "POST", "/groups/{group}/cancel", Done, 404, 409, 413, body=MembersBody)
async def cancel_group(request: Request, group: GroupName) -> Response:
    """Cancel the jobs of a group. Running jobs are asked to stop, which cannot be undone."""
    return await _steer(request, group, CANCEL, "retry")


@operation(router, "POST", "/groups/{group}/retry", Done, 404, 409, 413, body=MembersBody)
async def retry_group(request: Request, group: GroupName) -> Response:
    """Queue the jobs of a group again that failed or were cancelled."""
    return await _steer(request, group, RETRY, "cancel")


@operation(router, "POST", "/groups/{group}/hold", Done, 404, 409, 413, body=MembersBody)
async def hold_group(request: Request, group: GroupName) -> Response:
    """Hold the waiting jobs of a group."""
    return await _steer(request, group, HOLD, "release")


@operation(router, "POST", "/groups/{group}/release", Done, 404, 409, 413, body=MembersBody)
async def release_group(request: Request, group: GroupName) -> Response:
    """Release the held jobs of a group."""
    return await _steer(request, group, RELEASE, "hold")


@operation(router, "POST", "/groups/{group}/move", Done, 404, 409, 413, body=GroupMoveBody)
async def move_group(request: Request, group: GroupName) -> Response:
    """Move the waiting jobs of a group before or behind all others of their priority, in their order."""
    place = (await body_of(request, GroupMoveBody))["place"]
    return await carry_out(request, lambda store: _apply(store, group, moving(place), None)[0])


@operation(router, "POST", "/groups/{group}/snooze", Done, 404, 409, 413, body=GroupSnoozeBody)
async def snooze_group(request: Request, group: GroupName) -> Response:
    """Snooze the rules of the running jobs of a group; 0 seconds end the snooze."""
    who, body = user_of(request).name, await body_of(request, GroupSnoozeBody)
    try:
        seconds = seconds_of(body["seconds"])
    except BadInputError as error:
        raise InvalidFieldsError({"seconds": str(error)}) from None

    def snooze(store: Store) -> Done:
        running = [job.attempt for job in _members(store, group) if job.state == "running" and job.attempt is not None]
        number = sum(store.attempts.snooze(attempt, seconds, who) for attempt in running)
        if not number:
            raise ConflictError(f"the group {group} was not snoozed: none of its jobs is running")
        what = f"snoozed for {format_duration(seconds)}" if seconds else "watched again"
        return Done(changed=True, message=f"{group}: {_count(number)} {what}")

    return await carry_out(request, snooze)


async def _steer(request: Request, group: str, verb: Verb, back: str) -> Response:
    """`back`: the verb that undoes it for the changed jobs."""
    body = await body_of(request, MembersBody)
    chosen = None if body.get("jobs") is None else set(body["jobs"])
    wanted = REINSTATE if verb is RETRY and body.get("held") else verb

    def work(store: Store) -> Done:
        done, changed = _apply(store, group, wanted, chosen)
        # A running job that got a stop request will have lost its work.
        able = [job for job in changed if job.state != "running"]
        if not able or len(able) > _MOST_UNDONE:
            return done
        undone: dict[str, object] = {"jobs": [job.id for job in able]}
        if verb is CANCEL and any(job.state == "held" for job in able):
            undone["held"] = True  # jobs that were held must not start
        path = f"{request.url.path.rpartition('/')[0]}/{back}"
        return msgspec.structs.replace(done, undo=Undo(method="POST", path=path, body=undone))

    return await carry_out(request, work)


def _apply(store: Store, group: str, verb: Verb, chosen: set[str] | None) -> tuple[Done, list[Job]]:
    members = _members(store, group)
    meant = [job for job in members if (job.state in verb.among if chosen is None else job.id in chosen)]
    now = store.clock()
    able = [job for job in meant if verb.obstacle(job, now) is None]
    became = verb.apply(store, [job.id for job in able]) if able else {}
    if not became:
        raise ConflictError(f"the group {group} was not {verb.done}: no job of it is {' or '.join(verb.among)}")
    words: dict[str, int] = {}
    for word in became.values():
        words[word] = words.get(word, 0) + 1
    told = ", ".join(f"{_count(number)} {word}" for word, number in words.items())
    return Done(changed=True, message=f"{group}: {told}"), [job for job in able if job.id in became]


def _found(store: Store, name: str) -> Group:
    try:
        return store.groups.get(name)
    except BadInputError:
        raise NotFoundError(f"there is no group {name[:60]!a}") from None


def _members(store: Store, name: str) -> list[Job]:
    if members := store.jobs.members(f"{GROUP_PREFIX}{name}"):
        return members
    raise NotFoundError(f"there is no group {name[:60]!a}")


def _count(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"
