"""Messages in plain text, and one sender thread per URL that delivers them with retries."""

import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from stoker.actions.notify import AppriseChannel, Tone
from stoker.errors import StokerError
from stoker.notifications.events import Event, EventKind, Turn, listed
from stoker.notifications.throttle import SECONDS_BETWEEN
from stoker.units import capitalized, format_duration

# Fits the limits of every service.
MAX_LENGTH: Final = 1000
_MAX_LINK: Final = 200
_MAX_NAMES: Final = 3
# Wording for one event and for several, and the tone.
_TITLES: Final[dict[tuple[EventKind, Turn], tuple[str, str, Tone]]] = {
    ("failed", "happened"): ("job failed", "jobs failed", "failure"),
    ("stopped", "happened"): ("job was stopped by a rule", "jobs were stopped by a rule", "warning"),
    ("warned", "happened"): ("job may have to be stopped", "jobs may have to be stopped", "warning"),
    ("succeeded", "happened"): ("job succeeded", "jobs succeeded", "success"),
    ("cancelled", "happened"): ("job was cancelled", "jobs were cancelled", "warning"),
    ("group-done", "happened"): ("group is done", "groups are done", "info"),
    ("queue-empty", "happened"): ("the queue is empty", "times the queue became empty", "info"),
    ("gpu-unknown", "began"): ("GPU cannot be read", "GPUs cannot be read", "warning"),
    ("gpu-unknown", "over"): ("GPU can be read again", "GPUs can be read again", "success"),
    ("gpu-quarantined", "began"): ("GPU is out of rotation", "GPUs are out of rotation", "warning"),
    ("gpu-quarantined", "over"): ("GPU is in rotation again", "GPUs are in rotation again", "success"),
    ("worker-gone", "began"): ("worker is gone", "workers are gone", "failure"),
    ("worker-gone", "over"): ("worker is back", "workers are back", "success"),
}
_LISTS: Final[dict[EventKind, str]] = {"failed": "/jobs?state=failed", "stopped": "/jobs?state=failed"}
_BY_SEVERITY: Final[tuple[Tone, ...]] = ("failure", "warning", "info", "success")
# Characters that chats interpret as markup, and lookalikes that they do not.
_MARKUP: Final = str.maketrans("*`<>[]@~|\\", "∗ʼ‹›［］＠∼∣∖")
_EDGE_UNDERSCORES: Final = re.compile(r"(?<![^\W_])_+|_+(?![^\W_])")


class Message(msgspec.Struct, frozen=True, kw_only=True):
    kind: EventKind
    title: str
    body: str
    events: tuple[Event, ...]
    tone: Tone = "info"


def compose(kind: EventKind, events: Sequence[Event], link: str, *, prefix: str = "") -> Message:
    """`prefix`: `more` after a message of the same kind."""
    parts = [
        _summary(group, prefix)
        for turn in ("happened", "began", "over")
        if (group := [event for event in events if event.turn == turn])
    ]
    where = _link_line(kind, events, link.rstrip("/"))
    room = MAX_LENGTH - len(where) - 1
    text = "\n".join(body for _title, body in parts)
    text = text if len(text) <= room else f"{text[: room - 1]}…"
    return Message(
        kind=kind,
        title=f"Stoker: {parts[0][0]}",
        body=f"{text}\n{where}",
        events=tuple(events),
        # The end of a problem is good news only if the message contains nothing else.
        tone=min((event.tone or _TITLES[kind, event.turn][2] for event in events), key=_BY_SEVERITY.index),
    )


