"""What a person is told while the watcher watches: changes that matter, each once, never a line per look."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from stoker.gpus.model import known
from stoker.rules.policy import Policy
from stoker.rules.verdict import Activity, Verdict
from stoker.units import format_duration

# A driver that is being reset or updated is back by then; what lasts longer is nothing that mends itself.
UNKNOWN_PATIENCE: Final = 300.0


class News(NamedTuple):
    sentence: str
    urgent: bool
    """Whether it is worth a message to somebody who does not read the log."""


class Newsroom:
    """Feeds on verdicts and says what is new. Pure: it has no clock."""

    def __init__(self, policy: Policy, intention: str, *, unknown_patience: float = UNKNOWN_PATIENCE) -> None:
        """`intention` is what will be done when the window is over, as the end of a sentence."""
        self._policy = policy
        self._intention = intention
        self._unknown_patience = unknown_patience
        self._arming = False
        self._warned = False
        self._told_unknown = ""

    def hear(self, verdict: Verdict, activities: Sequence[Activity]) -> list[News]:
        found = [self._armed(verdict), self._warning(verdict), self._unknown(verdict, activities)]
        return [news for news in found if news is not None]

    def start_over(self) -> None:
        """After acting: the GPUs must be used again first, and the next idle stretch is warned of again."""
        self._arming = True
        self._warned = False

    def _armed(self, verdict: Verdict) -> News | None:
        was, self._arming = self._arming, verdict.word == "arming" or (self._arming and verdict.word == "unknown")
        if was and not self._arming:
            return News("armed: GPUs have been active", urgent=False)
        return None

    def _warning(self, verdict: Verdict) -> News | None:
        share = self._policy.warn_at
        if share is None or verdict.word == "idle":
            return None
        late = verdict.progress >= share
        if late and not self._warned:
            self._warned = True
            left = format_duration(max(self._policy.window - verdict.idle_for, 0.0))
            return News(f"{verdict.reason}; unless that changes, in {left}: {self._intention}", urgent=True)
        if not late and self._warned:
            self._warned = False
            return News(f"the warning is over: {verdict.reason}", urgent=False)
        return None

    def _unknown(self, verdict: Verdict, activities: Sequence[Activity]) -> News | None:
        if verdict.unknown_for == 0.0 and self._told_unknown:
            told, self._told_unknown = self._told_unknown, ""
            return News(f"{told} can be read again", urgent=False)
        if self._told_unknown or verdict.unknown_for < self._unknown_patience:
            return None
        unknown = [(a.label, a.peak.reason) for a in activities if not known(a.peak)]
        self._told_unknown = ", ".join(label for label, _ in unknown) or "the GPUs"
        reason = unknown[0][1] if unknown else verdict.reason
        sentence = f"{self._told_unknown} could not be read for {format_duration(verdict.unknown_for)}: {reason}"
        return News(f"{sentence}; what is unknown never counts as idle", urgent=True)
