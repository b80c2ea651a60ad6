"""Live pages: server-sent events with the sections that changed, each rendered once for everybody who may see it.

A connection remembers which state of each section it has sent. Whenever the board has a new version it sends what
differs: a page that is slow, or that was asleep, is never behind by more than one message. A connection says who it is
only once, so whether that still holds is asked again with every beat.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from fastapi import APIRouter, Request
from starlette.responses import StreamingResponse

from stoker.errors import BadInputError, StokerError
from stoker.overview.detail import read
from stoker.overview.model import Overview
from stoker.web.house import House, house_of, visitor_of
from stoker.web.pages.sections import render, render_job
from stoker.web.visitor import Role

router = APIRouter(include_in_schema=False)

# A page that has heard nothing for a few beats tries again; proxies close what is silent for a minute.
_BEAT_EVERY: Final = 15.0
# Changes of one job are looked for when anything changed, but not more often than anybody can read.
_BETWEEN_JOB_LOOKS: Final = 0.5

Sections = dict[str, str]


class Showcase:
    """The sections of the newest version, by role: rendered when the first page asks for them."""

    def __init__(self) -> None:
        self._version = -1
        self._by_role: dict[Role, Sections] = {}

    def sections(self, overview: Overview, version: int, role: Role) -> Sections:
        if version != self._version:
            self._version, self._by_role = version, {}
        if role not in self._by_role:
            self._by_role[role] = {name: event(name, html) for name, html in render(overview, role).items()}
        return self._by_role[role]


class JobShowcase:
    """The same for the pages of single jobs: one look at a job serves everybody who watches it."""

    def __init__(self) -> None:
        self._looks: dict[tuple[str, Role], asyncio.Task[Sections]] = {}

    async def sections(self, house: House, job: str, role: Role) -> Sections:
        which = (job, role)
        look = self._looks.get(which)
        if look is None:
            look = self._looks[which] = asyncio.create_task(self._look(house, job, role))
            look.add_done_callback(
                lambda _: asyncio.get_running_loop().call_later(_BETWEEN_JOB_LOOKS, self._forget, which)
            )
        return await asyncio.shield(look)

    def _forget(self, which: tuple[str, Role]) -> None:
        self._looks.pop(which, None)

    async def _look(self, house: House, job: str, role: Role) -> Sections:
        detail = await house.desk.ask(lambda store: read(store, job, house.config.home))
        return {name: event(name, html) for name, html in render_job(detail, role).items()}


def event(name: str, text: str) -> str:
    """One server-sent event."""
    # A carriage return would end a line too, and what follows it would be read as a field.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return f"event: {name}\n" + "".join(f"data: {line}\n" for line in lines) + "\n"


@router.get("/live")
async def overview_events(request: Request) -> StreamingResponse:
    house, visitor = house_of(request), visitor_of(request)
    showcase: Showcase = request.app.state.showcase

    async def sections(version: int) -> Sections:
        latest = house.board.latest
        return {} if latest is None else showcase.sections(latest, version, visitor.role)

    return _answer(house, _events(house, sections, lambda: house.keys.still_valid(visitor)))


@router.get("/live/jobs/{job}")
async def job_events(request: Request, job: str) -> StreamingResponse:
    house, visitor = house_of(request), visitor_of(request)
    showcase: JobShowcase = request.app.state.job_showcase

    async def sections(_version: int) -> Sections:
        try:
            return await showcase.sections(house, job, visitor.role)
        except BadInputError:
            return {"gone": event("gone", job)}  # it was cleaned away
        except StokerError:
            return {}

    return _answer(house, _events(house, sections, lambda: house.keys.still_valid(visitor)))


def _answer(house: House, events: AsyncIterator[str]) -> StreamingResponse:
    async def counted() -> AsyncIterator[str]:
        house.board.viewers += 1
        try:
            async for text in events:
                yield text
        finally:
            house.board.viewers -= 1

    # Proxies that collect what they pass on are asked not to.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(counted(), media_type="text/event-stream", headers=headers)


async def _events(
    house: House, sections: Callable[[int], Awaitable[Sections]], still_valid: Callable[[], bool]
) -> AsyncIterator[str]:
    yield "retry: 2000\n\n"
    house.board.look_now()
    sent: Sections = {}
    version, problem, spoke = -1, None, time.monotonic()
    while still_valid():
        version = await house.board.changed(version, _BEAT_EVERY)
        if house.board.is_over:
            return
        current = await sections(version)
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
