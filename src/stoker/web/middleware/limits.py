"""Limits for requests, connections and streamed responses."""

import asyncio
import time
from collections import defaultdict
from typing import Final

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from stoker.web.auth.key_file import User
from stoker.web.auth.requests import headers_named, refuse
from stoker.web.config import Config

# A sweep of a thousand long commands takes a tenth of it.
MAX_BODY: Final = 1024 * 1024
# Without authentication only a token is expected: strangers cannot fill the memory.
MAX_ANONYMOUS_BODY: Final = 8 * 1024
# A phone on a poor connection sends a megabyte in this time.
BODY_TIMEOUT: Final = 30.0


class WholeBody:
    """Reads the whole body before the request is handled: a slow or endless body takes only a connection."""

    def __init__(self, app: ASGIApp, config: Config, seconds: float = BODY_TIMEOUT) -> None:
        self._app = app
        self._config = config
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        limit = MAX_ANONYMOUS_BODY if scope.get("state", {}).get("user") is None else MAX_BODY
        try:
            if _declared(scope) > limit:
                raise _TooLargeError
            async with asyncio.timeout(self._seconds):
                body = await _collected(receive, limit)
        except TimeoutError:
            message = f"the request did not arrive within {self._seconds:g} s"
            # The rest of the body is not read either.
            answer = refuse(scope, self._config, 408, message, {"Connection": "close"})
            await answer(scope, receive, send)
            return
        except _TooLargeError:
            await _too_large(scope, self._config, limit)(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), send)


class _TooLargeError(Exception):
    pass


async def _collected(receive: Receive, limit: int) -> bytes | None:
    """The whole body; None if the client disconnected."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > limit:
            raise _TooLargeError
        if not message.get("more_body", False):
            return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then what `receive` returns: the disconnection."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def _declared(scope: Scope) -> int:
    lengths = headers_named(scope, b"content-length")
    return max((int(length) for length in lengths if length.isascii() and length.isdigit()), default=0)


def _has_body(scope: Scope) -> bool:
    return _declared(scope) > 0 or bool(headers_named(scope, b"transfer-encoding"))


def _too_large(scope: Scope, config: Config, limit: int) -> ASGIApp:
    return refuse(scope, config, 413, f"the request is larger than {limit // 1024:,} KiB: send less at once")


# The head of a request is one or two packets.
HEAD_DEADLINE: Final = 10.0
# More than BODY_TIMEOUT, so that slow clients get its error message first.
BODY_DEADLINE: Final = 35.0
# A sleeping phone does not read; it reconnects when it wakes.
READ_DEADLINE: Final = 60.0
# Connections without a request; the oldest is closed, so that idle connections block nobody. Hundreds of pages may
# reconnect at once when the server restarts.
MAX_IDLE: Final = 400


class DeadlineProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol with deadlines for slow clients."""

    head_seconds = HEAD_DEADLINE
    body_seconds = BODY_DEADLINE
    read_seconds = READ_DEADLINE

    _deadline: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    _phase: object = None
    idle_since = 0.0
    """In monotonic seconds."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self.idle_since = time.monotonic()
        self._expect(h11.IDLE)
        idle = [other for other in self.connections if isinstance(other, DeadlineProtocol) and other.is_idle]
        if len(idle) > MAX_IDLE:
            min(idle, key=lambda other: other.idle_since).transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether no request is being handled."""
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request, against its declaration
        return (cycle is None or cycle.response_complete) and not self.transport.is_closing()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._deadline, self._reading):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        phase = self.conn.their_state
        if phase is not self._phase or self.cycle is not before:
            self._expect(phase)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.idle_since = time.monotonic()
        if self.conn.their_state is h11.IDLE:
            # uvicorn's keep-alive timeout applies until the next request begins.
            self._phase = None
            self._cancel()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading = self.loop.call_later(self.read_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        super().resume_writing()

    def _expect(self, phase: object) -> None:
        """Sets the deadline of this part of the request."""
        self._phase = phase
        self._cancel()
        if phase is h11.IDLE:
            self._deadline = self.loop.call_later(self.head_seconds, self.transport.abort)
        elif phase is h11.SEND_BODY:
            self._deadline = self.loop.call_later(self.body_seconds, self.transport.abort)

    def _cancel(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


# A window takes one or two streams, a token has up to fifty devices, and programs follow logs too.
MAX_TOKEN_STREAMS: Final = 250
# Of a thousand connections; the rest is for operators and short requests.
MAX_VIEWER_STREAMS: Final = 300


class OpenStream:
    """One streamed response."""

    def __init__(self, user: User, task: "asyncio.Task[object]", parts: int) -> None:
        self.user = user
        self.parts = parts
        self.is_ended = False
        """Whether it was ended in favour of a newer one."""
        self._task = task

    def end(self) -> None:
        self.is_ended = True
        self._task.cancel()


class StreamLimits:
    """The open streams by token, oldest first."""

    def __init__(self, max_per_token: int = MAX_TOKEN_STREAMS, max_of_viewers: int = MAX_VIEWER_STREAMS) -> None:
        self._max_per_token = max_per_token
        self._max_of_viewers = max_of_viewers
        self._open: defaultdict[str, list[OpenStream]] = defaultdict(list)

    def begin(self, user: User, task: "asyncio.Task[object]", parts: int = 1) -> OpenStream:
        """Ends the oldest streams of the same token, or of the viewer token with most, above the limits."""
        stream = OpenStream(user, task, parts)
        own = self._open[user.token]
        own.append(stream)
        while _parts(own) > self._max_per_token:
            own.pop(0).end()
        viewers = [streams for streams in self._open.values() if streams and not streams[0].user.operates]
        while sum(map(_parts, viewers)) > self._max_of_viewers and not user.operates:
            max(viewers, key=_parts).pop(0).end()
        return stream

    def finish(self, stream: OpenStream) -> None:
        own = self._open[stream.user.token]
        if stream in own:
            own.remove(stream)
        if not own:
            del self._open[stream.user.token]


def _parts(streams: list[OpenStream]) -> int:
    return sum(stream.parts for stream in streams)
