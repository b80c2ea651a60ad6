"""Logs of attempts: tails, which the queue keeps, and streams to readers on other machines.

A reader keeps requesting the whole log. The worker that has the log writes it chunk by chunk. The chunks are deleted
when the requests stop.
"""

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from stoker.logs.reader import LogChunk
from stoker.queue.driver import Changes, CollisionError, Parameters, Row
from stoker.queue.model import HEARD_WITHIN, LogRequest
from stoker.queue.table import Table, json_text, tail_of

# The last tail arrives within this many seconds after the outcome, if the worker is alive.
LAST_WITHIN: Final = 10.0
SECONDS_BETWEEN_LOOKS: Final = 0.02
# A completely streamed log stays for this many seconds, for the next reader.
KEPT: Final = 60.0
# The number of chunks per read, a few megabytes.
_MOST_PIECES: Final = 8
# Longer lines are split over several rows.
_LONGEST_PIECE: Final = 2**20
# The number of chunks deleted per call, so that the caller does not wait.
_MOST_FORGOTTEN: Final = 16


def _tail_parameters(attempt: str, text: str, is_last: bool) -> Parameters:
    return {"attempt": attempt, "tail": tail_of(text), "is_last": int(is_last)}


class Logs(Table):
    """The logs of attempts."""

    def write(self, attempt: str, text: str, *, is_last: bool = False) -> bool:
        """Stores the tail of an attempt's log. `is_last`: it is final."""
        return bool(self._driver.fetch("write log", _tail_parameters(attempt, text, is_last)))

    def write_last(self, tails: Mapping[str, str]) -> None:
        """Stores final tails, by attempt id."""
        rows = [_tail_parameters(attempt, text, True) for attempt, text in tails.items()]
        try:
            self._driver.transaction(lambda: self._driver.many("write log", rows))
        except CollisionError:
            # `stoker clean` has just removed one of the jobs.
            for row in rows:
                with contextlib.suppress(CollisionError):
                    self._driver.fetch("write log", row)

    def is_late(self, attempt: str) -> bool:
        """True if the final tail is still expected: it arrives shortly after the outcome, if the worker is alive."""
        parameters: Parameters = {"attempt": attempt, "within": LAST_WITHIN, "heard": HEARD_WITHIN}
        return bool(self._driver.fetch("late log", parameters))

    def wait(self, attempt: str) -> None:
        """Waits for the final tail."""
        while self.is_late(attempt):
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def read(self, attempt: str) -> str:
        rows = self._driver.fetch("read log", {"attempt": attempt})
        return str(rows[0][0]) if rows else ""

    def tails(self, attempts: Iterable[str], letters: int = 4096) -> dict[str, str]:
        """The stored tails of several logs, by attempt id."""
        wanted = list(attempts)
        if not wanted or letters < 1:
            return {}
        return dict(self._driver.fetch("last words", {"attempts": json_text(wanted), "letters": letters}))

    def request_stream(self, attempt: str, seconds: float) -> bool:
        """Requests the whole log for this many seconds. False if there is no such attempt."""
        which: Parameters = {"attempt": attempt, "seconds": float(seconds)}
        if self._driver.fetch("renew log stream", which):
            return True
        try:
            return self._change(lambda: self._driver.fetch("request log stream", which), _worker) != []
        except CollisionError:  # it was deleted just now
            return False

    def stream_requests(self) -> list[LogRequest]:
        """The current requests for logs."""
        return [LogRequest(*row) for row in self._driver.fetch("log requests", {})]

    def write_chunk(self, attempt: str, chunk: LogChunk) -> bool:
        """Writes the next chunk. False if the requests have stopped, or an earlier chunk is missing."""
        return self._driver.transaction(lambda: self._write_chunk(attempt, chunk))

    def _write_chunk(self, attempt: str, chunk: LogChunk) -> bool:
        of: dict[str, str | int | bytes] = {"attempt": attempt, "edition": chunk.edition}
        state: Parameters = {
            **of,
            "start": chunk.start,
            "size": chunk.size,
            "unfinished": chunk.unfinished,
            "behind": int(chunk.is_behind),
            "complete": int(chunk.is_complete),
        }
        if not self._driver.fetch("advance log stream", state):
            return False
        if chunk.finished or chunk.start == 0:
            self._driver.fetch("drop other editions", {**of, "most": _MOST_FORGOTTEN})
        for begin in range(0, len(chunk.finished), _LONGEST_PIECE):
            data = chunk.finished[begin : begin + _LONGEST_PIECE]
            self._driver.fetch("write log chunk", {**of, "start": chunk.start + begin, "data": data})
        return True

    def drop_stream(self, attempt: str) -> None:
        """Ends a requested stream. Readers fall back to the stored tail."""

        def work() -> None:
            self._driver.fetch("drop log stream", {"attempt": attempt})
            self._driver.fetch("drop other editions", {"attempt": attempt, "edition": "", "most": _MOST_FORGOTTEN})

        self._driver.transaction(work)

    def read_chunk(self, attempt: str, edition: str = "", start: int = 0) -> LogChunk | None:
        """The log from `start` if the edition is current, otherwise the newest edition from its beginning."""
        for newest, size, unfinished, behind, complete in self._driver.fetch("log stream", {"attempt": attempt}):
            begin = start if newest == edition else 0
            rows = self._driver.fetch(
                "log chunks", {"attempt": attempt, "edition": newest, "start": begin, "most": _MOST_PIECES}
            )
            finished = b""
            for place, data in rows:
                if place == begin + len(finished):
                    finished += bytes(data)
            # Chunks newer than the first query do not fit its unfinished line.
            is_all = begin + len(finished) == size
            return LogChunk(
                edition=newest,
                start=begin,
                finished=finished,
                unfinished=bytes(unfinished or b"") if is_all else b"",
                is_behind=bool(behind) or not is_all,
                is_complete=bool(complete) and is_all,
            )
        return None

    def expire_streams(self) -> bool:
        """Deletes some chunks without recent requests. False if more are left."""
        return self._driver.transaction(self._expire_streams)

    def _expire_streams(self) -> bool:
        if len(self._driver.fetch("expire log chunks", {"seconds": KEPT, "most": _MOST_FORGOTTEN})) == _MOST_FORGOTTEN:
            return False
        self._driver.fetch("expire log streams", {"seconds": KEPT})
        return True


def _worker(rows: Sequence[Row]) -> Changes:
    """A change that concerns the worker that has the log."""
    return Changes(workers=frozenset(worker for (worker,) in rows))
