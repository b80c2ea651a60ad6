"""`/jobs/{job}/attempts`: every try at a job: what it printed, why it was stopped, how its batch size was found."""

import asyncio
import codecs
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from stoker.logs.reader import LogUpdate, TailReader, last_lines, stored_lines
from stoker.queue.logs import LAST_WITHIN, SECONDS_BETWEEN_LOOKS
from stoker.queue.model import Attempt, AttemptDetails
from stoker.queue.store import Store
from stoker.web.answers import TEXT, answer, found, problems_listed, text_listed
from stoker.web.api.described import described
from stoker.web.api.jobs import JobId
from stoker.web.app_state import AppState, app_state_of
from stoker.web.logs import channels_of, log_response
from stoker.web.problems import NotFoundError

router = APIRouter(tags=["attempts"])

MARKDOWN: Final = "text/markdown; charset=utf-8"
EXTENT: Final = "Stoker-Log"
# The last lines are looked for in so much of the end: more than anybody reads, and little enough to be held in memory.
LONGEST_END: Final = 4 * 2**20
Number = Annotated[int, Path(ge=1, lt=2**31, description="Which attempt at the job; the first is 1.")]


class AttemptMade(msgspec.Struct, frozen=True, kw_only=True):
    """One try at a job, and what is known of it."""

    attempt: Attempt
    host: str | None
    """The machine; null when it has been forgotten."""
    cause: str
    rule: str
    """How it ended, as its record has it, such as `idle`; empty while it runs."""
    is_here: bool
    """Whether its log is on this machine; others stream theirs while their workers run."""


class AttemptList(msgspec.Struct, frozen=True, kw_only=True):
    """All tries at a job, the first one first."""

    items: list[AttemptMade]


class Probes(msgspec.Struct, frozen=True, kw_only=True):
    """How the batch size was found."""

    fit: dict[str, Any]
    """The size, the line of memory over size, the limit, and the probes that they rest on."""


@router.get(
    "/jobs/{job}/attempts",
    operation_id="list_attempts",
    summary="The tries at a job",
    response_model=described(AttemptList),
    response_description="The first one first.",
    responses=problems_listed(404),
)
async def list_attempts(request: Request, job: JobId) -> Response:
    """Where each ran, when, and how it ended."""
    app_state = app_state_of(request)

    def attempts(store: Store) -> tuple[list[Attempt], dict[str, str], dict[str, AttemptDetails]]:
        made = store.attempts.of(found(store, job).id)
        hosts = {worker.id: worker.host for worker in store.workers.all()}
        return made, hosts, store.attempts.causes([attempt.id for attempt in made])

    made, hosts, causes = await app_state.pool.run(attempts)
    here = await channels_of(request).local(made, app_state.config.home)
    return answer(
        AttemptList(
            items=[
                AttemptMade(
                    attempt=attempt,
                    host=hosts.get(attempt.worker),
                    cause=causes.get(attempt.id, AttemptDetails()).cause,
                    rule=causes.get(attempt.id, AttemptDetails()).rule,
                    is_here=attempt.id in here,
                )
                for attempt in made
            ]
        )
    )


@router.get(
    "/jobs/{job}/attempts/{number}/log",
    operation_id="get_log",
    summary="What an attempt printed",
    response_class=Response,
    responses={
        200: text_listed(
            "text/plain", "The output as it was written.", {EXTENT: "`whole`, or `end` where only that is here."}
        ),
        **problems_listed(404),
    },
)
async def get_log(
    request: Request,
    job: JobId,
    number: Number,
    lines: Annotated[
        int | None, Query(ge=0, lt=2**31, description="Only the last so many lines, of the last 4 MiB.")
    ] = None,
) -> Response:
    """All of it, from whatever machine has it; where that is gone, its end, which the queue keeps."""
    app_state, channels = app_state_of(request), channels_of(request)
    attempt = await app_state.pool.run(lambda store: _attempt(store, job, number))
    is_here = bool(await channels.local([attempt], app_state.config.home))
    if is_here:
        while await app_state.pool.run(lambda store: store.logs.is_late(attempt.id)):
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
    if lines is None:
        response = await log_response(app_state, channels, attempt, {"Content-Type": TEXT})
        if isinstance(response, StreamingResponse):
            response.body_iterator = _decoded(response.body_iterator)
        return response
    if not is_here and (stored := await _stored_lines(app_state, attempt, lines)) is not None:
        return _text(stored, "end")
    async with channels.whole(attempt, app_state) as whole:
        if whole is None:
            tail = await app_state.pool.run(lambda store: store.logs.read(attempt.id))
            return _text(last_lines(TailReader(lambda: tail).read(), lines), "end")
        return _text(last_lines(await _end_of(whole), lines), "whole")


