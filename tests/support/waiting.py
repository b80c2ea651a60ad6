"""Waiting for an event, with a deadline."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(what: Callable[[], T | None], *, deadline: float = 60.0, named: str = "the event") -> T:
    """The first true answer of `what`; fails the test when there is none in time."""
    ends = time.monotonic() + deadline
    while not (answer := what()):
        if time.monotonic() > ends:
            raise AssertionError(f"{named} did not happen within {deadline:g} s")
        time.sleep(0.01)
    return answer
