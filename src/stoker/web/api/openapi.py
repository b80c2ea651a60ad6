"""The description of the API: each operation states its result and errors; schemas come from the structs."""

from collections.abc import Awaitable, Callable, Mapping
from inspect import getdoc
from typing import Any, Final, Literal, TypeVar

import msgspec
from fastapi import APIRouter, FastAPI
from starlette.responses import Response

from stoker.queue.fields import FIELDS
from stoker.web.problems import MEDIA_TYPE, Problem

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Response]])
Method = Literal["GET", "POST", "PATCH", "DELETE"]

_PROBLEMS: Final[Mapping[int, str]] = {
    400: "The request cannot be parsed.",
    401: "The token is missing or invalid.",
    403: "The token is a viewer's, or the request comes from another site.",
    404: "Not found.",
    409: "Not possible in the current state; `detail` says why.",
    413: "The body is larger than 1 MiB.",
    422: "Some fields or parameters are invalid; `errors` lists them.",
    429: "Too many wrong tokens from this address: wait for `Retry-After` seconds.",
    503: "The queue does not answer: try again after `Retry-After` seconds.",
}
_structs: Final[list[type[msgspec.Struct]]] = [Problem]


def operation(
    router: APIRouter,
    method: Method,
    path: str,
    result: type[msgspec.Struct] | str,
    *problems: int,
    body: type[msgspec.Struct] | None = None,
    statuses: tuple[int, ...] = (200,),
) -> Callable[[Handler], Handler]:
    """Declares a handler, whose docstring describes it. `result` is a struct, or the media type of a text."""
    extra = None if body is None else {"requestBody": {"required": True, "content": _content(body)}}
    success = {"description": "Success.", "content": _content(result)}
    described = problem_responses(*problems)
    described.update(dict.fromkeys(statuses, success))

    def declare(handler: Handler) -> Handler:
        router.add_api_route(
            path,
            handler,
            methods=[method],
            operation_id=handler.__name__,
            summary=(getdoc(handler) or "").partition(".")[0],
            status_code=statuses[0],
            response_class=Response,
            responses=described,
            openapi_extra=extra,
        )
        return handler

    return declare


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {"description": _PROBLEMS[status], "content": {MEDIA_TYPE: {"schema": schema}}} for status in statuses
    }


def _content(kind: type[msgspec.Struct] | str) -> dict[str, Any]:
    if isinstance(kind, str):
        return {kind: {"schema": {"type": "string"}}}
    _structs.append(kind)
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


def install(app: FastAPI) -> None:
    """Adds the schemas that operations refer to."""
    generated = app.openapi

    def openapi() -> dict[str, Any]:
        description = generated()
        schemas = description.setdefault("components", {}).setdefault("schemas", {})
        if "Problem" not in schemas:
            schemas |= msgspec.json.schema_components(_structs, ref_template="#/components/schemas/{name}")[1]
            for name in ("Job", "JobSpec"):
                for field in FIELDS.keys() & schemas[name]["properties"].keys():
                    schemas[name]["properties"][field]["description"] = FIELDS[field].help
        return description

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents it
