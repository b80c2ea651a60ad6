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
from stoker.web.app_state import AppState, house_of, visitor_of
from stoker.web.pages.job_list import Listing
from stoker.web.pages.sections import render_job
from stoker.web.rendered_sections import Events, Looks, RenderedSections, event

router = APIRouter(include_in_schema=False)

# A page that has heard nothing for a few beats tries again; proxies close what is silent for a minute.
_BEAT_EVERY: Final = 15.0


@router.get("/live")
async def overview_events(request: Request) -> StreamingResponse:
    house, visitor = house_of(request), visitor_of(request)
    showcase: RenderedSections = request.app.state.showcase

    async def events() -> Events:
        latest = house.board.latest
        return {} if latest is None else (await showcase.shown(latest, house.board.version, visitor.role)).events

    return _answer(house, _stream(house, events, lambda: house.keys.still_valid(visitor)))


@router.get("/live/jobs")
async def list_events(
    request: Request, state: str = "", tag: str = "", cursor: str = "", unseen: str = ""
) -> StreamingResponse:
    house, visitor = house_of(request), visitor_of(request)
    looks: Looks = request.app.state.looks
    listing = Listing.asked(state, tag, cursor, unseen)

    async def sections() -> dict[str, str]:
        return listing.sections(await house.desk.ask(listing.look), visitor.role)

    async def events() -> Events:
        try:
            return await looks.events(house.board.version, (listing, visitor.role), sections)
        except StokerError:
            return {}

    return _answer(house, _stream(house, events, lambda: house.keys.still_valid(visitor)))


@router.get("/live/jobs/{job}")
async def job_events(request: Request, job: str) -> StreamingResponse:
    house, visitor = house_of(request), visitor_of(request)
    looks: Looks = request.app.state.looks

    async def sections() -> dict[str, str]:
        found = await house.desk.ask(lambda store: detail.read_detail(store, job, house.config.home))
        return render_job(found, visitor.role)

    async def events() -> Events:
        try:
            return await looks.events(house.board.version, (job, visitor.role), sections)
        except BadInputError:
            return {"gone": event("gone", job)}  # it was cleaned away
        except StokerError:
            return {}

    return _answer(house, _stream(house, events, lambda: house.keys.still_valid(visitor)))


def _answer(house: AppState, stream: AsyncIterator[str]) -> StreamingResponse:
    async def counted() -> AsyncIterator[str]:
        house.board.viewers += 1
        try:
            async for text in stream:
                yield text
        finally:
            house.board.viewers -= 1

    # Proxies that collect what they pass on are asked not to.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(counted(), media_type="text/event-stream", headers=headers)


async def _stream(
    house: AppState, events: Callable[[], Awaitable[Events]], still_valid: Callable[[], bool]
) -> AsyncIterator[str]:
    yield "retry: 2000\n\n"
    house.board.look_now()
    sent: Events = {}
    version, problem, spoke = -1, None, time.monotonic()
    while still_valid():
        version = await house.board.changed(version, _BEAT_EVERY)
        if house.board.is_over:
            return
        current = await events()
        said = [text for name, text in current.items() if sent.get(name) != text]
        sent = current or sent
        if problem != house.board.problem:
            problem = house.board.problem
            said.append(event("problem", problem or ""))
        if not said and time.monotonic() - spoke >= _BEAT_EVERY:
            said.append(event("beat", ""))
        if said:
            spoke = time.monotonic()
            yield "".join(said)
