"""The attendants of one worker: those that have a job, those that are held ready, and what all of them say."""

from collections.abc import Iterator
from typing import Final

from stoker.worker.assignment import Keepers
from stoker.worker.engagement import Engagement
from stoker.worker.messages import Attend, Channel, Over, Ready
from stoker.worker.nursery import Nursery

# One for the next job, and one for the job after it: while the first starts, a new one is being made.
SPARE: Final = 2


class Crew:
    """Knows by every line who is at its other end."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._idle: dict[Channel, Keepers] = {}
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

    def keep_some_ready(self) -> None:
        """Orders attendants so that the next jobs find theirs, and lets those go that are too many."""
        for _ in range(SPARE - len(self._idle) - len(self._new) - self._nursery.expected):
            self._nursery.order()
        for channel in list(self._idle)[SPARE * 2 :]:
            del self._idle[channel]
            channel.close()

    def take(self) -> tuple[Channel, Keepers]:
        """One that is ready, waiting for it if there is none."""
        while True:
            while self._idle:
                channel, keepers = self._idle.popitem()
                if channel.receive() is None and channel.open:
                    return channel, keepers
                channel.close()
            self._await_one()

    def engage(self, engagement: Engagement) -> None:
        """Gives the attendant its job; it is on disk."""
        self.engaged[engagement.attempt] = engagement
        if engagement.channel is not None:
            engagement.channel.send(Attend(str(engagement.record.directory)))

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
            if engagement.over is not None and was is None:
                ended.append(engagement)
        return ended

    def dismiss(self) -> None:
        """Lets everybody go who has no job. Those that have one go on."""
        for channel in (*self._idle, *self._new):
            channel.close()
        self._nursery.close()

    def _await_one(self) -> None:
        channel = next(iter(self._new), None) or self._nursery.wait_for_one()
        self._new.add(channel)
        channel.wait()
        self._hear_idle(channel)

    def _receive_new(self) -> None:
        while (channel := self._nursery.receive()) is not None:
            self._new.add(channel)

    def _hear_idle(self, channel: Channel) -> None:
        message = channel.receive()
        if isinstance(message, Ready):
            self._new.discard(channel)
            self._idle[channel] = message.keepers
        elif not channel.open:
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
            if engagement.over is None and not engagement.watch_guardian():
                engagement.conclude()
