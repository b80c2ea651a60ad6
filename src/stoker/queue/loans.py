"""Outputs that somebody on another machine reads: the machine that has them lends them through the queue meanwhile.

The queue keeps only the end of an output. Whoever wants the whole says so, again and again; the worker of the machine
that has it brings it piece by piece, and all of it goes again when nobody wants it any more.
"""

from typing import Final

from stoker.queue.driver import Driver, Parameters, Row
from stoker.queue.model import Lent, Wanted

# In seconds: what was lent to its end is still there for a reader that comes soon after another one.
KEPT: Final = 60.0
# What one look brings at most: a few megabytes.
_MOST_PIECES: Final = 8
# A line may be of any length; a row should not.
_LONGEST_PIECE: Final = 2**20
# What is deleted at once, by somebody who has other things to do.
_MOST_FORGOTTEN: Final = 16


def ask(driver: Driver, attempt: str, seconds: float) -> list[Row]:
    """One row, unless there is no such attempt."""
    return driver.fetch("ask for loan", {"attempt": attempt, "seconds": float(seconds)})


def renew(driver: Driver, attempt: str, seconds: float) -> bool:
    """False when nobody wanted it any more: then its worker must be told."""
    return bool(driver.fetch("renew loan", {"attempt": attempt, "seconds": float(seconds)}))


def wanted(driver: Driver) -> list[Wanted]:
    return [Wanted(*row) for row in driver.fetch("wanted outputs", {})]


def lend(driver: Driver, attempt: str, lent: Lent) -> bool:
    """False, and nothing is kept, when nobody wants it any more, or what comes before it is not here."""
    of: dict[str, str | int | bytes] = {"attempt": attempt, "edition": lent.edition}
    state: Parameters = {
        **of,
        "start": lent.start,
        "size": lent.size,
        "unfinished": lent.unfinished,
        "behind": int(lent.is_behind),
        "complete": int(lent.is_complete),
    }
    if not driver.fetch("lend", state):
        return False
    if lent.finished or lent.start == 0:
        driver.fetch("take back other editions", {**of, "most": _MOST_FORGOTTEN})
    for begin in range(0, len(lent.finished), _LONGEST_PIECE):
        data = lent.finished[begin : begin + _LONGEST_PIECE]
        driver.fetch("lend piece", {**of, "start": lent.start + begin, "data": data})
    return True


def take_back(driver: Driver, attempt: str) -> None:
    """Whoever reads it has to do with what the queue keeps."""
    driver.fetch("take back", {"attempt": attempt})
    driver.fetch("take back other editions", {"attempt": attempt, "edition": "", "most": _MOST_FORGOTTEN})


def lent(driver: Driver, attempt: str, edition: str, start: int) -> Lent | None:
    """What there is from `start` of this edition on; of another one, if there is only that, from its beginning."""
    for newest, size, unfinished, behind, complete in driver.fetch("loan", {"attempt": attempt}):
        begin = start if newest == edition else 0
        rows = driver.fetch(
            "lent pieces", {"attempt": attempt, "edition": newest, "start": begin, "most": _MOST_PIECES}
        )
        finished = b""
        for place, data in rows:
            if place == begin + len(finished):
                finished += bytes(data)
        # What was brought since the first question has another unfinished line behind it.
        is_all = begin + len(finished) == size
        return Lent(
            edition=newest,
            start=begin,
            finished=finished,
            unfinished=bytes(unfinished or b"") if is_all else b"",
            is_behind=bool(behind) or not is_all,
            is_complete=bool(complete) and is_all,
        )
    return None


def end(driver: Driver) -> bool:
    """Forgets some of what nobody has wanted for a while. False when there is more of it."""
    if len(driver.fetch("forget pieces", {"seconds": KEPT, "most": _MOST_FORGOTTEN})) == _MOST_FORGOTTEN:
        return False
    driver.fetch("forget loans", {"seconds": KEPT})
    return True
