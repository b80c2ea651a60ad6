"""How much a request may carry, and how long it may take to bring it."""

import asyncio
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.web.auth.origin import headers_named
from stoker.web.auth.refusal import refusal
from stoker.web.config import Config

# A sweep of a thousand long commands is a tenth of it.
MOST: Final = 1024 * 1024
# Who has not been let in brings a token, and no more: nobody can fill the memory from outside.
MOST_OF_STRANGERS: Final = 8 * 1024
# A phone in a tunnel brings a megabyte in this time; who is slower is not waited for.
SECONDS: Final = 30.0


class DeclaredSize:
    """Refuses what says by itself that it is too large."""

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _declared(scope) > MOST:
            await _too_large(scope, self._config, MOST)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class WholeBody:
    """Collects the body before anything is done with it: a slow or endless one costs a connection, and nothing else."""

    def __init__(self, app: ASGIApp, config: Config, seconds: float = SECONDS) -> None:
        self._app = app
        self._config = config
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        most = MOST_OF_STRANGERS if scope.get("state", {}).get("visitor") is None else MOST
        try:
            async with asyncio.timeout(self._seconds):
                body = await _collected(receive, most)
        except TimeoutError:
            sentence = f"the request did not arrive within {self._seconds:g} s"
            # The rest of it is not waited for either.
            answer = refusal(scope, self._config, 408, sentence, {"Connection": "close"})
            await answer(scope, receive, send)
            return
        except _TooLargeError:
            await _too_large(scope, self._config, most)(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), send)


class _TooLargeError(Exception):
    pass


async def _collected(receive: Receive, most: int) -> bytes | None:
    """All of it; None when the client has left."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > most:
            raise _TooLargeError
        if not message.get("more_body", False):
            return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then whatever comes: that the client has left."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def _declared(scope: Scope) -> int:
    lengths = headers_named(scope, b"content-length")
    return max((int(length) for length in lengths if length.isascii() and length.isdigit()), default=0)


def _has_body(scope: Scope) -> bool:
    return _declared(scope) > 0 or bool(headers_named(scope, b"transfer-encoding"))


def _too_large(scope: Scope, config: Config, most: int) -> ASGIApp:
    return refusal(scope, config, 413, f"the request is larger than {most // 1024:,} KiB: send less at once")
