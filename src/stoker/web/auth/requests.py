"""Headers, addresses and cookies of requests, and responses that refuse them."""

import http
import ipaddress
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.responses import HTMLResponse, Response
from starlette.types import Scope

from stoker.web.auth.keys import KEPT_FOR
from stoker.web.config import Config
from stoker.web.problems import problem, wants_page
from stoker.web.templating import rendered

_DEFAULT_PORTS: Final = {"http": "80", "https": "443"}


_ADDRESS_UNKNOWN: Final = "-"


def headers_named(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def header(scope: Scope, name: bytes) -> str:
    """The first of that name; empty when there is none."""
    return next(iter(headers_named(scope, name)), "")


def bearer(scope: Scope) -> str | None:
    """The bearer token of the request."""
    scheme, _, secret = header(scope, b"authorization").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else None


def split_host(host: str) -> tuple[str, str]:
    """The name in lower case, without brackets or trailing dot, and the port as written."""
    if host.startswith("["):
        name, _, rest = host[1:].partition("]")
        return name.lower(), rest.removeprefix(":")
    name, _, port = host.partition(":")
    return name.lower().rstrip("."), port


def is_secure(scope: Scope, config: Config) -> bool:
    """Whether the browser uses TLS, to this server or to the proxy at the public address.

    The Host header identifies the proxy: a browser that bypasses it uses another name and has no TLS.
    """
    if scope.get("scheme") == "https":
        return True
    public = urlsplit(config.url)
    return public.scheme == "https" and split_host(header(scope, b"host"))[0] == (public.hostname or "").lower()


def own_origins(scope: Scope, config: Config) -> set[str]:
    """The origins that a browser sends for pages of this server."""
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
    """The address of the peer. Forwarding headers are ignored: anybody can forge them."""
    client = scope.get("client")
    return str(client[0]) if client else _ADDRESS_UNKNOWN


def client_network(address: str) -> str:
    """The address, or its /64 network for IPv6: one subscriber can use every address in it."""
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


# A forged header may repeat the cookie; the browser's own comes first.
_MAX_COOKIES: Final = 4


def cookie_name(scope: Scope, config: Config) -> str:
    """Contains the port, because browsers share cookies between the ports of a host.

    The prefix `__Host-` makes browsers accept it only over TLS and from this very host.
    """
    server = scope.get("server")
    port = config.port or (server[1] if server else 0)
    return f"__Host-stoker-{port}" if is_secure(scope, config) else f"stoker-{port}"


def session_cookies(scope: Scope, config: Config) -> list[str]:
    name = cookie_name(scope, config)
    found = []
    for line in headers_named(scope, b"cookie"):
        for pair in line.split(";"):
            key, _, value = pair.strip().partition("=")
            if key == name and value:
                found.append(value.strip('"'))
    return found[:_MAX_COOKIES]


def cookie_for(scope: Scope, config: Config, secret: str) -> str:
    """The Set-Cookie header of a new session."""
    return _set_cookie(scope, config, secret, round(KEPT_FOR))


def expired_cookie(scope: Scope, config: Config) -> str:
    """The Set-Cookie header that removes the cookie."""
    return _set_cookie(scope, config, "", 0)


def _set_cookie(scope: Scope, config: Config, value: str, seconds: int) -> str:
    secure = "; Secure" if is_secure(scope, config) else ""
    name = cookie_name(scope, config)
    return f"{name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"


def refuse(
    scope: Scope, config: Config, status: int, message: str, headers: Mapping[str, str] | None = None
) -> Response:
    """A page for browsers, JSON for programs."""
    if wants_page(scope):
        return html_refusal(scope, config, "refused.html", status, headers, message=message)
    return json_refusal(status, message, headers)


def json_refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return problem(status, http.HTTPStatus(status).phrase, message, headers=headers)


def html_refusal(
    scope: Scope, config: Config, template: str, status: int, headers: Mapping[str, str] | None = None, **context: Any
) -> Response:
    user = scope.get("state", {}).get("user")
    page = rendered(template, user=user, site=config.title, status=status, **context)
    return HTMLResponse(page, status, headers)
