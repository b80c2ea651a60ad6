"""The cookie by which a device is known."""

from typing import Final

from starlette.types import Scope

from stoker.web.auth.origin import headers_named, is_secure
from stoker.web.config import Config
from stoker.web.keys import KEPT_FOR

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
