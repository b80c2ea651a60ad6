"""Submitting from the page: a form that keeps what was typed when something in it cannot be meant."""

import hashlib
import secrets
from typing import Final

from fastapi import APIRouter, HTTPException, Request
from starlette.responses import RedirectResponse, Response

from stoker.errors import BadInputError
from stoker.queue.model import Job
from stoker.queue.store import Store
from stoker.web.app_state import AppState, house_of, visitor_of
from stoker.web.idempotency import submit_once
from stoker.web.pages import submit_form
from stoker.web.pages.submit_form import Form
from stoker.web.problems import MistakesError
from stoker.web.submission import jobs_of
from stoker.web.templating import page

router = APIRouter()

# Whoever has worked in more places than these lately types the one that is meant.
_RECENT_JOBS: Final = 50


@router.get("/submit")
async def form(request: Request, again: str = "") -> Response:
    if not visitor_of(request).operates:
        raise HTTPException(403, "a token that may only look cannot submit: `stoker tokens add` makes one that may act")
    house, key = house_of(request), secrets.token_urlsafe(16)
    operates = visitor_of(request).operates

    def look(store: Store) -> tuple[Form, list[str]]:
        directories = submit_form.recent_directories(store.page(limit=_RECENT_JOBS))
        if again:
            return submit_form.like(store.job(again), key, whole=operates), directories
        return submit_form.empty(directories[0], key), directories

    filled, directories = await house.desk.ask(look)
    return _page(request, filled, directories)


@router.post("/submit")
async def submit(request: Request) -> Response:
    house, sender = house_of(request), visitor_of(request).name
    try:
        filled = submit_form.sent(await request.body())
    except ValueError:
        return Response("a form with so many fields is not ours", 400, media_type="text/plain")
    try:
        jobs = await house.desk.ask(lambda store: _submitted(store, filled, sender))
    except MistakesError as error:
        return await _again(request, house, filled, error.mistakes)
    except BadInputError as error:
        return await _again(request, house, filled, {"": str(error)})
    house.board.look_now()
    return RedirectResponse(f"/jobs/{jobs[0].id}" if len(jobs) == 1 else f"/jobs?made={len(jobs)}", 303)


def _submitted(store: Store, filled: Form, sender: str) -> list[Job]:
    original = submit_form.like(store.job(filled.again), filled.key) if filled.again else None
    wanted = submit_form.wanted(filled, original)
    # With what was asked for in the key, a form that is changed and sent once more is another submission.
    asked = submit_form.content(filled)
    key = f"{filled.key}:{hashlib.sha256(asked).hexdigest()}" if filled.key else None
    return submit_once(store, key, sender, asked, lambda: jobs_of(store, wanted, sender)).jobs


async def _again(request: Request, house: AppState, filled: Form, mistakes: dict[str, str]) -> Response:
    directories = await house.desk.ask(lambda store: submit_form.recent_directories(store.page(limit=_RECENT_JOBS)))
    return _page(request, filled, directories, mistakes)


def _page(request: Request, filled: Form, directories: list[str], mistakes: dict[str, str] | None = None) -> Response:
    return page(
        request,
        "submit.html",
        status=422 if mistakes else 200,
        form=filled,
        directories=directories,
        mistakes=submit_form.beside(mistakes or {}),
        above=submit_form.above(mistakes or {}),
        here="submit",
    )
