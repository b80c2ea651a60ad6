"""What went wrong, as RFC 9457 has it: one JSON object with a sentence for people and a status for programs."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from stoker.errors import BadInputError, QueueAwayError, StokerError

MEDIA_TYPE: Final = "application/problem+json"
# What no person looks at, also when a browser asks for it.
_FOR_PROGRAMS: Final = ("/api", "/metrics", "/healthz", "/static")
# A database that restarts is back within seconds.
_SECONDS_UNTIL_BACK: Final = 5
# The first few are enough to mend a request by; a hostile one may have a hundred thousand.
_MOST_ERRORS: Final = 50
_LONGEST_DETAIL: Final = 1000


class FieldError(BaseModel):
    """One thing in a request that cannot be meant."""

    pointer: str | None = Field(None, description="Where in the body, as RFC 6901 writes it.")
    parameter: str | None = Field(None, description="Which parameter or header.")
    detail: str = Field(description="What is wrong with it.")


class Problem(BaseModel):
    """What went wrong (RFC 9457)."""

    type: str = Field(description="Always `about:blank`: the status says what kind it is.")
    title: str
    status: int
    detail: str = Field(description="One sentence for people: what is wrong, and what to do.")
    errors: list[FieldError] | None = Field(None, description="Where several things may be wrong: each of them.")


ErrorPage = Callable[[Request, int, str, str], Response]
"""Makes a page for people of a status, a title and a sentence."""


class NotFoundError(BadInputError):
    """What the address names is not there."""


class ConflictError(BadInputError):
    """It cannot be done to what the address names, as that is now."""


class InvalidFieldsError(BadInputError):
    """Several things in one form cannot be meant: a sentence for each field."""

    def __init__(self, mistakes: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{field}: {sentence}" for field, sentence in mistakes.items()))
        self.mistakes = dict(mistakes)


class ParameterError(BadInputError):
    """One parameter or header cannot be meant."""

    def __init__(self, parameter: str, sentence: str) -> None:
        super().__init__(sentence)
        self.parameter = parameter


def problem(
    status: int, title: str, detail: str, *, headers: Mapping[str, str] | None = None, **more: object
) -> Response:
    """The answer. `more` are further members of the object."""
    told = {"type": "about:blank", "title": title, "status": status, "detail": _shown(detail), **more}
    # Escaped to ASCII: what came in may hold half a character, which no encoder would take.
    return Response(json.dumps(told), status, headers=headers, media_type=MEDIA_TYPE)


def install(app: FastAPI, page: ErrorPage | None = None) -> None:
    """Every error of the application becomes a problem, or a `page` for whoever asked for HTML."""

    def answer(
        request: Request, status: int, detail: str, headers: Mapping[str, str] | None = None, **more: object
    ) -> Response:
        title = _title(status)
        if page is None or not wants_page(request.scope):
            return problem(status, title, detail, headers=headers, **more)
        shown = page(request, status, title, detail)
        shown.headers.update(headers or {})
        return shown

    def stoker_error(request: Request, error: Exception) -> Response:
        if isinstance(error, InvalidFieldsError):
            return answer(request, 422, _several(len(error.mistakes)), errors=_of_fields(error.mistakes))
        if isinstance(error, ParameterError):
            mistake = {"parameter": error.parameter, "detail": str(error)}
            return answer(request, 422, _several(1), errors=[mistake])
        status = status_of(error)
        headers = {"Retry-After": str(_SECONDS_UNTIL_BACK)} if status == 503 else None
        return answer(request, status, str(error), headers)

    def http_exception(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = error.headers if isinstance(error, HTTPException) else None
        return answer(request, status, _sentence(request, status, error), headers)

    def invalid(request: Request, error: Exception) -> Response:
        found, body = (error.errors(), error.body) if isinstance(error, RequestValidationError) else ([], None)
        mistakes = _of_validation(found, body)
        return answer(request, 422, _several(len(mistakes)), errors=mistakes)

    def unforeseen(request: Request, _error: Exception) -> Response:
        return answer(request, 500, "something went wrong here that should not have: the server's log says what")

    app.add_exception_handler(StokerError, stoker_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_exception)
    app.add_exception_handler(Exception, unforeseen)
    app.openapi = partial(_described, app.openapi)  # type: ignore[method-assign]  # FastAPI's own way to add to it


def _described(openapi: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """With the schema that every problem in the description refers to."""
    description = openapi()
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    told = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(told.pop("$defs"))
    schemas["Problem"] = told
    return description


def wants_page(scope: Scope) -> bool:
    """Whether a person looks at the answer, and not a program."""
    path: str = scope["path"]
    if any(path == place or path.startswith(f"{place}/") for place in _FOR_PROGRAMS):
        return False
    return "text/html" in Headers(scope=scope).get("accept", "")


def status_of(error: Exception) -> int:
    """What an error of ours means to a program."""
    match error:
        case NotFoundError():
            return 404
        case ConflictError():
            return 409
        case InvalidFieldsError() | ParameterError():
            return 422
        case BadInputError():
            return 400
        case QueueAwayError():
            return 503
    # Whatever else keeps the queue from answering is not the doing of who asked, and may pass.
    return 503


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def _shown(text: str) -> str:
    return text if len(text) <= _LONGEST_DETAIL else text[: _LONGEST_DETAIL - 1] + "…"


def _sentence(request: Request, status: int, error: Exception) -> str:
    match status:
        case 404:
            return f"there is nothing at {request.url.path[:200]}"
        case 405:
            return f"{request.method} cannot be done to {request.url.path[:200]}"
    said = str(error.detail) if isinstance(error, HTTPException) and error.detail else ""
    return said or _title(status)


def _several(count: int) -> str:
    return "one thing in the request cannot be meant" if count == 1 else "some things in the request cannot be meant"


def _of_fields(mistakes: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"pointer": f"#/{_pointed(field)}", "detail": _shown(text)} for field, text in mistakes.items()]


def _of_validation(found: Sequence[Any], body: object) -> list[dict[str, str]]:
    """What pydantic found, without the value itself: it may be a secret, or not even text."""
    told: dict[tuple[str, str], list[str]] = {}
    for one in found[:_MOST_ERRORS]:
        if one["type"] == "json_invalid":
            told["pointer", "#"] = ["this is not JSON"]
            continue
        where, *path = one["loc"]
        if where == "body":
            place = "".join(f"/{_pointed(part)}" for part in _sent(path, body, is_missing=one["type"] == "missing"))
            key = "pointer", f"#{place}"
        else:
            key = "parameter", ".".join(map(str, path))
        told.setdefault(key, []).append(_plain(str(one["msg"])))
    # Where several types will do, each says what it misses.
    return [
        {kind: place, "detail": _shown(", or ".join(dict.fromkeys(details)))} for (kind, place), details in told.items()
    ]


def _sent(path: Sequence[object], body: object, *, is_missing: bool) -> list[str]:
    """The way to it through the body as it was sent: pydantic also names the types that it tried."""
    value: Any = body
    kept = []
    for number, part in enumerate(path):
        places = value if isinstance(value, Mapping) else range(len(value)) if isinstance(value, list) else ()
        if part in places:
            value = value[part]
        elif not (is_missing and number == len(path) - 1):
            continue
        kept.append(str(part))
    return kept


def _plain(message: str) -> str:
    return message[:1].lower() + message[1:]


def _pointed(part: str) -> str:
    """As RFC 6901 writes a part of a pointer."""
    return part[:100].replace("~", "~0").replace("/", "~1")
