"""How much a request may carry, and how long it may take to bring it."""

import asyncio
import time
from collections import defaultdict
from typing import Final

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from stoker.web.auth.requests import headers_named, refusal
from stoker.web.auth.user import User
from stoker.web.config import Config

# A sweep of a thousand long commands is a tenth of it.
MOST: Final = 1024 * 1024
# Who has not been let in brings a token, and no more: nobody can fill the memory from outside.
MOST_OF_STRANGERS: Final = 8 * 1024
# A phone in a tunnel brings a megabyte in this time; who is slower is not waited for.
SECONDS: Final = 30.0


class DeclaredSize:
    """Refuses what says by itself that it is too large."""

    def __init__(self, app: ASGIApp, config: Config) -> None:
        self._app = app
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _declared(scope) > MOST:
            await _too_large(scope, self._config, MOST)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


class WholeBody:
    """Collects the body before anything is done with it: a slow or endless one costs a connection, and nothing else."""

    def __init__(self, app: ASGIApp, config: Config, seconds: float = SECONDS) -> None:
        self._app = app
        self._config = config
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        most = MOST_OF_STRANGERS if scope.get("state", {}).get("user") is None else MOST
        try:
            async with asyncio.timeout(self._seconds):
                body = await _collected(receive, most)
        except TimeoutError:
            sentence = f"the request did not arrive within {self._seconds:g} s"
            # The rest of it is not waited for either.
            answer = refusal(scope, self._config, 408, sentence, {"Connection": "close"})
            await answer(scope, receive, send)
            return
        except _TooLargeError:
            await _too_large(scope, self._config, most)(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replayed(body, receive), send)


class _TooLargeError(Exception):
    pass


async def _collected(receive: Receive, most: int) -> bytes | None:
    """All of it; None when the client has left."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > most:
            raise _TooLargeError
        if not message.get("more_body", False):
            return bytes(body)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then whatever comes: that the client has left."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def _declared(scope: Scope) -> int:
    lengths = headers_named(scope, b"content-length")
    return max((int(length) for length in lengths if length.isascii() and length.isdigit()), default=0)


def _has_body(scope: Scope) -> bool:
    return _declared(scope) > 0 or bool(headers_named(scope, b"transfer-encoding"))


def _too_large(scope: Scope, config: Config, most: int) -> ASGIApp:
    return refusal(scope, config, 413, f"the request is larger than {most // 1024:,} KiB: send less at once")


# A head is one packet or two, also from a phone.
HEAD_SECONDS: Final = 10.0
# A little more than a body has: so that whoever is slow is told so first.
BODY_SECONDS: Final = 35.0
# A phone that sleeps does not read; it comes again when it wakes.
READ_SECONDS: Final = 60.0
# Connections that ask for nothing now. The one that has been silent for longest makes room: a crowd of them keeps
# nobody out. When a server comes back, some hundreds of pages do too, all at once.
MOST_SILENT: Final = 400


class PunctualProtocol(H11Protocol):
    """HTTP/1.1 as the server speaks it, with deadlines."""

    head_seconds = HEAD_SECONDS
    body_seconds = BODY_SECONDS
    read_seconds = READ_SECONDS

    _deadline: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None
    _phase: object = None
    came = 0.0
    """When it began to be silent."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as the server has it
        super().connection_made(transport)
        self.came = time.monotonic()
        self._expect(h11.IDLE)
        silent = [other for other in self.connections if isinstance(other, PunctualProtocol) and other.is_silent]
        if len(silent) > MOST_SILENT:
            min(silent, key=lambda other: other.came).transport.abort()

    @property
    def is_silent(self) -> bool:
        """Whether it holds a place and asks for nothing: not yet, or not any more."""
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request, whatever its declaration says
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
        self.came = time.monotonic()
        if self.conn.their_state is h11.IDLE:
            # The server's own time for a connection that rests; the first letter of the next head begins ours.
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
        """Gives the client the time that this part of a request may take, once."""
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


# A window takes one or two, and a token lets in fifty devices; programs follow logs as well.
MOST_OF_TOKEN: Final = 250
# Of a thousand connections; the rest is for operators, and for what is asked and answered at once.
MOST_OF_VIEWERS: Final = 300


class Stream:
    """One open answer."""

    def __init__(self, user: User, task: "asyncio.Task[object]", parts: int) -> None:
        self.user = user
        self.parts = parts
        self.is_ended = False
        """Whether it had to make room."""
        self._task = task

    def end(self) -> None:
        self.is_ended = True
        self._task.cancel()


class Streams:
    """Those that are open now, by token, the oldest first."""

    def __init__(self, most_of_token: int = MOST_OF_TOKEN, most_of_viewers: int = MOST_OF_VIEWERS) -> None:
        self._most_of_token = most_of_token
        self._most_of_viewers = most_of_viewers
        self._open: defaultdict[str, list[Stream]] = defaultdict(list)

    def begin(self, user: User, task: "asyncio.Task[object]", parts: int = 1) -> Stream:
        """Ends the oldest of the same token while it has too many, or of the viewer who has most while all have."""
        stream = Stream(user, task, parts)
        own = self._open[user.token]
        own.append(stream)
        while _parts(own) > self._most_of_token:
            own.pop(0).end()
        viewers = [streams for streams in self._open.values() if streams and not streams[0].user.operates]
        while sum(map(_parts, viewers)) > self._most_of_viewers and not user.operates:
            max(viewers, key=_parts).pop(0).end()
        return stream

    def finish(self, stream: Stream) -> None:
        own = self._open[stream.user.token]
        if stream in own:
            own.remove(stream)
        if not own:
            del self._open[stream.user.token]


def _parts(streams: list[Stream]) -> int:
    return sum(stream.parts for stream in streams)
