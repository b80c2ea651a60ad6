"""The shims of one worker: those with an attempt, and those held ready for the next ones."""

import math
import select
import time
from collections.abc import Collection, Iterator
from typing import Final

from stoker.engines.attempt import AttemptResult
from stoker.engines.local.fork_server import ForkServer
from stoker.engines.local.messages import ShimChannel, ShimReady, StartAttempt
from stoker.engines.local.record import AttemptProcesses
from stoker.engines.local.running_attempt import LocalAttempt
from stoker.errors import StokerError

# One for the next job, and one for the job after it: while the first starts, another is forked.
SPARE: Final = 2
# A shim is ready within milliseconds, also on a busy machine.
_PATIENCE: Final = 10.0
_POLL: Final = 0.2
# Between a shim that could not get ready and the next order.
_AFTER_FAILURE: Final = 1.0


class ShimPool:
    """Knows by every connection which shim is at its other end."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server
        self._idle: dict[ShimChannel, AttemptProcesses] = {}
        self._no_orders_until = -math.inf
        self._new: set[ShimChannel] = set()
        """Shims that have not sent yet that they are ready."""
        self.attempts: dict[str, LocalAttempt] = {}
        """By id, until the queue has everything of them."""

    def running(self) -> list[LocalAttempt]:
        """The attempts without a result."""
        return [one for one in self.attempts.values() if one.result is None]

    def descriptors(self) -> Iterator[int]:
        yield self._fork_server.fileno()
        for channel in (*self._idle, *self._new):
            yield channel.fileno()
        for attempt in self.attempts.values():
            if attempt.channel is not None:
                yield attempt.channel.fileno()
            elif attempt.reaper_exit >= 0:
                yield attempt.reaper_exit

    def due(self) -> float:
        """When `receive` is to be called at the latest, in monotonic seconds."""
        return min((one.retry_at for one in self.attempts.values()), default=math.inf)

    def replenish(self) -> None:
        """Orders shims for the next jobs, and closes those that are too many. Raises StokerError."""
        if time.monotonic() >= self._no_orders_until:
            for _ in range(SPARE - len(self._idle) - len(self._new) - self._fork_server.expected):
                self._fork_server.order()
        for channel in list(self._idle)[SPARE * 2 :]:
            del self._idle[channel]
            channel.close()

    def take(self) -> tuple[ShimChannel, AttemptProcesses]:
        """A shim that is ready, waiting for one if necessary. Raises StokerError when none comes."""
        ends = time.monotonic() + _PATIENCE
        while True:
            while self._idle:
                channel, processes = self._idle.popitem()
                if channel.receive() is None and channel.open:
                    return channel, processes
                channel.close()
            if time.monotonic() > ends:
                # A shim that hangs must not be waited for the next time too.
                for channel in self._new:
                    channel.close()
                self._new.clear()
                raise StokerError("no process for it came up: the machine is out of processes or memory, or suspended")
            self._await_one()

    def start(self, attempt: LocalAttempt) -> None:
        """Sends the shim its attempt, which is on disk. Raises StokerError when the shim is gone."""
        directory = str(attempt.record.directory)
        if attempt.channel is not None and not attempt.channel.send(StartAttempt(directory)):
            raise StokerError("the process that was to run it was killed")
        self.attempts[attempt.id] = attempt

    def receive(self, readable: Collection[int]) -> list[LocalAttempt]:
        """Handles what the shims sent; the attempts whose result has become known."""
        if self._fork_server.fileno() in readable:
            self._receive_new()
        for channel in [one for one in (*self._idle, *self._new) if one.fileno() in readable]:
            self._receive_from_idle(channel)
        ended = []
        for attempt in list(self.attempts.values()):
            connection, before = attempt.channel, attempt.result
            if connection is not None and connection.fileno() in readable:
                self._receive_from(attempt, connection)
            elif attempt.reaper_exit in readable:
                attempt.conclude()
            elif attempt.retry_at <= time.monotonic():
                attempt.connect()
            if attempt.result is not None and before is None:
                ended.append(attempt)
        return ended

    def close(self) -> None:
        """Shims without an attempt leave; the others go on."""
        for channel in (*self._idle, *self._new):
            channel.close()
        self._fork_server.close()

    def _await_one(self) -> None:
        """Waits a moment for a shim to come, or to get ready."""
        self.replenish()
        poll = select.poll()
        for descriptor in (self._fork_server.fileno(), *(channel.fileno() for channel in self._new)):
            poll.register(descriptor, select.POLLIN)
        readable = {descriptor for descriptor, _ in poll.poll(_POLL * 1000)}
        if self._fork_server.fileno() in readable:
            self._receive_new()
        for channel in [one for one in self._new if one.fileno() in readable]:
            self._receive_from_idle(channel)

    def _receive_new(self) -> None:
        try:
            while (channel := self._fork_server.receive()) is not None:
                self._new.add(channel)
        except OSError:
            self._no_orders_until = time.monotonic() + _AFTER_FAILURE

    def _receive_from_idle(self, channel: ShimChannel) -> None:
        message = channel.receive()
        if isinstance(message, ShimReady):
            self._new.discard(channel)
            self._idle[channel] = message.processes
        elif not channel.open:
            if channel in self._new:
                # It could not get ready: the machine is short of something, and the next one would fail as well.
                self._no_orders_until = time.monotonic() + _AFTER_FAILURE
            self._new.discard(channel)
            self._idle.pop(channel, None)
            channel.close()

    def _receive_from(self, attempt: LocalAttempt, channel: ShimChannel) -> None:
        while (message := channel.receive()) is not None:
            if isinstance(message, AttemptResult):
                attempt.result = message
            elif isinstance(message, ShimReady):
                # Its last attempt is complete on disk.
                self._idle[channel] = message.processes
                attempt.channel = None
                return
        if not channel.open:
            channel.close()
            attempt.channel = None
            if attempt.result is None:
                attempt.connect()
