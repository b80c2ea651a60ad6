"""Logs and reports of attempts: followed live, and as files to take away.

What a job printed is made safe for a page on this side only. Files are named by the ids that the queue knows, never by
what was asked for.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from fastapi import APIRouter, FastAPI, Header, HTTPException, Query, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from stoker.errors import BadInputError, StokerError
from stoker.logs.html_lines import STEP, place_of
from stoker.logs.readers import OutputReader
from stoker.logs.remote_file import Mirror, may_be_lent
from stoker.queue.driver import QueueAwayError
from stoker.queue.fields import ID
from stoker.queue.model import ENDED, Attempt, Job
from stoker.web.app_state import AppState, app_state_of, user_of
from stoker.web.log_channel import Channels
from stoker.web.log_follower import Follower, Mark, event


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    if hasattr(app.state, "log_channels"):
        await app.state.log_channels.close()


router = APIRouter(include_in_schema=False, lifespan=_lifespan)

# A page that has heard nothing for a few beats tries again; proxies close what is silent for a minute.
_BEAT_EVERY: Final = 15.0
# Whether the server ends, and whether the visitor is still welcome, is asked at least this often.
_LOOK_UP_EVERY: Final = 1.0
# A worker that is there begins to lend within this, and goes on as long as it brings something within this.
_LENT_WITHIN: Final = 3.0
_LOOK_FOR_LOAN: Final = 0.1


def channels_of(request: Request) -> Channels:
    """Those of this application, made when somebody first follows a log."""
    state, app_state = request.app.state, app_state_of(request)
    if not hasattr(state, "log_channels"):
        state.log_channels = Channels(app_state.config.home, app_state.pool)
    channels: Channels = state.log_channels
    return channels


@router.get("/jobs/{job}/attempts")
async def attempts(request: Request, job: str) -> JSONResponse:
    """Which there are, for the picker of a page that waits for another one."""
    found, tries = await _attempts(app_state_of(request), job)
    told = [{"number": attempt.number, "outcome": attempt.outcome} for attempt in tries]
    return JSONResponse({"over": found.state in ENDED, "attempts": told}, headers={"Cache-Control": "no-store"})


@router.get("/jobs/{job}/attempts/{number}/log/live")
async def follow(
    request: Request,
    job: str,
    number: str,
    last_event_id: Annotated[str, Header()] = "",
    after: str = "",
    whole: Annotated[str, Query(alias="all")] = "",
) -> StreamingResponse:
    """The last lines, or all of them, or those after a mark; then whatever comes, until the attempt has ended."""
    attempt = await _attempt(app_state_of(request), job, number)
    # A browser that reconnects by itself asks with the old address: what it says beside it is newer.
    mark = Mark.parse(last_event_id or after)
    # Proxies that collect what they pass on are asked not to.
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    events = _events(request, attempt, mark, from_the_beginning=whole == "1")
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _events(
    request: Request, attempt: Attempt, mark: Mark | None, from_the_beginning: bool
) -> AsyncIterator[str]:
    app_state, user, channels = app_state_of(request), user_of(request), channels_of(request)
    channel = channels.join(attempt)
    try:
        yield "retry: 2000\n\n"
        follower = Follower(channel, mark, from_the_beginning)
        version, problem, spoke = 0, "", time.monotonic()
        while not app_state.snapshot_cache.is_over and app_state.keys.still_valid(user):
            before, version = version, await channel.changed(version, _LOOK_UP_EVERY)
            if version == before:
                if time.monotonic() - spoke >= _BEAT_EVERY:
                    spoke = time.monotonic()
                    yield event("beat", None)
                continue
            if channel.problem != problem:
                problem = channel.problem
                yield event("problem", problem)
            async for text in follower.news():
                spoke = time.monotonic()
                yield text
            if channel.is_over and channel.version == version:
                if channel.ending is not None:
                    yield event("end", channel.ending)
                return
    finally:
        channels.leave(channel)


@router.get("/jobs/{job}/attempts/{number}/log")
async def download(request: Request, job: str, number: str) -> Response:
    """The output as a text file: the whole where it is to be had, or else the end that the queue keeps."""
    app_state, channels = app_state_of(request), channels_of(request)
    attempt = await _attempt(app_state, job, number)
    found = await find_output(app_state, channels, attempt)
    headers = _file(attempt, "log", "text/plain") | {"Stoker-Log": "whole"}
    if found is None:
        text = await app_state.pool.ask(lambda store: store.log(attempt.id))
        return Response(text.encode(), headers=headers | {"Stoker-Log": "end"})
    return StreamingResponse(output_of(channels, found), headers=headers)


class Found(NamedTuple):
    """Where the whole of an output is."""

    directory: Path
    close: Callable[[], None]
    """When it is not needed any more."""


async def find_output(app_state: AppState, channels: Channels, attempt: Attempt) -> Found | None:
    """Here, or brought here from the machine that has it; None when nobody lends it."""
    directory = await channels.in_thread(lambda: place_of(app_state.config.home, attempt))
    if directory is not None:
        return Found(directory, lambda: None)
    if not channels.borrowing.acquire(blocking=False):
        return None
    mirror = Mirror(attempt.id)

    def close() -> None:
        mirror.close()
        channels.borrowing.release()

    borrowed = None
    try:
        if await app_state.pool.ask(lambda store: may_be_lent(store, attempt)) and await _is_lent(
            app_state, mirror, attempt
        ):
            borrowed = mirror.directory
    except QueueAwayError:
        raise
    except (StokerError, OSError):
        return None  # there is no room for it here, or the database has something against it
    finally:
        if borrowed is None:
            channels.later(close)
    return None if borrowed is None else Found(borrowed, lambda: channels.later(close))


async def _is_lent(app_state: AppState, mirror: Mirror, attempt: Attempt) -> bool:
    """Once all of it is here that there is now, or somebody was waited for in vain."""
    ends = time.monotonic() + _LENT_WITHIN
    edition = ""
    while True:
        before = mirror.size
        await app_state.pool.ask(mirror.update)
        if edition and mirror.edition != edition:
            return False  # it grows faster than it is lent, or its worker was started anew
        edition = mirror.edition
        if mirror.is_complete or (mirror.edition and not mirror.is_behind and attempt.outcome is None):
            return True
        if mirror.size > before:
            ends = time.monotonic() + _LENT_WITHIN
        elif time.monotonic() > ends:
            return False
        await asyncio.sleep(_LOOK_FOR_LOAN if mirror.size == before else 0.0)


async def output_of(channels: Channels, found: Found) -> AsyncIterator[bytes]:
    """All of it, in steps, so that no more than one of them is in memory."""
    reader = OutputReader(found.directory)

    def close() -> None:
        reader.close()
        found.close()

    steps = channels.steps(close)
    try:
        is_behind = True
        while is_behind:
            piece = await steps.do(lambda: reader.read(STEP))
            is_behind = reader.is_behind
            yield piece.finished + piece.unfinished
    finally:
        steps.close()


@router.get("/jobs/{job}/attempts/{number}/report")
async def report(request: Request, job: str, number: str) -> Response:
    """Why it was stopped, as the Markdown that it was written in."""
    app_state = app_state_of(request)
    attempt = await _attempt(app_state, job, number)
    details = await app_state.pool.ask(lambda store: store.details(attempt.id))
    if details is None or not details.report:
        raise HTTPException(404, f"attempt {attempt.number} of job {attempt.job} has no report: it was not stopped")
    return Response(details.report.encode(), headers=_file(attempt, "md", "text/markdown"))


def _file(attempt: Attempt, ending: str, kind: str) -> dict[str, str]:
    """Headers of something to be kept, not shown: whatever is in it, no browser runs it."""
    return {
        "Content-Type": f"{kind}; charset=utf-8",
        "Content-Disposition": f'attachment; filename="stoker-{attempt.job}-{attempt.number}.{ending}"',
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
    }


async def _attempt(app_state: AppState, job: str, number: str) -> Attempt:
    _, attempts = await _attempts(app_state, job)
    for attempt in attempts:
        if str(attempt.number) == number:
            return attempt
    raise HTTPException(404, f"job {job} has no such attempt")


async def _attempts(app_state: AppState, job: str) -> tuple[Job, list[Attempt]]:
    if not ID.fullmatch(job):
        raise HTTPException(404, "there is no such job: an id has eight hexadecimal digits")
    try:
        return await app_state.pool.ask(lambda store: (store.job(job), store.attempts(job)))
    except BadInputError as error:
        raise HTTPException(404, str(error)) from None
