"""The application: every router in one place, around what they share."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from stoker.version import __version__
from stoker.web import api, entry, health, live, live_many, logs, metrics, pages, problems, statics
from stoker.web.app_state import AppState
from stoker.web.pages.trouble import trouble_page
from stoker.web.rendered_sections import Looks, RenderedSections


def create_app(house: AppState) -> FastAPI:
    """Without the guard: `serving.guarded_app` is what may be connected to."""
    app = FastAPI(
        title="Stoker",
        version=__version__,
        summary="Jobs, GPUs and workers of a Stoker queue.",
        openapi_url="/api/openapi.json",
        # Their pages load scripts from elsewhere, which this page never does.
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
    )
    app.state.house = house
    app.state.showcase = RenderedSections()
    app.state.looks = Looks()
    problems.install(app, trouble_page)
    for part in (api, metrics, health, pages, live, live_many, logs, entry):
        app.include_router(part.router)
    app.mount("/static", statics.files())
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    house: AppState = app.state.house
    house.board.start()
    try:
        yield
    finally:
        house.board.stop()
        app.state.showcase.close()
        house.desk.close()
