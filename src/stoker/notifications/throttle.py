"""How often people are told: of each kind of event once a minute at the most, in all processes, and nothing is lost."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, Protocol

import msgspec

from stoker.notifications.events import Event, Kind

# Who is told more often than that looks no more.
SECONDS_BETWEEN: Final = 60.0
# A message takes the stretch it is sent in and the two that follow: whoever finds the next one free is far enough away.
_STRETCH: Final = 30.0
_STRETCHES: Final = 3
# Another process has sent something: when that was is not known.
_ASK_AGAIN: Final = 5.0


class Ledger(Protocol):
    """What was told, in all processes: `queue.Store` is one."""

    def note_once(self, key: str) -> bool: ...

    def forget_note(self, key: str) -> bool: ...


class Bundle(msgspec.Struct, frozen=True):
    """Events of one kind that are to be one message."""

    kind: Kind
    events: tuple[Event, ...]
    following: str
    """`more` when it comes after one that this process sent a while ago."""


class Throttle:
    """Holds events back until they may be told. What is only once told is claimed just before: whoever dies while it
    holds something back has told nobody, and another process or the next one finds it again."""

    def __init__(self) -> None:
        self._arrived: deque[Event] = deque()
        self._waiting: dict[Kind, list[Event]] = {}
        self._ours: dict[Kind, list[Event]] = {}
        """Claimed, and not sent yet."""
        self._not_before: dict[Kind, float] = {}
        self._sent: dict[Kind, float] = {}

    def add(self, events: Iterable[Event]) -> None:
        self._arrived += events

    def due(self, now: float, ledger: Ledger) -> Iterator[Bundle]:
        """What is to be sent now; `now` by the clock that all processes share."""
        self._sort(ledger)
        for kind in {*self._waiting, *self._ours}:
            if now < self._not_before.get(kind, 0.0):
                continue
            if not (turn := _turn(kind, now, ledger)):
                self._not_before[kind] = now + _ASK_AGAIN
                continue
            self._claim(kind, ledger)
            if events := self._ours.pop(kind, []):
                following = "more" if now - self._sent.get(kind, -SECONDS_BETWEEN * 2) < 2 * SECONDS_BETWEEN else ""
                self._sent[kind] = now
                self._not_before[kind] = now + SECONDS_BETWEEN
                yield Bundle(kind, tuple(events), following)
            else:
                for key in turn:
                    ledger.forget_note(key)

    def _sort(self, ledger: Ledger) -> None:
        # Here and below one by one: a queue that goes away in the middle of it must not take events along.
        while self._arrived:
            event = self._arrived[0]
            if event.turn == "over":
                self._end(event, ledger)
            else:
                self._waiting.setdefault(event.kind, []).append(event)
            self._arrived.popleft()

    def _end(self, over: Event, ledger: Ledger) -> None:
        """That something is over can be claimed once, and only after it was told to have begun, by whomever."""
        # Whoever hears of it only now need not hear that it began.
        if waiting := [event for event in self._waiting.get(over.kind, []) if event.key != over.key]:
            self._waiting[over.kind] = waiting
        else:
            self._waiting.pop(over.kind, None)
        if ledger.forget_note(over.key):
            self._ours.setdefault(over.kind, []).append(over)

    def _claim(self, kind: Kind, ledger: Ledger) -> None:
        waiting = self._waiting.get(kind, [])
        while waiting:
            if ledger.note_once(waiting[0].key):
                self._ours.setdefault(kind, []).append(waiting[0])
            waiting.pop(0)
        self._waiting.pop(kind, None)

    def unsent(self) -> list[Event]:
        """What was claimed and will not be sent: whoever leaves gives it back."""
        return [event for events in self._ours.values() for event in events]


def give_back(events: Iterable[Event], ledger: Ledger) -> None:
    """Lets another process tell these."""
    for event in events:
        if event.turn == "over":
            ledger.note_once(event.key)
        else:
            ledger.forget_note(event.key)


def _turn(kind: Kind, now: float, ledger: Ledger) -> list[str]:
    """The right to send one message of this kind now; empty when somebody sent one less than a minute ago."""
    first = int(now // _STRETCH)
    keys = [f"pace:{kind}:{number}" for number in range(first, first + _STRETCHES)]
    return keys if all(ledger.note_once(key) for key in keys) else []
