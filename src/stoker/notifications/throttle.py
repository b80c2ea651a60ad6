"""Limits messages to one a minute per kind of event and URL. Further events are combined; none is lost."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

import msgspec

from stoker.notifications.events import Event, EventKind

# People ignore more than one message a minute.
SECONDS_BETWEEN: Final = 60.0


class SentEvents(Protocol):
    """The events that any process has sent; `queue.Store` implements it."""

    def note_once(self, key: str) -> bool: ...

    def forget_note(self, key: str) -> bool: ...


_Stream = tuple[EventKind, str]
"""A kind of event, and the URL that it is for."""


class Batch(msgspec.Struct, frozen=True):
    """Events of one kind for one message."""

    kind: EventKind
    to: str
    """The recipient's URL; empty for the URLs of `[notify]`."""
    events: tuple[Event, ...]
    prefix: str
    """`more` after an earlier message of this process."""


class Throttle:
    """Delays events until they may be sent, and claims them just before sending: another process sends the events of
    one that dies."""

    def __init__(self) -> None:
        self._new: deque[Event] = deque()
        self._pending: dict[_Stream, list[Event]] = {}
        self._claimed: dict[_Stream, list[Event]] = {}
        """Claimed but not sent yet."""
        self._sent: dict[_Stream, float] = {}

    def add(self, events: Iterable[Event]) -> None:
        self._new += events

    def due(self, now: float, sent: SentEvents) -> Iterator[Batch]:
        """The batches to send now, by the database's clock."""
        self._sort_new(sent)
        for kind, to in {*self._pending, *self._claimed}:
            stream = (kind, to)
            since = now - self._sent.get(stream, -math.inf)
            if since < SECONDS_BETWEEN:
                continue
            self._claim(stream, sent)
            if events := self._claimed.pop(stream, []):
                self._sent[stream] = now
                yield Batch(kind, to, tuple(events), "more" if since < 2 * SECONDS_BETWEEN else "")

    def _sort_new(self, sent: SentEvents) -> None:
        # One by one, here and below: an outage of the queue in between must not lose events.
        while self._new:
            event = self._new[0]
            if event.turn == "over":
                self._end(event, sent)
            else:
                self._pending.setdefault((event.kind, event.to), []).append(event)
            self._new.popleft()

    def _end(self, over: Event, sent: SentEvents) -> None:
        """The end of a condition is claimed once, and only if its beginning was sent by any process."""
        # A beginning that was not sent yet is dropped.
        stream = (over.kind, over.to)
        if pending := [event for event in self._pending.get(stream, []) if event.key != over.key]:
            self._pending[stream] = pending
        else:
            self._pending.pop(stream, None)
        if sent.forget_note(over.key):
            self._claimed.setdefault(stream, []).append(over)

    def _claim(self, stream: _Stream, sent: SentEvents) -> None:
        pending = self._pending.get(stream, [])
        while pending:
            if sent.note_once(pending[0].key):
                self._claimed.setdefault(stream, []).append(pending[0])
            pending.pop(0)
        self._pending.pop(stream, None)

    def unsent(self) -> list[Event]:
        """Claimed events that will not be sent."""
        return [event for events in self._claimed.values() for event in events]


def release(events: Iterable[Event], sent: SentEvents) -> None:
    """Lets another process send these."""
    for event in events:
        if event.turn == "over":
            sent.note_once(event.key)
        else:
            sent.forget_note(event.key)
