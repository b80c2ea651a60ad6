"""Keeps other sites from acting through somebody's browser."""

import ipaddress
import re
import socket
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from stoker.web.auth.requests import (
    bearer,
    cookies_named,
    header,
    headers_named,
    own_origins,
    refusal,
    refusal_in_json,
    same_origin,
    split_host,
)
from stoker.web.config import Config

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
# `none`: the person did it by hand, in the address bar or a bookmark.
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
            answer = refusal_in_json(400, "there are no WebSockets here: /live has server-sent events")
        elif scope["method"] == "OPTIONS" and header(scope, b"access-control-request-method"):
            answer = refusal_in_json(403, "other sites may not ask here from somebody's browser")
        elif scope["method"] not in SAFE_METHODS and self._is_foreign(scope):
            sentence = "this came from another site, so nothing was done: open the page itself and do it there"
            answer = refusal(scope, self._config, 403, sentence)
        else:
            await self._app(scope, receive, send)
            return
        await answer(scope, receive, send)

    def _is_foreign(self, scope: Scope) -> bool:
        if bearer(scope) is not None:
            return False  # no other site can make a browser send one
        if site := header(scope, b"sec-fetch-site"):
            return site not in _FROM_HERE
        if origin := header(scope, b"origin"):
            return not same_origin(origin, own_origins(scope, self._config))
        # Every browser says one of both. A program may say neither, but a cookie is not for programs.
        return bool(cookies_named(scope, self._config))


_NAME: Final = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,253})")


class Hosts:
    def __init__(self, app: ASGIApp, config: Config) -> None:
        self._app = app
        self._names = names_of(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        hosts = headers_named(scope, b"host")
        if len(hosts) != 1:
            answer = refusal_in_json(400, "the request does not say which host it is for")
            await answer(scope, receive, send)
        elif not self.answers_to(hosts[0]):
            # In JSON also for people: it is read by whoever has the name, and should tell them nothing of the page.
            await refusal_in_json(421, _not_here(hosts[0]))(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def answers_to(self, host: str) -> bool:
        name = split_host(host)[0]
        return name in self._names or name.endswith(".localhost") or _is_address(name)


def names_of(config: Config) -> frozenset[str]:
    """All names of this machine that it knows itself, and those that it was told."""
    own = socket.gethostname().lower()
    short = own.partition(".")[0]
    # The last is what phones call machines of the same network.
    known = ["localhost", own, short, f"{short}.local", *config.names, urlsplit(config.url).hostname or "", config.host]
    return frozenset(split_host(name)[0] for name in known) - {""}


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _not_here(host: str) -> str:
    name = split_host(host)[0]
    if not _NAME.fullmatch(name):
        return "this page does not answer under that name"
    return (
        f"this page does not answer under the name {name}: if that is this machine,"
        f" start it with `--name {name}`, or with `--url` and the public address"
    )
