"""Exponential back-off with a limit."""


def delay(first: float, earlier: int, longest: float) -> float:
    """Seconds to wait after `earlier` pauses."""
    # Beyond sixty doublings a float would overflow long after the limit.
    return float(min(longest, first * 2.0 ** min(max(earlier, 0), 60)))


class Backoff:
    """The pauses of one retry loop; call `reset` after a success."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = first
        self._longest = longest
        self._tries = 0

    def next(self) -> float:
        """The next pause."""
        pause = delay(self._first, self._tries, self._longest)
        self._tries += 1
        return pause

    def reset(self) -> None:
        self._tries = 0
