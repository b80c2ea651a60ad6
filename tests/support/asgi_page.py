"""A page that follows a log, without a network: what it is sent, and what a browser would show of it."""

import asyncio
import json
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from starlette.types import ASGIApp, Message

from stoker.web.auth.key_file import User


class AsgiPage:
    """One request; `async with` ends it as a browser does that is closed."""

    def __init__(self, app: ASGIApp, address: str, user: User, headers: dict[str, str] | None = None) -> None:
        path, _, query = address.partition("?")
        self._app = app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "server": ("127.0.0.1", 7865),
            "client": ("127.0.0.1", 1),
            "state": {"user": user},
        }
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.largest = 0
        """The longest piece that the body came in."""
        self.is_complete = False
        self._parsed = 0
        self.events: list[tuple[str, str]] = []
        self.mark = ""
        self.lines: dict[int, str] = {}
        self._left = asyncio.Event()
        self.awake = asyncio.Event()
        """Clear it, and the page takes nothing more until it is set again."""
        self.awake.set()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.awake.set()
        self._left.set()
        await self._task

    async def _run(self) -> None:
        await self._app(self._scope, self._receive, self._send)

    async def _receive(self) -> Message:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await self.awake.wait()
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            return
        piece = message.get("body", b"")
        self.body += piece
        self.largest = max(self.largest, len(piece))
        self.is_complete = not message.get("more_body", False)
        if self.headers.get("content-type", "").startswith("text/event-stream"):
            self._hear()

    def _hear(self) -> None:
        """As an EventSource does."""
        while (end := self.body.find(b"\n\n", self._parsed)) >= 0:
            fields = [line.partition(": ") for line in self.body[self._parsed : end].decode().split("\n")]
            self._parsed = end + 2
            name = next((value for field, _, value in fields if field == "event"), "")
            data = "\n".join(value for field, _, value in fields if field == "data")
            self.mark = next((value for field, _, value in fields if field == "id"), self.mark)
            if name:
                self.events.append((name, data))
                self._show(name, data)

    def _show(self, name: str, data: str) -> None:
        if name == "begin":
            self.lines = {}
        elif name in {"lines", "last"}:
            told: dict[str, Any] = json.loads(data)
            self.lines = {number: html for number, html in self.lines.items() if number < told["from"]}
            self.lines |= dict(enumerate(told["lines"], told["from"]))

    @property
    def text(self) -> list[str]:
        return [self.lines[number] for number in sorted(self.lines)]

    def heard(self, name: str) -> list[str]:
        return [data for kind, data in self.events if kind == name]

    async def until(
        self, what: Callable[[], object], named: str = "what was waited for", deadline: float = 60.0
    ) -> None:
        ends = time.monotonic() + deadline
        while not what():
            assert time.monotonic() < ends, f"{named} did not happen; the last of it: {self.events[-3:]}"
            await asyncio.sleep(0.005)

    async def ended(self) -> Self:
        await self.until(lambda: self.is_complete, "the end of the answer")
        return self
