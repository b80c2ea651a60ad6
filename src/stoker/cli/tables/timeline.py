"""What every GPU did over time: kept small while looks pass by, drawn together into as many points as a chart has."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from stoker.gpus.model import Look, Reading, known

# Fractions are kept in ten-thousandths, as recordings have them: four bytes per GPU and look, 30 MB for a month.
_STEPS: Final = 10_000
_UNKNOWN: Final = 0xFFFF


class Bin(NamedTuple):
    """A stretch of the chart. Highest and lowest are both kept, so that neither a burst nor a pause can vanish."""

    low: float
    high: float
    mean: float


class Drawn(NamedTuple):
    """A chart's points from left to right, one for each equal stretch of time."""

    bins: list[Bin | None]
    """None where nothing is known."""
    unknown: list[bool]
    """Whether something in the stretch could not be read. Other stretches without a bin were not recorded."""


class _Track:
    def __init__(self, absent: int) -> None:
        self.peaks = array("H", [_UNKNOWN]) * absent
        self.means = array("H", [_UNKNOWN]) * absent


class Timeline:
    """Follows looks. Two that are further apart than `longest_gap` have a hole between them."""

    def __init__(self, longest_gap: float) -> None:
        self._longest_gap = longest_gap
        self._times = array("d")
        self._tracks: dict[str, _Track] = {}

    def following(self, looks: Iterable[Look]) -> Iterator[Look]:
        """The same looks, each noted as it passes."""
        for look in looks:
            self.add(look)
            yield look

    def add(self, look: Look) -> None:
        readings = {reading.uuid: reading for reading in look.readings}
        for uuid in readings.keys() - self._tracks.keys():
            self._tracks[uuid] = _Track(len(self._times))
        for uuid, track in self._tracks.items():
            peak, mean = _noted(readings.get(uuid))
            track.peaks.append(peak)
            track.means.append(mean)
        self._times.append(look.at)

    def drawn(self, uuids: Sequence[str], begun: float, ended: float, points: int) -> Drawn:
        """This stretch of time in so many points: for several GPUs, the highest of them at each moment."""
        tracks = [self._tracks[uuid] for uuid in uuids if uuid in self._tracks]
        pens = [_Pen() for _ in range(points)]
        scale = points / (ended - begun) if ended > begun else 0.0
        first = bisect_left(self._times, begun)
        # One more at the end: the look after it speaks for the time up to it.
        last = min(bisect_left(self._times, ended) + 1, len(self._times))
        for place in range(first, last):
            at = self._times[place]
            since = self._times[place - 1] if place else at
            if at - since > self._longest_gap:
                since = at
            left = min(max(int((since - begun) * scale), 0), points - 1)
            right = min(max(int((at - begun) * scale), 0), points - 1)
            peak = mean = 0
            for track in tracks:
                peak = max(peak, track.peaks[place])
                mean = max(mean, track.means[place])
            for pen in pens[left : right + 1]:
                pen.put(peak, mean)
        return Drawn([pen.bin() for pen in pens], [pen.unknown for pen in pens])


class _Pen:
    """Gathers what falls into one point."""

    __slots__ = ("count", "high", "low", "total", "unknown")

    def __init__(self) -> None:
        self.low, self.high, self.total, self.count = _STEPS, 0, 0, 0
        self.unknown = False

    def put(self, peak: int, mean: int) -> None:
        if peak == _UNKNOWN:
            self.unknown = True
            return
        self.low = min(self.low, peak)
        self.high = max(self.high, peak)
        self.total += mean
        self.count += 1

    def bin(self) -> Bin | None:
        if not self.count:
            return None
        return Bin(self.low / _STEPS, self.high / _STEPS, self.total / self.count / _STEPS)


def _noted(reading: Reading | None) -> tuple[int, int]:
    used = reading.utilization if reading is not None else None
    if used is None or not known(used):
        return _UNKNOWN, _UNKNOWN
    return _steps(used.peak), _steps(used.mean)


def _steps(fraction: float) -> int:
    return min(max(round(fraction * _STEPS), 0), _STEPS)
