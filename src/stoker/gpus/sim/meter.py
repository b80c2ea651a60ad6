"""What a driver would have measured on a GPU: samples, power, energy, heat. No clock, no I/O."""

import math
from collections.abc import Mapping
from typing import Final

from stoker.gpus.model import Utilization
from stoker.gpus.sim.load import Totals, Use

# NVIDIA's driver has been seen to keep a hundred samples of utilization, about six a second.
SAMPLE: Final = 1 / 6
MOST_SAMPLES: Final = 100
LONGEST_SPAN: Final = MOST_SAMPLES * SAMPLE
# A mid-sized board: at rest, and at its limit.
IDLE_WATTS: Final = 20.0
LIMIT_WATTS: Final = 350.0
# The same board's degrees, and the seconds in which it goes most of the way: what air-cooled ones do.
COOL: Final = 30.0
HOT: Final = 80.0
WARMING: Final = 45.0

UseKey = tuple[int, int, int]
"""Pid, start time and number of the use."""
Uses = Mapping[UseKey, Use]


def span_of(since: float, now: float) -> float:
    """Seconds that the samples since the look before speak for: older ones have been overwritten."""
    return min(max(0.0, now - since), LONGEST_SPAN)


def shares(uses: Uses, start: float, end: float) -> list[Totals]:
    """Sample by sample, the share of the GPU that was used; all processes together use at most the whole."""
    length = end - start
    if length <= 0:
        start, length = end - SAMPLE, SAMPLE
    count = max(1, min(MOST_SAMPLES, round(length / SAMPLE)))
    edges = [start + length * number / count for number in range(count)] + [end]
    samples = [Totals()] * count
    for use in uses.values():
        totals = [use.totals(edge) for edge in edges]
        samples = [
            sample + (after - before) for sample, before, after in zip(samples, totals[:-1], totals[1:], strict=True)
        ]
    width = length / count
    return [Totals(_share(sample.work / width), _share(sample.effort / width)) for sample in samples]


def _share(value: float) -> float:
    # Differences of long totals carry noise in the last digits, which no driver would show.
    return round(min(1.0, max(0.0, value)), 6)


def utilization(samples: list[Totals]) -> Utilization:
    works = [sample.work for sample in samples]
    return Utilization(max(works), round(math.fsum(works) / len(works), 6), len(works))


def watts(samples: list[Totals]) -> float:
    """The mean draw over the samples."""
    return IDLE_WATTS + (LIMIT_WATTS - IDLE_WATTS) * _mean_effort(samples)


def _mean_effort(samples: list[Totals]) -> float:
    return math.fsum(sample.effort for sample in samples) / len(samples)


class SimMeter:
    """The energy counter and the thermometer of one GPU, which go on between looks."""

    def __init__(self, opened: float) -> None:
        self.joules = 0.0
        self.celsius: float | None = None
        """None before the first look."""
        self._at = opened
        self._totals: dict[UseKey, Totals] = {}

    def advance(self, uses: Uses, now: float) -> None:
        """Brings both up to now, given what was used since they were last brought up."""
        elapsed = now - self._at
        if elapsed > 0:
            recent = span_of(self._at, now)
            effort = recent * _mean_effort(shares(uses, now - recent, now))
            if elapsed > recent:
                effort += self._effort_until(uses, now - recent)
            self.joules += IDLE_WATTS * elapsed + (LIMIT_WATTS - IDLE_WATTS) * effort
            self._warm(effort / elapsed, elapsed)
        self._at = now
        self._totals = {key: use.totals(now) for key, use in uses.items()}

    def _effort_until(self, uses: Uses, end: float) -> float:
        """The effort from the last time until `end`: too far back for samples, but the totals have it."""
        effort = 0.0
        for key, use in uses.items():
            begun = Totals() if use.start >= self._at else self._totals.get(key) or use.totals(self._at)
            effort += (use.totals(end) - begun).effort
        return min(max(0.0, effort), end - self._at)

    def _warm(self, effort: float, elapsed: float) -> None:
        goal = COOL + (HOT - COOL) * effort
        if self.celsius is None:
            self.celsius = goal
        else:
            self.celsius = goal + (self.celsius - goal) * math.exp(-elapsed / WARMING)
