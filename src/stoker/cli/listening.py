"""Waiting for the queue to change: by its bell, and with patience when its database is away."""

import select
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeVar

from stoker.queue.driver import QueueAwayError

if TYPE_CHECKING:
    from stoker.queue import Store

# The bell may be late in rare cases; nobody minds so short a delay then.
SLOW_POLL: Final = 2.0
# A database that restarts needs a few seconds; asking more often does not bring it back.
_BETWEEN_TRIES: Final = 1.0

T = TypeVar("T")


class Listener:
    """One person's wait for news of a queue."""

    def __init__(self, store: "Store") -> None:
        self._bell = store.bell()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bell.close()

    def wait(self, seconds: float) -> bool:
        """Waits for news for so long at the most; whether there may be some."""
        number = self._bell.fileno()
        if number < 0:
            time.sleep(max(0.0, seconds))
        else:
            waiting = select.poll()
            waiting.register(number, select.POLLIN)
            waiting.poll(max(0.0, seconds) * 1000)
        return self._bell.heard()


def patiently(question: Callable[[], T], deadline: float | None = None) -> T:
    """The answer, when the database gives one: what runs goes on without it, so whoever waits does too."""
    told = False
    while True:
        try:
            return question()
        except QueueAwayError as error:
            if deadline is not None and time.monotonic() >= deadline:
                raise
            if not told:
                note(f"{error}; waiting for it")
                told = True
            time.sleep(_BETWEEN_TRIES)


def note(sentence: str) -> None:
    """Something that a person should know, beside the output."""
    sys.stdout.flush()
    sys.stderr.write(f"stoker: {sentence}\n")
    sys.stderr.flush()
