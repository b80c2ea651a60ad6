"""Reads the end of an attempt's output from the queue, for machines on which it did not run."""

from collections.abc import Callable
from typing import Final

from stoker.runs.output_reader import Piece

# As much as is looked for at first; longer than most lines, so that it is seldom found in a wrong place.
_PROBE: Final = 256
# Nobody should take what is left of an output for all of it.
_MISSING: Final = b"[stoker: lines are missing here, they came faster than the queue is told of them]\n"


class TailReader:
    """`tail` gives the last part of the output as it is now: what was told before is recognised and left out."""

    is_here: Final = False
    is_whole: Final = False
    is_late: Final = False

    def __init__(self, tail: Callable[[], str], told: bytes = b"") -> None:
        """`told` are the last lines that another reader has told: the tail may still be behind them."""
        self._tail = tail
        self._told = told
        self._may_lag = bool(told)

    def read(self) -> Piece:
        text = self._tail().encode()
        end = text.rfind(b"\n") + 1
        lines = text[:end]
        if self._may_lag and lines in self._told:
            return Piece(b"", text[end:] if self._told.endswith(lines) else b"")
        self._may_lag = False
        if fresh := unknown(self._told, lines):
            # All that the next tail can begin with.
            self._told = lines
        return Piece(fresh, text[end:])

    def give_up(self) -> None:
        """Nothing is late."""

    def close(self) -> None:
        """Nothing is open."""


def unknown(told: bytes, lines: bytes) -> bytes:
    """What follows in `lines` on those that were told; all, with a word on what is missing, when it does not."""
    known = overlap(told, lines)
    fresh = lines[known:]
    return _MISSING + fresh if fresh and told and not known else fresh


def overlap(before: bytes, after: bytes) -> int:
    """How many bytes of `after`, at its beginning, are the end of `before`: as many as can be."""
    probe = after[:_PROBE]
    at = before.find(probe[: len(before)]) if probe else -1
    while at >= 0:
        size = len(before) - at
        if after.startswith(before[at:]):
            return size
        at = before.find(probe, at + 1)
    return _short_overlap(before, after)


def _short_overlap(before: bytes, after: bytes) -> int:
    """The same where less than the probe is common."""
    longest = min(len(before), len(after), _PROBE)
    return next((size for size in range(longest, 0, -1) if before.endswith(after[:size])), 0)
