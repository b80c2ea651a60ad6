"""The read-only pages: overview, list of jobs, job; and the error page."""

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast, get_args
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from stoker.errors import BadInputError
from stoker.queue.fields import State
from stoker.queue.model import Failure, Job
from stoker.queue.search import LONGEST_QUERY, SORTS, Sort, parse_sort
from stoker.queue.store import Store
from stoker.settings import USUAL_EVENTS
from stoker.status import detail
from stoker.status.health import RECENT
from stoker.web.answers import Page, place_of, read_page, searched
from stoker.web.api.notifications import settings_of
from stoker.web.api.tokens import shown_tokens
from stoker.web.app_state import AppState, app_state_of, user_of
from stoker.web.auth.key_file import Role
from stoker.web.pages.sections import OVERVIEW, for_page, render, render_job, render_list, trusted
from stoker.web.problems import NotFoundError, ParameterError
from stoker.web.sse.snapshot_cache import SnapshotCache
from stoker.web.statics import static_file
from stoker.web.templating import page

router = APIRouter()

OVERVIEW_KEY: Final = None
"""Key of the overview in the section cache."""

# How long a page waits for the first snapshot of a new server; then it is sent empty and filled later.
_FIRST_READ_TIMEOUT: Final = 1.5


@router.get("/")
async def overview(request: Request) -> Response:
    app_state, role = app_state_of(request), user_of(request).role
    snapshot_cache = app_state.snapshot_cache
    if snapshot_cache.latest is None:
        await snapshot_cache.changed(0, _FIRST_READ_TIMEOUT)
    latest, rendered = snapshot_cache.latest, None
    if latest is not None:
        rendered = await app_state.section_cache.get(
            snapshot_cache.version, (OVERVIEW_KEY, role), lambda: render_overview(app_state, role)
        )
    return page(
        request,
        "overview.html",
        sections=for_page(latest, role, rendered.sections) if latest and rendered else dict.fromkeys(OVERVIEW, ""),
        is_empty=latest is None,
        problem=snapshot_cache.problem,
        here="overview",
        live="/live",
        now=now_of(snapshot_cache),
    )


async def render_overview(app_state: AppState, role: Role) -> Mapping[str, str]:
    """The sections of the newest snapshot; none before the first."""
    snapshot = app_state.snapshot_cache.latest
    # Hundreds of GPUs take a tenth of a second, so it happens in a thread.
    return {} if snapshot is None else await asyncio.to_thread(render, snapshot, role)


def now_of(snapshot_cache: SnapshotCache) -> float | None:
    """The current time by the queue's clock."""
    return (
        None if snapshot_cache.latest is None else snapshot_cache.latest.now + time.monotonic() - snapshot_cache.read_at
    )


@router.get("/jobs/{job}")
async def job_page(request: Request, job: str) -> Response:
    app_state = app_state_of(request)
    try:
        found = await app_state.pool.run(lambda store: detail.read_detail(store, job, app_state.config.home))
    except BadInputError as error:
        raise NotFoundError(str(error)) from None
    if found.job.id != job:
        # Found by its name or a prefix of its id.
        return RedirectResponse(f"/jobs/{found.job.id}", 307)
    return page(
        request,
        "job.html",
        detail=found,
        curve_jobs=[{"id": found.job.id, "name": found.job.name or found.job.id}],
        usage=_usage_of_job(found),
        sections=trusted(render_job(found, user_of(request).role)),
        here="job",
        live=f"/live/jobs/{found.job.id}",
        now=found.now,
    )


def _usage_of_job(found: detail.JobDetail) -> dict[str, Any] | None:
    """For the charts of its GPUs; None for a job that never had one."""
    names = {
        uuid: f"GPU {name}" for one in found.attempts for uuid, name in zip(one.attempt.gpus, one.gpus, strict=False)
    }
    where = f"/api/v1/jobs/{found.job.id}/history"
    return {"where": where, "names": names, "goesOn": found.job.ended is None} if names else None


