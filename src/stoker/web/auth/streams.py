"""How many answers that go on and on a token may have open: who opens too many ends their own, and shuts out nobody.

An answer that is several in one counts as so many.
"""

import asyncio
from collections import defaultdict
from typing import Final

from stoker.web.user import User

# A window takes one or two, and a token lets in fifty devices; programs follow logs as well.
MOST_OF_TOKEN: Final = 250
# Of a thousand connections; the rest is for operators, and for what is asked and answered at once.
MOST_OF_VIEWERS: Final = 300


class Stream:
    """One open answer."""

    def __init__(self, visitor: User, task: "asyncio.Task[object]", parts: int) -> None:
        self.visitor = visitor
        self.parts = parts
        self.is_ended = False
        """Whether it had to make room."""
        self._task = task

    def end(self) -> None:
        self.is_ended = True
        self._task.cancel()


class Streams:
    """Those that are open now, by token, the oldest first."""

    def __init__(self, most_of_token: int = MOST_OF_TOKEN, most_of_viewers: int = MOST_OF_VIEWERS) -> None:
        self._most_of_token = most_of_token
        self._most_of_viewers = most_of_viewers
        self._open: defaultdict[str, list[Stream]] = defaultdict(list)

    def begin(self, visitor: User, task: "asyncio.Task[object]", parts: int = 1) -> Stream:
        """Ends the oldest of the same token while it has too many, or of the viewer who has most while all have."""
        stream = Stream(visitor, task, parts)
        own = self._open[visitor.token]
        own.append(stream)
        while _parts(own) > self._most_of_token:
            own.pop(0).end()
        viewers = [streams for streams in self._open.values() if streams and not streams[0].visitor.operates]
        while sum(map(_parts, viewers)) > self._most_of_viewers and not visitor.operates:
            max(viewers, key=_parts).pop(0).end()
        return stream

    def finish(self, stream: Stream) -> None:
        own = self._open[stream.visitor.token]
        if stream in own:
            own.remove(stream)
        if not own:
            del self._open[stream.visitor.token]


def _parts(streams: list[Stream]) -> int:
    return sum(stream.parts for stream in streams)
