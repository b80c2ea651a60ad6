"""The access log: one line per request, without query strings and secrets."""

import contextlib
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.web.auth.keys import TOKEN_PREFIX
from stoker.web.auth.requests import client_address

_NO_USER: Final = "-"
# Longer than any path of the page.
_MAX_LENGTH: Final = 300
# Tokens may be pasted anywhere, also into the path.
_SECRET: Final = re.compile(rf"{TOKEN_PREFIX}[A-Za-z0-9_-]+")
# The client disconnected before the response.
_NO_RESPONSE: Final = 499


class AccessLog:
    def __init__(self, app: ASGIApp, log: Callable[[str], None]) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        begun = time.monotonic()
        status = _NO_RESPONSE

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            status = 500
            raise
        finally:
            # A full disk loses the line, not the response.
            with contextlib.suppress(OSError):
                self._log(line_of(scope, status, time.monotonic() - begun))


def line_of(scope: Scope, status: int, seconds: float) -> str:
    """`2026-11-16T02:20:01Z 192.0.2.7 phone GET /jobs/7 200 12ms`."""
    when = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    user = scope.get("state", {}).get("user")
    who = _NO_USER if user is None else one_word(user.name)
    method = one_word(scope.get("method", "WEBSOCKET"))
    path = one_word(scope["path"])
    return f"{when} {one_word(client_address(scope))} {who} {method} {path} {status} {round(seconds * 1000)}ms"


def one_word(text: str) -> str:
    """Escapes spaces and control characters, which could forge lines or control a terminal."""
    hidden = _SECRET.sub(f"{TOKEN_PREFIX}…", text)
    return "".join(letter if _is_plain(letter) else _escaped(letter) for letter in hidden[:_MAX_LENGTH])


def _is_plain(letter: str) -> bool:
    return letter.isprintable() and letter not in {" ", "\\"}


def _escaped(letter: str) -> str:
    return f"\\x{ord(letter):02x}" if ord(letter) < 256 else f"\\u{{{ord(letter):x}}}"
