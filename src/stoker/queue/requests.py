"""What people want of attempts that run, as their workers ask for it."""

import math

from stoker.errors import BadInputError
from stoker.queue.driver import Driver, Row
from stoker.queue.fields import LONGEST_LABEL
from stoker.queue.model import Requests, Snoozed
from stoker.queue.rows import clean_text


def requests_for(driver: Driver, worker: str) -> Requests:
    """In one question: every worker asks it whenever the bell rings.

    A snooze that somebody has ended is told as one of no time; one that is over by itself is told no more.
    """
    rows = driver.fetch("requests", {"worker": worker})
    return Requests(
        cancelled=frozenset(name for name, unwanted, *_snooze in rows if unwanted),
        snoozed={
            name: Snoozed(seconds=float(left), by=who, until=float(until))
            for name, _unwanted, left, until, who in rows
            if left is not None
        },
    )


def snooze(driver: Driver, attempt: str, seconds: float, by: str) -> list[Row]:
    """One row when it still runs."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise BadInputError(f"a snooze of {seconds} s cannot be: zero or more is meant")
    who = clean_text(by)[:LONGEST_LABEL]
    return driver.fetch("snooze", {"attempt": attempt, "seconds": float(seconds), "who": who})
