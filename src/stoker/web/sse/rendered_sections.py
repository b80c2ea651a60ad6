"""What is on show: sections rendered once for everybody who may see them, away from the loop that serves everybody.

Hundreds of GPUs make a tenth of a second of HTML. A thread makes it, and pages that are opened meanwhile wait for the
same.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
from markupsafe import Markup

from stoker.status.model import Snapshot
from stoker.web.auth.user import Role
from stoker.web.pages.sections import for_page, render

# Pages that are only open wait for each other: what people do must find a free thread at the desk.
_LOOKS_AT_ONCE: Final = 2

# A look that takes longer, such as one for a tag that tens of thousands of jobs have, gets only so much of the time,
# but what it found is soon looked for again.
_DEAR: Final = 0.1
_SHARE: Final = 0.1
_LONGEST_KEPT: Final = 10.0

Events = dict[str, str]
"""Server-sent events, by the section that they bring."""


class Shown(msgspec.Struct, frozen=True):
    """One version, as one role sees it."""

    events: Events
    sections: dict[str, Markup]
    """The same for a page that is opened."""


class RenderedSections:
    """The newest version of the overview."""

    def __init__(self) -> None:
        self._painter = ThreadPoolExecutor(1, thread_name_prefix="painter")
        self._version = -1
        self._by_role: dict[Role, asyncio.Future[Shown]] = {}

    async def shown(self, snapshot: Snapshot, version: int, role: Role) -> Shown:
        if version != self._version:
            self._version, self._by_role = version, {}
        painting = self._by_role.get(role)
        if painting is None:
            painting = asyncio.get_running_loop().run_in_executor(self._painter, _paint, snapshot, role)
            self._by_role[role] = painting
        return await asyncio.shield(painting)

    def close(self) -> None:
        self._painter.shutdown(wait=False, cancel_futures=True)


def _paint(snapshot: Snapshot, role: Role) -> Shown:
    sections = render(snapshot, role)
    return Shown({name: event(name, html) for name, html in sections.items()}, for_page(snapshot, role, sections))


class Looks:
    """The other live pages: with each version of the board, one look serves everybody who has the same page open."""

    def __init__(self) -> None:
        self._version = -1
        self._looks: dict[Hashable, asyncio.Task[Events]] = {}
        self._dear: dict[Hashable, tuple[float, Events]] = {}
        """What took long to find, and until when it is good enough, in monotonic seconds."""
        self._turns = asyncio.Semaphore(_LOOKS_AT_ONCE)

    async def events(
        self, version: int, which: Hashable, sections: Callable[[], Awaitable[Mapping[str, str]]]
    ) -> Events:
        """What `sections` finds, or has found for somebody else who asked for the same."""
        if version != self._version:
            self._version, self._looks = version, {}
            self._dear = {one: kept for one, kept in self._dear.items() if kept[0] > time.monotonic()}
        if which in self._dear:
            return self._dear[which][1]
        look = self._looks.get(which)
        if look is None:
            look = self._looks[which] = asyncio.create_task(self._look(which, sections))
            look.add_done_callback(_ask_why)
        return await asyncio.shield(look)

    async def _look(self, which: Hashable, sections: Callable[[], Awaitable[Mapping[str, str]]]) -> Events:
        async with self._turns:
            begun = time.monotonic()
            found = {name: event(name, html) for name, html in (await sections()).items()}
            took = time.monotonic() - begun
        if took > _DEAR:
            self._dear[which] = time.monotonic() + min(took / _SHARE, _LONGEST_KEPT), found
        return found


def _ask_why(look: "asyncio.Task[Events]") -> None:
    if not look.cancelled():
        look.exception()  # whoever waited for it may have left: then nobody else asks


def event(name: str, text: str) -> str:
    """One server-sent event."""
    # A carriage return would end a line too, and what follows it would be read as a field.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return f"event: {name}\n" + "".join(f"data: {line}\n" for line in lines) + "\n"
