"""Compresses answers: a page to a tenth, and a live section that comes again with a few figures changed to a fortieth.

The length of an answer tells no secret (BREACH). That attack needs a secret and text of the attacker's choice in one
answer, which a browser asks for as often as the attacker wants. No body here holds a token, a cookie or a password:
tokens are in fragments of links and in request headers, cookies in headers, environments are masked. And no other site
can have somebody's browser ask here as that person: the cookie is `SameSite=Strict`.
"""

import zlib
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.web.auth.origin import header

# Below this the headers weigh more than what compression saves.
_WORTH_COMPRESSING: Final = 500
_LEVEL: Final = 5
# The section before must be in the window, or what comes again is not found there. It takes 160 KiB for each stream.
_WINDOW: Final = 15
_MEMORY: Final = 6
_GZIP: Final = 16


def compressed(app: ASGIApp) -> ASGIApp:
    """`app` with answers compressed for whoever understands that."""
    return _Streams(GZipMiddleware(app, _WORTH_COMPRESSING, _LEVEL))


class _Streams:
    """Server-sent events: each is on its way as soon as it is there, which Starlette's own middleware cannot do."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or "gzip" not in header(scope, b"accept-encoding"):
            await self._app(scope, receive, send)
            return
        stream: zlib._Compress | None = None

        async def compressing(message: Message) -> None:
            nonlocal stream
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                if headers.get("content-type", "").startswith("text/event-stream"):
                    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP + _WINDOW, _MEMORY)
                    headers["Content-Encoding"] = "gzip"
                    headers.add_vary_header("Accept-Encoding")
            elif stream is not None:
                more = message.get("more_body", False)
                body = stream.compress(message.get("body", b"")) + stream.flush(
                    zlib.Z_SYNC_FLUSH if more else zlib.Z_FINISH
                )
                message = {**message, "body": body}
            await send(message)

        await self._app(scope, receive, compressing)
