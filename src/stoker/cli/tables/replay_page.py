"""A replay as one page in one file: what each GPU did, the rule's window, and when it would have fired.

The page loads nothing from anywhere and runs no script. Everything that comes from outside (names of GPUs, processes,
users and files, reasons) is escaped where it is put into the page.
"""

import importlib.resources
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from html import escape
from string import Template
from typing import Final, NamedTuple

from stoker.cli.output import count_of
from stoker.cli.tables import replay as text
from stoker.gpus.model import Gpu, Look, Reading, known
from stoker.gpus.report import title
from stoker.rules.registry import in_words
from stoker.rules.replay import Firing, Moment, Replay, Stretch
from stoker.units import capitalized, format_duration, format_percent

# About the width of a large screen in pixels.
_POINTS: Final = 1000
_DETAIL_POINTS: Final = 300
# --json has the rest.
_MOST_DETAILS: Final = 12
_MOST_FIRINGS: Final = 200
_MOST_STRETCHES: Final = 30
# Numbers above the charts that are closer than this share of the width are left out.
_CLOSEST_MARKS: Final = 0.03
_CLOSEST_ON_PHONE: Final = 0.09
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_TICKS: Final = (
    1, 2, 5, 10, 30, _MINUTE, 2 * _MINUTE, 5 * _MINUTE, 10 * _MINUTE, 30 * _MINUTE, _HOUR, 2 * _HOUR, 3 * _HOUR,
    6 * _HOUR, 12 * _HOUR, _DAY, 2 * _DAY, 7 * _DAY, 14 * _DAY, 28 * _DAY, 91 * _DAY, 365 * _DAY,
)  # fmt: skip
_MOST_TICKS: Final = 8


# Fractions in ten-thousandths, as in recordings: four bytes per GPU and look, 30 MB for a month.
_STEPS: Final = 10_000
_UNKNOWN: Final = 0xFFFF


class Bin(NamedTuple):
    """One point of the chart. Lowest and highest are both kept, so that no burst or pause vanishes."""

    low: float
    high: float
    mean: float


class Drawn(NamedTuple):
    """The points of a chart from left to right."""

    bins: list[Bin | None]
    """None where nothing is known."""
    unknown: list[bool]
    """Whether something could not be read there. Other points without a bin were not recorded."""


class _Track:
    def __init__(self, absent: int) -> None:
        self.peaks = array("H", [_UNKNOWN]) * absent
        self.means = array("H", [_UNKNOWN]) * absent


class Timeline:
    """Collects looks. Two that are further apart than `longest_gap` have a gap between them."""

    def __init__(self, longest_gap: float) -> None:
        self._longest_gap = longest_gap
        self._times = array("d")
        self._tracks: dict[str, _Track] = {}

    def following(self, looks: Iterable[Look]) -> Iterator[Look]:
        """The same looks, each collected as it passes."""
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
        """The chart of this stretch of time: for several GPUs, the highest at each moment."""
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
    return _ten_thousandths(used.peak), _ten_thousandths(used.mean)


def _ten_thousandths(fraction: float) -> int:
    return min(max(round(fraction * _STEPS), 0), _STEPS)


def page_of(replay: Replay, timeline: Timeline, name: str) -> str:
    """The page for a recording with this name."""
    template = importlib.resources.files("stoker.cli.tables").joinpath("replay_page.html").read_text(encoding="utf-8")
    whole = _Span.of(replay.begun, replay.ended)
    gpus = count_of(len(replay.gpus), "GPU")
    facts = f"{gpus}, a look every {format_duration(replay.every)}, {text.period(replay)}"
    return Template(template).substitute(
        title=escape(f"{name}: {in_words(replay.policies)}"),
        heading=escape(f"{name}: {text.rule(replay.policies)}"),
        facts=escape(facts),
        outcome=_text(text.outcome(replay)),
        notes=_notes(replay),
        shares=_shares(replay),
        shares_in_words=escape(text.outcome(replay)),
        shares_key=_shares_key(replay),
        threshold=escape(f"idle is below {format_percent(replay.below)}"),
        charts=_charts(replay, timeline, whole),
        axis=_axis(whole),
        firings=_firings(replay, timeline),
        tables=_table(
            "Unknown and not recorded", sorted([*replay.unknown, *replay.gaps], key=lambda stretch: stretch.begun.at)
        ),
    )


