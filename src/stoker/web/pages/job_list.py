"""All jobs, newest first, page by page: those of a state, or with a tag."""

from typing import Final, cast, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from starlette.responses import Response

from stoker.queue.model import State
from stoker.queue.store import Store
from stoker.web.house import house_of
from stoker.web.pages import words
from stoker.web.pages.front import now_of
from stoker.web.pagination import Page, page_of, place_of
from stoker.web.templating import page

router = APIRouter()

# A few screens of a phone, and one of a desk.
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


@router.get("/jobs")
async def jobs(request: Request, state: str = "", tag: str = "", cursor: str = "", made: str = "") -> Response:
    house = house_of(request)
    states: tuple[State, ...] = (cast("State", state),) if state in get_args(State) else ()

    def look(store: Store) -> Page:
        before = place_of(cursor) if cursor else None
        return page_of(store.page(states, tag.strip() or None, before, _ON_A_PAGE + 1), _ON_A_PAGE)

    found = await house.desk.ask(look)
    return page(
        request,
        "jobs.html",
        jobs=found.items,
        next=_address(state, tag, found.next) if found.next else None,
        first=_address(state, tag) if cursor else None,
        choices=[(value, label, _address(value, tag)) for value, label in _CHOICES],
        state=states[0] if states else "",
        tag=tag.strip(),
        made=int(made) if made.isascii() and made.isdigit() and len(made) < 7 else 0,
        because=words.because,
        took=words.took,
        here="jobs",
        now=now_of(house.board),
    )


def _address(state: str, tag: str, cursor: str = "") -> str:
    asked = [(name, value) for name, value in (("state", state), ("tag", tag), ("cursor", cursor)) if value]
    return f"/jobs?{urlencode(asked)}" if asked else "/jobs"
