"""Keeps other sites from acting through somebody's browser."""

from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from stoker.web.auth.cookie import cookies_named
from stoker.web.auth.origin import bearer, header, own_origins, same_origin
from stoker.web.auth.refusal import refusal, refusal_in_json
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
