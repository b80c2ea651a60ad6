"""Under which names the page answers.

A site of somebody else can let its own name point to this machine, and a browser then takes the page for a part of that
site (DNS rebinding). It cannot do so with a name that is not its own, nor with an address.
"""

import ipaddress
import re
import socket
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from stoker.web.auth.origin import headers_named, split_host
from stoker.web.auth.refusal import refusal_in_json
from stoker.web.config import Config

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
