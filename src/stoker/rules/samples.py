"""The rule that counts samples: a GPU is idle when each of its last n samples was below the threshold."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from stoker.gpus.model import Look, Maybe, Reading, Unknown, known
from stoker.units import format_duration

Percents = Mapping[str, Maybe[int]]


class Sample(NamedTuple):
    """What every GPU did at most since the sample before, by uuid in the machine's order, in whole percents."""

    percents: Percents
    problem: str | None = None
    """Why there is no GPU in it."""


class SampleGatherer:
    """Makes a sample of one look or of several: the highest peak of each GPU, unknown if any look at it was.

    Between two looks that were too far apart anything may have happened, so what the later one says is unknown.
    """

    def __init__(self, longest_gap: float, longest_unseen: float) -> None:
        """`longest_unseen`: how much of the time between two looks the later one may leave out."""
        self._longest_gap = longest_gap
        self._longest_unseen = longest_unseen
        self._percents: dict[str, Maybe[int]] | None = None
        self._problem: str | None = None
        self._last: float | None = None

    def add(self, look: Look) -> None:
        gap = 0.0 if self._last is None else look.at - self._last
        self._last = look.at
        self._problem = look.problem.reason if look.problem else None
        before = self._percents
        now = {reading.uuid: self._told(reading, gap) for reading in look.readings}
        self._percents = now if before is None else {uuid: _higher(before.get(uuid), now[uuid]) for uuid in now}

    def _told(self, reading: Reading, gap: float) -> Maybe[int]:
        if gap > self._longest_gap or gap - reading.vouched > self._longest_unseen:
            return Unknown(f"nobody looked for {format_duration(gap)}")
        return _percent(reading.utilization.peak) if known(reading.utilization) else reading.utilization

    def take(self) -> Sample:
        """The sample; the next one begins."""
        percents, self._percents = self._percents or {}, None
        return Sample(percents, None if percents else self._problem or "there is no GPU to read")


class SamplesRule:
    """Feeds on samples and says after each which GPUs are idle, once as many as required are."""

    def __init__(self, threshold: int, samples: int, require: Literal["all", "any"] = "all") -> None:
        """`threshold` in percent: at it is not below it."""
        self._threshold = threshold
        self._samples = samples
        self._require = require
        self._below: dict[str, int] = {}
        """How many samples in a row, up to now, were below the threshold."""

    def observe(self, percents: Percents) -> tuple[str, ...]:
        """The uuids of the idle GPUs when the rule is fulfilled, none at all when it is not."""
        if not self._below.keys() <= percents.keys():
            # A GPU that fell off the machine may be the one that the job was working on: nothing before counts.
            self._below = {}
        self._below = {
            uuid: self._below.get(uuid, 0) + 1 if known(percent) and percent < self._threshold else 0
            for uuid, percent in percents.items()
        }
        idle = tuple(uuid for uuid, count in self._below.items() if count >= self._samples)
        if self._require == "all" and len(idle) < len(percents):
            return ()
        return idle


def _percent(fraction: float) -> int:
    """Whole percents, rounded up: what is shown is what is judged, and a little work is not none."""
    return math.ceil(round(fraction * 100, 6))


def _higher(before: Maybe[int] | None, now: Maybe[int]) -> Maybe[int]:
    if before is None:
        return Unknown("it was not there all the time")
    if not known(before) or not known(now):
        return now if known(before) else before
    return max(before, now)