def plain(text: str) -> str:
    """Text that looks the same but contains no markup."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return _EDGE_UNDERSCORES.sub(lambda found: "＿" * len(found[0]), printable.translate(_MARKUP))


def _summary(events: Sequence[Event], prefix: str) -> tuple[str, str]:
    """The title and the body."""
    first = events[0]
    one, several, _tone = _TITLES[first.kind, first.turn]
    if len(events) == 1:
        about = "" if first.kind == "queue-empty" else f": {first.name}"
        return plain(f"{one}{about}"), plain(first.message)
    many = " ".join(filter(None, [str(len(events)), prefix, several]))
    names = "" if first.kind == "queue-empty" else f": {listed([event.name for event in events], _MAX_NAMES)}"
    return plain(many), plain(f"{capitalized(many)}{names}.")


def _link_line(kind: EventKind, events: Sequence[Event], link: str) -> str:
    path, hint = (events[0].path, events[0].hint) if len(events) == 1 else (_LISTS.get(kind, "/"), "stoker list")
    if not link or len(link) > _MAX_LINK:
        return f"{hint} says more."
    return f"{link}{path}"


def send_test(url: str, link: str, where: str) -> str:
    """Sends a test message and returns the scheme. `where` is the setting of the URL, for the error."""
    channel = AppriseChannel(url)
    try:
        channel.prepare(where)
        host = os.uname().nodename
        text = f"This is a test: messages of Stoker on {host} arrive here."
        channel.send("Stoker: a test", f"{text}\n{link}" if link else text)
    finally:
        channel.close()
    return channel.scheme


# For a restart of the service, a longer one, an outage. Then messages are dropped.
RETRY_DELAYS: Final = (30.0, 120.0, 600.0)
# A service that is down for days must not fill the memory: the oldest messages are dropped.
_MAX_QUEUED: Final = 100
# How long to wait for a message that is being sent.
_STOP_TIMEOUT: Final = 5.0


class _Queued(msgspec.Struct):
    message: Message
    due: float
    failures: int = 0


class Sender:
    """Delivers messages to one URL in its own thread."""

    def __init__(
        self, channel: AppriseChannel, log: Callable[[str], None], retry_delays: Sequence[float] = RETRY_DELAYS
    ) -> None:
        self._channel = channel
        self._log = log
        self._retry_delays = retry_delays
        self._changed = threading.Condition()
        self._queue: list[_Queued] = []
        self._sent: dict[str, float] = {}
        """When a message of each kind was last sent."""
        self._stopping = False
        self.idle_since: float | None = time.monotonic()
        """Start of the idle time; None while there are messages."""
        self._thread = threading.Thread(target=self._run, name=f"sender {channel.scheme}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, message: Message) -> None:
        """Queues the message and returns at once."""
        with self._changed:
            self._queue.append(_Queued(message, time.monotonic()))
            self.idle_since = None
            if len(self._queue) > _MAX_QUEUED:
                self._give_up(self._queue[0], "too many others wait")
            self._changed.notify()

    def stop(self) -> list[Message]:
        """The unsent messages; one that is being sent counts as sent."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(_STOP_TIMEOUT)
        with self._changed:
            return [queued.message for queued in self._queue]

    def _run(self) -> None:
        while (queued := self._next()) is not None:
            try:
                self._channel.send(queued.message.title, queued.message.body, queued.message.tone)
            except StokerError as error:
                self._failed(queued, str(error))
            except Exception as error:  # noqa: BLE001 - a bug in a service's plugin must not end the thread
                # Its message may contain the URL.
                self._failed(queued, f"the message by {self._channel.scheme} was not sent ({type(error).__name__})")
            else:
                with self._changed:
                    self._sent[queued.message.kind] = time.monotonic()

    def _next(self) -> _Queued | None:
        """Waits for the first message that is due; None when stopping."""
        with self._changed:
            while not self._stopping:
                queued = min(self._queue, key=self._due, default=None)
                if queued is None and self.idle_since is None:
                    self.idle_since = time.monotonic()
                left = None if queued is None else self._due(queued) - time.monotonic()
                if queued is not None and left is not None and left <= 0:
                    self._queue.remove(queued)
                    return queued
                self._changed.wait(left)
        return None

    def _due(self, queued: _Queued) -> float:
        """Delayed messages are not sent all at once."""
        last = self._sent.get(queued.message.kind)
        return queued.due if last is None else max(queued.due, last + SECONDS_BETWEEN)

    def _failed(self, queued: _Queued, error: str) -> None:
        with self._changed:
            if queued.failures >= len(self._retry_delays):
                self._log(f"{error}; given up after {queued.failures + 1} tries: {queued.message.title}")
                return
            pause = self._retry_delays[queued.failures]
            if queued.failures == 0:
                self._log(f"{error}; trying again in {format_duration(pause)}")
            self._queue.append(_Queued(queued.message, time.monotonic() + pause, queued.failures + 1))

    def _give_up(self, queued: _Queued, why: str) -> None:
        self._queue.remove(queued)
        self._log(f"a message by {self._channel.scheme} was given up, as {why}: {queued.message.title}")
