"""Live pages: server-sent events with the sections that changed, each rendered once for everybody who may see it.

A connection remembers which state of each section it has sent. Whenever the board has a new version it sends what
differs: a page that is slow, or that was asleep, is never behind by more than one message. A connection says who it is
only once, so whether that still holds is asked again with every beat.
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
from stoker.web.sse.rendered_sections import Events, Looks, RenderedSections, event

router = APIRouter(include_in_schema=False)

# A page that has heard nothing for a few beats tries again; proxies close what is silent for a minute.
_BEAT_EVERY: Final = 15.0


@router.get("/live")
async def overview_events(request: Request) -> StreamingResponse:
    app_state, user = app_state_of(request), user_of(request)
    rendered_sections: RenderedSections = request.app.state.rendered_sections

    async def events() -> Events:
        latest = app_state.snapshot_cache.latest
        return (
            {}
            if latest is None
            else (await rendered_sections.shown(latest, app_state.snapshot_cache.version, user.role)).events
        )

    return _answer(app_state, _stream(app_state, events, lambda: app_state.keys.still_valid(user)))


@router.get("/live/jobs")
async def list_events(
    request: Request, state: str = "", tag: str = "", cursor: str = "", unseen: str = ""
) -> StreamingResponse:
    app_state, user = app_state_of(request), user_of(request)
    looks: Looks = request.app.state.looks
    listing = Listing.asked(state, tag, cursor, unseen)

    async def sections() -> dict[str, str]:
        return listing.sections(await app_state.pool.ask(listing.look), user.role)

    async def events() -> Events:
        try:
            return await looks.events(app_state.snapshot_cache.version, (listing, user.role), sections)
        except StokerError:
            return {}

    return _answer(app_state, _stream(app_state, events, lambda: app_state.keys.still_valid(user)))


@router.get("/live/jobs/{job}")
async def job_events(request: Request, job: str) -> StreamingResponse:
    app_state, user = app_state_of(request), user_of(request)
    looks: Looks = request.app.state.looks

    async def sections() -> dict[str, str]:
        found = await app_state.pool.ask(lambda store: detail.read_detail(store, job, app_state.config.home))
        return render_job(found, user.role)

    async def events() -> Events:
        try:
            return await looks.events(app_state.snapshot_cache.version, (job, user.role), sections)
        except BadInputError:
            return {"gone": event("gone", job)}  # it was cleaned away
        except StokerError:
            return {}

    return _answer(app_state, _stream(app_state, events, lambda: app_state.keys.still_valid(user)))


def _answer(app_state: AppState, stream: AsyncIterator[str]) -> StreamingResponse:
    async def counted() -> AsyncIterator[str]:
        app_state.snapshot_cache.viewers += 1
        try:
            async for text in stream:
                yield text
        finally:
            app_state.snapshot_cache.viewers -= 1

    # Proxies that collect what they pass on are asked not to.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(counted(), media_type="text/event-stream", headers=headers)


async def _stream(
    app_state: AppState, events: Callable[[], Awaitable[Events]], still_valid: Callable[[], bool]
) -> AsyncIterator[str]:
    yield "retry: 2000\n\n"
    app_state.snapshot_cache.look_now()
    sent: Events = {}
    version, problem, spoke = -1, None, time.monotonic()
    while still_valid():
        version = await app_state.snapshot_cache.changed(version, _BEAT_EVERY)
        if app_state.snapshot_cache.is_over:
            return
        current = await events()
        said = [text for name, text in current.items() if sent.get(name) != text]
        sent = current or sent
        if problem != app_state.snapshot_cache.problem:
            problem = app_state.snapshot_cache.problem
            said.append(event("problem", problem or ""))
        if not said and time.monotonic() - spoke >= _BEAT_EVERY:
            said.append(event("beat", ""))
        if said:
            spoke = time.monotonic()
            yield "".join(said)
