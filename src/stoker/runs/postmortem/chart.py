"""The window of a run as a small chart of text, one line per GPU, narrow enough for a phone."""

import math
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from stoker.gpus.model import Look, Maybe, Unknown, known
from stoker.units import format_duration, format_percent

if TYPE_CHECKING:
    from typing_extensions import TypeIs

# What a phone held upright shows of a block of code without scrolling.
WIDTH: Final = 40
# A window that is shorter than the quickest look says nothing.
SHORTEST: Final = 0.001
# The lowest block is nothing at all; anything above nothing is seen to be higher.
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_UNKNOWN: Final = "?"
_NOTHING: Final = " "
# Room for ` 100%` after the bars.
_CAPTION: Final = 5
# A label longer than this, such as a name that was given to a GPU, is cut so that the bars keep most of the width.
_LABEL: Final = 10


class Sample(NamedTuple):
    """What one GPU did in the stretch of time before a moment."""

    at: float
    """Monotonic seconds."""
    span: float
    peak: Maybe[float]
    """The highest utilization, as a fraction of 1."""


class Series(NamedTuple):
    """One GPU over time."""

    label: str
    samples: Sequence[Sample]


def series_of(looks: Sequence[Look], only: Container[str] | None = None) -> list[Series]:
    """A series for each GPU that was seen (of these uuids), in the order of their indices; oldest look first."""
    names = {
        gpu.uuid: (gpu.index, f"GPU {gpu.index}")
        for look in looks
        for gpu in look.gpus
        if only is None or gpu.uuid in only
    }
    samples: dict[str, list[Sample]] = {uuid: [] for uuid in names}
    before: float | None = None
    for look in looks:
        since = look.at - before if before is not None else 0.0
        before = look.at
        told = {reading.uuid: reading for reading in look.readings}
        for uuid, of_gpu in samples.items():
            if reading := told.get(uuid):
                peak = reading.utilization.peak if known(reading.utilization) else reading.utilization
                of_gpu.append(Sample(look.at, reading.span or since, peak))
            elif look.problem:
                of_gpu.append(Sample(look.at, since, look.problem))
    return [Series(names[uuid][1], samples[uuid]) for uuid in sorted(names, key=lambda uuid: (names[uuid], uuid))]


def chart(series: Sequence[Series], window: float, *, below: float | None = None) -> str:
    """The peak of each stretch of the `window` seconds before the last sample, as block characters."""
    last = max((sample.at for one in series for sample in one.samples if math.isfinite(sample.at)), default=None)
    if last is None or not SHORTEST <= window < math.inf:
        return "no readings"
    room = max(min(len(one.label), _LABEL) for one in series)
    columns = WIDTH - room - 1 - _CAPTION
    lines = []
    for one in series:
        bins = _bins(one.samples, last - window, window / columns, columns)
        bars = "".join(_mark(values, below) for values in bins)
        lines.append(f"{_cut(one.label, room):<{room}} {bars}{_caption(bins):>{_CAPTION}}")
    lines.append(f"{'':<{room}} {_axis(window, columns)}")
    return "\n".join([*(line.rstrip() for line in lines), *_legend(lines[:-1], below)])


def _bins(samples: Sequence[Sample], begin: float, width: float, columns: int) -> list[list[Maybe[float]]]:
    bins: list[list[Maybe[float]]] = [[] for _ in range(columns)]
    for sample in samples:
        ended = (sample.at - begin) / width
        if not 0 < ended < math.inf:
            continue
        # A look at the very end of a stretch speaks for that stretch, not for the next.
        home = min(math.ceil(ended), columns) - 1
        begun = ended - sample.span / width if sample.span > 0 else ended
        # Earlier stretches count where it speaks for half of them or more: less would smear a peak over two.
        first = min(math.ceil(max(begun, 0.0) - 0.5), home)
        for place in range(first, home + 1):
            bins[place].append(sample.peak)
    return bins


def _mark(values: Sequence[Maybe[float]], below: float | None) -> str:
    """One character for a stretch. Quiet as far as it was seen, but not seen throughout, is unknown."""
    peak = _peak(values)
    if peak is None:
        return _UNKNOWN if values else _NOTHING
    quiet = peak < below if below is not None else peak == 0
    if quiet and any(not _is_number(value) for value in values):
        return _UNKNOWN
    return _BLOCKS[math.ceil(min(max(peak, 0.0), 1.0) * (len(_BLOCKS) - 1))]


def _peak(values: Sequence[Maybe[float]]) -> float | None:
    return max((value for value in values if _is_number(value)), default=None)


def _is_number(value: Maybe[float]) -> "TypeIs[float]":
    return not isinstance(value, Unknown) and math.isfinite(value)


def _caption(bins: Sequence[Sequence[Maybe[float]]]) -> str:
    """The peak of the whole window. Less than one percent is not rounded to nothing."""
    peak = _peak([value for values in bins for value in values])
    if peak is None:
        return _UNKNOWN
    return "<1%" if 0 < peak < 0.005 else format_percent(min(max(peak, 0.0), 1.0))


def _axis(window: float, columns: int) -> str:
    begin = f"{format_duration(window)} before"
    return f"{begin}{'the end':>{columns - len(begin)}}" if len(begin) + 8 <= columns else begin[:columns]


def _legend(lines: Sequence[str], below: float | None) -> list[str]:
    notes = ["on the right: the highest"]
    if below is not None:
        notes.append(f"idle is below {format_percent(below)}")
    if any(_UNKNOWN in line for line in lines):
        notes.append("? could not be read")
    return notes


def _cut(label: str, room: int) -> str:
    return label if len(label) <= room else f"{label[: room - 1]}…"
