"""What wakes a worker at once when another process has changed the queue."""

import math
import time
from collections.abc import Callable
from typing import Final, Protocol

# Every NOTIFY takes a lock of the whole PostgreSQL server and wakes every listener; this delay is too short to notice.
SECONDS_BETWEEN: Final = 0.02


class ChangeListener(Protocol):
    """May wake for nothing and in rare cases be late, so every user also polls slowly.

    Changes by the store that created it do not count. Only that store's thread uses it, and closes it before the store.
    """

    def fileno(self) -> int:
        """Readable when something may have changed; -1 while it cannot listen."""

    def poll(self) -> bool:
        """Whether something may have changed since the last call. Never raises; reconnects a lost listener."""

    def close(self) -> None: ...


class NotifyThrottle:
    """The first notification after a pause is sent at once; one too soon after it is deferred."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = -math.inf
        self._deferred = False

    def may_send(self) -> bool:
        """Whether a notification may be sent now."""
        return self._clock() - self._last >= SECONDS_BETWEEN

    def sent(self) -> None:
        """It covers everything that was deferred."""
        self._last = self._clock()
        self._deferred = False

    def defer(self) -> None:
        self._deferred = True

    def flush_due(self) -> float | None:
        """In how many seconds a deferred notification may be sent; None when there is none."""
        return max(0.0, self._last + SECONDS_BETWEEN - self._clock()) if self._deferred else None
