"""Security headers of all responses, and compression."""

import zlib
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.web.auth.requests import header, is_secure, json_refusal, split_host
from stoker.web.config import Config

CONTENT_SECURITY_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self';"
    " manifest-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
_ALWAYS: Final = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",  # for browsers that do not know frame-ancestors
    # Not `no-referrer`: browsers would then send `Origin: null` with this page's own forms, and over plain HTTP the
    # origin is the only difference to another site's forms. `same-origin` also sends no referrer to other sites.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), display-capture=(), geolocation=(), microphone=(), payment=(), usb=()",
}
_A_YEAR: Final = "max-age=31536000"


class SecurityHeaders:
    def __init__(self, app: ASGIApp, config: Config) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._add(scope, MutableHeaders(raw=message.setdefault("headers", [])))
            await send(message)

        try:
            await self._app(scope, receive, with_headers)
        except Exception:
            if not started:
                await json_refusal(500, "internal error: the server's log has details")(scope, receive, with_headers)
            raise

    def _add(self, scope: Scope, headers: MutableHeaders) -> None:
        for name, value in _ALWAYS.items():
            headers[name] = value
        if not scope["path"].startswith("/static/"):
            # After logout, the browser's back button must not show earlier pages.
            headers["Cache-Control"] = "no-store"
        if is_secure(scope, self._config) and not split_host(header(scope, b"host"))[1]:
            # Only on the default port: the header applies to all ports of the host, and would break other people's
            # plain HTTP pages there.
            headers["Strict-Transport-Security"] = _A_YEAR


# Smaller responses gain nothing.
_MIN_SIZE: Final = 500
_LEVEL: Final = 5
# The window must hold the previous version of a section, which the next one repeats. 160 KiB per stream.
_WINDOW: Final = 15
_MEMORY: Final = 6
_GZIP: Final = 16


def compressed(app: ASGIApp) -> ASGIApp:
    """`app` with compressed responses for clients that accept them."""
    return _CompressedEvents(GZipMiddleware(app, _MIN_SIZE, _LEVEL))


class _CompressedEvents:
    """Compresses server-sent events and flushes each one at once, which Starlette's middleware does not."""

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
