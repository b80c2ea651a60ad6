"""Protection against requests that other sites make through a user's browser."""

import ipaddress
import re
import socket
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from stoker.web.auth.requests import (
    bearer,
    header,
    headers_named,
    json_refusal,
    own_origins,
    refuse,
    same_origin,
    session_cookies,
    split_host,
)
from stoker.web.config import Config

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
# `none`: the address bar or a bookmark.
_FROM_HERE: Final = frozenset({"same-origin", "none"})


class CsrfProtection:
    def __init__(self, app: ASGIApp, config: Config) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if header(scope, b"upgrade").lower() == "websocket":
            answer = json_refusal(400, "WebSockets are not supported: /live sends server-sent events")
        elif scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method"):
            answer = json_refusal(403, "requests from other sites are not allowed")
        elif scope["method"] not in SAFE_METHODS and self._is_foreign(scope):
            message = (
                "the request came from another site, so nothing was changed: open the page itself and repeat it there"
            )
            answer = refuse(scope, self._config, 403, message)
        else:
            await self._app(scope, receive, send)
            return
        await answer(scope, receive, send)

    def _is_foreign(self, scope: Scope) -> bool:
        if bearer(scope) is not None:
            return False  # no other site can make a browser send a token
        if site := header(scope, b"sec-fetch-site"):
            return site not in _FROM_HERE
        if origin := header(scope, b"origin"):
            return not same_origin(origin, own_origins(scope, self._config))
        # Browsers send at least one of the two headers. Programs may send neither, but do not use cookies.
        return bool(session_cookies(scope, self._config))


_NAME: Final = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,253})")


class Hosts:
    """Refuses host names that are not this machine's, against DNS rebinding."""

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self._app = app
        self._names = names_of(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        hosts = headers_named(scope, b"host")
        if len(hosts) != 1:
            answer = json_refusal(400, "the request needs exactly one Host header")
            await answer(scope, receive, send)
        elif not self._is_own(hosts[0]):
            # In JSON also for browsers: the owner of that name may read it, and learns nothing about the page.
            await json_refusal(421, _unknown_host(hosts[0]))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_own(self, host: str) -> bool:
        name = split_host(host)[0]
        return name in self._names or name.endswith(".localhost") or _is_address(name)


def names_of(config: Config) -> frozenset[str]:
    """The names of this machine: those of the system and those of the configuration."""
    own = socket.gethostname().lower()
    short = own.partition(".")[0]
    # `.local`: how phones find machines in the same network (mDNS).
    known = ["localhost", own, short, f"{short}.local", *config.names, urlsplit(config.url).hostname or "", config.host]
    return frozenset(split_host(name)[0] for name in known) - {""}


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _unknown_host(host: str) -> str:
    name = split_host(host)[0]
    if not _NAME.fullmatch(name):
        return "the page does not serve this host name"
    return (
        f"the page does not serve the host name {name}: if it is a name of this machine,"
        f" start the page with `--name {name}`, or with `--url` and the public address"
    )
