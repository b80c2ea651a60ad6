"""How the gate says no: as RFC 9457 asks to programs, as a page to people."""

import http
from collections.abc import Mapping
from typing import Any

from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from stoker.web.config import Config
from stoker.web.problems import problem, wants_page
from stoker.web.templating import rendered


def refusal(
    scope: Scope, config: Config, status: int, sentence: str, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer to a request that goes no further."""
    if wants_page(scope):
        return refusal_page(scope, config, "refused.html", status, headers, sentence=sentence)
    return refusal_in_json(status, sentence, headers)


def refusal_in_json(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    return problem(status, http.HTTPStatus(status).phrase, sentence, headers=headers)


def refusal_page(
    scope: Scope, config: Config, template: str, status: int, headers: Mapping[str, str] | None = None, **context: Any
) -> Response:
    visitor = scope.get("state", {}).get("visitor")
    page = rendered(template, visitor=visitor, site=config.title, status=status, **context)
    return HTMLResponse(page, status, headers)
