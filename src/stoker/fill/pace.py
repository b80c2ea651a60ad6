"""How soon after an event a scan may follow: at once, unless events come so often that scans would cost too much."""

from typing import Final

# A monitor that opens the nodes all day long must not make its watcher a burden.
_SHARE: Final = 0.05
"""Of a core, for scans in the long run."""
_SAVINGS: Final = 0.5
"""Seconds of processor time that a quiet time leaves for a busy one: people come in bursts too."""
# However much is going on: somebody who waits for his GPU is seen within this.
_LONGEST_GAP: Final = 0.3


class ScanPacer:
    """Keeps account of what scans cost, in seconds of processor time. It has no clock of its own."""

    def __init__(self, now: float) -> None:
        self._credit = _SAVINGS
        self._at = now

    def soonest(self, now: float) -> float:
        """When the next scan may be."""
        credit = self._credit_at(now)
        return now if credit >= 0 else now - credit / _SHARE

    def spent(self, now: float, seconds: float) -> None:
        # More debt than the longest gap makes up for would be remembered for nothing.
        self._credit = max(self._credit_at(now) - seconds, -_LONGEST_GAP * _SHARE)
        self._at = now

    def _credit_at(self, now: float) -> float:
        return min(_SAVINGS, self._credit + (now - self._at) * _SHARE)
