"""What a browser asks for at a fixed address: the manifest that makes the page installable, and its icon."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from stoker.web.statics import answer, static

router = APIRouter()


@router.get("/manifest.webmanifest")
async def manifest(request: Request) -> Response:
    return _file(request, "manifest.webmanifest")


@router.get("/favicon.ico")
async def favicon(request: Request) -> Response:
    return _file(request, "icons/icon-192.png")


def _file(request: Request, name: str) -> Response:
    file = static(name)
    return Response(status_code=404) if file is None else answer(file, request.headers)
