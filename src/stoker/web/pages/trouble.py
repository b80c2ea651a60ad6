"""What a person sees instead of a page that there is not."""

from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from stoker.web.templating import page

_HEADINGS: Final = {404: "Not here", 422: "Not understood", 503: "The queue is away"}


def trouble_page(request: Request, status: int, _title: str, sentence: str) -> Response:
    """For `problems.install`."""
    heading = _HEADINGS.get(status, "That did not work")
    return page(request, "trouble.html", status=status, heading=heading, told=sentence, status_code=status)
