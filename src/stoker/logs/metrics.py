"""Curves from a job's output: `step=100 loss=1.23`, `{"loss": 1.23}`, the postfix of a tqdm bar.

Pure; never raises. A curve has a bounded number of points, and only evenly spaced parts of a long log are read, so time
and memory are bounded.
"""

import math
import re
from collections.abc import Collection, Iterator
from typing import Final, Literal, NamedTuple

import msgspec

from stoker.logs.search import LogView
from stoker.logs.steps import MARK, sign_in

Axis = Literal["step", "epoch", "line"]

# More than the pixels of a phone.
_MOST_POINTS: Final = 500
_MOST_NAMES: Final = 64
_MOST_CURVES: Final = 12
_LONGEST_LINE: Final = 2000
# The amount of a log to read: a second of work.
_MOST_READ: Final = 4 << 20
_PARTS: Final = 256

_VALUE: Final = re.compile(
    r"(?<![\w./:-])(?P<name>[A-Za-z][\w./@-]{0,47}?)[\"']?[ \t]{0,2}[=:][ \t]{0,2}"
    r"(?P<value>[-+]?(?:\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})(?:[eE][-+]?\d{1,3})?|[-+]?(?:nan|inf)(?:inity)?)"
    # Not a duration, a share of memory, a time, a version or an address.
    r"(?![\w%]|[.:/-]\d|:\w| ?(?:s|ms|min|h|[kMGT]?i?B|it/s)\b)",
    re.IGNORECASE | re.ASCII,
)
_COLOUR: Final = re.compile(r"\x1b\[[0-9;:]{0,40}[mK]")
_STEP: Final = re.compile(r"(?:global_?|train_?|current_?)?(?:step|iter|iteration)s?", re.IGNORECASE)
_EPOCH: Final = re.compile(r"(?:current_?)?epochs?", re.IGNORECASE)
# Numbers that are not results, unless requested.
_NO_RESULT: Final = re.compile(
    r"(?:rank|seed|port|pid|gpu|device|line|id|version|node|worker|local_?rank|world_?size)s?", re.IGNORECASE
)
# The figures that people look at first.
_FIRST: Final = re.compile(r"loss|perplexity|ppl|nll|error|acc|f1|bleu|reward|map|auc", re.IGNORECASE)


