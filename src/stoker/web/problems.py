"""Errors as problem details (RFC 9457): one JSON object with a message and a status."""

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Final

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from msgspec import Meta
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from stoker.errors import BadInputError, InvalidFieldsError, StokerError

MEDIA_TYPE: Final = "application/problem+json"
# JSON or text even for browsers.
_FOR_PROGRAMS: Final = ("/api", "/metrics", "/healthz", "/static")
# A database restart takes seconds.
_RETRY_AFTER: Final = 5
# A hostile request may have a hundred thousand.
_MAX_ERRORS: Final = 50
_MAX_DETAIL: Final = 1000


class FieldError(msgspec.Struct):
    """One invalid field, parameter or header."""

    detail: str
    pointer: Annotated[str | None, Meta(description="The field of the body, as a JSON pointer (RFC 6901).")] = None
    parameter: Annotated[str | None, Meta(description="The name of the parameter or header.")] = None


class Problem(msgspec.Struct):
    """An error (RFC 9457)."""

    type: Annotated[str, Meta(description="Always `about:blank`; see `status`.")]
    title: str
    status: int
    detail: Annotated[str, Meta(description="One sentence for people: what is wrong, and what to do.")]
    errors: Annotated[list[FieldError] | None, Meta(description="The invalid fields and parameters.")] = None


ErrorPage = Callable[[Request, int, str, str], Response]
"""Renders an error page from a status, a title and a message."""


class NotFoundError(BadInputError):
    """The resource does not exist."""

    status = 404


class ConflictError(BadInputError):
    """The current state of the resource does not allow it."""

    status = 409


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
        if isinstance(error, InvalidFieldsError | ParameterError):
            return invalid(request, _errors_in(error))
        if isinstance(error, BadInputError):
            return answer(request, getattr(error, "status", 400), str(error))
        # Other errors are not the client's fault and may be temporary.
        return answer(request, 503, str(error), {"Retry-After": str(_RETRY_AFTER)})

    def http_exception(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return answer(request, 500, "internal error: the server's log has details")
        match error.status_code:
            case 404:
                detail = f"there is nothing at {request.url.path[:200]}"
            case 405:
                detail = f"{request.method} is not allowed for {request.url.path[:200]}"
            case _:
                detail = error.detail
        return answer(request, error.status_code, detail, error.headers)

    def invalid_parameters(request: Request, error: Exception) -> Response:
        # Without the values, which may be secret or not even text.
        found = error.errors()[:_MAX_ERRORS] if isinstance(error, RequestValidationError) else []
        return invalid(
            request, [{"parameter": ".".join(map(str, one["loc"][1:])), "detail": str(one["msg"])} for one in found]
        )

    def invalid(request: Request, errors: list[dict[str, str]]) -> Response:
        several = "some values in the request are invalid"
        return answer(
            request, 422, several if len(errors) > 1 else "one value in the request is invalid", errors=errors
        )

    app.add_exception_handler(StokerError, stoker_error)
    app.add_exception_handler(RequestValidationError, invalid_parameters)
    app.add_exception_handler(HTTPException, http_exception)
    app.add_exception_handler(Exception, http_exception)


def wants_page(scope: Scope) -> bool:
    """Whether the client is a browser that shows a page."""
    path: str = scope["path"]
    if any(path == place or path.startswith(f"{place}/") for place in _FOR_PROGRAMS):
        return False
    return "text/html" in Headers(scope=scope).get("accept", "")


def _errors_in(error: InvalidFieldsError | ParameterError) -> list[dict[str, str]]:
    if isinstance(error, ParameterError):
        return [{"parameter": error.parameter, "detail": str(error)}]
    return [
        {"pointer": f"#/{_escaped(field)}" if field else "#", "detail": _shown(text)}
        for field, text in list(error.mistakes.items())[:_MAX_ERRORS]
    ]


def _title(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"


def _shown(text: str) -> str:
    return text if len(text) <= _MAX_DETAIL else text[: _MAX_DETAIL - 1] + "…"


def _escaped(field: str) -> str:
    """For a JSON pointer (RFC 6901)."""
    return field[:100].replace("~", "~0").replace("/", "~1")
