"""Pages of a list that grows at its front: where the next page begins, as text that only we can read."""

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

# Two numbers, written out.
_LONGEST: Final = 200
_NONE: Final = "that is no cursor: use the `next` of a page as it is"


class Page(NamedTuple):
    items: list[Job]
    next: str | None
    """The cursor of the page after it; None when this is the last."""


def cursor_of(job: Job) -> str:
    """The place right behind this job."""
    return base64.urlsafe_b64encode(msgspec.json.encode((job.submitted, job.position))).decode().rstrip("=")


def place_of(cursor: str) -> tuple[float, float]:
    """What `Store.page` calls `before`."""
    try:
        if len(cursor) > _LONGEST or not cursor.isascii():
            raise ValueError(cursor)
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        submitted, position = msgspec.json.decode(text, type=tuple[float, float])
    except (ValueError, binascii.Error):
        raise ParameterError("cursor", _NONE) from None
    if not (math.isfinite(submitted) and math.isfinite(position)):
        raise ParameterError("cursor", _NONE)
    return submitted, position


def page_of(found: list[Job], limit: int) -> Page:
    """Of one job more than a page holds, when there is one more."""
    items = found[:limit]
    return Page(items, cursor_of(items[-1]) if len(found) > limit else None)


def link_to_next(request: Request, cursor: str) -> str:
    """The `Link` header (RFC 8288), relative to the address that was asked for."""
    kept = [(name, value) for name, value in request.query_params.multi_items() if name != "cursor"]
    return f'<{request.url.path}?{urlencode([*kept, ("cursor", cursor)])}>; rel="next"'


JSON: Final = "application/json"
TEXT: Final = "text/plain; charset=utf-8"

_WHEN: Final[Mapping[int, str]] = {
    400: "The request cannot be read: it is not JSON, or not text in UTF-8.",
    401: "There is no token with it, or one that is not known.",
    403: "The token is a viewer's, or the request comes from another site.",
    404: "There is no such thing.",
    409: "It cannot be done to this as it is now; the detail says why.",
    413: "The body is larger than 1 MiB.",
    422: "Some of what was asked for cannot be meant; `errors` says what and where.",
    429: "Too many wrong tokens came from there: wait as long as `Retry-After` says.",
    503: "The queue does not answer now: try again after `Retry-After` seconds.",
}


class Undo(msgspec.Struct, frozen=True, kw_only=True):
    """The request that takes it back."""

    method: Literal["POST", "PATCH"]
    path: str
    body: dict[str, Any] | None = None


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request to change something."""

    changed: bool
    """False when it was so already."""
    message: str
    """For people."""
    undo: Undo | None = None
    """None when it cannot be taken back."""


def answer(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """It as JSON. That nobody keeps it is said by the guard, of all answers."""
    return Response(msgspec.json.encode(value), status, headers=headers, media_type=JSON)


def answer_with_jobs(
    request: Request, value: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """The same for what has jobs in it: without what this visitor must not see of them."""
    return answer(masked(to_builtins(value), for_viewer=not user_of(request).operates), status, headers)


def tagged(request: Request, value: object) -> Response:
    """It as JSON that need not be sent again to who has the same already."""
    body = msgspec.json.encode(value)
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"ETag": tag})
    return Response(body, headers={"ETag": tag}, media_type=JSON)


def found(store: Store, name: str) -> Job:
    """The job with this id; no beginnings and no names, which may mean another one tomorrow."""
    if ID.fullmatch(name):
        try:
            job = store.jobs.get(name)
        except BadInputError:
            job = None
        if job is not None and job.id == name:
            return job
    raise NotFoundError(f"there is no job {name[:40]!a}")


async def known_parameters(request: Request) -> None:
    """Refuses a question with a slip in it: `?sate=held` must not be answered with all jobs."""
    route = request.scope.get("route")
    known = {field.alias for field in route.dependant.query_params} if isinstance(route, APIRoute) else set()
    if unknown := [name for name in request.query_params if name not in known]:
        may = f"it may have {', '.join(sorted(known))}" if known else "it takes none"
        raise ParameterError(unknown[0][:100], f"there is no such parameter here: {may}")


def problems_listed(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For the description of an operation."""
    return {
        status: {
            "description": _WHEN[status],
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in statuses
    }


def text_listed(media_type: str, description: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The description of an answer that is text, and of what its headers say."""
    return {
        "description": description,
        "content": {media_type: {"schema": {"type": "string"}}},
        "headers": {
            name: {"description": words, "schema": {"type": "string"}} for name, words in (headers or {}).items()
        },
    }


def names_of(values: Sequence[str]) -> str:
    return ", ".join(value.replace("_", " ") for value in values)