class _Span(NamedTuple):
    """The time that a chart shows, on the recording's clock, and the wall-clock time of its start."""

    begun: float
    ended: float
    wall: float

    @classmethod
    def of(cls, begun: Moment, ended: Moment) -> "_Span":
        # A recording of a single look is drawn one second wide.
        return cls(begun.at, max(ended.at, begun.at + 1.0), begun.wall)

    def place(self, at: float) -> float:
        """How far from the left, as a share of the width."""
        return min(max((at - self.begun) / (self.ended - self.begun), 0.0), 1.0)


def _notes(replay: Replay) -> str:
    notes = []
    if (cost := text.cost(replay)) is not None:
        notes.append(f'<p class="note {"bad" if replay.hits else "good"}">{_text(cost)}</p>')
    more = [text.warnings(replay), *text.blind_spots(replay)]
    notes += [f'<p class="soft">{_text(sentence)}</p>' for sentence in more if sentence]
    return "\n".join(notes)


def _parts(replay: Replay) -> list[tuple[str, str, float]]:
    """Class, name and GPU-seconds of each part of the recorded time."""
    totals = replay.totals
    busy = max(totals.recorded - totals.idle - totals.unknown, 0.0)
    return [
        ("is-busy", "busy", busy),
        ("is-idle", "idle, not saved", max(totals.idle - totals.saved, 0.0)),
        ("is-saved", "saved", totals.saved),
        ("is-unknown", "unknown", totals.unknown),
    ]


def _shares(replay: Replay) -> str:
    recorded = replay.totals.recorded or 1.0
    return "".join(
        f'<i class="{kind}" style="width:{_percent(seconds / recorded)}"></i>'
        for kind, _name, seconds in _parts(replay)
        if seconds
    )


def _shares_key(replay: Replay) -> str:
    recorded = replay.totals.recorded or 1.0
    return "".join(
        f'<li><span class="swatch {kind}"></span>{name} <b>{text.gpu_hours(seconds)}</b> '
        f"{_text('GPU-hours')} ({format_percent(seconds / recorded)})</li>"
        for kind, name, seconds in _parts(replay)
    )


def _marks(firings: Sequence[Firing], span: _Span) -> str:
    """The numbers of the firings above the charts, with links to their descriptions."""
    marks = []
    last = last_on_phone = -1.0
    for number, firing in enumerate(firings[:_MOST_FIRINGS], 1):
        place = span.place(firing.moment.at)
        if place - last >= _CLOSEST_MARKS:
            last = place
            crowded = place - last_on_phone < _CLOSEST_ON_PHONE
            last_on_phone = last_on_phone if crowded else place
            kind = ' class="crowded"' if crowded else ""
            marks.append(f'<a{kind} href="#firing-{number}" style="left:{_percent(place)}">{number}</a>')
    return "".join(marks)


def _charts(replay: Replay, timeline: Timeline, span: _Span) -> str:
    """One below the other, on the same time axis."""
    marks = f'<div class="marks">{_marks(replay.firings, span)}</div>' if replay.firings else ""
    above = [marks] + [""] * len(replay.gpus)
    return "\n".join(
        f'<div class="gpu"><div class="gpu-name"><b>GPU {gpu.index}</b><span>{escape(title(gpu))}</span></div>'
        f"{head}{_gpu_plot(gpu, replay, timeline, span)}</div>"
        for gpu, head in zip(replay.gpus, above, strict=False)
    )


