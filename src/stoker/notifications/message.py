"""A message to people: of one event its sentence, of several how many and which, and a link. Plain text."""

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from stoker.actions.messages import Tone
from stoker.notifications.events import Event, Kind, Turn, some

# What fits everywhere, and is read.
LONGEST: Final = 1000
_LONGEST_LINK: Final = 200
_MOST_NAMES: Final = 3
_TITLES: Final[dict[tuple[Kind, Turn], tuple[str, str]]] = {
    ("failed", "happened"): ("job failed", "jobs failed"),
    ("idle-stopped", "happened"): ("job was stopped: idle", "jobs were stopped: their GPUs stayed idle"),
    ("queue-empty", "happened"): ("the queue is empty", "times the queue became empty"),
    ("gpu-unknown", "began"): ("GPU cannot be read", "GPUs cannot be read"),
    ("gpu-unknown", "over"): ("GPU can be read again", "GPUs can be read again"),
    ("worker-gone", "began"): ("worker is gone", "workers are gone"),
    ("worker-gone", "over"): ("worker is back", "workers are heard of again"),
}
_TONES: Final[dict[tuple[Kind, Turn], Tone]] = {
    ("failed", "happened"): "failure",
    ("idle-stopped", "happened"): "warning",
    ("queue-empty", "happened"): "info",
    ("gpu-unknown", "began"): "warning",
    ("gpu-unknown", "over"): "success",
    ("worker-gone", "began"): "failure",
    ("worker-gone", "over"): "success",
}
_LISTS: Final[dict[Kind, str]] = {"failed": "/jobs?state=failed", "idle-stopped": "/jobs?state=failed"}
_WORST_FIRST: Final[tuple[Tone, ...]] = ("failure", "warning", "info", "success")
# Letters that chats and mail programs make bold, links, mentions or pictures of, and ones that only look like them.
_MARKUP: Final = str.maketrans("*`<>[]@~|\\", "∗ʼ‹›［］＠∼∣∖")
_EDGE_UNDERSCORES: Final = re.compile(r"(?<![^\W_])_+|_+(?![^\W_])")


class Message(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    title: str
    body: str
    events: tuple[Event, ...]
    """All that it tells of."""
    tone: Tone = "info"


def compose(kind: Kind, events: Sequence[Event], link: str, *, following: str = "") -> Message:
    """`following` is the word `more` when it comes after a message of the same kind."""
    parts = [
        _part(group, following)
        for turn in ("happened", "began", "over")
        if (group := [event for event in events if event.turn == turn])
    ]
    where = _where(kind, events, link.rstrip("/"))
    room = LONGEST - len(where) - 1
    text = "\n".join(body for _title, body in parts)
    text = text if len(text) <= room else f"{text[: room - 1]}…"
    return Message(
        kind=kind,
        title=f"Stoker: {parts[0][0]}",
        body=f"{text}\n{where}",
        events=tuple(events),
        # What is over is good news only when nothing else is told with it.
        tone=min((_TONES[kind, event.turn] for event in events), key=_WORST_FIRST.index),
    )


def plain(text: str) -> str:
    """The same to the eye, and nothing else to a chat."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return _EDGE_UNDERSCORES.sub(lambda found: "＿" * len(found[0]), printable.translate(_MARKUP))


def _part(events: Sequence[Event], following: str) -> tuple[str, str]:
    """The title, and what it is about."""
    first = events[0]
    one, several = _TITLES[first.kind, first.turn]
    if len(events) == 1:
        about = "" if first.kind == "queue-empty" else f": {first.name}"
        return plain(f"{one}{about}"), plain(first.sentence)
    many = " ".join(filter(None, [str(len(events)), following, several]))
    names = "" if first.kind == "queue-empty" else f": {some([event.name for event in events], _MOST_NAMES)}"
    return plain(many), plain(f"{_capital(many)}{names}.")


def _where(kind: Kind, events: Sequence[Event], link: str) -> str:
    path, hint = (events[0].path, events[0].hint) if len(events) == 1 else (_LISTS.get(kind, "/"), "stoker list")
    if not link or len(link) > _LONGEST_LINK:
        return f"{hint} says more."
    return f"{link}{path}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
