"""Errors as problem details (RFC 9457): one JSON object with a message and a status."""

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
# JSON or text even for browsers.
_FOR_PROGRAMS: Final = ("/api", "/metrics", "/healthz", "/static")
# A database restart takes seconds.
_RETRY_AFTER: Final = 5
# A hostile request may have a hundred thousand.
_MAX_ERRORS: Final = 50
_MAX_DETAIL: Final = 1000


class FieldError(BaseModel):
    """One invalid field, parameter or header."""

    pointer: str | None = Field(None, description="The place in the body, as a JSON pointer (RFC 6901).")
    parameter: str | None = Field(None, description="The name of the parameter or header.")
    detail: str = Field(description="What is wrong with it.")


class Problem(BaseModel):
    """An error (RFC 9457)."""

    type: str = Field(description="Always `about:blank`; see `status`.")
    title: str
    status: int
    detail: str = Field(description="One sentence for people: what is wrong, and what to do.")
    errors: list[FieldError] | None = Field(None, description="The invalid fields and parameters.")


ErrorPage = Callable[[Request, int, str, str], Response]
"""Renders an error page from a status, a title and a message."""


class NotFoundError(BadInputError):
    """The resource does not exist."""


class ConflictError(BadInputError):
    """The current state of the resource does not allow it."""


class InvalidFieldsError(BadInputError):
    """Invalid fields of a form or body, with a message for each."""

    def __init__(self, mistakes: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{field}: {message}" for field, message in mistakes.items()))
        self.mistakes = dict(mistakes)


class ParameterError(BadInputError):
    """An invalid parameter or header."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(message)
        self.parameter = parameter


def problem(
    status: int, title: str, detail: str, *, headers: Mapping[str, str] | None = None, **more: object
) -> Response:
    """`more`: further members of the object."""
    content = {"type": "about:blank", "title": title, "status": status, "detail": _shown(detail), **more}
    # Escaped to ASCII: input may contain lone surrogates, which cannot be encoded.
    return Response(json.dumps(content), status, headers=headers, media_type=MEDIA_TYPE)


def install(app: FastAPI, page: ErrorPage | None = None) -> None:
    """Turns all errors of the application into problems, or into a `page` for browsers."""

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
        headers = {"Retry-After": str(_RETRY_AFTER)} if status == 503 else None
        return answer(request, status, str(error), headers)

    def http_exception(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        headers = error.headers if isinstance(error, HTTPException) else None
        return answer(request, status, _message(request, status, error), headers)

    def invalid(request: Request, error: Exception) -> Response:
        found, body = (error.errors(), error.body) if isinstance(error, RequestValidationError) else ([], None)
        mistakes = _of_validation(found, body)
        return answer(request, 422, _several(len(mistakes)), errors=mistakes)

    def unforeseen(request: Request, _error: Exception) -> Response:
        return answer(request, 500, "internal error: the server's log has details")

    app.add_exception_handler(StokerError, stoker_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_exception)
    app.add_exception_handler(Exception, unforeseen)
    app.openapi = partial(_described, app.openapi)  # type: ignore[method-assign]  # as FastAPI documents it


def _described(openapi: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Adds the schema `Problem`, which all error responses refer to."""
    description = openapi()
    schemas = description.setdefault("components", {}).setdefault("schemas", {})
    schema = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(schema.pop("$defs"))
    schemas["Problem"] = schema
    return description


def wants_page(scope: Scope) -> bool:
    """Whether the client is a browser that shows a page."""
    path: str = scope["path"]
    if any(path == place or path.startswith(f"{place}/") for place in _FOR_PROGRAMS):
        return False
    return "text/html" in Headers(scope=scope).get("accept", "")


def status_of(error: Exception) -> int:
    """The HTTP status of an error."""
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
    # Other errors are not the client's fault and may be temporary.
    return 503


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def _shown(text: str) -> str:
    return text if len(text) <= _MAX_DETAIL else text[: _MAX_DETAIL - 1] + "…"


def _message(request: Request, status: int, error: Exception) -> str:
    match status:
        case 404:
            return f"there is nothing at {request.url.path[:200]}"
        case 405:
            return f"{request.method} cannot be done to {request.url.path[:200]}"
    said = str(error.detail) if isinstance(error, HTTPException) and error.detail else ""
    return said or _title(status)


def _several(count: int) -> str:
    return "one value in the request is invalid" if count == 1 else "some values in the request are invalid"


def _of_fields(mistakes: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"pointer": f"#/{_pointed(field)}", "detail": _shown(text)} for field, text in mistakes.items()]


def _of_validation(found: Sequence[Any], body: object) -> list[dict[str, str]]:
    """The errors of pydantic without the values, which may be secret or not even text."""
    details_by_place: dict[tuple[str, str], list[str]] = {}
    for one in found[:_MAX_ERRORS]:
        if one["type"] == "json_invalid":
            details_by_place["pointer", "#"] = ["this is not JSON"]
            continue
        where, *path = one["loc"]
        if where == "body":
            place = "".join(f"/{_pointed(part)}" for part in _sent(path, body, is_missing=one["type"] == "missing"))
            key = "pointer", f"#{place}"
        else:
            key = "parameter", ".".join(map(str, path))
        details_by_place.setdefault(key, []).append(_plain(str(one["msg"])))
    # If several types are allowed, each has a message.
    return [
        {kind: place, "detail": _shown(", or ".join(dict.fromkeys(details)))}
        for (kind, place), details in details_by_place.items()
    ]


def _sent(path: Sequence[object], body: object, *, is_missing: bool) -> list[str]:
    """The path within the body: pydantic also includes the types that it tried."""
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
    """Escaped for a JSON pointer (RFC 6901)."""
    return part[:100].replace("~", "~0").replace("/", "~1")
