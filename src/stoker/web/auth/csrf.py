"""Keeps other sites from acting through somebody's browser."""

import ipaddress
import re
import socket
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from stoker.web.auth.authentication import cookies_named, refusal, refusal_in_json
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


_DEFAULT_PORTS: Final = {"http": "80", "https": "443"}
_ADDRESS_UNKNOWN: Final = "-"


def headers_named(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def header(scope: Scope, name: bytes) -> str:
    """The first of that name; empty when there is none."""
    return next(iter(headers_named(scope, name)), "")


def bearer(scope: Scope) -> str | None:
    """The token that a program shows with its request."""
    scheme, _, secret = header(scope, b"authorization").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else None


def split_host(host: str) -> tuple[str, str]:
    """The name in lower case, without brackets or the root's dot, and the port as it is written."""
    if host.startswith("["):
        name, _, rest = host[1:].partition("]")
        return name.lower(), rest.removeprefix(":")
    name, _, port = host.partition(":")
    return name.lower().rstrip("."), port


def is_secure(scope: Scope, config: Config) -> bool:
    """Whether the browser came by TLS: to us, or to the proxy that has the public address.

    A proxy is known by the name that the browser used: whoever comes past it, by a plain address, has no TLS.
    """
    if scope.get("scheme") == "https":
        return True
    public = urlsplit(config.url)
    return public.scheme == "https" and split_host(header(scope, b"host"))[0] == (public.hostname or "").lower()


def own_origins(scope: Scope, config: Config) -> set[str]:
    """What a browser calls the origin of pages from here."""
    scheme = "https" if is_secure(scope, config) else "http"
    own = {_origin(scheme, header(scope, b"host"))}
    if config.url:
        public = urlsplit(config.url)
        own.add(_origin(public.scheme, public.netloc))
    return own


def same_origin(origin: str, own: set[str]) -> bool:
    scheme, found, host = origin.partition("://")
    return bool(found) and _origin(scheme, host) in own


def client_address(scope: Scope) -> str:
    """The socket's other end. What a header says about it could be anybody's invention."""
    client = scope.get("client")
    return str(client[0]) if client else _ADDRESS_UNKNOWN


def neighbourhood(address: str) -> str:
    """The address, or the network that one subscriber has of IPv6: they can take any address of it."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


def _origin(scheme: str, host: str) -> str:
    scheme = scheme.lower()
    name, port = split_host(host)
    return f"{scheme}://{name}:{port or _DEFAULT_PORTS.get(scheme, '')}"


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
