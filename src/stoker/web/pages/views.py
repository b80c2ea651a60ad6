"""The overview: what one sees first."""

import time
from typing import TYPE_CHECKING, Final

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from stoker.errors import BadInputError
from stoker.status import detail
from stoker.web.app_state import app_state_of, user_of
from stoker.web.pages.sections import OVERVIEW, render_job, trusted
from stoker.web.problems import NotFoundError
from stoker.web.sse.snapshot_cache import SnapshotCache
from stoker.web.statics import static_file
from stoker.web.templating import page

if TYPE_CHECKING:
    from stoker.web.sse.rendered_sections import RenderedSections

router = APIRouter()

# A server that has just started reads the queue within this; after that the page comes without it, and fills itself.
_PATIENCE: Final = 1.5


@router.get("/")
async def overview(request: Request) -> Response:
    snapshot_cache = app_state_of(request).snapshot_cache
    if snapshot_cache.latest is None:
        await snapshot_cache.changed(0, _PATIENCE)
    latest, sections = snapshot_cache.latest, trusted(dict.fromkeys(OVERVIEW, ""))
    if latest is not None:
        rendered_sections: RenderedSections = request.app.state.rendered_sections
        sections = (await rendered_sections.get(latest, snapshot_cache.version, user_of(request).role)).sections
    return page(
        request,
        "overview.html",
        sections=sections,
        is_empty=latest is None,
        problem=snapshot_cache.problem,
        here="overview",
        live="/live",
        now=now_of(snapshot_cache),
    )


def now_of(snapshot_cache: SnapshotCache) -> float | None:
    """What the queue's clock says now, as far as we know."""
    return (
        None if snapshot_cache.latest is None else snapshot_cache.latest.now + time.monotonic() - snapshot_cache.read_at
    )


@router.get("/jobs/{job}")
async def job_page(request: Request, job: str) -> Response:
    app_state = app_state_of(request)
    try:
        found = await app_state.pool.run(lambda store: detail.read_detail(store, job, app_state.config.home))
    except BadInputError as error:
        raise NotFoundError(str(error)) from None
    if found.job.id != job:
        # A name or the beginning of an id led here: one job has one address.
        return RedirectResponse(f"/jobs/{found.job.id}", 307)
    return page(
        request,
        "job.html",
        detail=found,
        sections=trusted(render_job(found, user_of(request).role)),
        here="job",
        live=f"/live/jobs/{found.job.id}",
        now=found.now,
    )


@router.get("/manifest.webmanifest")
async def manifest() -> Response:
    return static_file("manifest.webmanifest")


@router.get("/favicon.ico")
async def favicon() -> Response:
    return static_file("icons/icon-192.png")


_HEADINGS: Final = {404: "Not here", 422: "Not understood", 503: "The queue is away"}


def error_page(request: Request, status: int, _title: str, message: str) -> Response:
    """For `problems.install`."""
    heading = _HEADINGS.get(status, "That did not work")
    return page(request, "error.html", status=status, heading=heading, message=message, status_code=status)
