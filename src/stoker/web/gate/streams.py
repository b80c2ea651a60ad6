"""How many answers that go on and on a token may have open: who opens too many ends their own, and shuts out nobody."""

import asyncio
from collections import defaultdict
from typing import Final

from stoker.web.visitor import Visitor

# A device takes one or two, and a token lets in fifty devices; programs follow logs as well.
MOST_OF_TOKEN: Final = 250
# Of a thousand connections; the rest is for operators, and for what is asked and answered at once.
MOST_OF_VIEWERS: Final = 300


class Stream:
    """One open answer."""

    def __init__(self, visitor: Visitor, task: "asyncio.Task[object]") -> None:
        self.visitor = visitor
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

    def begin(self, visitor: Visitor, task: "asyncio.Task[object]") -> Stream:
        """Ends the oldest of the same token when it has too many, or of the viewer who has most when all have."""
        stream = Stream(visitor, task)
        own = self._open[visitor.token]
        own.append(stream)
        if len(own) > self._most_of_token:
            self._end_oldest(own)
        viewers = [streams for streams in self._open.values() if streams and not streams[0].visitor.operates]
        if sum(map(len, viewers)) > self._most_of_viewers and not visitor.operates:
            self._end_oldest(max(viewers, key=len))
        return stream

    def finish(self, stream: Stream) -> None:
        own = self._open[stream.visitor.token]
        if stream in own:
            own.remove(stream)
        if not own:
            del self._open[stream.visitor.token]

    def _end_oldest(self, streams: list[Stream]) -> None:
        streams.pop(0).end()