async def _stored_lines(app_state: AppState, attempt: Attempt, count: int) -> LogUpdate | None:
    """The last lines from the tail in the queue, unless its end may still be missing."""
    tail, now = await app_state.pool.run(lambda store: (store.logs.read(attempt.id), store.clock()))
    is_old = attempt.ended is None or now - attempt.ended >= LAST_WITHIN
    return stored_lines(tail, count) if is_old else None


def _text(update: LogUpdate, extent: str) -> Response:
    text = (update.finished + update.unfinished).decode(errors="replace")
    return Response(text, headers={EXTENT: extent}, media_type=TEXT)


async def _decoded(output: AsyncIterable[str | bytes | memoryview]) -> AsyncIterator[str]:
    """Valid UTF-8, whatever the job wrote; a character may be cut between two chunks."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    async for chunk in output:
        yield decoder.decode(chunk.encode() if isinstance(chunk, str) else bytes(chunk))
    yield decoder.decode(b"", final=True)


async def _end_of(whole: AsyncIterator[LogUpdate]) -> LogUpdate:
    """The last part of a log, from the beginning of a line."""
    blocks: deque[bytes] = deque()
    size, unfinished = 0, b""
    async for update in whole:
        unfinished = update.unfinished
        blocks.append(update.finished)
        size += len(update.finished)
        while size - len(blocks[0]) >= LONGEST_END:
            size -= len(blocks.popleft())
    return LogUpdate(b"".join(blocks), unfinished)


@router.get(
    "/jobs/{job}/attempts/{number}/report",
    operation_id="get_report",
    summary="Why an attempt was stopped",
    response_class=Response,
    responses={200: text_listed("text/markdown", "The report, in Markdown."), **problems_listed(404)},
)
async def get_report(request: Request, job: JobId, number: Number) -> Response:
    """What it did when its GPUs were idle: its processes, their stacks and its last output."""

    def report(store: Store) -> str:
        details = store.attempts.details(_attempt(store, job, number).id)
        if details is None or not details.report:
            raise NotFoundError(f"there is no report of attempt {number} at job {job}: it was not stopped for idleness")
        return details.report

    text = await app_state_of(request).pool.run(report)
    return Response(text, media_type=MARKDOWN)


@router.get(
    "/jobs/{job}/attempts/{number}/fit",
    operation_id="get_fit",
    summary="How the batch size was found",
    response_model=described(Probes),
    response_description="The probes and what follows from them.",
    responses=problems_listed(404),
)
async def get_fit(request: Request, job: JobId, number: Number) -> Response:
    """The sizes that were tried, the memory that each took, and the line through them."""

    def fit(store: Store) -> Probes:
        details = store.attempts.details(_attempt(store, job, number).id)
        if details is None or not details.fit:
            raise NotFoundError(f"no batch size was found for attempt {number} at job {job}")
        return Probes(fit=details.fit)

    return answer(await app_state_of(request).pool.run(fit))


def _attempt(store: Store, job: str, number: int) -> Attempt:
    attempts = store.attempts.of(found(store, job).id)
    chosen = next((attempt for attempt in attempts if attempt.number == number), None)
    if chosen is None:
        had = "it has not started yet" if not attempts else f"its last one is {attempts[-1].number}"
        raise NotFoundError(f"job {job} has no attempt {number}: {had}")
    return chosen
