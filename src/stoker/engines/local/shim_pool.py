"""The attendants of one worker: those that have a job, those that are held ready, and what all of them say."""

import math
import select
import time
from collections.abc import Iterator
from typing import Final

from stoker.engines.local.attempt_spec import AttemptProcesses
from stoker.engines.local.fork_server import ForkServer
from stoker.engines.local.messages import AttemptResult, Ready, ShimChannel, StartAttempt
from stoker.engines.local.running_attempt import RunningAttempt
from stoker.errors import StokerError

# One for the next job, and one for the job after it: while the first starts, a new one is being made.
SPARE: Final = 2
# One is there within milliseconds, also on a machine that is busy.
_PATIENCE: Final = 10.0
_MOMENT: Final = 0.2
# No other is made so soon after one that could not get ready.
_AFTER_TROUBLE: Final = 1.0


class ShimPool:
    """Knows by every line who is at its other end."""

    def __init__(self, nursery: ForkServer) -> None:
        self._nursery = nursery
        self._idle: dict[ShimChannel, AttemptProcesses] = {}
        self._no_orders_until = -math.inf
        self._new: set[ShimChannel] = set()
        """Those that have not said yet that they are ready."""
        self.engaged: dict[str, RunningAttempt] = {}
        """By the id of the attempt, until the queue has everything of it."""

    def running(self) -> list[RunningAttempt]:
        """Those of which no end is known."""
        return [one for one in self.engaged.values() if one.over is None]

    def descriptors(self) -> Iterator[int]:
        """What becomes readable when `attend` has something to do."""
        yield self._nursery.fileno()
        for channel in (*self._idle, *self._new):
            yield channel.fileno()
        for running_attempt in self.engaged.values():
            if running_attempt.channel is not None:
                yield running_attempt.channel.fileno()
            elif running_attempt.reaper_end >= 0:
                yield running_attempt.reaper_end

    def due(self) -> float:
        """When `attend` is to be called at the latest, in monotonic seconds."""
        return min((one.retry_at for one in self.engaged.values()), default=math.inf)

    def keep_some_ready(self) -> None:
        """Orders attendants so that the next jobs find theirs, and lets those go that are too many."""
        if time.monotonic() >= self._no_orders_until:
            for _ in range(SPARE - len(self._idle) - len(self._new) - self._nursery.expected):
                self._nursery.order()
        for channel in list(self._idle)[SPARE * 2 :]:
            del self._idle[channel]
            channel.close()

    def take(self) -> tuple[ShimChannel, AttemptProcesses]:
        """One that is ready, waiting for it if there is none. Raises StokerError when none comes."""
        ends = time.monotonic() + _PATIENCE
        while True:
            while self._idle:
                channel, keepers = self._idle.popitem()
                if channel.receive() is None and channel.open:
                    return channel, keepers
                channel.close()
            if time.monotonic() > ends:
                # Whoever was stopped, or hangs, must not be waited for the next time too.
                self._dismiss_new()
                raise StokerError("no process for it came up: the machine is out of processes or memory, or held up")
            self._await_one()

    def engage(self, running_attempt: RunningAttempt) -> None:
        """Gives the attendant its job, which is on disk. Raises StokerError when the attendant is gone."""
        if running_attempt.channel is not None and not running_attempt.channel.send(
            StartAttempt(str(running_attempt.record.directory))
        ):
            raise StokerError("the process that was to run it was killed")
        self.engaged[running_attempt.attempt] = running_attempt

    def attend(self, readable: set[int]) -> list[RunningAttempt]:
        """Hears whoever has something to say; the attempts of which the end has become known."""
        if self._nursery.fileno() in readable:
            self._receive_new()
        for channel in [one for one in (*self._idle, *self._new) if one.fileno() in readable]:
            self._hear_idle(channel)
        ended = []
        for running_attempt in list(self.engaged.values()):
            line, was = running_attempt.channel, running_attempt.over
            if line is not None and line.fileno() in readable:
                self._hear(running_attempt, line)
            elif running_attempt.reaper_end in readable:
                running_attempt.conclude()
            elif running_attempt.retry_at <= time.monotonic():
                running_attempt.reach()
            if running_attempt.over is not None and was is None:
                ended.append(running_attempt)
        return ended

    def dismiss(self) -> None:
        """Lets everybody go who has no job. Those that have one go on."""
        for channel in (*self._idle, *self._new):
            channel.close()
        self._nursery.close()

    def _await_one(self) -> None:
        """Waits a moment for one to come, or to say that it is ready."""
        self.keep_some_ready()
        poll = select.poll()
        for descriptor in (self._nursery.fileno(), *(channel.fileno() for channel in self._new)):
            poll.register(descriptor, select.POLLIN)
        readable = {descriptor for descriptor, _ in poll.poll(_MOMENT * 1000)}
        if self._nursery.fileno() in readable:
            self._receive_new()
        for channel in [one for one in self._new if one.fileno() in readable]:
            self._hear_idle(channel)

    def _receive_new(self) -> None:
        try:
            while (channel := self._nursery.receive()) is not None:
                self._new.add(channel)
        except OSError:
            self._no_orders_until = time.monotonic() + _AFTER_TROUBLE

    def _dismiss_new(self) -> None:
        for channel in self._new:
            channel.close()
        self._new.clear()

    def _hear_idle(self, channel: ShimChannel) -> None:
        message = channel.receive()
        if isinstance(message, Ready):
            self._new.discard(channel)
            self._idle[channel] = message.keepers
        elif not channel.open:
            if channel in self._new:
                # It could not get ready: the machine is short of something, and the next one would be no better off.
                self._no_orders_until = time.monotonic() + _AFTER_TROUBLE
            self._new.discard(channel)
            self._idle.pop(channel, None)
            channel.close()

    def _hear(self, running_attempt: RunningAttempt, channel: ShimChannel) -> None:
        while (message := channel.receive()) is not None:
            if isinstance(message, AttemptResult):
                running_attempt.over = message
            elif isinstance(message, Ready):
                # Its last job is behind it, and everything that printed is on disk.
                self._idle[channel] = message.keepers
                running_attempt.channel = None
                return
        if not channel.open:
            channel.close()
            running_attempt.channel = None
            if running_attempt.over is None:
                running_attempt.reach()
