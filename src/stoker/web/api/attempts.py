"""`/jobs/{job}/attempts`: the attempts of a job, their logs, reports and batch-size fits."""

import asyncio
import codecs
import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from stoker.logs.reader import LastLines, LogUpdate, TailReader, last_lines, stored_lines
from stoker.logs.search import LONGEST_TEXT, MOST_MATCHES, LineFinder
from stoker.queue.logs import LAST_WITHIN, SECONDS_BETWEEN_LOOKS
from stoker.queue.model import Attempt, AttemptDetails
from stoker.queue.store import Store
from stoker.web.answers import MOST_NODES, answer, found, found_attempt
from stoker.web.api.jobs import JobId
from stoker.web.api.openapi import operation
from stoker.web.app_state import AppState, app_state_of
from stoker.web.problems import NotFoundError, ParameterError
from stoker.web.sse.log_channels import LogCurves, LogMatches

router = APIRouter(tags=["attempts"])

TEXT: Final = "text/plain; charset=utf-8"
MARKDOWN: Final = "text/markdown; charset=utf-8"
Number = Annotated[int, Path(ge=1, lt=2**31, description="The number of the attempt, from 1.")]
Node = Annotated[int, Query(ge=0, lt=MOST_NODES, description="The rank of the node, for a job over several nodes.")]
Line = Annotated[int | None, Query(ge=0, lt=2**53)]
# From one request for a part of a log.
_MOST_LINES: Final = 10_000


class AttemptInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt. `host` is null if it is forgotten, `cause` and `rule` are empty while it runs or if unknown;
    `is_here`: whether its log is on this machine."""

    attempt: Attempt
    host: str | None
    cause: str
    rule: str
    is_here: bool


class AttemptList(msgspec.Struct, frozen=True, kw_only=True):
    """All attempts at a job, oldest first."""

    items: list[AttemptInfo]


class FitInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The batch size that was found, the line of memory over size, the limit and the probes."""

    fit: dict[str, Any]


@operation(router, "GET", "/jobs/{job}/attempts", AttemptList, 404)
async def list_attempts(request: Request, job: JobId) -> Response:
    """List the attempts of a job: where and when each ran, and how it ended."""
    app_state = app_state_of(request)

    def attempts(store: Store) -> tuple[list[Attempt], dict[str, str], dict[str, AttemptDetails]]:
        made = store.attempts.of(found(store, job).id)
        hosts = {worker.id: worker.host for worker in store.workers.all()}
        return made, hosts, store.attempts.causes([attempt.id for attempt in made])

    made, hosts, causes = await app_state.pool.run(attempts)
    here = await app_state.log_channels.local(made)
    none = AttemptDetails()
    items = [
        AttemptInfo(
            attempt=attempt,
            host=hosts.get(attempt.worker),
            cause=causes.get(attempt.id, none).cause,
            rule=causes.get(attempt.id, none).rule,
            is_here=attempt.id in here,
        )
        for attempt in made
    ]
    return answer(AttemptList(items=items))


@operation(router, "GET", "/jobs/{job}/attempts/{number}/log", "text/plain", 404)
async def get_log(
    request: Request,
    job: JobId,
    number: Number,
    lines: Annotated[
        int | None, Query(ge=0, lt=2**31, description="Only this many lines from the end, of the last 4 MiB.")
    ] = None,
    first: Annotated[
        int | None,
        Query(
            alias="from",
            ge=1,
            lt=2**53,
            description="From this line on, from 1: `lines` lines, by default 1,000, at most 10,000 or 4 MiB.",
        ),
    ] = None,
    node: Node = 0,
) -> Response:
    """Get the output of an attempt. The header `Stoker-Log` is `whole`, or `end` if only the tail is available.

    The queue stores only the tail of the first node.
    """
    app_state = app_state_of(request)
    channels = app_state.log_channels
    attempt = await app_state.pool.run(lambda store: found_attempt(store, job, number, node))
    headers = _file_headers(attempt, TEXT, f"node{node}.log" if node else "log")
    if first is not None:
        with channels.joined(attempt, node) as channel:
            text, is_whole = await channel.text(first - 1, min(_MOST_LINES, 1000 if lines is None else lines))
        return _text(LogUpdate(text, b""), headers | {"Stoker-Log": "whole" if is_whole else "end"})
    is_here = bool(await channels.local([attempt], node))
    if node and not is_here:
        return _text(LogUpdate(b"", b""), headers | {"Stoker-Log": "end"})
    if is_here:
        while await app_state.pool.run(lambda store: store.logs.is_late(attempt.id)):
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
    elif lines is not None and (stored := await _stored_lines(app_state, attempt, lines)) is not None:
        return _text(stored, headers | {"Stoker-Log": "end"})
    async with contextlib.AsyncExitStack() as stack:
        whole = await stack.enter_async_context(channels.whole(attempt, node))
        if whole is None:
            tail = await app_state.pool.run(lambda store: store.logs.read(attempt.id))
            update = (
                LogUpdate(tail.encode(), b"") if lines is None else last_lines(TailReader(lambda: tail).read(), lines)
            )
            return _text(update, headers | {"Stoker-Log": "end"})
        headers["Stoker-Log"] = "whole"
        if lines is not None:
            last = LastLines(lines)
            async for update in whole:
                last.add(update)
            return _text(last_lines(last.update(), lines), headers)
        return StreamingResponse(_decoded(whole, stack.pop_all()), headers=headers)


