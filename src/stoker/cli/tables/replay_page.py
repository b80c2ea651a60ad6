"""A replay as a self-contained page: GPU activity, the rule's window, and firings. The page loads nothing. Its script
gets only numbers; external text (names of GPUs, processes, users and files, reasons) is escaped where it is inserted.
"""

import importlib.resources
import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from string import Template
from typing import Any, Final

import msgspec

from stoker.cli.output import count_of
from stoker.cli.tables import replay as text
from stoker.gpus.model import Look, known
from stoker.gpus.report import title
from stoker.rules.registry import in_words
from stoker.rules.replay import Firing, Replay
from stoker.units import capitalized, format_duration, format_percent

# About the width of a large screen in pixels.
_POINTS: Final = 1000
_DETAIL_POINTS: Final = 300
# --json has the rest.
_MOST_DETAILS: Final = 12
_MOST_FIRINGS: Final = 200
_MOST_STRETCHES: Final = 30
_UPLOT: Final = "static/vendor/uplot-1.6.32.min"


class Curve(msgspec.Struct):
    """A chart from left to right: minimum, maximum and mean utilization of each point, None if unknown. Minimum and
    maximum preserve every burst and pause.
    """

    low: list[float | None]
    high: list[float | None]
    mean: list[float | None]
    unknown: list[bool]
    """Whether readings failed there. Other points without a value were not recorded."""


class Timeline:
    """Collects looks. Looks further apart than `longest_gap` have a gap between them."""

    def __init__(self, longest_gap: float) -> None:
        self._longest_gap = longest_gap
        self._times = array("d")
        self._peaks: dict[str, array[float]] = {}
        self._means: dict[str, array[float]] = {}

    def following(self, looks: Iterable[Look]) -> Iterator[Look]:
        """Passes looks through and collects them."""
        for look in looks:
            self._add(look)
            yield look

    def _add(self, look: Look) -> None:
        readings = {reading.uuid: reading for reading in look.readings}
        for uuid in readings.keys() - self._peaks.keys():
            self._peaks[uuid] = array("f", [math.nan]) * len(self._times)
            self._means[uuid] = array("f", [math.nan]) * len(self._times)
        for uuid, peaks in self._peaks.items():
            used = readings[uuid].utilization if uuid in readings else None
            peak, mean = (used.peak, used.mean) if used is not None and known(used) else (math.nan, math.nan)
            peaks.append(peak)
            self._means[uuid].append(mean)
        self._times.append(look.at)

    def drawn(self, uuids: Sequence[str], begun: float, ended: float, points: int) -> Curve:
        """The chart of this time range: for several GPUs, the maximum at each moment."""
        own = [uuid for uuid in uuids if uuid in self._peaks]
        high: list[float | None] = [None] * points
        low, unknown = [*high], [False] * points
        sums, counts = [0.0] * points, [0] * points
        scale = points / (ended - begun)
        first = bisect_left(self._times, begun)
        # One more at the end: the look after the range covers the time before it.
        for place in range(first, min(bisect_left(self._times, ended) + 1, len(self._times))):
            at = self._times[place]
            since = self._times[place - 1] if place else at
            if at - since > self._longest_gap:
                since = at
            peaks = [self._peaks[uuid][place] for uuid in own]
            is_unknown = any(map(math.isnan, peaks))
            left, right = (min(max(int((moment - begun) * scale), 0), points - 1) for moment in (since, at))
            for point in range(left, right + 1):
                if is_unknown:
                    unknown[point] = True
                    continue
                peak = max(peaks, default=0.0)
                high[point] = max(high[point] or 0.0, peak)
                low[point] = peak if low[point] is None else min(low[point] or 0.0, peak)
                sums[point] += max((self._means[uuid][place] for uuid in own), default=0.0)
                counts[point] += 1
        mean = (total / count if count else None for total, count in zip(sums, counts, strict=True))
        return Curve(_rounded(low), _rounded(high), _rounded(mean), unknown)


