"""The search for the largest batch that fits: chooses the next size to run from the results so far.

Pure: no clock, no process, no GPU. Everything is recomputed from the observations each time.

1. A run at the base size.
2. A run at the size of proportional growth. Part of the memory does not grow, so this overestimates the larger batch:
   it is safe, and far enough away to measure the growth.
3. A line memory = fixed + slope × size through both, solved for the limit, and a run at the answer. If that exceeds the
   limit, the next answer is on the line between the last size that fits and the first that does not.
4. If lines have led out of memory, memory is not linear: the interval between the last size that fits and the first
   that does not is halved, until little can be gained.
"""

import math
from typing import Final, NamedTuple

from stoker.fit.model import (
    Capacity,
    Fitted,
    NextProbe,
    NothingFitsError,
    ProbeFailedError,
    ProbeOutcome,
    SearchOptions,
)
from stoker.units import format_memory

# The number of probes for a good answer.
RUNS: Final = 4
# The number of probes if larger sizes ran out of memory and the best is poor: days of training are worth some minutes.
RUNS_FOR_A_POOR_ANSWER: Final = 9
# A smaller gain is not worth another probe.
WORTH: Final = 1.05
POOR: Final = 1.15
# A note is added when the first size that ran out of memory is further above the answer than this.
UNKNOWN_ABOVE: Final = 1.35
# Sizes further apart than this factor are bisected geometrically, others arithmetically.
APART: Final = 4
# Allocators request blocks of this size from the driver, so smaller differences may be rounding.
GRAIN: Final = 20 * 2**20
# On small devices the blocks are smaller.
GRAIN_SHARE: Final = 0.002
# The share of the margin that may be risked on rounding errors.
RISK: Final = 0.25
# A factor for a probe that ended before its memory was flat, as large as the default margin.
UNSETTLED: Final = 1.10
# A factor for a run that exhausted memory, whose needs are unknown.
BEYOND: Final = 1.05
# Sizes at least this fast, relative to the fastest, count as equally fast.
AS_FAST: Final = 0.97
# The speed of a size at least this near to the answer is taken as the answer's.
NEAR: Final = 0.8
# Memory that grows by less than this share of its earlier slope, between sizes this far apart, no longer grows.
FAR_APART: Final = 2
FLAT: Final = 0.05


# More accumulation steps than this many times the minimum would waste the GPU.
STEPS: Final = 4


class Split(NamedTuple):
    """An effective batch split into steps."""

    size: int
    accumulate: int