def _gpu_plot(gpu: Gpu, replay: Replay, timeline: Timeline, span: _Span) -> str:
    drawn = timeline.drawn([gpu.uuid], span.begun, span.ended, _POINTS)
    own = [firing for firing in replay.firings if gpu.uuid in firing.gpus]
    label = f"Utilization of GPU {gpu.index} over time; the rule fires {text.times(len(own))}"
    return _plot(drawn, own, replay.below, span, label)


def _plot(drawn: Drawn, firings: Iterable[Firing], below: float, span: _Span, label: str) -> str:
    """One curve with its marks."""
    shades = []
    for firing in firings:
        shades.append(_shade("window", span.place(firing.window_from.at), span.place(firing.moment.at)))
        shades.append(_shade("after", span.place(firing.moment.at), span.place(firing.until.at)))
    lines = [
        f'<i class="fire" style="left:{_percent(span.place(firing.moment.at))}"></i>'
        for firing in firings
        if span.begun <= firing.moment.at <= span.ended
    ]
    count = len(drawn.bins)
    holes = [point is None and not unknown for point, unknown in zip(drawn.bins, drawn.unknown, strict=True)]
    shades += [_shade("unknown", left / count, right / count) for left, right in _runs(drawn.unknown)]
    shades += [_shade("gap", left / count, right / count) for left, right in _runs(holes)]
    band, mean = _paths(drawn.bins)
    # Margins keep 0% and 100% off the frame.
    curve = (
        f'<svg viewBox="0 -5 {count} 110" preserveAspectRatio="none" role="img" aria-label="{escape(label)}">'
        f'<path class="band" d="{band}"/><path class="mean" d="{mean}"/></svg>'
    )
    threshold = f'<u style="top:{_percent((105 - below * 100) / 110)}"></u>'
    return f'<div class="plot">{"".join(shades)}{curve}{threshold}{"".join(lines)}</div>'


def _shade(kind: str, left: float, right: float) -> str:
    return f'<i class="{kind}" style="left:{_percent(left)};width:{_percent(right - left)}"></i>'


def _paths(bins: Sequence[Bin | None]) -> tuple[str, str]:
    """The area between lowest and highest, and the line of the means, as steps; with gaps where unknown."""
    areas, lines = [], []
    for left, right in _runs([point is not None for point in bins]):
        run = [point for point in bins[left:right] if point is not None]
        highs, lows, means = ([_height(value) for value in values] for values in zip(*run, strict=True))
        areas.append(f"M{left} {highs[0]}{_steps(highs, 1)}V{lows[-1]}{_steps(lows[::-1], -1)}Z")
        lines.append(f"M{left} {means[0]}{_steps(means, 1)}")
    return "".join(areas), "".join(lines)


def _height(fraction: float) -> str:
    return f"{100 - fraction * 100:.1f}".removesuffix(".0")


