"""The application with its routers, and the middleware around it."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from fastapi import APIRouter, FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from stoker.version import __version__
from stoker.web import api, logs, metrics, pages, problems, statics
from stoker.web.api import openapi
from stoker.web.app_state import AppState, app_state_of
from stoker.web.auth import login
from stoker.web.auth.authentication import Authentication
from stoker.web.auth.csrf import CsrfProtection, Hosts
from stoker.web.auth.keys import Keys
from stoker.web.config import Config
from stoker.web.middleware.access_log import AccessLog
from stoker.web.middleware.headers import SecurityHeaders, compressed
from stoker.web.middleware.limits import WholeBody
from stoker.web.pages.views import error_page
from stoker.web.sse import live


def create_app(app_state: AppState) -> FastAPI:
    """Without middleware; `with_middleware` adds authentication and limits."""
    app = FastAPI(
        title="Stoker",
        version=__version__,
        summary="Jobs, GPUs and workers of a Stoker queue.",
        openapi_url="/api/openapi.json",
        # FastAPI's documentation pages load scripts from other sites.
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
    )
    app.state.app_state = app_state
    problems.install(app, error_page)
    openapi.install(app)
    for part in (api, metrics, pages, live, logs, login):
        app.include_router(part.router)
    app.include_router(health)
    app.mount("/static", statics.VersionedFiles())
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app_state: AppState = app.state.app_state
    app_state.snapshot_cache.start()
    try:
        yield
    finally:
        await app_state.close()


def with_middleware(app: ASGIApp, config: Config, keys: Keys, log: Callable[[str], None]) -> ASGIApp:
    """`app` behind all middleware; `log` gets a line for every request."""
    # From the innermost. Bodies are read after authentication, so that strangers cannot fill the memory.
    app = WholeBody(app, config)
    # Outside of authentication, which may end a stream: its last bytes must be compressed too.
    app = compressed(Authentication(app, config, keys))
    app = CsrfProtection(app, config)
    app = Hosts(app, config)
    app = SecurityHeaders(app, config)
    return AccessLog(app, log)


health = APIRouter()

# The snapshot is read every few seconds; a database restart takes some more.
_STALE_AFTER: Final = 30.0


@health.get("/healthz", include_in_schema=False)
async def healthz(request: Request) -> Response:
    snapshot_cache = app_state_of(request).snapshot_cache
    if snapshot_cache.latest is None:
        return PlainTextResponse("starting\n", 503)
    if time.monotonic() - snapshot_cache.read_at > _STALE_AFTER:
        return PlainTextResponse("queue unavailable\n", 503)
    return PlainTextResponse("ok\n")