def _rounded(values: Iterable[float | None]) -> list[float | None]:
    return [None if value is None else round(value, 4) for value in values]


def page_of(replay: Replay, timeline: Timeline, name: str) -> str:
    """The page for a recording with this name."""
    page = importlib.resources.files("stoker.cli.tables")
    library = importlib.resources.files("stoker.web")
    charts: list[dict[str, Any]] = []
    gpus = count_of(len(replay.gpus), "GPU")
    facts = f"{gpus}, a look every {format_duration(replay.every)}, {text.period(replay)}"
    return Template(page.joinpath("replay_page.html").read_text(encoding="utf-8")).substitute(
        title=escape(f"{name}: {in_words(replay.policies)}"),
        heading=escape(f"{name}: {text.rule(replay.policies)}"),
        facts=escape(facts),
        outcome=_text(text.outcome(replay)),
        notes=_notes(replay),
        shares=_shares(replay),
        threshold=escape(f"idle is below {format_percent(replay.below)}"),
        gpus=_gpus(replay, timeline, charts),
        firings=_firings(replay, timeline, charts),
        stretches=_stretches(replay),
        # Last: the parts above have added their charts.
        charts=msgspec.json.encode(charts).decode(),
        style=library.joinpath(f"{_UPLOT}.css").read_text(encoding="utf-8"),
        script=library.joinpath(f"{_UPLOT}.js").read_text(encoding="utf-8")
        + page.joinpath("replay_page.js").read_text(encoding="utf-8"),
    )


def _notes(replay: Replay) -> str:
    notes = []
    if (cost := text.cost(replay)) is not None:
        notes.append(f'<p class="note {"bad" if replay.hits else "good"}">{_text(cost)}</p>')
    more = [text.warnings(replay), *text.blind_spots(replay)]
    notes += [f'<p class="soft">{_text(sentence)}</p>' for sentence in more if sentence]
    return "\n".join(notes)


def _shares(replay: Replay) -> str:
    """The recorded time as one bar, with a legend."""
    totals = replay.totals
    recorded = totals.recorded or 1.0
    parts = [
        ("is-busy", "busy", totals.recorded - totals.idle - totals.unknown - totals.hung),
        ("is-idle", "idle or hung, not saved", totals.idle + totals.hung - totals.saved),
        ("is-saved", "saved", totals.saved),
        ("is-unknown", "unknown", totals.unknown),
    ]
    bar = "".join(
        f'<i class="{kind}" style="width:{seconds / recorded:.2%}"></i>'
        for kind, _name, seconds in parts
        if seconds > 0
    )
    key = "".join(
        f'<li><span class="swatch {kind}"></span>{name} <b>{text.gpu_hours(max(seconds, 0.0))}</b> '
        f"{_text('GPU-hours')} ({format_percent(max(seconds, 0.0) / recorded)})</li>"
        for kind, name, seconds in parts
    )
    label = escape(text.outcome(replay))
    return f'<div class="shares" role="img" aria-label="{label}">{bar}</div>\n<ul class="key">{key}</ul>'


def _gpus(replay: Replay, timeline: Timeline, charts: list[dict[str, Any]]) -> str:
    """One chart per GPU, one below the other."""
    # A recording of a single look is drawn one second wide.
    begun, ended = replay.begun.at, max(replay.ended.at, replay.begun.at + 1.0)
    parts = []
    for gpu in replay.gpus:
        own = [(number, one) for number, one in enumerate(replay.firings, 1) if gpu.uuid in one.gpus]
        label = f"Utilization of GPU {gpu.index} over time; the rule fires {text.times(len(own))}"
        chart = _chart(replay, timeline.drawn([gpu.uuid], begun, ended, _POINTS), begun, ended, own)
        parts.append(
            f'<div class="gpu-name"><b>GPU {gpu.index}</b><span>{escape(title(gpu))}</span></div>'
            f"{_placed(chart, charts, label)}"
        )
    return "\n".join(parts)


