"""Pages of a list that grows at its front: where the next page begins, as text that only we can read."""

import base64
import binascii
import math
from typing import Final, NamedTuple
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request

from stoker.queue.model import Job
from stoker.web.problems import ParameterError

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