class Sizes:
    """The possible answers; the smallest is 1."""

    def __init__(self, search_options: SearchOptions) -> None:
        self._multiple = search_options.multiple
        self._effective = search_options.effective
        most = search_options.most
        if search_options.effective is not None:
            # A step larger than the effective batch is useless.
            most = min(most, self.up(search_options.effective))
        self.largest = self.down(most)

    def down(self, size: float) -> int:
        """The largest possible size up to `size`; 0 below one."""
        if size >= self._multiple:
            return int(size) // self._multiple * self._multiple
        return 1 << int(size).bit_length() - 1 if size >= 1 else 0

    def up(self, size: int) -> int:
        """The smallest possible size from `size` on."""
        power = 1 << (size - 1).bit_length()
        return power if power < self._multiple else -(-size // self._multiple) * self._multiple

    def split(self, size: int) -> Split | None:
        """The split of the effective batch into batches of at most `size`; None without an effective batch.

        The product is never below the effective batch, and as close to it as possible: a divisor wins over a larger
        batch, unless it takes more than four times the minimum number of steps. Ties go to fewer steps.
        """
        if self._effective is None:
            return None
        fewest = -(-self._effective // size)
        splits = [Split(self.up(-(-self._effective // steps)), steps) for steps in range(fewest, STEPS * fewest + 1)]
        possible = [split for split in splits if split.size <= size]
        return min(possible, key=lambda split: (split.size * split.accumulate, split.accumulate))


class _Point(NamedTuple):
    """The memory of one size: the observed value, and its upper bound."""

    size: int
    least: float
    most: float


class _Line(NamedTuple):
    """memory = fixed + slope × size."""

    fixed: float
    slope: float

    def __call__(self, size: float) -> float:
        return self.fixed + self.slope * size


class Search:
    """`next` returns the next probe or the answer; `record` adds an outcome."""

    def __init__(self, search_options: SearchOptions, capacity: Capacity) -> None:
        search_options.check()
        self._options = search_options
        self._sizes = Sizes(search_options)
        self._capacity = capacity
        self._observations: list[ProbeOutcome] = []

    @property
    def limit(self) -> int:
        """The limit of one run in bytes."""
        return self._capacity.limit(self._options)

    @property
    def _grain(self) -> float:
        return min(GRAIN, GRAIN_SHARE * self.limit)

    @property
    def observations(self) -> tuple[ProbeOutcome, ...]:
        return tuple(self._observations)

    def allow(self, capacity: Capacity) -> None:
        """Sets the current capacity, which changes with other users."""
        self._capacity = capacity

    def record(self, observation: ProbeOutcome) -> None:
        if observation.outcome == "fits" and observation.peak is None:
            raise ProbeFailedError(
                f"the memory of the run at batch size {observation.size} could not be seen, "
                "and without it no size can be computed"
            )
        self._observations.append(observation)

    def next(self) -> NextProbe | Fitted:
        """The next probe, or the answer."""
        largest = self._sizes.largest
        if not self._observations:
            first = min(self._sizes.down(self._options.base), largest)
            return NextProbe(first, verification=first == largest)
        room = min(largest, self._sizes.down(self._bound() - 1))
        if room == 0:
            raise NothingFitsError(self._nothing())
        best = self._best()
        if best is None:
            return NextProbe(min(room, self._smaller()), verification=False)
        return self._step(best, room)

    def _step(self, best: _Point, room: int) -> NextProbe | Fitted:
        """A larger size to try, or the answer."""
        alone = len(self._points()) == 1
        size = self._sizes.down(min(self._estimate(best, self.limit), room))
        if self._is_misled(best):
            size = min(size, max(self._middle(best), min(room, self._sizes.up(best.size + 1))))
        if size <= best.size and (alone or self._nearly_reaches_the_next(best)):
            # A single measurement does not predict the next size, and rounding may hide that it fits.
            size = min(room, self._sizes.up(best.size + 1))
        if size <= best.size:
            return self._fitted(self._sizes.down(min(best.size, room)))
        if self._is_worth_a_run(size / best.size):
            return NextProbe(size, verification=not alone or size == self._sizes.largest)
        # If a larger size has run, even within the margin, all smaller ones run as well.
        return self._fitted(size if self._edge() is not None else self._sizes.down(best.size))

    def _is_misled(self, best: _Point) -> bool:
        """True if extrapolation led out of memory twice, or once from a single point, which is the safer estimate."""
        outs = {seen.size for seen in self._observations if seen.outcome == "oom" and seen.size > best.size}
        return self._edge() is None and len(outs) >= min(2, len(self._points()))

    def _middle(self, best: _Point) -> int:
        """A size between the largest that fits and the smallest that does not."""
        bound = self._bound()
        far = bound > APART * best.size
        return self._sizes.down(math.sqrt(best.size * bound) if far else (best.size + bound) / 2)

    def _nearly_reaches_the_next(self, best: _Point) -> bool:
        reach = self._estimate(best, self.limit + self._grain)
        return len(self._observations) < RUNS and reach >= self._sizes.up(best.size + 1)

    def _is_worth_a_run(self, gain: float) -> bool:
        runs = len(self._observations)
        if runs < RUNS:
            return gain >= WORTH
        return self._has_run_out() and runs < RUNS_FOR_A_POOR_ANSWER and gain >= POOR

    def _has_run_out(self) -> bool:
        return self._bound() <= self._sizes.largest and self._edge() is None

    # What the observations say

    def _points(self) -> list[_Point]:
        """The known sizes that ran, smallest first."""
        points: dict[int, _Point] = {}
        for seen in self._observations:
            if seen.outcome == "fits" and seen.peak is not None:
                most = seen.peak * (1.0 if seen.settled else UNSETTLED)
                before = points.get(seen.size, _Point(seen.size, 0, 0))
                points[seen.size] = _Point(seen.size, max(seen.peak, before.least), max(most, before.most))
        return sorted(points.values())

    def _bound(self) -> int:
        """The smallest size known to be too large, or one above the largest possible."""
        out = [seen.size for seen in self._observations if seen.outcome == "oom"]
        full = [point.size for point in self._points() if point.most > self.limit]
        return min([*out, *full, self._sizes.largest + 1])

    def _best(self) -> _Point | None:
        bound = self._bound()
        return max((point for point in self._points() if point.size < bound), default=None)

    def _edge(self) -> _Point | None:
        """The smallest size that is too large, if it ran and only exceeded the limit."""
        bound = self._bound()
        return next((point for point in self._points() if point.size == bound and point.most > self.limit), None)

    # What follows from them

    def _estimate(self, best: _Point, limit: float) -> float:
        """The size at the limit, extrapolated from the largest that fits."""
        edge = self._edge()
        if edge is not None:
            return _reach(best, _slope(best, edge), limit)
        slope = self._slope_beyond(best)
        bound = self._bound()
        if bound <= self._sizes.largest and best.most + slope * (bound - best.size) < self._capacity.free:
            # It ran out of memory where this line predicts room, so the line is wrong.
            slope = (self._capacity.free * BEYOND - best.most) / (bound - best.size)
        return _reach(best, slope, limit)

    def _slope_beyond(self, best: _Point) -> float:
        """The steepest line from smaller sizes to the best, since memory only bends upwards."""
        smaller = [point for point in self._points() if point.size < best.size]
        if not smaller:
            return best.most / best.size
        slope = max(0.0, *(_slope(point, best) for point in smaller))
        lever = best.size - smaller[0].size
        ahead = min(_reach(best, slope, self.limit), self._sizes.largest) - best.size
        hidden = self._grain / lever
        affordable = RISK * (self._capacity.share(self._options) - self.limit)
        return slope if hidden * ahead <= affordable else slope + hidden

    def _smaller(self) -> int:
        """A size below all tried ones, none of which fits."""
        bound = self._bound()
        points = self._points()
        if len(points) > 1:
            low, high = points[:2]
            reach = _reach(low, max(0.0, _slope(low, high)), self.limit)
            return max(1, self._sizes.down(min(reach, bound)))
        # A size that ran above the limit is close to the answer. One that ran out of memory may be far above it, and
        # must not be followed by many others.
        return max(1, self._sizes.down(bound // 2 if points else bound // 4))

    # The answer

    def _fitted(self, found: int) -> Fitted:
        size, notes = self._knee(found)
        split = self._sizes.split(size)
        if split is not None:
            notes += _split_notes(split, self._options.effective)
            size = split.size
        line = self._line()
        return Fitted(
            size=size,
            accumulate=None if split is None else split.accumulate,
            fixed=line.fixed,
            slope=line.slope,
            predicted=self._predicted(size, line),
            limit=self.limit,
            observations=self.observations,
            note="; ".join([*self._memory_notes(), *self._unknown_above(found), *notes]),
        )

    def _line(self) -> _Line:
        """Least squares through all sizes that ran, with neither part negative."""
        points = self._points()
        mean_size = sum(point.size for point in points) / len(points)
        mean = sum(point.most for point in points) / len(points)
        spread = sum((point.size - mean_size) ** 2 for point in points)
        if spread == 0:
            return _Line(0.0, mean / mean_size)
        slope = max(0.0, sum((point.size - mean_size) * (point.most - mean) for point in points) / spread)
        if slope * mean_size > mean:
            return _Line(0.0, sum(point.size * point.most for point in points) / sum(p.size**2 for p in points))
        return _Line(mean - slope * mean_size, slope)

    def _predicted(self, size: int, line: _Line) -> int:
        """The line's value at this size, bounded by the values of the nearest sizes."""
        points = self._points()
        least = max((point.most for point in points if point.size <= size), default=0.0)
        most = min((point.most for point in points if point.size >= size), default=float("inf"))
        return round(min(max(line(size), least), most))

    def _memory_notes(self) -> list[str]:
        points = self._points()
        first, last = points[0], points[-1]
        far = [point for point in points if last.size >= FAR_APART * point.size]
        flat = [point for point in far if last.most - point.least <= self._grain]
        notes = []
        if first in flat:
            notes.append("the memory does not depend on the batch size: check that the program uses it")
        elif flat and _slope(flat[0], last) < FLAT * _slope(first, flat[0]):
            notes.append(f"the memory does not grow beyond a batch of {flat[0].size}: check that there is more data")
        if any(seen.outcome == "fits" and not seen.settled for seen in self._observations):
            notes.append("the memory was still growing when a probe ended")
        return notes

    def _unknown_above(self, found: int) -> list[str]:
        bound = self._bound()
        is_full = self._predicted(found, self._line()) >= NEAR * self.limit
        if is_full or not self._has_run_out() or bound <= UNKNOWN_ABOVE * found:
            return []
        return [f"a batch of {bound} does not fit, and sizes between are untried: `--base {found}` tries them"]

    def _knee(self, found: int) -> tuple[int, list[str]]:
        """The smallest size that is as fast as the fastest, if that is preferred, with notes."""
        fits = [seen for seen in self._observations if seen.outcome == "fits"]
        rates = {seen.size: seen.rate for seen in fits if seen.rate is not None}
        if max(rates, default=0) < NEAR * found:
            return found, ["the speed could not be read from the output"] if self._options.prefer == "fastest" else []
        fast = [size for size, rate in rates.items() if rate >= AS_FAST * max(rates.values())]
        knee = min((size for size in fast if size == self._sizes.down(size)), default=found)
        if knee >= found:
            return found, []
        if self._options.prefer == "fastest":
            return knee, [f"a batch of {found} fits and is not faster"]
        return found, [f"a batch of {knee} is as fast"]

    def _nothing(self) -> str:
        if self._options.per_gpu == 1:
            room = f"the {format_memory(self._capacity.free)} that there are"
        else:
            share = format_memory(int(self._capacity.share(self._options)))
            room = f"the {share} that each of {self._options.per_gpu} runs has"
        points = [point for point in self._points() if point.size == 1]
        if not points:
            return f"nothing fits: a batch of one ran out of memory, of {room}"
        return (
            f"nothing fits: a batch of one takes {format_memory(int(points[0].most))}, "
            f"and of {room} it may take {format_memory(self.limit)}"
        )


def _slope(low: _Point, high: _Point) -> float:
    """Bytes per example, pessimistically."""
    return (high.most - low.least) / (high.size - low.size)


def _reach(start: _Point, slope: float, limit: float) -> float:
    """The size at which a line from this point meets the limit."""
    if slope <= 0:
        return float("inf") if start.most <= limit else 0.0
    return start.size + (limit - start.most) / slope


def _split_notes(split: Split, effective: int | None) -> list[str]:
    made = split.size * split.accumulate
    if made == effective:
        return []
    return [f"{split.accumulate} steps of {split.size} make {made}, not {effective}"]
