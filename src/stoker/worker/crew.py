"""The attendants of one worker: those that have a job, those that are held ready, and what all of them say."""

import math
import select
import time
from collections.abc import Iterator
from typing import Final

from stoker.errors import StokerError
from stoker.worker.assignment import Keepers
from stoker.worker.engagement import Engagement
from stoker.worker.messages import Attend, Channel, Over, Ready
from stoker.worker.nursery import Nursery

# One for the next job, and one for the job after it: while the first starts, a new one is being made.
SPARE: Final = 2
# One is there within milliseconds, also on a machine that is busy.
_PATIENCE: Final = 10.0
_MOMENT: Final = 0.2
# No other is made so soon after one that could not get ready.
_AFTER_TROUBLE: Final = 1.0


class Crew:
    """Knows by every line who is at its other end."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._idle: dict[Channel, Keepers] = {}
        self._no_orders_until = -math.inf
        self._new: set[Channel] = set()
        """Those that have not said yet that they are ready."""
        self.engaged: dict[str, Engagement] = {}
        """By the id of the attempt, until the queue has everything of it."""

    def running(self) -> list[Engagement]:
        """Those of which no end is known."""
        return [one for one in self.engaged.values() if one.over is None]

    def descriptors(self) -> Iterator[int]:
        """What becomes readable when `attend` has something to do."""
        yield self._nursery.fileno()
        for channel in (*self._idle, *self._new):
            yield channel.fileno()
        for engagement in self.engaged.values():
            if engagement.channel is not None:
                yield engagement.channel.fileno()
            elif engagement.guardian_end >= 0:
                yield engagement.guardian_end

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

    def take(self) -> tuple[Channel, Keepers]:
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

    def engage(self, engagement: Engagement) -> None:
        """Gives the attendant its job, which is on disk. Raises StokerError when the attendant is gone."""
        if engagement.channel is not None and not engagement.channel.send(Attend(str(engagement.record.directory))):
            raise StokerError("the process that was to run it was killed")
        self.engaged[engagement.attempt] = engagement

    def attend(self, readable: set[int]) -> list[Engagement]:
        """Hears whoever has something to say; the attempts of which the end has become known."""
        if self._nursery.fileno() in readable:
            self._receive_new()
        for channel in [one for one in (*self._idle, *self._new) if one.fileno() in readable]:
            self._hear_idle(channel)
        ended = []
        for engagement in list(self.engaged.values()):
            line, was = engagement.channel, engagement.over
            if line is not None and line.fileno() in readable:
                self._hear(engagement, line)
            elif engagement.guardian_end in readable:
                engagement.conclude()
            elif engagement.retry_at <= time.monotonic():
                engagement.reach()
            if engagement.over is not None and was is None:
                ended.append(engagement)
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

    def _hear_idle(self, channel: Channel) -> None:
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

    def _hear(self, engagement: Engagement, channel: Channel) -> None:
        while (message := channel.receive()) is not None:
            if isinstance(message, Over):
                engagement.over = message
            elif isinstance(message, Ready):
                # Its last job is behind it, and everything that printed is on disk.
                self._idle[channel] = message.keepers
                engagement.channel = None
                return
        if not channel.open:
            channel.close()
            engagement.channel = None
            if engagement.over is None:
                engagement.reach()
