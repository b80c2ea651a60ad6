"""Live pages: server-sent events with the sections that changed.

A connection remembers what it sent of each section, and sends what differs in a new version of the snapshot: a page
that was slow or asleep is at most one message behind. Its authentication is checked again before every message.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse

from stoker.errors import BadInputError, StokerError
from stoker.status import detail
from stoker.web.app_state import AppState, app_state_of, user_of
from stoker.web.pages.job_list import Listing
from stoker.web.pages.sections import render_job
from stoker.web.pages.views import overview_sections
from stoker.web.sse.section_cache import event

router = APIRouter(include_in_schema=False)

Events = dict[str, str]
"""Server-sent events by section."""

# Pages reconnect after a few missing heartbeats, and proxies close connections that are silent for a minute.
_HEARTBEAT: Final = 15.0


@router.get("/live")
async def overview_events(request: Request) -> StreamingResponse:
    app_state, role = app_state_of(request), user_of(request).role

    async def events() -> Events:
        rendered = await overview_sections(app_state, role)
        return rendered.events if rendered is not None else {}

    return _response(request, events)


@router.get("/live/jobs")
async def list_events(
    request: Request, state: str = "", tag: str = "", cursor: str = "", unseen: str = ""
) -> StreamingResponse:
    app_state, role = app_state_of(request), user_of(request).role
    listing = Listing.parse(state, tag, cursor, unseen)

    async def render() -> dict[str, str]:
        return listing.sections(await app_state.pool.run(listing.read), role)

    async def events() -> Events:
        try:
            return (await app_state.section_cache.get(app_state.snapshot_cache.version, (listing, role), render)).events
        except StokerError:
            return {}

    return _response(request, events)


@router.get("/live/jobs/{job}")
async def job_events(request: Request, job: str) -> StreamingResponse:
    app_state, role = app_state_of(request), user_of(request).role

    async def render() -> dict[str, str]:
        job_detail = await app_state.pool.run(lambda store: detail.read_detail(store, job, app_state.config.home))
        return render_job(job_detail, role)

    async def events() -> Events:
        try:
            return (await app_state.section_cache.get(app_state.snapshot_cache.version, (job, role), render)).events
        except BadInputError:
            return {"gone": event("gone", job)}  # removed by `stoker clean`
        except StokerError:
            return {}

    return _response(request, events)


def _response(request: Request, events: Callable[[], Awaitable[Events]]) -> StreamingResponse:
    app_state, user = app_state_of(request), user_of(request)

    async def counted() -> AsyncIterator[str]:
        app_state.snapshot_cache.viewers += 1
        try:
            async for text in _stream(app_state, events, lambda: app_state.keys.still_valid(user)):
                yield text
        finally:
            app_state.snapshot_cache.viewers -= 1

    # X-Accel-Buffering: proxies must not buffer the stream.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(counted(), media_type="text/event-stream", headers=headers)


async def _stream(
    app_state: AppState, events: Callable[[], Awaitable[Events]], still_valid: Callable[[], bool]
) -> AsyncIterator[str]:
    yield "retry: 2000\n\n"
    app_state.snapshot_cache.refresh()
    sent: Events = {}
    version, problem, sent_at = -1, None, time.monotonic()
    while still_valid():
        version = await app_state.snapshot_cache.changed(version, _HEARTBEAT)
        if app_state.snapshot_cache.is_stopping:
            return
        current = await events()
        events_due = [text for name, text in current.items() if sent.get(name) != text]
        sent = current or sent
        if problem != app_state.snapshot_cache.problem:
            problem = app_state.snapshot_cache.problem
            events_due.append(event("problem", problem or ""))
        if not events_due and time.monotonic() - sent_at >= _HEARTBEAT:
            events_due.append(event("beat", ""))
        if events_due:
            sent_at = time.monotonic()
            yield "".join(events_due)
