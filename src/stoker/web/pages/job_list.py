"""All jobs, newest first, page by page: those of a state, or with a tag."""

from typing import Final, cast, get_args
from urllib.parse import urlencode

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from stoker.queue.fields import State
from stoker.queue.model import Failure
from stoker.queue.store import Store
from stoker.status.health import RECENT
from stoker.web.answers import Page, page_of, place_of
from stoker.web.app_state import app_state_of, user_of
from stoker.web.auth.key_file import Role
from stoker.web.pages.sections import render_list, trusted
from stoker.web.pages.views import now_of
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


_UNSEEN: Final = {
    "failed": "Jobs that failed in the last 24 h",
    "stopped": "Jobs that a rule stopped in the last 24 h",
}
# All on one page: whoever has more of them to look at in a day begins with the newest.
_MOST_UNSEEN: Final = 1000


class Listing(msgspec.Struct, frozen=True):
    """Which jobs somebody wants to see."""

    state: str = ""
    tag: str = ""
    cursor: str = ""
    unseen: str = ""
    """Only the failures that the overview tells of: `failed` or `stopped`."""

    @classmethod
    def parse(cls, state: str, tag: str, cursor: str, unseen: str = "") -> "Listing":
        """As an address has it. A state that there is not asks for every state."""
        if unseen in get_args(Failure):
            return cls(unseen=unseen)
        listing = cls(state if state in get_args(State) else "", tag.strip(), cursor)
        if cursor:
            place_of(cursor)  # or it is no cursor, and that is said before anything is begun
        return listing

    def read(self, store: Store) -> Page:
        if self.unseen:
            failures = store.jobs.failures(cast("Failure", self.unseen), store.clock() - RECENT, _MOST_UNSEEN)
            return Page(items=failures)
        states = (cast("State", self.state),) if self.state else ()
        before = place_of(self.cursor) if self.cursor else None
        return page_of(store.jobs.page(states, self.tag or None, before, _ON_A_PAGE + 1), _ON_A_PAGE)

    def sections(self, found: Page, role: Role) -> dict[str, str]:
        older = self.address(found.next) if found.next else None
        return render_list(found.items, older, self.address() if self.cursor else None, role)

    def address(self, cursor: str = "", *, of: str = "/jobs") -> str:
        parts = (("state", self.state), ("tag", self.tag), ("cursor", cursor), ("unseen", self.unseen))
        asked = [(name, value) for name, value in parts if value]
        return f"{of}?{urlencode(asked)}" if asked else of


@router.get("/jobs")
async def jobs(
    request: Request, state: str = "", tag: str = "", cursor: str = "", made: str = "", unseen: str = ""
) -> Response:
    app_state = app_state_of(request)
    listing = Listing.parse(state, tag, cursor, unseen)
    found = await app_state.pool.run(listing.read)
    return page(
        request,
        "jobs.html",
        sections=trusted(listing.sections(found, user_of(request).role)),
        choices=[(value, label, Listing(value, listing.tag).address()) for value, label in _CHOICES],
        state=listing.state,
        unseen=_UNSEEN.get(listing.unseen, ""),
        tag=listing.tag,
        made=int(made) if made.isascii() and made.isdigit() and len(made) < 7 else 0,
        here="jobs",
        live=listing.address(cursor, of="/live/jobs"),
        now=now_of(app_state.snapshot_cache),
    )
