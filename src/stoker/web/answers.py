"""Responses in JSON, pages of jobs, and results of changes."""

import base64
import binascii
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from fastapi.routing import APIRoute
from msgspec import to_builtins
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import BadInputError
from stoker.masking import masked
from stoker.queue.field_kinds import ID
from stoker.queue.fields import State
from stoker.queue.model import Attempt, Job
from stoker.queue.search import Mark, Query, Sort, parse_query, parse_sort
from stoker.queue.store import Store
from stoker.web.app_state import app_state_of, user_of
from stoker.web.problems import NotFoundError, ParameterError

# A name of 200 letters and an id are shorter.
_MAX_CURSOR: Final = 2000
_INVALID_CURSOR: Final = "invalid cursor: use the `next` of a page unchanged"
# The maximum that a job may request.
MOST_NODES: Final = 1024


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Some jobs. `next` is the `cursor` of the next page; null on the last one. `cut`: more than 10,000 jobs match, and
    the newest 10,000 of them are sorted."""

    items: list[Job]
    next: str | None = None
    cut: bool = False


def cursor_of(mark: Mark) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(mark)).decode().rstrip("=")


def place_of(cursor: str) -> Mark:
    """The argument `after` of `Store.jobs.search`."""
    try:
        if len(cursor) > _MAX_CURSOR or not cursor.isascii():
            raise ValueError(cursor)
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        first, second = msgspec.json.decode(text, type=tuple[float | str, float | str])
    except (ValueError, binascii.Error):
        raise ParameterError("cursor", _INVALID_CURSOR) from None
    if not all(isinstance(one, str) or math.isfinite(one) for one in (first, second)):
        raise ParameterError("cursor", _INVALID_CURSOR)
    return first, second


def searched(q: str, states: Sequence[State] = (), tag: str | None = None, sort: str = "") -> tuple[Query, Sort]:
    """The query and the order of a list, from the parameters of an address."""
    try:
        query = parse_query(q)
    except BadInputError as error:
        raise ParameterError("q", str(error)) from None
    try:
        order = parse_sort(sort)
    except BadInputError as error:
        raise ParameterError("sort", str(error)) from None
    try:
        return query.narrowed(states, tag), order
    except BadInputError as error:
        raise ParameterError("state", str(error)) from None


def read_page(store: Store, which: tuple[Query, Sort], after: Mark | None, limit: int) -> Page:
    query, sort = which
    try:
        found = store.jobs.search(query, sort, after, limit)
    except BadInputError:
        raise ParameterError("cursor", _INVALID_CURSOR) from None
    mark = (
        None if found.next is None else base64.urlsafe_b64encode(msgspec.json.encode(found.next)).decode().rstrip("=")
    )
    return Page(items=found.jobs, next=mark, cut=found.cut)


class Undo(msgspec.Struct, frozen=True, kw_only=True):
    """The request that undoes the change."""

    method: Literal["POST", "PATCH"]
    path: str
    body: dict[str, Any] | None = None


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a change. `changed` is false if nothing had to change, `undo` null if it cannot be undone."""

    changed: bool
    message: str
    undo: Undo | None = None


async def carry_out(request: Request, work: Callable[[Store], Done]) -> Response:
    """Changes the queue and updates all pages at once."""
    app_state = app_state_of(request)
    done = await app_state.pool.run(work)
    app_state.snapshot_cache.refresh()
    return answer(done)


def answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers=headers, media_type="application/json")


def answer_with_jobs(
    request: Request, value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """For values that contain jobs: masks secrets for this user."""
    return answer(masked(to_builtins(value), for_viewer=not user_of(request).operates), status, headers)


def found(store: Store, name: str) -> Job:
    """The job with exactly this id: prefixes and names may match another job later."""
    if ID.fullmatch(name):
        try:
            job = store.jobs.get(name)
        except BadInputError:
            job = None
        if job is not None and job.id == name:
            return job
    raise NotFoundError(f"there is no job {name[:40]!a}")


def found_attempt(store: Store, job: str, number: int, node: int = 0) -> Attempt:
    """`node`: rank in a job over several nodes."""
    asked = found(store, job)
    if node >= asked.nodes:
        raise NotFoundError(f"job {job} has no node {node}: " + _nodes_in_words(asked.nodes))
    attempts = store.attempts.of(asked.id)
    chosen = next((attempt for attempt in attempts if attempt.number == number), None)
    if chosen is None:
        had = "it has not started yet" if not attempts else f"its last one is {attempts[-1].number}"
        raise NotFoundError(f"job {job} has no attempt {number}: {had}")
    return chosen


def _nodes_in_words(count: int) -> str:
    return "it runs on one machine" if count == 1 else f"they are 0 to {count - 1}"


async def known_parameters(request: Request) -> None:
    """Refuses misspelled parameters: `?sate=held` must not return all jobs."""
    route = request.scope.get("route")
    known = {field.alias for field in route.dependant.query_params} if isinstance(route, APIRoute) else set()
    if unknown := [name for name in request.query_params if name not in known]:
        allowed = f"the parameters are {', '.join(sorted(known))}" if known else "there are no parameters"
        raise ParameterError(unknown[0][:100], f"unknown parameter: {allowed}")
