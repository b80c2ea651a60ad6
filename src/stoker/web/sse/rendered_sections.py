"""HTML sections of live pages, each rendered once for all pages that show it.

Rendering hundreds of GPUs takes a tenth of a second, so it happens in a thread.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec
from markupsafe import Markup

from stoker.status.model import Snapshot
from stoker.web.auth.key_file import Role
from stoker.web.pages.sections import for_page, render

# Leaves connections of the pool free for what people do.
_MAX_QUERIES: Final = 2

# Queries that take longer, such as for a tag of tens of thousands of jobs, are repeated less often: they may use this
# share of the time, and their results are kept for at most this long.
_SLOW: Final = 0.1
_SHARE: Final = 0.1
_MAX_KEPT: Final = 10.0

Events = dict[str, str]
"""Server-sent events by section."""


class RenderedSnapshot(msgspec.Struct, frozen=True):
    """One version of the snapshot for one role."""

    events: Events
    sections: dict[str, Markup]
    """The same for a new page."""


class RenderedSections:
    """The sections of the newest snapshot, by role."""

    def __init__(self) -> None:
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="render-sections")
        self._version = -1
        self._by_role: dict[Role, asyncio.Future[RenderedSnapshot]] = {}

    async def get(self, snapshot: Snapshot, version: int, role: Role) -> RenderedSnapshot:
        if version != self._version:
            self._version, self._by_role = version, {}
        rendering = self._by_role.get(role)
        if rendering is None:
            rendering = asyncio.get_running_loop().run_in_executor(self._renderer, _render_snapshot, snapshot, role)
            self._by_role[role] = rendering
        return await asyncio.shield(rendering)

    def close(self) -> None:
        self._renderer.shutdown(wait=False, cancel_futures=True)


def _render_snapshot(snapshot: Snapshot, role: Role) -> RenderedSnapshot:
    sections = render(snapshot, role)
    return RenderedSnapshot(
        {name: event(name, html) for name, html in sections.items()}, for_page(snapshot, role, sections)
    )


class SectionCache:
    """Sections of the other live pages: one query per version serves all users with the same page open."""

    def __init__(self) -> None:
        self._version = -1
        self._queries: dict[Hashable, asyncio.Task[Events]] = {}
        self._slow: dict[Hashable, tuple[float, Events]] = {}
        """Results of slow queries, and until when they are used, in monotonic seconds."""
        self._limit = asyncio.Semaphore(_MAX_QUERIES)

    async def events(
        self, version: int, which: Hashable, sections: Callable[[], Awaitable[Mapping[str, str]]]
    ) -> Events:
        """The result of `sections`, shared by all callers with the same `which`."""
        if version != self._version:
            self._version, self._queries = version, {}
            self._slow = {one: kept for one, kept in self._slow.items() if kept[0] > time.monotonic()}
        if which in self._slow:
            return self._slow[which][1]
        query = self._queries.get(which)
        if query is None:
            query = self._queries[which] = asyncio.create_task(self._run(which, sections))
            query.add_done_callback(_retrieve_exception)
        return await asyncio.shield(query)

    async def _run(self, which: Hashable, sections: Callable[[], Awaitable[Mapping[str, str]]]) -> Events:
        async with self._limit:
            started = time.monotonic()
            events = {name: event(name, html) for name, html in (await sections()).items()}
            took = time.monotonic() - started
        if took > _SLOW:
            self._slow[which] = time.monotonic() + min(took / _SHARE, _MAX_KEPT), events
        return events


def _retrieve_exception(query: "asyncio.Task[Events]") -> None:
    if not query.cancelled():
        query.exception()  # all callers may be gone; asyncio logs exceptions that nobody retrieved


def event(name: str, text: str) -> str:
    """One server-sent event."""
    # A carriage return also ends a line, and the rest would be parsed as a field.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return f"event: {name}\n" + "".join(f"data: {line}\n" for line in lines) + "\n"
