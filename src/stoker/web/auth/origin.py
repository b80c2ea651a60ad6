"""How a request came: by which name and scheme, from which address, with which token."""

import ipaddress
from typing import Final
from urllib.parse import urlsplit

from starlette.types import Scope

from stoker.web.config import Config

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
