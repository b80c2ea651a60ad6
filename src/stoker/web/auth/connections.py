"""How long a connection may do nothing, and how many may.

The server waits for ever for the rest of a request's head, and for ever for a client that does not read its answer.
Here both have a time. Who is slow with a body is answered by `body_limit`; this is for what no answer can reach.
"""

import asyncio
import time
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

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
