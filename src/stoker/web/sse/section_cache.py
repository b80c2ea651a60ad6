"""HTML sections of live pages, each rendered once for all pages that show it."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Final

import msgspec

# Leaves connections of the pool free for what people do.
_MAX_RENDERING: Final = 2


class Rendered(msgspec.Struct, frozen=True):
    sections: Mapping[str, str]
    """HTML by the name of the section."""
    events: dict[str, str]
    """The same as server-sent events."""


class SectionCache:
    """One query and one rendering per version of the snapshot serve all users with the same page open."""

    def __init__(self) -> None:
        self._version = -1
        self._rendering: dict[Hashable, asyncio.Task[Rendered]] = {}
        self._limit = asyncio.Semaphore(_MAX_RENDERING)

    async def get(self, version: int, which: Hashable, render: Callable[[], Awaitable[Mapping[str, str]]]) -> Rendered:
        """The result of `render`, shared by all callers with the same `which`."""
        if version != self._version:
            self._version, self._rendering = version, {}
        task = self._rendering.get(which)
        if task is None:
            task = self._rendering[which] = asyncio.create_task(self._render(render))
            task.add_done_callback(_retrieve_exception)
        return await asyncio.shield(task)

    async def _render(self, render: Callable[[], Awaitable[Mapping[str, str]]]) -> Rendered:
        async with self._limit:
            sections = await render()
        return Rendered(sections, {name: event(name, html) for name, html in sections.items()})


def _retrieve_exception(task: "asyncio.Task[Rendered]") -> None:
    if not task.cancelled():
        task.exception()  # all callers may be gone; asyncio logs exceptions that nobody retrieved


# Proxies must not buffer the stream.
STREAM_HEADERS: Final = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def event(name: str, text: str) -> str:
    """One server-sent event."""
    # A carriage return also ends a line, and the rest would be parsed as a field.
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return f"event: {name}\n" + "".join(f"data: {line}\n" for line in lines) + "\n"
