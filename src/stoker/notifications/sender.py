"""Brings messages to one URL in a thread of its own: tries again when the service is down, and gives up in the end."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from stoker.actions.messages import Channel
from stoker.errors import StokerError
from stoker.notifications.message import Message
from stoker.notifications.throttle import SECONDS_BETWEEN
from stoker.units import format_duration

# A restart of the service, a longer one, an outage that somebody works on; what is older is no news.
PAUSES: Final = (30.0, 120.0, 600.0)
# A service that is down for days must not fill the memory; of the oldest nobody wants to hear any more.
_MOST_WAITING: Final = 100
# Whoever stops waits so long for a message that is on its way.
_LAST_WORDS: Final = 5.0


class _Parcel(msgspec.Struct):
    message: Message
    due: float
    failures: int = 0


class Sender:
    """One URL, and what is still to be brought there."""

    def __init__(self, channel: Channel, say: Callable[[str], None], pauses: Sequence[float] = PAUSES) -> None:
        self._channel = channel
        self._say = say
        self._pauses = pauses
        self._news = threading.Condition()
        self._parcels: list[_Parcel] = []
        self._brought: dict[str, float] = {}
        """When a message of each kind was last brought."""
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name=f"courier {channel.scheme}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self, message: Message) -> None:
        """Never waits."""
        with self._news:
            self._parcels.append(_Parcel(message, time.monotonic()))
            if len(self._parcels) > _MOST_WAITING:
                self._give_up(self._parcels[0], "too many others wait")
            self._news.notify()

    def leave(self) -> list[Message]:
        """What was not brought; one that is on its way counts as brought after a few seconds."""
        with self._news:
            self._leaving = True
            self._news.notify()
        self._thread.join(_LAST_WORDS)
        with self._news:
            return [parcel.message for parcel in self._parcels]

    def _run(self) -> None:
        while (parcel := self._next()) is not None:
            try:
                self._channel.send(parcel.message.title, parcel.message.body, parcel.message.tone)
            except StokerError as error:
                self._failed(parcel, str(error))
            except Exception as error:  # noqa: BLE001 - a service's own code must not silence it for ever
                # Its words might hold the URL.
                self._failed(parcel, f"the message by {self._channel.scheme} was not sent ({type(error).__name__})")
            else:
                with self._news:
                    self._brought[parcel.message.kind] = time.monotonic()

    def _next(self) -> _Parcel | None:
        """The first that is due, once it is; None when it is time to leave."""
        with self._news:
            while not self._leaving:
                parcel = min(self._parcels, key=self._when, default=None)
                left = None if parcel is None else self._when(parcel) - time.monotonic()
                if parcel is not None and left is not None and left <= 0:
                    self._parcels.remove(parcel)
                    return parcel
                self._news.wait(left)
        return None

    def _when(self, parcel: _Parcel) -> float:
        """Those that a service could not take for a while must not come all at once."""
        last = self._brought.get(parcel.message.kind)
        return parcel.due if last is None else max(parcel.due, last + SECONDS_BETWEEN)

    def _failed(self, parcel: _Parcel, error: str) -> None:
        with self._news:
            if parcel.failures >= len(self._pauses):
                self._say(f"{error}; given up after {parcel.failures + 1} tries: {parcel.message.title}")
                return
            pause = self._pauses[parcel.failures]
            if parcel.failures == 0:
                self._say(f"{error}; trying again in {format_duration(pause)}")
            self._parcels.append(_Parcel(parcel.message, time.monotonic() + pause, parcel.failures + 1))

    def _give_up(self, parcel: _Parcel, why: str) -> None:
        self._parcels.remove(parcel)
        self._say(f"a message by {self._channel.scheme} was given up, as {why}: {parcel.message.title}")
