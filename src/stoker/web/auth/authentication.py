"""Authentication by cookie or bearer token, and authorization: viewers read, operators change."""

import asyncio
from typing import Final

from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.web.auth.csrf import SAFE_METHODS
from stoker.web.auth.key_file import User
from stoker.web.auth.keys import Keys
from stoker.web.auth.requests import (
    bearer,
    client_address,
    client_network,
    html_refusal,
    json_refusal,
    refuse,
    session_cookies,
)
from stoker.web.auth.throttle import FailureThrottle, TooManyFailuresError
from stoker.web.config import Config
from stoker.web.middleware.limits import OpenStream, StreamLimits
from stoker.web.problems import wants_page

# What a browser needs before login, and the health check.
_PUBLIC: Final = frozenset({"/login", "/logout", "/healthz", "/manifest.webmanifest", "/favicon.ico"})
_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="stoker"'}


class Authentication:
    def __init__(self, app: ASGIApp, config: Config, keys: Keys) -> None:
        self._app = app
        self._config = config
        self._keys = keys
        self._throttle = FailureThrottle()
        # Separate: a program that retries with a revoked token must not block people from logging in.
        self._login_throttle = FailureThrottle()
        self._streams = StreamLimits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state.pop("user", None)
        state["login_throttle"] = self._login_throttle
        try:
            user = self._identify(scope)
        except TooManyFailuresError as error:
            refused = json_refusal(429, str(error), {"Retry-After": str(error.seconds)})
            await refused(scope, receive, send)
            return
        if user is not None:
            state["user"] = user
        refusal = self._refusal(scope, user)
        if refusal is not None:
            await refusal(scope, receive, send)
        elif user is None:
            await self._app(scope, receive, send)
        else:
            await self._respond(user, scope, receive, self._while_valid(user, send))

    def _identify(self, scope: Scope) -> User | None:
        secret = bearer(scope)
        if secret is not None:
            # A token takes precedence over any cookie.
            return self._by_token(secret, client_network(client_address(scope)))
        users = (self._keys.by_session(cookie) for cookie in session_cookies(scope, self._config))
        return next((user for user in users if user is not None), None)

    def _by_token(self, secret: str, address: str) -> User | None:
        user = self._keys.by_token(secret)
        if user is None:
            self._throttle.failed(address)
        return user

    def _refusal(self, scope: Scope, user: User | None) -> Response | None:
        if _is_public(scope["path"]):
            return None
        if user is None:
            return self._unauthenticated(scope)
        if scope["method"] not in SAFE_METHODS and not user.operates:
            message = (
                f"the token {user.name!r} is read-only:"
                " `stoker tokens add` on the page's machine creates one that can make changes"
            )
            return refuse(scope, self._config, 403, message)
        return None

    def _unauthenticated(self, scope: Scope) -> Response:
        if self._keys.problem is not None:
            message = "the page cannot read its tokens, so nobody can log in: `stoker tokens` shows the error"
            return refuse(scope, self._config, 503, message)
        if not wants_page(scope):
            message = "a token is required: send `Authorization: Bearer TOKEN`; `stoker tokens` creates one"
            return json_refusal(401, message, _CHALLENGE)
        query = scope["query_string"].decode("latin-1")
        # The body of a form is lost, so only GET requests are repeated after login.
        target = f"{scope['path']}{'?' if query else ''}{query}" if scope["method"] == "GET" else "/"
        return html_refusal(
            scope, self._config, "login.html", 401, _CHALLENGE, next=local_path(target), check=True, mistake=""
        )

    async def _respond(self, user: User, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts a streamed response against its token's limit; a newer one may end it."""
        task = asyncio.current_task()
        stream: OpenStream | None = None
        parts = max(1, len(QueryParams(scope["query_string"]).getlist("on")))

        async def counted(message: Message) -> None:
            nonlocal stream
            if stream is None and task is not None and message.get("more_body", False):
                stream = self._streams.begin(user, task, parts)
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except asyncio.CancelledError:
            if stream is None or task is None or not stream.is_ended:
                raise
            task.uncancel()
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            if stream is not None:
                self._streams.finish(stream)

    def _while_valid(self, user: User, send: Send) -> Send:
        """Ends a streamed response when its user logs out or its token is revoked."""
        is_ended = False

        async def send_while_valid(message: Message) -> None:
            nonlocal is_ended
            if is_ended:
                return
            if message["type"] == "http.response.body" and message.get("more_body", False):
                is_ended = not self._keys.still_valid(user)
                if is_ended:
                    message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        return send_while_valid


def local_path(target: str) -> str:
    """`target` if it is a path of this page, else `/`: login never redirects to another site or to itself."""
    if not target.startswith("/") or target[1:2] in {"/", "\\"} or not target.isprintable() or "\\" in target:
        return "/"
    return "/" if target.partition("?")[0] in {"/login", "/logout"} else target


def _is_public(path: str) -> bool:
    return path in _PUBLIC or path.startswith("/static/")