@router.get("/gpu")
async def gpu_page(request: Request, host: str = "", gpu: str = "") -> Response:
    """One GPU over an hour, a day or a week."""
    if not host or not gpu:
        raise NotFoundError("the address names no GPU: open one from the overview")
    latest = app_state_of(request).snapshot_cache.latest
    machines = () if latest is None else latest.machines
    known = [one for machine in machines if machine.host == host for one in machine.gpus if one.uuid == gpu]
    shown = known[-1] if known else None
    name = f"GPU {gpu[:100]}" if shown is None else f"GPU {shown.index}"
    return page(
        request,
        "gpu.html",
        title=f"{name} on {host[:300]}",
        gpu=shown,
        usage={
            "where": f"/api/v1/history?{urlencode({'host': host[:300], 'gpu': gpu[:100]})}",
            "names": {gpu: name},
            "memory": None if shown is None else shown.memory_total,
            "goesOn": True,
        },
        here="gpu",
    )


# More lines in one chart cannot be told apart.
_MOST_COMPARED: Final = 8


@router.get("/compare")
async def compare(request: Request, jobs: str = "") -> Response:
    """The curves of several jobs over each other: ids, names, or `group:NAME`, with commas between."""
    words = [word for word in (part.strip() for part in jobs[:2000].split(",")) if word]
    problem = ""

    def read(store: Store) -> list[Job]:
        return list({job.id: job for word in words for job in store.jobs.named(word)}.values())

    try:
        found = await app_state_of(request).pool.run(read)
    except BadInputError as error:
        found, problem = [], str(error)
    # Started jobs have curves.
    shown = sorted(found, key=lambda job: not job.attempts)[:_MOST_COMPARED]
    return page(
        request,
        "compare.html",
        asked=jobs[:2000],
        problem=problem,
        curve_jobs=[
            {"id": job.id, "name": name}
            for job, name in zip(shown, _told_apart([job.name or job.id for job in shown]), strict=True)
        ],
        left_out=len(found) - len(shown),
        others=",".join(job.id for job in found if job not in shown),
        here="compare",
    )


def _told_apart(names: Sequence[str]) -> list[str]:
    """Names without the words that all of them begin with, as those of a sweep do."""
    words = [name.split(" ") for name in names]
    while len(words) > 1 and all(len(rest) > 1 and rest[0] == words[0][0] for rest in words):
        words = [rest[1:] for rest in words]
    return [" ".join(rest) for rest in words]


# Descriptions for people.
_EVENT_WORDS: Final = {
    "failed": "A job failed",
    "stopped": "A rule stopped a job",
    "warned": "A rule will stop a job soon",
    "succeeded": "A job succeeded",
    "group-done": "A group is done",
    "queue-empty": "The queue is empty",
    "gpu-unknown": "A GPU cannot be read",
    "gpu-quarantined": "A GPU is out of rotation",
    "worker-gone": "A worker is gone",
}


@router.get("/settings")
async def settings(request: Request) -> Response:
    """The settings of this browser; for operators also messages and viewer links."""
    app_state, operates = app_state_of(request), user_of(request).operates
    added = await app_state.pool.run(lambda store: store.notices.urls()) if operates else []
    return page(
        request,
        "settings.html",
        acts=operates,
        notifications=settings_of(app_state, added) if operates else None,
        tokens=await asyncio.to_thread(shown_tokens, app_state.keys) if operates else [],
        event_words=_EVENT_WORDS,
        usual_events=USUAL_EVENTS,
        here="settings",
        now=now_of(app_state.snapshot_cache),
    )


@router.get("/manifest.webmanifest")
async def manifest() -> Response:
    return static_file("manifest.webmanifest")


@router.get("/favicon.ico")
async def favicon() -> Response:
    return static_file("icons/icon-192.png")


_ON_A_PAGE: Final = 50
_CHOICES: Final = (
    ("", "All"),
    ("running", "Running"),
    ("queued", "Queued"),
    ("held", "Held"),
    ("failed", "Failed"),
    ("succeeded", "Succeeded"),
    ("cancelled", "Cancelled"),
)
_STATE: Final = re.compile(r"(?:(?<=\s)|^)state:\S*", re.IGNORECASE)
_UNSEEN: Final = {
    "failed": "Jobs that failed in the last 24 h",
    "stopped": "Jobs that a rule stopped in the last 24 h",
}
# All on one page; if there are more, only the newest.
_MOST_UNSEEN: Final = 1000