@operation(router, "GET", "/jobs/{job}/attempts/{number}/log/matches", LogMatches, 404)
async def search_log(
    request: Request,
    job: JobId,
    number: Number,
    text: Annotated[
        str | None,
        Query(
            min_length=1,
            max_length=LONGEST_TEXT,
            description="In one line, in upper or lower case. Without it: lines that report an error, such as a "
            "traceback, memory that ran out, or NCCL.",
        ),
    ] = None,
    before: Annotated[Line, Query(description="Only the last matches before this line.")] = None,
    after: Annotated[Line, Query(description="Only the first matches after this line.")] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_MATCHES)] = 100,
    node: Node = 0,
) -> Response:
    """Find the lines of a log with a text, or those that report an error: the last ones, or those before or after a
    line, in the order of the log."""
    if before is not None and after is not None:
        raise ParameterError("after", "give either before or after")
    if text is not None and "\n" in text:
        raise ParameterError("text", "search for text within one line")
    app_state = app_state_of(request)
    attempt = await app_state.pool.run(lambda store: found_attempt(store, job, number, node))
    finder = LineFinder(text)
    return answer(await app_state.log_channels.search(attempt, node, finder, before, after, limit))


@operation(router, "GET", "/jobs/{job}/attempts/{number}/curves", LogCurves, 404)
async def get_curves(
    request: Request,
    job: JobId,
    number: Number,
    name: Annotated[list[str] | None, Query(max_length=64, description="Only these figures (repeatable).")] = None,
    node: Node = 0,
) -> Response:
    """Get the figures that an attempt printed, such as its loss, as curves of at most 1,000 points.

    Without `name`: the `metrics` of the job, or all that look like results.
    """
    app_state = app_state_of(request)
    attempt, names = await app_state.pool.run(
        lambda store: (found_attempt(store, job, number, node), name or found(store, job).metrics)
    )
    return answer(await app_state.log_channels.curves(attempt, node, names))


async def _stored_lines(app_state: AppState, attempt: Attempt, count: int) -> LogUpdate | None:
    """The last lines from the tail in the queue, unless its end may still be missing."""
    tail, now = await app_state.pool.run(lambda store: (store.logs.read(attempt.id), store.clock()))
    is_old = attempt.ended is None or now - attempt.ended >= LAST_WITHIN
    return stored_lines(tail, count) if is_old else None


def _text(update: LogUpdate, headers: dict[str, str]) -> Response:
    return Response((update.finished + update.unfinished).decode(errors="replace"), headers=headers)


async def _decoded(whole: AsyncIterator[LogUpdate], stack: contextlib.AsyncExitStack) -> AsyncIterator[str]:
    """Valid UTF-8 for any output, in steps, so only one is in memory."""
    # A character may be split between two steps.
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    async with stack:
        async for update in whole:
            yield decoder.decode(update.finished + update.unfinished)
        yield decoder.decode(b"", final=True)


@operation(router, "GET", "/jobs/{job}/attempts/{number}/report", "text/markdown", 404)
async def get_report(request: Request, job: JobId, number: Number) -> Response:
    """Get the report on a stopped attempt: its processes, their stacks and its last output."""
    attempt, details = await app_state_of(request).pool.run(lambda store: _details(store, job, number))
    if not details.report:
        raise NotFoundError(f"attempt {number} of job {job} has no report: no rule stopped it")
    return Response(details.report, headers=_file_headers(attempt, MARKDOWN, "md"))


@operation(router, "GET", "/jobs/{job}/attempts/{number}/fit", FitInfo, 404)
async def get_fit(request: Request, job: JobId, number: Number) -> Response:
    """Get how the batch size was found: the probes, their memory and the line through them."""
    _attempt, details = await app_state_of(request).pool.run(lambda store: _details(store, job, number))
    if not details.fit:
        raise NotFoundError(f"no batch size was found for attempt {number} of job {job}")
    return answer(FitInfo(fit=details.fit))


def _file_headers(attempt: Attempt, media_type: str, suffix: str) -> dict[str, str]:
    """A download: a browser must not display a job's output."""
    name = f"stoker-{attempt.job}-{attempt.number}.{suffix}"
    return {
        "Content-Type": media_type,
        "Content-Disposition": f'attachment; filename="{name}"',
        "X-Content-Type-Options": "nosniff",
    }


def _details(store: Store, job: str, number: int) -> tuple[Attempt, AttemptDetails]:
    attempt = found_attempt(store, job, number)
    return attempt, store.attempts.details(attempt.id) or AttemptDetails()
