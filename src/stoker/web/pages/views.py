"""The overview: what one sees first."""

import asyncio
import time
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from stoker.errors import BadInputError
from stoker.status import detail
from stoker.web.app_state import AppState, app_state_of, user_of
from stoker.web.auth.key_file import Role
from stoker.web.pages.sections import OVERVIEW, for_page, render, render_job, trusted
from stoker.web.problems import NotFoundError
from stoker.web.sse.section_cache import Rendered
from stoker.web.sse.snapshot_cache import SnapshotCache
from stoker.web.statics import static_file
from stoker.web.templating import page

router = APIRouter()

# How long a page waits for the first snapshot of a new server; then it is sent empty and filled later.
_FIRST_READ_TIMEOUT: Final = 1.5


@router.get("/")
async def overview(request: Request) -> Response:
    app_state, role = app_state_of(request), user_of(request).role
    snapshot_cache = app_state.snapshot_cache
    if snapshot_cache.latest is None:
        await snapshot_cache.changed(0, _FIRST_READ_TIMEOUT)
    latest, rendered = snapshot_cache.latest, await overview_sections(app_state, role)
    return page(
        request,
        "overview.html",
        sections=for_page(latest, role, rendered.sections) if latest and rendered else dict.fromkeys(OVERVIEW, ""),
        is_empty=latest is None,
        problem=snapshot_cache.problem,
        here="overview",
        live="/live",
        now=now_of(snapshot_cache),
    )


async def overview_sections(app_state: AppState, role: Role) -> Rendered | None:
    """Of the newest snapshot; None before the first."""
    snapshot = app_state.snapshot_cache.latest
    if snapshot is None:
        return None
    return await app_state.section_cache.get(
        app_state.snapshot_cache.version,
        ("overview", role),
        # Hundreds of GPUs take a tenth of a second, so it happens in a thread.
        lambda: asyncio.to_thread(render, snapshot, role),
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
