"""Outputs that somebody on another machine reads: the machine that has them lends them through the queue meanwhile.

The queue keeps only the end of an output. Whoever wants the whole says so, again and again; the worker of the machine
that has it brings it piece by piece, and all of it goes again when nobody wants it any more.
"""

from typing import Final

from stoker.logs.model import LogChunk
from stoker.queue.driver import Driver, Parameters, Row
from stoker.queue.model import LogRequest

# In seconds: what was lent to its end is still there for a reader that comes soon after another one.
KEPT: Final = 60.0
# What one look brings at most: a few megabytes.
_MOST_PIECES: Final = 8
# A line may be of any length; a row should not.
_LONGEST_PIECE: Final = 2**20
# What is deleted at once, by somebody who has other things to do.
_MOST_FORGOTTEN: Final = 16


def request(driver: Driver, attempt: str, seconds: float) -> list[Row]:
    """One row, unless there is no such attempt."""
    return driver.fetch("request log stream", {"attempt": attempt, "seconds": float(seconds)})


def renew(driver: Driver, attempt: str, seconds: float) -> bool:
    """False when nobody wanted it any more: then its worker must be told."""
    return bool(driver.fetch("renew log stream", {"attempt": attempt, "seconds": float(seconds)}))


def requests(driver: Driver) -> list[LogRequest]:
    return [LogRequest(*row) for row in driver.fetch("log requests", {})]


def write(driver: Driver, attempt: str, chunk: LogChunk) -> bool:
    """False, and nothing is kept, when nobody wants it any more, or what comes before it is not here."""
    of: dict[str, str | int | bytes] = {"attempt": attempt, "edition": chunk.edition}
    state: Parameters = {
        **of,
        "start": chunk.start,
        "size": chunk.size,
        "unfinished": chunk.unfinished,
        "behind": int(chunk.is_behind),
        "complete": int(chunk.is_complete),
    }
    if not driver.fetch("advance log stream", state):
        return False
    if chunk.finished or chunk.start == 0:
        driver.fetch("drop other editions", {**of, "most": _MOST_FORGOTTEN})
    for begin in range(0, len(chunk.finished), _LONGEST_PIECE):
        data = chunk.finished[begin : begin + _LONGEST_PIECE]
        driver.fetch("write log chunk", {**of, "start": chunk.start + begin, "data": data})
    return True


def drop(driver: Driver, attempt: str) -> None:
    """Whoever reads it has to do with what the queue keeps."""
    driver.fetch("drop log stream", {"attempt": attempt})
    driver.fetch("drop other editions", {"attempt": attempt, "edition": "", "most": _MOST_FORGOTTEN})


def read(driver: Driver, attempt: str, edition: str, start: int) -> LogChunk | None:
    """What there is from `start` of this edition on; of another one, if there is only that, from its beginning."""
    for newest, size, unfinished, behind, complete in driver.fetch("log stream", {"attempt": attempt}):
        begin = start if newest == edition else 0
        rows = driver.fetch("log chunks", {"attempt": attempt, "edition": newest, "start": begin, "most": _MOST_PIECES})
        finished = b""
        for place, data in rows:
            if place == begin + len(finished):
                finished += bytes(data)
        # What was brought since the first question has another unfinished line behind it.
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


def expire(driver: Driver) -> bool:
    """Forgets some of what nobody has wanted for a while. False when there is more of it."""
    if len(driver.fetch("expire log chunks", {"seconds": KEPT, "most": _MOST_FORGOTTEN})) == _MOST_FORGOTTEN:
        return False
    driver.fetch("expire log streams", {"seconds": KEPT})
    return True
