"""How often people are told: of each kind of event once a minute at the most, in all processes, and nothing is lost."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

import msgspec

from stoker.notifications.events import Event, Kind

# Who is told more often than that looks no more.
SECONDS_BETWEEN: Final = 60.0
# A message takes the stretch it is sent in and the two that follow: whoever finds the next one free is far enough away.
_SLOT: Final = 30.0
_SLOTS_PER_MESSAGE: Final = 3
# Another process has sent something: when that was is not known.
_RETRY_AFTER: Final = 5.0


class SentEvents(Protocol):
    """What was told, in all processes: `queue.Store` is one."""

    def note_once(self, key: str) -> bool: ...

    def forget_note(self, key: str) -> bool: ...


class Batch(msgspec.Struct, frozen=True):
    """Events of one kind that are to be one message."""

    kind: Kind
    events: tuple[Event, ...]
    prefix: str
    """`more` when it comes after one that this process sent a while ago."""


class Throttle:
    """Holds events back until they may be told. What is only once told is claimed just before: whoever dies while it
    holds something back has told nobody, and another process or the next one finds it again."""

    def __init__(self) -> None:
        self._new: deque[Event] = deque()
        self._pending: dict[Kind, list[Event]] = {}
        self._claimed: dict[Kind, list[Event]] = {}
        """Claimed, and not sent yet."""
        self._blocked_until: dict[Kind, float] = {}
        self._sent: dict[Kind, float] = {}

    def add(self, events: Iterable[Event]) -> None:
        self._new += events

    def due(self, now: float, sent: SentEvents) -> Iterator[Batch]:
        """What is to be sent now; `now` by the clock that all processes share."""
        self._sort_new(sent)
        for kind in {*self._pending, *self._claimed}:
            if now < self._blocked_until.get(kind, 0.0):
                continue
            if not (slot := _reserve_slot(kind, now, sent)):
                self._blocked_until[kind] = now + _RETRY_AFTER
                continue
            self._claim(kind, sent)
            if events := self._claimed.pop(kind, []):
                prefix = "more" if now - self._sent.get(kind, -SECONDS_BETWEEN * 2) < 2 * SECONDS_BETWEEN else ""
                self._sent[kind] = now
                self._blocked_until[kind] = now + SECONDS_BETWEEN
                yield Batch(kind, tuple(events), prefix)
            else:
                for key in slot:
                    sent.forget_note(key)

    def _sort_new(self, sent: SentEvents) -> None:
        # Here and below one by one: a queue that goes away in the middle of it must not take events along.
        while self._new:
            event = self._new[0]
            if event.turn == "over":
                self._end(event, sent)
            else:
                self._pending.setdefault(event.kind, []).append(event)
            self._new.popleft()

    def _end(self, over: Event, sent: SentEvents) -> None:
        """That something is over can be claimed once, and only after it was told to have begun, by whomever."""
        # Whoever hears of it only now need not hear that it began.
        if pending := [event for event in self._pending.get(over.kind, []) if event.key != over.key]:
            self._pending[over.kind] = pending
        else:
            self._pending.pop(over.kind, None)
        if sent.forget_note(over.key):
            self._claimed.setdefault(over.kind, []).append(over)

    def _claim(self, kind: Kind, sent: SentEvents) -> None:
        pending = self._pending.get(kind, [])
        while pending:
            if sent.note_once(pending[0].key):
                self._claimed.setdefault(kind, []).append(pending[0])
            pending.pop(0)
        self._pending.pop(kind, None)

    def unsent(self) -> list[Event]:
        """What was claimed and will not be sent: whoever leaves gives it back."""
        return [event for events in self._claimed.values() for event in events]


def release(events: Iterable[Event], sent: SentEvents) -> None:
    """Lets another process tell these."""
    for event in events:
        if event.turn == "over":
            sent.note_once(event.key)
        else:
            sent.forget_note(event.key)


def _reserve_slot(kind: Kind, now: float, sent: SentEvents) -> list[str]:
    """The right to send one message of this kind now; empty when somebody sent one less than a minute ago."""
    first = int(now // _SLOT)
    keys = [f"pace:{kind}:{number}" for number in range(first, first + _SLOTS_PER_MESSAGE)]
    return keys if all(sent.note_once(key) for key in keys) else []
