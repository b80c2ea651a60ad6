"""What is done now and then, beside something that is done often."""

import time
from collections.abc import Callable


class PeriodicTask:
    """Comes the first time, and then once in so many seconds of this process."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._next: float | None = None

    def is_due(self) -> bool:
        now = self._clock()
        if self._next is not None and now < self._next:
            return False
        self._next = now + self._seconds
        return True
