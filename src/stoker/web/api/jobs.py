"""`/jobs`: list jobs, submit them, read one and explain its state."""

from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Header, Path, Query
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from stoker.queue.code.comparison import read_changes
from stoker.queue.explanation import Why
from stoker.queue.fields import JobSpec, State
from stoker.queue.model import Job
from stoker.queue.search import FIELDS_TO_SEARCH, LONGEST_QUERY, MOST_SORTED, SORTS
from stoker.queue.store import Store
from stoker.status.forecast import why
from stoker.web.answers import Page, answer, answer_with_jobs, found, place_of, read_page, searched
from stoker.web.api.bodies import SubmitBody, body_of
from stoker.web.api.openapi import operation
from stoker.web.app_state import app_state_of, user_of
from stoker.web.problems import NotFoundError
from stoker.web.submission import HEADER, Submitted, jobs_of, new_group_of, submit_once

router = APIRouter(tags=["jobs"])

# Printable characters, as a header may contain.
_KEY: Final = r"^[!-~]{1,200}$"
JobId = Annotated[str, Path(description="The id of a job.", json_schema_extra={"pattern": "^[0-9a-f]{8}$"})]


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """The submitted jobs; with `dry_run`, what would be submitted is in `rehearsed`."""

    jobs: list[Job] = []
    rehearsed: list[JobSpec] = []


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job is in its state."""

    job: str
    state: State
    why: Why


SearchText = Annotated[
    str,
    Query(
        max_length=LONGEST_QUERY,
        description="A search like `name:resnet state:failed since:2d lr=1e-3`. Words are searched in name, command, "
        f"tags and id; the fields are {', '.join(FIELDS_TO_SEARCH)}.",
    ),
]


@operation(router, "GET", "/jobs", Page)
async def list_jobs(
    request: Request,
    q: SearchText = "",
    state: Annotated[list[State] | None, Query(description="Only in these states (repeatable).")] = None,
    tag: Annotated[str | None, Query(max_length=200, description="Only with this tag.")] = None,
    sort: Annotated[
        str,
        Query(
            max_length=20,
            description=f"The order: {', '.join(SORTS)}; a leading `-` reverses the order. Of more than "
            f"{MOST_SORTED:,} matches, the newest {MOST_SORTED:,} are sorted.",
        ),
    ] = "submitted",
    limit: Annotated[int, Query(ge=1, le=200, description="The number of jobs on a page.")] = 50,
    cursor: Annotated[str | None, Query(max_length=2000, description="The `next` of the previous page.")] = None,
) -> Response:
    """List or search jobs, newest first. New jobs do not shift the pages."""
    after = None if cursor is None else place_of(cursor)
    which = searched(q, tuple(dict.fromkeys(state or ())), tag, sort)
    found = await app_state_of(request).pool.run(lambda store: read_page(store, which, after, limit))
    return answer_with_jobs(request, found)


@operation(router, "POST", "/jobs", Submission, 409, 413, body=SubmitBody, statuses=(201, 200))
async def submit_jobs(
    request: Request,
    idempotency_key: Annotated[
        str | None,
        Header(
            alias=HEADER,
            pattern=_KEY,
            description="New for each submission. The same key and body return the same jobs, with status 200.",
        ),
    ] = None,
) -> Response:
    """Submit a job or a sweep. Its command runs on a worker's machine with the worker's permissions."""
    body, sender = await body_of(request, SubmitBody), user_of(request).name
    pool = app_state_of(request).pool
    if body.get("dry_run"):
        rehearsed = await pool.run(lambda store: jobs_of(store, body, sender))
        return answer_with_jobs(request, Submission(rehearsed=rehearsed))
    asked = msgspec.json.encode(body, order="sorted")

    def submit(store: Store) -> Submitted:
        return submit_once(
            store, idempotency_key, sender, asked, lambda: jobs_of(store, body, sender), new_group_of(body)
        )

    done = await pool.run(submit)
    app_state_of(request).snapshot_cache.refresh()
    submission = Submission(jobs=done.jobs)
    if done.is_replay:
        return answer_with_jobs(request, submission, headers={"Idempotent-Replayed": "true"})
    headers = {"Location": f"{request.url.path}/{done.jobs[0].id}"} if len(done.jobs) == 1 else None
    return answer_with_jobs(request, submission, 201, headers)


@operation(router, "GET", "/jobs/{job}", Job, 404)
async def get_job(request: Request, job: JobId) -> Response:
    """Get a job: its options, state and result."""
    return answer_with_jobs(request, await app_state_of(request).pool.run(lambda store: found(store, job)))


@operation(router, "GET", "/jobs/{job}/why", Reason, 404)
async def explain_job(request: Request, job: JobId) -> Response:
    """Explain why a job waits, or how it ended, as `stoker why` does."""

    def explain(store: Store) -> Reason:
        one = found(store, job)
        return Reason(job=one.id, state=one.state, why=why(store, one))

    return answer(await app_state_of(request).pool.run(explain))


@operation(router, "GET", "/jobs/{job}/diff", "text/plain", 404)
async def diff_job(request: Request, job: JobId) -> Response:
    """Show how the code of a job with a snapshot differed from its commit, as `stoker diff` does. For operators."""
    if not user_of(request).operates:
        raise HTTPException(403, f"the token {user_of(request).name!r} is read-only: code is shown to operators")

    def read(store: Store) -> bytes:
        one = found(store, job)
        if one.code is None:
            raise NotFoundError(f"job {one.id} has no snapshot of its code")
        return read_changes(store.blobs, one).text

    text = (await app_state_of(request).pool.run(read)).decode(errors="replace")
    return Response(text, media_type="text/plain")
