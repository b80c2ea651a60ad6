"""Looks at a steady rhythm for an event loop: what to wait for, until when, and the look once it has come."""

import time
from typing import Final

from stoker.gpus.model import Look
from stoker.gpus.prober import Prober

# The driver's buffer holds sixteen seconds of samples: looks that are further apart would miss some of them.
LONGEST_WAIT: Final = 10.0
# Of the distance between two looks: at least this much lies between the end of one and the next.
_LEAST_SHARE: Final = 0.5


class Sampler:
    """Asks the prober at its times. An event loop polls `fileno()` until `due()` and then calls `step()`."""

    def __init__(self, prober: Prober, every: float, *, first: float = 0.0) -> None:
        """`first` is how long to wait before the first look."""
        self._prober = prober
        self._every = min(every, LONGEST_WAIT)
        self._next = time.monotonic() + first
        self._asked = False

    def fileno(self) -> int:
        """Readable when a look may have come; -1 while none is asked for."""
        return self._prober.fileno() if self._asked else -1

    def due(self) -> float:
        """When to call `step()` at the latest."""
        return time.monotonic() + self._prober.remaining() if self._asked else self._next

    def no_later_than(self, at: float | None) -> None:
        """Moves the next look forward to `at`: something is decided then."""
        if at is not None and not self._asked:
            self._next = min(self._next, max(at, time.monotonic()))

    def postpone(self, seconds: float) -> None:
        """Leaves the GPUs alone for a while."""
        self._next = time.monotonic() + seconds

    def step(self) -> Look | None:
        """A look that has come, or None. Raises `AbsentError` when there is nothing to look at."""
        if not self._asked:
            if time.monotonic() < self._next:
                return None
            self._prober.ask()
            self._asked = True
        try:
            look = self._prober.answer()
        except Exception:
            self._over()
            raise
        if look is not None:
            self._over()
        return look

    def _over(self) -> None:
        """The next look is one distance after this one was due, or after now where this one was late.

        What was missed is not made up for: a look right behind another would speak for no time at all, and rules that
        count looks would count it all the same.
        """
        self._asked = False
        now = time.monotonic()
        planned = self._next + self._every
        self._next = planned if planned - now >= self._every * _LEAST_SHARE else now + self._every