def _chart(
    replay: Replay, curve: Curve, begun: float, ended: float, firings: Sequence[tuple[int, Firing]]
) -> dict[str, Any]:
    """Data for the script; times are wall-clock times."""
    wall = replay.begun.wall - replay.begun.at
    return {
        "begun": begun + wall,
        "ended": ended + wall,
        "below": replay.below,
        "curve": curve,
        "firings": [
            {
                "number": number,
                "from": one.window_from.at + wall,
                "at": one.moment.at + wall,
                "until": one.until.at + wall,
                "hung": one.hung,
            }
            for number, one in firings
        ],
    }


def _placed(chart: dict[str, Any], charts: list[dict[str, Any]], label: str) -> str:
    charts.append(chart)
    return f'<div class="plot" role="img" aria-label="{escape(label)}" data-chart="{len(charts) - 1}"></div>'


def _firings(replay: Replay, timeline: Timeline, charts: list[dict[str, Any]]) -> str:
    if not replay.firings:
        return ""
    shown = list(enumerate(replay.firings[:_MOST_FIRINGS], 1))
    cards = "".join(
        _card(number, one, _detail(number, one, replay, timeline, charts) if number <= _MOST_DETAILS else "")
        for number, one in shown
    )
    return f'<h2>When it would have fired</h2>\n<ol class="firings">{cards}</ol>{_rest(replay.firings, _MOST_FIRINGS)}'


def _card(number: int, firing: Firing, detail: str) -> str:
    badge = '<span class="badge bad">work came back</span>' if firing.hit_work else ""
    working = text.also_working(firing)
    extra = f'<p class="soft">{escape(working)}.</p>' if working else ""
    after = text.what_came_after(firing)
    return (
        f'<li class="firing{" hit" if firing.hit_work else ""}">'
        f"<h3><b>{number}</b>{escape(text.local_time(firing.moment.wall))}{badge}</h3>"
        f"<p>{escape(capitalized(firing.rule))}: {escape(firing.reason)}. {escape(capitalized(after))}. "
        f'<span class="saved">{text.gpu_hours(firing.saved)} GPU-hours saved</span></p>{extra}{detail}</li>'
    )


def _detail(number: int, firing: Firing, replay: Replay, timeline: Timeline, charts: list[dict[str, Any]]) -> str:
    """A detailed view of the window, with some time before and after; the maximum of its GPUs."""
    window = firing.moment.at - firing.window_from.at
    begun = max(firing.window_from.at - window / 2, replay.begun.at)
    # Up to the return of the work, unless this makes the window invisibly small.
    ended = firing.until.at + window / 4 if firing.idle_after <= 4 * window else firing.moment.at + window
    ended = max(min(ended, replay.ended.at), begun + 1.0)
    curve = timeline.drawn(firing.gpus, begun, ended, _DETAIL_POINTS)
    label = "Utilization around this firing, the highest of its GPUs"
    return _placed(_chart(replay, curve, begun, ended, [(number, firing)]), charts, label)


def _stretches(replay: Replay) -> str:
    stretches = sorted([*replay.unknown, *replay.gaps], key=lambda stretch: stretch.begun.at)
    if not stretches:
        return ""
    rows = "".join(
        f"<tr><td>{escape(text.local_time(stretch.begun.wall))}</td><td>{format_duration(stretch.seconds)}</td>"
        f"<td>{escape(stretch.reason)}</td></tr>"
        for stretch in stretches[:_MOST_STRETCHES]
    )
    table = f"<table><tr><th>from</th><th>for</th><th>why</th></tr>{rows}</table>"
    return f"<h2>Unknown and not recorded</h2>\n{table}{_rest(stretches, _MOST_STRETCHES)}\n"


def _rest(found: Sequence[object], most: int) -> str:
    return f'<p class="soft">And {len(found) - most:,} more: --json has them all.</p>' if len(found) > most else ""


def _text(sentence: str) -> str:
    """Escaped, and without a line break in GPU-hours."""
    return escape(sentence).replace("GPU-hours", "GPU\N{NON-BREAKING HYPHEN}hours")
