"""Answers that are kept for a while, because asking for them costs a database more than they change."""

import math
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

T = TypeVar("T")

# A question that takes long is asked so seldom that it takes no more than this share of the time.
SHARE: Final = 0.02
# What takes less is asked each time: a machine that is busy for a moment must not make it look dear.
CHEAP: Final = 0.01
# What was dear once may only have been held up: until it was so twice, its answer is kept no longer than this.
DOUBTFUL: Final = 5.0


class ThrottledCache(Generic[T]):
    """One answer: as fresh as its price allows, and never asked for again within `at_least` seconds."""

    def __init__(self, at_least: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._at_least = at_least
        self._clock = clock
        self._due = -math.inf
        self._kept: list[T] = []
        self._took = 0.0

    def is_due(self) -> bool:
        return self._clock() >= self._due

    def get(self, ask: Callable[[], T]) -> T:
        """What `ask` says, or said a short while ago."""
        began = self._clock()
        if began < self._due and self._kept:
            return self._kept[0]
        answer = ask()
        ended = self._clock()
        self._kept = [answer]
        before, self._took = self._took, ended - began
        proven = _worth(min(before, self._took))
        self._due = ended + max(self._at_least, proven, min(_worth(self._took), DOUBTFUL))
        return answer


def _worth(price: float) -> float:
    """How many seconds an answer is kept that took so many."""
    return price / SHARE if price > CHEAP else 0.0
