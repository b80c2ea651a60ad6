"""Waiting for an event, with a deadline."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection
from typing import TypeVar

T = TypeVar("T")


def wait_for(what: Callable[[], T | None], *, deadline: float = 60.0, named: str = "the event") -> T:
    """The first true answer of `what`; fails the test when there is none in time."""
    ends = time.monotonic() + deadline
    pause = 0.001
    while not (answer := what()):
        if time.monotonic() > ends:
            raise AssertionError(f"{named} did not happen within {deadline:g} s")
        time.sleep(pause)
        # Much happens at once: what does not may be looked for less often.
        pause = min(2 * pause, 0.01)
    return answer


def kill_all(those: Callable[[], Collection[int]]) -> None:
    """Until there are none: the first of them may start others while they die."""

    def are_gone() -> bool:
        found = those()
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not found

    wait_for(are_gone, named="the end of what a test has left")
