"""One page that follows a log: which lines it has been told, and what it is told next, as server-sent events."""

from collections.abc import AsyncIterator, Iterator
from itertools import takewhile
from typing import Final, NamedTuple

import msgspec

from stoker.logs.html_lines import Row
from stoker.web.log_channel import FIRST_LINES, Channel

# A message that a phone takes in without a pause.
_MOST_ROWS: Final = 500
_MOST_LETTERS: Final = 128 * 1024


class Mark(NamedTuple):
    """How far a page has come; the id of an event."""

    epoch: str
    number: int
    """Of the first line that may still change."""

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> "Mark | None":
        epoch, _, number = text.partition(".")
        return cls(epoch, int(number)) if number.isascii() and number.isdigit() and len(number) < 16 else None


class Follower:
    """A `lines` event replaces all lines from its number on; `last` does the same, when it is only the last one."""

    def __init__(self, channel: Channel, mark: Mark | None, from_the_beginning: bool) -> None:
        self._channel = channel
        self._mark = mark
        self._from_the_beginning = from_the_beginning
        self._epoch = ""
        self._next = 0
        self._told: tuple[Row, ...] = ()
        """The lines that it was told and that may since have changed."""

    async def news(self) -> AsyncIterator[str]:
        """What the page does not know yet."""
        channel = self._channel
        if channel.epoch != self._epoch:
            for text in self._begin():
                yield text
        if self._next < channel.first:
            async for rows in channel.earlier_rows(self._next):
                self._next = rows[-1].number + 1
                for text in self._events("lines", rows):
                    yield text
            self._next, self._told = max(self._next, channel.first), ()
        for text in self._difference():
            yield text

    def _begin(self) -> Iterator[str]:
        """Goes on where the page was, if that is still known; or tells it to begin anew."""
        channel, mark = self._channel, self._mark
        self._epoch, self._told, self._mark = channel.epoch, (), None
        if mark is not None and mark.epoch == channel.epoch and mark.number <= channel.first_open:
            self._next = mark.number
            return
        whole = self._from_the_beginning and channel.is_whole
        self._next = 0 if whole else channel.last_rows(FIRST_LINES)
        yield event("begin", {"from": self._next, "whole": channel.is_whole})

    def _difference(self) -> list[str]:
        """Made once for all who have come as far: there may be hundreds."""
        shared, whose = self._channel.shared, (id(self._told), self._next)
        if whose not in shared:
            shared[whose] = list(self._compared())
        self._next, self._told = self._channel.first_open, self._channel.open
        return shared[whose]

    def _compared(self) -> Iterator[str]:
        told, now = self._told, self._channel.rows_from(self._told[0].number if self._told else self._next)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(told, now, strict=False)))
        if same < len(now):
            is_last = len(told) == len(now) == same + 1
            yield from self._events("last" if is_last else "lines", now[same:])
        elif same < len(told):
            yield self._event("lines", told[same].number, [])

    def _events(self, name: str, rows: list[Row]) -> Iterator[str]:
        """In parts: lines of one event have numbers without a gap."""
        part: list[str] = []
        begin = size = 0
        for number, html in rows:
            if part and (number != begin + len(part) or len(part) >= _MOST_ROWS or size >= _MOST_LETTERS):
                yield self._event(name, begin, part)
                part = []
            if not part:
                begin, size = number, 0
            part.append(html)
            size += len(html)
        yield self._event(name, begin, part)

    def _event(self, name: str, begin: int, part: list[str]) -> str:
        mark = Mark(self._epoch, min(begin + len(part), self._channel.first_open))
        return f"id: {mark}\n" + event(name, {"from": begin, "lines": part})


def event(name: str, value: object) -> str:
    """JSON has no line ends of its own, so nothing that was printed can end the event."""
    return f"event: {name}\ndata: {msgspec.json.encode(value).decode()}\n\n"
