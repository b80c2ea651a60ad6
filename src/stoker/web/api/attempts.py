"""`/jobs/{job}/attempts`: every try at a job: what it printed, why it was stopped, how its batch size was found."""

from pathlib import Path as FilePath
from typing import Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from stoker.overview.outputs import OutputReader, directory_of, has_output, last_lines, reader_of
from stoker.queue.model import Attempt
from stoker.queue.store import Store
from stoker.web.api.answers import TEXT, answer, found, problems_listed, text_listed
from stoker.web.api.described import described
from stoker.web.api.jobs import JobId
from stoker.web.house import house_of
from stoker.web.problems import NotFoundError

router = APIRouter(tags=["attempts"])

MARKDOWN: Final = "text/markdown; charset=utf-8"
EXTENT: Final = "Stoker-Log"
Number = Annotated[int, Path(ge=1, lt=2**31, description="Which attempt at the job; the first is 1.")]


class AttemptMade(msgspec.Struct, frozen=True, kw_only=True):
    """One try at a job, and what is known of it."""

    attempt: Attempt
    host: str | None
    """The machine; null when it has been forgotten."""
    cause: str
    """How it ended, as its record has it, such as `idle`; empty while it runs."""
    is_whole: bool
    """Whether all of its output is on this machine, and not only its end in the queue."""


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
    house = house_of(request)

    def attempts(store: Store) -> AttemptList:
        made = store.attempts(found(store, job).id)
        hosts = {worker.id: worker.host for worker in store.workers()}
        causes = store.causes([attempt.id for attempt in made])
        return AttemptList(
            items=[
                AttemptMade(
                    attempt=attempt,
                    host=hosts.get(attempt.worker),
                    cause=causes.get(attempt.id, ""),
                    is_whole=has_output(directory_of(house.config.home, attempt)),
                )
                for attempt in made
            ]
        )

    return answer(await house.desk.ask(attempts))


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
    lines: Annotated[int | None, Query(ge=0, lt=2**31, description="Only the last so many lines.")] = None,
) -> Response:
    """All of it where the job ran on the machine of this server, else its end, which the queue keeps."""
    house = house_of(request)
    text, is_whole = await house.desk.ask(
        lambda store: _output(store, house.config.home, _attempt(store, job, number), lines)
    )
    return Response(text, headers={EXTENT: "whole" if is_whole else "end"}, media_type=TEXT)


def _output(store: Store, home: FilePath, attempt: Attempt, lines: int | None) -> tuple[str, bool]:
    reader = reader_of(store, home, attempt)
    try:
        piece = last_lines(reader.read(), lines)
    finally:
        reader.close()
    return (piece.finished + piece.unfinished).decode(errors="replace"), isinstance(reader, OutputReader)


@router.get(
    "/jobs/{job}/attempts/{number}/report",
    operation_id="get_report",
    summary="Why an attempt was stopped",
    response_class=Response,
    responses={200: text_listed("text/markdown", "The report, in Markdown."), **problems_listed(404)},
)
async def get_report(request: Request, job: JobId, number: Number) -> Response:
    """What it did when its GPUs were idle: its processes, their stacks, its last words."""

    def report(store: Store) -> str:
        finding = store.finding(_attempt(store, job, number).id)
        if finding is None or not finding.report:
            raise NotFoundError(f"there is no report of attempt {number} at job {job}: it was not stopped for idleness")
        return finding.report

    text = await house_of(request).desk.ask(report)
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
        finding = store.finding(_attempt(store, job, number).id)
        if finding is None or not finding.fit:
            raise NotFoundError(f"no batch size was found for attempt {number} at job {job}")
        return Probes(fit=finding.fit)

    return answer(await house_of(request).desk.ask(fit))


def _attempt(store: Store, job: str, number: int) -> Attempt:
    attempts = store.attempts(found(store, job).id)
    chosen = next((attempt for attempt in attempts if attempt.number == number), None)
    if chosen is None:
        had = "it has not started yet" if not attempts else f"its last one is {attempts[-1].number}"
        raise NotFoundError(f"job {job} has no attempt {number}: {had}")
    return chosen
