"""JSON responses, pagination by cursor, and descriptions of responses for OpenAPI."""

import base64
import binascii
import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlencode

import msgspec
from fastapi.routing import APIRoute
from msgspec import to_builtins
from starlette.requests import Request
from starlette.responses import Response

from stoker.errors import BadInputError
from stoker.masking import masked
from stoker.queue.fields import ID
from stoker.queue.model import Job
from stoker.queue.store import Store
from stoker.web.app_state import user_of
from stoker.web.problems import MEDIA_TYPE, NotFoundError, ParameterError

# Two encoded numbers are shorter.
_MAX_CURSOR: Final = 200
_INVALID_CURSOR: Final = "invalid cursor: use the `next` of a page unchanged"


class Page(NamedTuple):
    items: list[Job]
    next: str | None
    """The cursor of the next page; None on the last one."""


def cursor_of(job: Job) -> str:
    """The cursor for the jobs after this one."""
    return base64.urlsafe_b64encode(msgspec.json.encode((job.submitted, job.position))).decode().rstrip("=")


def place_of(cursor: str) -> tuple[float, float]:
    """The argument `before` of `Store.jobs.page`."""
    try:
        if len(cursor) > _MAX_CURSOR or not cursor.isascii():
            raise ValueError(cursor)
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        submitted, position = msgspec.json.decode(text, type=tuple[float, float])
    except (ValueError, binascii.Error):
        raise ParameterError("cursor", _INVALID_CURSOR) from None
    if not (math.isfinite(submitted) and math.isfinite(position)):
        raise ParameterError("cursor", _INVALID_CURSOR)
    return submitted, position


def page_of(found: list[Job], limit: int) -> Page:
    """`found` has one job more than the page if there is a next page."""
    items = found[:limit]
    return Page(items, cursor_of(items[-1]) if len(found) > limit else None)


def link_to_next(request: Request, cursor: str) -> str:
    """The `Link` header (RFC 8288)."""
    kept = [(name, value) for name, value in request.query_params.multi_items() if name != "cursor"]
    return f'<{request.url.path}?{urlencode([*kept, ("cursor", cursor)])}>; rel="next"'


JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"

_WHEN: Final[Mapping[int, str]] = {
    400: "The request is not valid JSON or not UTF-8.",
    401: "The token is missing or invalid.",
    403: "The token is a viewer's, or the request comes from another site.",
    404: "Not found.",
    409: "Not possible in the current state; `detail` says why.",
    413: "The body is larger than 1 MiB.",
    422: "Some fields or parameters are invalid; `errors` lists them.",
    429: "Too many wrong tokens from this address: wait for `Retry-After` seconds.",
    503: "The queue does not answer: try again after `Retry-After` seconds.",
}


class Undo(msgspec.Struct, frozen=True, kw_only=True):
    """The request that undoes the change."""

    method: Literal["POST", "PATCH"]
    path: str
    body: dict[str, Any] | None = None


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a request to change something."""

    changed: bool
    """False if nothing had to be changed."""
    message: str
    """For people."""
    undo: Undo | None = None
    """None if it cannot be undone."""


def answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers=headers, media_type=JSON)


def answer_with_jobs(
    request: Request, value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """For values that contain jobs: masks what this user must not see."""
    return answer(masked(to_builtins(value), for_viewer=not user_of(request).operates), status, headers)


def tagged(request: Request, value: object) -> Response:
    """With an ETag, and without a body if the client has the same version."""
    body = msgspec.json.encode(value)
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"ETag": tag})
    return Response(body, headers={"ETag": tag}, media_type=JSON)


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


async def known_parameters(request: Request) -> None:
    """Refuses misspelled parameters: `?sate=held` must not return all jobs."""
    route = request.scope.get("route")
    known = {field.alias for field in route.dependant.query_params} if isinstance(route, APIRoute) else set()
    if unknown := [name for name in request.query_params if name not in known]:
        allowed = f"the parameters are {', '.join(sorted(known))}" if known else "there are no parameters"
        raise ParameterError(unknown[0][:100], f"unknown parameter: {allowed}")


def problems_listed(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error responses of an operation, for OpenAPI."""
    return {
        status: {
            "description": _WHEN[status],
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in statuses
    }


def text_listed(media_type: str, description: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A text response and its headers, for OpenAPI."""
    return {
        "description": description,
        "content": {media_type: {"schema": {"type": "string"}}},
        "headers": {
            name: {"description": text, "schema": {"type": "string"}} for name, text in (headers or {}).items()
        },
    }


def names_of(values: Sequence[str]) -> str:
    return ", ".join(value.replace("_", " ") for value in values)