class Listing(msgspec.Struct, frozen=True):
    """Which jobs a list shows."""

    q: str = ""
    sort: str = ""
    cursor: str = ""
    unseen: str = ""
    """Only failures that were not dismissed: `failed` or `stopped`."""

    @classmethod
    def parse(cls, q: str, state: str, tag: str, sort: str, cursor: str, unseen: str = "") -> "Listing":
        """From the query of an address. State and tag become parts of the search; an unknown state stands for all."""
        if unseen in get_args(Failure):
            return cls(unseen=unseen)
        tag = tag.strip().replace('"', "")
        tagged = f'tag:"{tag}"' if " " in tag else f"tag:{tag}" if tag else ""
        words = (q.strip(), f"state:{state}" if state in get_args(State) else "", tagged)
        listing = cls(
            " ".join(word for word in words if word), "" if sort.strip() == "submitted" else sort.strip(), cursor
        )
        if cursor:
            place_of(cursor)  # raises for an invalid one
        searched(listing.q, sort=listing.sort)  # the same
        return listing

    def read(self, store: Store) -> Page:
        if self.unseen:
            failures = store.jobs.failures(cast("Failure", self.unseen), store.clock() - RECENT, _MOST_UNSEEN)
            return Page(items=failures)
        after = place_of(self.cursor) if self.cursor else None
        return read_page(store, searched(self.q, sort=self.sort), after, _ON_A_PAGE)

    def sections(self, found: Page, role: Role) -> dict[str, str]:
        older = self.address(found.next) if found.next else None
        heads = {} if self.unseen else {name: self._sorted_by(name) for name in SORTS}
        return render_list(
            found, older, self.address() if self.cursor else None, role, self.q, heads, bool(self.unseen)
        )

    def _sorted_by(self, name: str) -> tuple[str, str]:
        """The address of the list sorted by this column, reversed if it already is; and the current order."""
        now = parse_sort(self.sort)
        way = "" if now.by != name else "descending" if now.descending else "ascending"
        wanted = Sort(name, SORTS[name].descending != (now.by == name and now.descending == SORTS[name].descending))
        return msgspec.structs.replace(self, sort=str(wanted)).address(), way

    def in_state(self, state: str) -> "Listing":
        """The same search in another state, or in all."""
        rest = _STATE.sub(" ", self.q).strip()
        return Listing(" ".join(word for word in (rest, f"state:{state}" if state else "") if word), self.sort)

    def address(self, cursor: str = "", *, of: str = "/jobs") -> str:
        sort = "" if self.sort == "submitted" else self.sort
        parts = (("q", self.q), ("sort", sort), ("cursor", cursor), ("unseen", self.unseen))
        asked = [(name, value) for name, value in parts if value]
        return f"{of}?{urlencode(asked)}" if asked else of


@router.get("/jobs")
async def jobs(
    request: Request,
    q: str = "",
    state: str = "",
    tag: str = "",
    sort: str = "",
    cursor: str = "",
    made: str = "",
    unseen: str = "",
) -> Response:
    app_state = app_state_of(request)
    try:
        listing = Listing.parse(q, state, tag, sort, cursor, unseen)
    except ParameterError as error:
        if error.parameter != "q":
            raise
        return _bad_search(request, q, error)
    found = await app_state.pool.run(listing.read)
    now = parse_sort(listing.sort)
    return page(
        request,
        "jobs.html",
        sections=trusted(listing.sections(found, user_of(request).role)),
        choices=[
            (listing.in_state(value).address(), label, listing.in_state(value).q == listing.q)
            for value, label in _CHOICES
        ],
        sorts=[(name, key.title, name == now.by) for name, key in SORTS.items()],
        unseen=_UNSEEN.get(listing.unseen, ""),
        q=listing.q,
        mistake="",
        made=int(made) if made.isascii() and made.isdigit() and len(made) < 7 else 0,
        here="jobs",
        live=listing.address(cursor, of="/live/jobs"),
        now=now_of(app_state.snapshot_cache),
    )


def _bad_search(request: Request, q: str, error: ParameterError) -> Response:
    """The page with the search as typed and its error."""
    return page(
        request,
        "jobs.html",
        status=422,
        sections={"list": ""},
        choices=[(Listing().in_state(value).address(), label, False) for value, label in _CHOICES],
        sorts=[],
        unseen="",
        q=q[:LONGEST_QUERY],
        mistake=str(error),
        made=0,
        here="jobs",
    )


_HEADINGS: Final = {404: "Not found", 422: "Invalid address", 503: "The queue is unavailable"}


def error_page(request: Request, status: int, _title: str, message: str) -> Response:
    """For `problems.install`."""
    heading = _HEADINGS.get(status, "Something went wrong")
    return page(request, "error.html", status=status, heading=heading, message=message, status_code=status)
