"""`/jobs`: list them, put new ones in, look at one, and change what one asks for."""

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Header, Path, Query
from starlette.requests import Request
from starlette.responses import Response

from stoker.queue.explanation import Why, why
from stoker.queue.fields import JobSpec, State
from stoker.queue.model import Job
from stoker.queue.store import Store
from stoker.web.answers import (
    Page,
    answer,
    answer_with_jobs,
    found,
    link_to_next,
    page_of,
    place_of,
    problems_listed,
)
from stoker.web.api.bodies import SubmitBody, said
from stoker.web.api.described import described
from stoker.web.app_state import app_state_of, user_of
from stoker.web.submission import HEADER, REPLAYED, Submitted, jobs_of, submit_once

router = APIRouter(tags=["jobs"])

# As printable text, which a header may hold.
_KEY: Final = r"^[!-~]{1,200}$"
JobId = Annotated[str, Path(description="The id of a job.", json_schema_extra={"pattern": "^[0-9a-f]{8}$"})]


class JobListPage(msgspec.Struct, frozen=True, kw_only=True):
    """Some of the jobs, newest first."""

    items: list[Job]
    next: str | None
    """The `cursor` of the page after it; null when this is the last."""


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """What was submitted, or would be."""

    jobs: list[Job]
    """The jobs, in their order; none when nothing was submitted."""
    rehearsed: list[JobSpec]
    """What would be submitted; only with `dry_run`."""


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job is as it is."""

    job: str
    state: State
    why: Why


@router.get(
    "/jobs",
    operation_id="list_jobs",
    summary="Jobs, newest first",
    response_model=described(JobListPage),
    response_description="One page of them.",
    responses={
        200: {
            "headers": {
                "Link": {
                    "description": 'The address of the next page, with rel="next" (RFC 8288).',
                    "schema": {"type": "string"},
                }
            }
        }
    },
)
async def list_jobs(
    request: Request,
    state: Annotated[list[State] | None, Query(description="Only in these states; may be repeated.")] = None,
    tag: Annotated[str | None, Query(max_length=200, description="Only with this tag.")] = None,
    limit: Annotated[int, Query(ge=1, le=200, description="How many a page holds.")] = 50,
    cursor: Annotated[str | None, Query(max_length=200, description="The `next` of the page before.")] = None,
) -> Response:
    """Jobs as they were submitted, the newest first. Pages stay right while jobs come in."""
    before = None if cursor is None else place_of(cursor)
    states = tuple(dict.fromkeys(state or ()))
    some = await app_state_of(request).pool.run(lambda store: store.jobs.page(states, tag, before, limit + 1))
    page: Page = page_of(some, limit)
    headers = {} if page.next is None else {"Link": link_to_next(request, page.next)}
    return answer_with_jobs(request, JobListPage(items=page.items, next=page.next), headers=headers)


@router.post(
    "/jobs",
    operation_id="submit_jobs",
    summary="Submit a job, or a sweep",
    status_code=201,
    response_model=described(Submission),
    response_description="The jobs that wait now.",
    responses={
        200: {
            "model": described(Submission),
            "description": "The jobs of before, when the key was used before; with `dry_run`, what would be submitted.",
            "headers": {
                REPLAYED: {"description": "`true` when these are the jobs of before.", "schema": {"type": "string"}}
            },
        },
        **problems_listed(409, 413),
    },
)
async def submit_jobs(
    request: Request,
    body: SubmitBody,
    idempotency_key: Annotated[
        str | None,
        Header(
            alias=HEADER,
            pattern=_KEY,
            description="Any text that is new for each submission: the same key and body give the same jobs again.",
        ),
    ] = None,
) -> Response:
    """Puts commands into the queue: whoever may do this may run anything on the machines of the workers."""
    wanted, sender = said(body), user_of(request).name
    pool = app_state_of(request).pool
    if body.dry_run:
        rehearsed = await pool.run(lambda store: jobs_of(store, wanted, sender))
        return answer_with_jobs(request, Submission(jobs=[], rehearsed=rehearsed))
    asked = msgspec.json.encode(body.model_dump(mode="json", exclude_unset=True), order="sorted")

    def submit(store: Store) -> Submitted:
        return submit_once(store, idempotency_key, sender, asked, lambda: jobs_of(store, wanted, sender))

    done = await pool.run(submit)
    app_state_of(request).snapshot_cache.refresh()
    submission = Submission(jobs=done.jobs, rehearsed=[])
    if done.is_replay:
        return answer_with_jobs(request, submission, headers={REPLAYED: "true"})
    headers = {"Location": f"{request.url.path}/{done.jobs[0].id}"} if len(done.jobs) == 1 else None
    return answer_with_jobs(request, submission, 201, headers)


@router.get(
    "/jobs/{job}",
    operation_id="get_job",
    summary="One job",
    response_model=described(Job),
    response_description="The job as it is now.",
    responses=problems_listed(404),
)
async def get_job(request: Request, job: JobId) -> Response:
    """What the job asks for, and what became of it."""
    return answer_with_jobs(request, await app_state_of(request).pool.run(lambda store: found(store, job)))


@router.get(
    "/jobs/{job}/why",
    operation_id="explain_job",
    summary="Why a job is as it is",
    response_model=described(Reason),
    response_description="The reason, in three lengths.",
    responses=problems_listed(404),
)
async def explain_job(request: Request, job: JobId) -> Response:
    """Above all why it does not run yet, as `stoker why` says it."""

    def explain(store: Store) -> Reason:
        one = found(store, job)
        return Reason(job=one.id, state=one.state, why=why(store, one))

    return answer(await app_state_of(request).pool.run(explain))