class LogCurve(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over the steps of a job."""

    name: str
    axis: Axis
    """The unit of `at`: steps, epochs, or the lines with this figure."""
    at: list[float]
    values: list[float | None]
    """Null if not a number, such as a loss of NaN."""
    last: float | None
    """The newest value."""


class LineFigures(NamedTuple):
    """The figures of one line."""

    step: float | None
    epoch: float | None
    values: dict[str, float]
    is_bar: bool = False
    """Whether the step is that of a progress bar."""


def figures_in(line: str) -> LineFigures:
    """The figures in a line, and its step or epoch."""
    step = epoch = None
    values: dict[str, float] = {}
    if len(line) > _LONGEST_LINE or not ("=" in line or ":" in line):
        return LineFigures(None, None, values)
    if "\x1b" in line:
        line = _COLOUR.sub("", line)
    for found in _VALUE.finditer(line):
        name, value = found["name"], float(found["value"])
        if _STEP.fullmatch(name):
            step = value if math.isfinite(value) else step
        elif _EPOCH.fullmatch(name):
            epoch = value if math.isfinite(value) else epoch
        else:
            values[name] = value
    if values and step is None and (sign := sign_in(line)) is not None and sign.done is not None:
        return LineFigures(sign.done, epoch, values, is_bar=sign.elapsed is not None or MARK in sign.line)
    return LineFigures(step, epoch, values)


class _Points:
    """The points of one curve; neighbours are merged if there are too many."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.at: list[float] = []
        self.values: list[float | None] = []
        self.last: float | None = None
        self._each = 1
        """The number of figures per point."""
        self._count = 0
        self._base = 0.0
        self._before = -math.inf
        self._open: list[float] = []

    def add(self, at: float | None, value: float, begins_at: float) -> None:
        """`begins_at`: steps start over when they are not above this share of the last one."""
        self._count += 1
        if at is None:
            at = float(self._count)
        elif at <= self._before * begins_at:
            self._base += self._before
        self._before = at
        self.last = value if math.isfinite(value) else None
        self._open.append(value)
        if len(self._open) < self._each:
            return
        self.at.append(self._base + at)
        self.values.append(_mean(self._open))
        self._open = []
        if len(self.at) >= 2 * _MOST_POINTS:
            self._each *= 2
            self.at = self.at[1::2]
            pairs = zip(self.values[::2], self.values[1::2], strict=True)
            self.values = [None if a is None or b is None else (a + b) / 2 for a, b in pairs]

    def curve(self, name: str) -> LogCurve:
        at, values = self.at[:], self.values[:]
        if self._open:
            at, values = [*at, self._base + self._before], [*values, _mean(self._open)]
        return LogCurve(name=name, axis=self.axis, at=at, values=values, last=self.last)


def _mean(values: list[float]) -> float | None:
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else None


class CurveReader:
    """Collects curves from blocks of lines."""

    def __init__(self, names: Collection[str] = ()) -> None:
        """`names`: only these; if empty, all that look like results."""
        self._names = tuple(names)
        self._points: dict[str, _Points] = {}

    def feed(self, text: str) -> None:
        for line in text.split("\n"):
            for number, state in enumerate(line.splitlines()):
                figures = figures_in(state)
                # The next bar is of another epoch, even at the same step; other lines may be of two ranks.
                begins_at = 0.5 if number or not figures.is_bar else 1.0
                for name, value in figures.values.items():
                    if (name in self._names) if self._names else not _NO_RESULT.fullmatch(name):
                        self._add(name, figures, value, begins_at)

    def _add(self, name: str, figures: LineFigures, value: float, begins_at: float) -> None:
        points = self._points.get(name)
        if points is None:
            if len(self._points) >= _MOST_NAMES:
                return
            axis: Axis = "step" if figures.step is not None else "epoch" if figures.epoch is not None else "line"
            points = self._points[name] = _Points(axis)
        at = {"step": figures.step, "epoch": figures.epoch, "line": None}[points.axis]
        if points.axis == "line" or at is not None:
            points.add(at, value, begins_at)

    def curves(self) -> list[LogCurve]:
        """The requested curves in order, or all with at least two points, the most interesting first."""
        if self._names:
            return [self._points[name].curve(name) for name in self._names if name in self._points]
        found = [points.curve(name) for name, points in self._points.items() if len(points.at) > 1]
        return sorted(found, key=lambda curve: (not _FIRST.search(curve.name), curve.name.lower()))[:_MOST_CURVES]


def last_figures(text: str, names: Collection[str]) -> dict[str, float | None]:
    """The newest values of these figures in the text; None if not a number, such as a loss of NaN."""
    found: dict[str, float | None] = {}
    for line in reversed(text.splitlines()):
        values = figures_in(line).values
        for name in names:
            if name in values and name not in found:
                found[name] = values[name] if math.isfinite(values[name]) else None
        if len(found) == len(names):
            break
    return {name: found[name] for name in names if name in found}


def curves_of(view: LogView, names: Collection[str] = ()) -> list[LogCurve]:
    """The curves in a log; for a long log, in evenly spaced parts and its end."""
    reader = CurveReader(names)
    for part in _parts(view):
        reader.feed(part.decode(errors="replace"))
    return reader.curves()


def _parts(view: LogView) -> Iterator[bytes]:
    if view.size <= _MOST_READ:
        whole = b""
        while part := view.read(len(whole), view.size - len(whole)):
            whole += part
        yield whole  # a line may continue in the second file
        return
    length = _MOST_READ // _PARTS
    for number in range(_PARTS):
        offset = number * (view.size - length) // (_PARTS - 1)
        part = view.read(offset, length)
        if offset:
            part = part.partition(b"\n")[2]  # the first line is incomplete
        yield part if number == _PARTS - 1 else part[: part.rfind(b"\n") + 1]
