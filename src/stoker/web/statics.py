"""The files that the page is made of, each under an address that changes with its content.

They are few and small, so they are read once and kept, together with what they are when compressed: a request is a look
into a table, and no path of a request ever becomes a path of the file system.
"""

import gzip
import hashlib
from functools import cache
from pathlib import Path
from typing import Final

import msgspec
from starlette.datastructures import Headers, QueryParams
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

_FOLDER: Final = Path(__file__).parent / "static"
_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
}
# The address has the content in it, so whoever has it has the right one for good.
_FOR_GOOD: Final = "public, max-age=31536000, immutable"
_ASK_AGAIN: Final = "no-cache"
# Below this the headers weigh more than what compression saves.
_WORTH_COMPRESSING: Final = 500


class Static(msgspec.Struct, frozen=True):
    """One file."""

    content: bytes
    compressed: bytes | None
    type: str
    version: str


def static_url(name: str) -> str:
    """Where `name` is found, with its version; a name that there is not is a mistake in a template."""
    return f"/static/{name}?v={_table()[name].version}"


def static(name: str) -> Static | None:
    """The file of that name, if there is one."""
    return _table().get(name)


def answer(file: Static, headers: Headers, *, caching: str = _ASK_AGAIN) -> Response:
    """The file as a response, compressed where that is understood, or that it has not changed."""
    about = {"Cache-Control": caching, "ETag": f'"{file.version}"', "Vary": "Accept-Encoding"}
    if f'"{file.version}"' in headers.get("if-none-match", ""):
        return Response(status_code=304, headers=about)
    if file.compressed is not None and "gzip" in headers.get("accept-encoding", ""):
        return Response(file.compressed, media_type=file.type, headers=about | {"Content-Encoding": "gzip"})
    return Response(file.content, media_type=file.type, headers=about)


def files() -> ASGIApp:
    """What is mounted at /static."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await _respond(scope)(scope, receive, send)

    return serve


def _respond(scope: Scope) -> Response:
    if scope["type"] != "http" or scope["method"] not in {"GET", "HEAD"}:
        return PlainTextResponse("only GET and HEAD are for files", status_code=405, headers={"Allow": "GET, HEAD"})
    path: str = scope["path"]
    file = static(path.removeprefix(scope.get("root_path", "")).removeprefix("/static").removeprefix("/"))
    if file is None:
        return PlainTextResponse("there is no such file", status_code=404)
    asked_for = QueryParams(scope["query_string"]).get("v")
    return answer(file, Headers(scope=scope), caching=_FOR_GOOD if asked_for == file.version else _ASK_AGAIN)


@cache
def _table() -> dict[str, Static]:
    """Every file that a browser may have, by its name below the folder."""
    return {
        path.relative_to(_FOLDER).as_posix(): _read(path)
        for path in sorted(_FOLDER.rglob("*"))
        if path.is_file() and path.suffix in _TYPES
    }


def _read(path: Path) -> Static:
    content = path.read_bytes()
    compressed = gzip.compress(content, 9, mtime=0) if path.suffix != ".png" else b""
    return Static(
        content=content,
        compressed=compressed if len(content) > _WORTH_COMPRESSING and 0 < len(compressed) < len(content) else None,
        type=_TYPES[path.suffix],
        version=hashlib.sha256(content).hexdigest()[:16],
    )
