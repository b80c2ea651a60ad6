"""Static files, each with an address that changes with its content."""

import hashlib
import mimetypes
import os
from functools import cache
from pathlib import Path
from typing import Final

from starlette.datastructures import QueryParams
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

_DIRECTORY: Final = Path(__file__).parent / "static"
# The address contains a digest of the content, so a cached copy never becomes stale.
_IMMUTABLE: Final = "public, max-age=31536000, immutable"
_REVALIDATE: Final = "no-cache"

mimetypes.add_type("application/manifest+json", ".webmanifest")


def static_url(name: str) -> str:
    """The address of `name`, with its version."""
    return f"/static/{name}?v={_version(_DIRECTORY / name)}"


def static_file(name: str) -> FileResponse:
    """One file under another address."""
    return FileResponse(_DIRECTORY / name, headers={"Cache-Control": _REVALIDATE})


class VersionedFiles(StaticFiles):
    """Lets browsers cache a file forever if the address has its current version."""

    def __init__(self) -> None:
        super().__init__(directory=_DIRECTORY)

    def file_response(
        self, full_path: "os.PathLike[str] | str", stat_result: os.stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        is_current = QueryParams(scope["query_string"]).get("v") == _version(Path(full_path))
        response.headers["Cache-Control"] = _IMMUTABLE if is_current else _REVALIDATE
        return response


@cache
def _version(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
