"""What a request says of itself: where it came from and its cookies; and how one is refused."""

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


# A forged header may repeat it; the browser's own comes first.
_MOST: Final = 4


def cookie_name(scope: Scope, config: Config) -> str:
    """Browsers do not keep the cookies of two ports apart, so the port is in its name.

    By TLS it has a name that only a page by TLS of this very host could have given it.
    """
    server = scope.get("server")
    port = config.port or (server[1] if server else 0)
    return f"__Host-stoker-{port}" if is_secure(scope, config) else f"stoker-{port}"


def cookies_named(scope: Scope, config: Config) -> list[str]:
    """What the browser sent under our name."""
    name = cookie_name(scope, config)
    found = []
    for line in headers_named(scope, b"cookie"):
        for pair in line.split(";"):
            key, _, value = pair.strip().partition("=")
            if key == name and value:
                found.append(value.strip('"'))
    return found[:_MOST]


def cookie_for(scope: Scope, config: Config, secret: str) -> str:
    """The header that gives a device its cookie."""
    return _header(scope, config, secret, round(KEPT_FOR))


def no_cookie(scope: Scope, config: Config) -> str:
    """The header that takes it away."""
    return _header(scope, config, "", 0)


def _header(scope: Scope, config: Config, value: str, seconds: int) -> str:
    secure = "; Secure" if is_secure(scope, config) else ""
    name = cookie_name(scope, config)
    return f"{name}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"


def refusal(
    scope: Scope, config: Config, status: int, sentence: str, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer to a request that goes no further."""
    if wants_page(scope):
        return refusal_page(scope, config, "refused.html", status, headers, sentence=sentence)
    return refusal_in_json(status, sentence, headers)


def refusal_in_json(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    return problem(status, http.HTTPStatus(status).phrase, sentence, headers=headers)


def refusal_page(
    scope: Scope, config: Config, template: str, status: int, headers: Mapping[str, str] | None = None, **context: Any
) -> Response:
    user = scope.get("state", {}).get("user")
    page = rendered(template, user=user, site=config.title, status=status, **context)
    return HTMLResponse(page, status, headers)