def _steps(heights: Sequence[str], direction: int) -> str:
    """A step per height; equal ones are one long step."""
    steps: list[str] = []
    length = 0
    for here, following in zip(heights, [*heights[1:], None], strict=True):
        length += direction
        if here != following:
            steps.append(f"h{length}" if following is None else f"h{length}V{following}")
            length = 0
    return "".join(steps)


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    """The runs of true values, as half-open ranges."""
    edges = [place for place in range(len(flags) + 1) if _at(flags, place) != _at(flags, place - 1)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _at(flags: Sequence[bool], place: int) -> bool:
    return flags[place] if 0 <= place < len(flags) else False


def _axis(span: _Span) -> str:
    """Round times in the reader's time zone, with the day where it changes."""
    length = span.ended - span.begun
    step = next((tick for tick in _TICKS if length / tick <= _MOST_TICKS), _TICKS[-1])
    zone = datetime.fromtimestamp(span.wall).astimezone().utcoffset()
    offset = zone.total_seconds() if zone else 0.0
    tick = -(-(span.wall + offset) // step) * step - offset
    ticks: list[str] = []
    day = ""
    while tick <= span.wall + length:
        place = (tick - span.wall) / length
        local = datetime.fromtimestamp(tick).astimezone()
        today = f"{local:%a} {local.day} {local:%b}"
        clock = "" if step >= _DAY else f"{local:%H:%M}" if step >= _MINUTE else f"{local:%H:%M:%S}"
        text = "<br>".join(part for part in (clock, today if today != day else "") if part)
        kind = "first" if place < 0.08 else "last" if place > 0.92 else ""
        odd = " odd" if len(ticks) % 2 else ""
        ticks.append(f'<span class="{kind}{odd}" style="left:{_percent(place)}">{text}</span>')
        day = today
        tick += step
    return "".join(ticks)


def _firings(replay: Replay, timeline: Timeline) -> str:
    if not replay.firings:
        return ""
    cards = [
        _card(number, firing, _detail(firing, replay, timeline) if number <= _MOST_DETAILS else "")
        for number, firing in enumerate(replay.firings[:_MOST_FIRINGS], 1)
    ]
    more = len(replay.firings) - len(cards)
    rest = f'<p class="soft">And {f"{more:,} more"}: --json has them all.</p>' if more else ""
    return f'<h2>When it would have fired</h2>\n<ol class="firings">{"".join(cards)}</ol>{rest}'


def _card(number: int, firing: Firing, detail: str) -> str:
    badge = '<span class="badge bad">work came back</span>' if firing.hit_work else ""
    working = text.also_working(firing)
    extra = f'<p class="soft">{escape(working)}.</p>' if working else ""
    after = text.what_came_after(firing)
    return (
        f'<li class="firing{" hit" if firing.hit_work else ""}" id="firing-{number}">'
        f"<h3><b>{number}</b>{escape(text.local_time(firing.moment.wall))}{badge}</h3>"
        f"<p>{escape(capitalized(firing.reason))}. {escape(capitalized(after))}. "
        f'<span class="saved">{text.gpu_hours(firing.saved)} GPU-hours saved</span></p>{extra}{detail}</li>'
    )


def _detail(firing: Firing, replay: Replay, timeline: Timeline) -> str:
    """A closer view of the window, with some time before and after; the highest of its GPUs."""
    window = firing.moment.at - firing.window_from.at
    begun = max(firing.window_from.at - window / 2, replay.begun.at)
    # Up to the return of the work, unless the window would become too small to see.
    ended = firing.until.at + window / 4 if firing.idle_after <= 4 * window else firing.moment.at + window
    ended = min(ended, replay.ended.at)
    span = _Span(begun, max(ended, begun + 1.0), firing.moment.wall - (firing.moment.at - begun))
    drawn = timeline.drawn(firing.gpus, span.begun, span.ended, _DETAIL_POINTS)
    label = "Utilization around this firing, the highest of the GPUs that were idle"
    return f'{_plot(drawn, [firing], replay.below, span, label)}<div class="axis">{_axis(span)}</div>'


def _table(heading: str, stretches: Sequence[Stretch]) -> str:
    if not stretches:
        return ""
    rows = "".join(
        f'<tr><td class="nowrap">{escape(text.local_time(stretch.begun.wall))}</td>'
        f'<td class="nowrap">{format_duration(stretch.seconds)}</td><td>{escape(stretch.reason)}</td></tr>'
        for stretch in stretches[:_MOST_STRETCHES]
    )
    more = len(stretches) - _MOST_STRETCHES
    rest = f'<p class="soft">And {more:,} more: --json has them all.</p>' if more > 0 else ""
    return f"<h2>{heading}</h2>\n<table><tr><th>from</th><th>for</th><th>why</th></tr>{rows}</table>{rest}\n"


def _text(sentence: str) -> str:
    """Escaped, and without a line break in GPU-hours."""
    return escape(sentence).replace("GPU-hours", "GPU\N{NON-BREAKING HYPHEN}hours")


def _percent(share: float) -> str:
    return f"{share * 100:.2f}".rstrip("0").rstrip(".") + "%"
