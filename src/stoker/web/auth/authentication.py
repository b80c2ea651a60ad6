"""Who comes in, and what they may do: by cookie or token; viewers look, operators act."""

import asyncio
from typing import Final

from starlette.datastructures import QueryParams
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stoker.web.auth.csrf import SAFE_METHODS
from stoker.web.auth.keys import Keys
from stoker.web.auth.requests import (
    bearer,
    client_address,
    cookies_named,
    neighbourhood,
    refusal,
    refusal_in_json,
    refusal_page,
)
from stoker.web.auth.throttle import FailureThrottle, TooManyFailuresError
from stoker.web.auth.user import User
from stoker.web.config import Config
from stoker.web.middleware.limits import Stream, Streams
from stoker.web.problems import wants_page

# What a browser needs before anybody is let in, and what tells a supervisor that the server lives.
_PUBLIC: Final = frozenset({"/login", "/logout", "/healthz", "/manifest.webmanifest", "/favicon.ico"})
_CHALLENGE: Final = {"WWW-Authenticate": 'Bearer realm="stoker"'}


class Authentication:
    def __init__(self, app: ASGIApp, config: Config, keys: Keys) -> None:
        self._app = app
        self._config = config
        self._keys = keys
        self._patience = FailureThrottle()
        # A program with a token that was revoked keeps trying: that must not keep people from logging in.
        self._login_patience = FailureThrottle()
        self._streams = Streams()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state.pop("user", None)
        state["patience"] = self._login_patience
        try:
            user = self._identify(scope)
        except TooManyFailuresError as error:
            answer = refusal_in_json(429, str(error), {"Retry-After": str(error.seconds)})
            await answer(scope, receive, send)
            return
        if user is not None:
            state["user"] = user
        no = self._obstacle(scope, user)
        if no is not None:
            await no(scope, receive, send)
        elif user is None:
            await self._app(scope, receive, send)
        else:
            await self._answered(user, scope, receive, self._while_valid(user, send))

    def _identify(self, scope: Scope) -> User | None:
        secret = bearer(scope)
        if secret is not None:
            # Who shows a token is that token's, whatever cookie comes along.
            return self._by_token(secret, neighbourhood(client_address(scope)))
        found = (self._keys.by_session(cookie) for cookie in cookies_named(scope, self._config))
        return next((user for user in found if user is not None), None)

    def _by_token(self, secret: str, address: str) -> User | None:
        user = self._keys.by_token(secret)
        if user is None:
            self._patience.failed(address)
        return user

    def _obstacle(self, scope: Scope, user: User | None) -> Response | None:
        """Why a request goes no further."""
        if _is_public(scope["path"]):
            return None
        if user is None:
            return self._not_let_in(scope)
        if scope["method"] not in SAFE_METHODS and not user.operates:
            sentence = (
                f"the token {user.name!r} may look and nothing else:"
                " `stoker tokens add`, on the machine of the page, makes one that may act"
            )
            return refusal(scope, self._config, 403, sentence)
        return None

    def _not_let_in(self, scope: Scope) -> Response:
        if self._keys.problem is not None:
            sentence = "the tokens of this page cannot be read, so nobody is let in: `stoker tokens` says what is wrong"
            return refusal(scope, self._config, 503, sentence)
        if not wants_page(scope):
            sentence = "a token is needed: send `Authorization: Bearer TOKEN`, which `stoker tokens` makes"
            return refusal_in_json(401, sentence, _CHALLENGE)
        query = scope["query_string"].decode("latin-1")
        # What a form would have sent is gone, so nobody is led back to where only forms go.
        wanted = f"{scope['path']}{'?' if query else ''}{query}" if scope["method"] == "GET" else "/"
        return refusal_page(
            scope, self._config, "login.html", 401, _CHALLENGE, wanted=local_path(wanted), check=True, mistake=""
        )

    async def _answered(self, user: User, scope: Scope, receive: Receive, send: Send) -> None:
        """An answer that goes on and on has one of its token's places, and may have to give it to a newer one."""
        task = asyncio.current_task()
        stream: Stream | None = None
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
        """Ends an answer that goes on and on, when whom it is for has been logged out or revoked."""
        over = False

        async def guarded(message: Message) -> None:
            nonlocal over
            if over:
                return
            if message["type"] == "http.response.body" and message.get("more_body", False):
                over = not self._keys.still_valid(user)
                if over:
                    message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        return guarded


def local_path(wanted: str) -> str:
    """A path on this page, whatever was asked for: nobody is sent elsewhere, nor to where they are already."""
    if not wanted.startswith("/") or wanted[1:2] in {"/", "\\"} or not wanted.isprintable() or "\\" in wanted:
        return "/"
    return "/" if wanted.partition("?")[0] in {"/login", "/logout"} else wanted


def _is_public(path: str) -> bool:
    return path in _PUBLIC or path.startswith("/static/")
