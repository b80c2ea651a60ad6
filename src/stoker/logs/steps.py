"""Step counts in a job's output: progress in one line, and the number of steps in a text.

Pure; never raises. Only unambiguous progress counts: a drawn bar, a number next to a word that training programs use,
or a percentage in brackets. `loss 3/4`, dates and versions do not count.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

# Longer lines are not bars. This also bounds the work of the patterns.
LONGEST_LINE: Final = 1000

_SCALES: Final = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}

# Replaces a drawn bar; plain text never contains it.
MARK: Final = "\0"
_DRAWING: Final = re.compile(
    r"(?<=%)\|[^|]*(?:\||$)"  # tqdm, with any characters
    r"|\[[=#>.\-*█▒░━ ]{3,}\]"  # keras, wget, pip
    r"|[━╸╺█▉▊▋▌▍▎▏░▒▓■□▰▱](?:[━╸╺█▉▊▋▌▍▎▏░▒▓■□▰▱ ]*[━╸╺█▉▊▋▌▍▎▏░▒▓■□▰▱])"  # rich
)

_PERCENT: Final = r"(?<![\d.])(?P<percent>\d{1,3}(?:\.\d{1,6})?) ?%"
_NUMBER: Final = r"\d{1,15}(?:,\d{3}){0,4}(?:\.\d{1,6})?"
# A letter after a blank is a scale only for bytes: `step 3/4 m=0.9` does not mean millions.
_BLANK: Final = r"(?: (?=[kMGTPE]?(?:i?B|bytes)\b))?"
_COUNT: Final = (
    rf"(?<![\w./:-])(?P<done>{_NUMBER}){_BLANK}(?P<done_scale>[kMGTPE]?)(?P<done_unit>i?B|bytes)? *(?:/|of) *"
    rf"(?P<total>{_NUMBER}){_BLANK}(?P<total_scale>[kMGTPE]?)(?P<total_unit>i?B|bytes)?(?![\w/:]|\.\d)"
)
TIME: Final = r"(?:\d{1,4} days?, )?(?:\d{1,5}:)?\d{1,3}:\d{2}"
UNITS: Final = r"(?:\d{1,6}(?:\.\d{1,3})? ?[dhms](?![a-z]) ?){1,4}"
_WORDS: Final = (
    r"(?:steps?|iter(?:ation)?s?|batch(?:es)?|epochs?|episodes?|trials?|rounds?|updates?|samples?|examples?|images?"
    r"|files?|shards?|chunks?|parts?|tasks?|items?|documents?|docs|sequences?|progress|train(?:ing)?|validation)"
)


def compiled(pattern: str) -> re.Pattern[str]:
    """ASCII only: digits of other scripts match but are not in the table."""
    return re.compile(pattern, re.IGNORECASE | re.ASCII)


# Most lines fail this quick check.
_COULD_BE: Final = re.compile(r"[/%]|\bof\b")

# Patterns of progress, the most reliable first. Of several in one line the last counts: steps follow their epoch.
_SIGNS: Final = (
    # tqdm: `317/1000 [02:11<04:40, …`, also with a unit: `45.2MB/1.20GB [`.
    compiled(
        rf"(?<![\w./:-])(?P<done>{_NUMBER})(?P<done_scale>[kMGTPE]?)[^\s/\[\]\d]{{0,12}}/"
        rf"(?P<total>{_NUMBER}|\?)(?P<total_scale>[kMGTPE]?)[^\s/\[\]\d]{{0,12}} *"
        rf"\[(?P<elapsed>{TIME})<(?P<remaining>{TIME}|\?)"
    ),
    # The same without a total: `317it [02:11, 2.44it/s]`.
    compiled(
        rf"(?<![\w./:-])(?P<done>{_NUMBER})(?P<done_scale>[kMGTPE]?) ?[^\s/\[\]\d]{{0,12}} *"
        rf"\[{TIME}, +(?:\?|{_NUMBER})[^\s/\[\]]{{0,12}}/"
    ),
    compiled(rf"{MARK} *(?:\d{{1,3}}(?:\.\d+)?%)? *{_COUNT}"),
    compiled(rf"{_COUNT} *(?:\d{{1,3}}(?:\.\d+)?%)? *{MARK}"),
    compiled(rf"{_PERCENT} *{MARK}"),
    compiled(rf"{MARK} *{_PERCENT}"),
    # `Epoch 3/10: 317/1000`.
    compiled(rf"\bepochs?\b[ :=]*[\[(]?[ ]*\d{{1,9}} ?/ ?\d{{1,9}}[^\w/]{{1,6}}{_COUNT}"),
    # `step 317/1000`, `Epoch: [3][317/1000]`, `Epoch(train) [3][317/1000]`, `Train Epoch: 3 [20480/60000 (34%)]`.
    compiled(
        rf"(?<![-/.]){_WORDS}\b(?:\([a-z]{{1,12}}\))?[ \t]*[:=#]?[ \t]*(?:\[\d{{1,9}}\]|\d{{1,9}}(?= *[\[(]))?"
        rf"[ \t]*[\[(]?[ \t]*{_COUNT}"
    ),
    compiled(rf"{_COUNT} +{_WORDS}\b"),
    # `[317/1000] Building …`, unless a time shows that it is a date.
    compiled(rf"^\W{{0,3}}\[ *{_COUNT} *\](?! *\d{{1,2}}:)"),
    compiled(rf"\[ *{_PERCENT} *\]"),
    compiled(rf"\bprogress\b[ :=]*{_PERCENT}"),
    compiled(rf"{_PERCENT} +(?:complete|completed|done|finished)\b"),
)


class Sign(NamedTuple):
    """Progress found in a line."""

    line: str
    """With `MARK` in place of drawn bars."""
    start: int
    """Where its own figures begin in the line."""
    has_count: bool
    fraction: float | None = None
    done: float | None = None
    total: float | None = None
    remaining: str | None = None
    elapsed: str | None = None


def sign_in(line: str) -> Sign | None:
    """The most reliable progress in a line of plain text."""
    if len(line) > LONGEST_LINE or not _COULD_BE.search(line):
        return None
    plain = _DRAWING.sub(f" {MARK} ", line)
    for pattern in _SIGNS:
        for found in reversed(list(pattern.finditer(plain))):
            if (sign := _parse(plain, found)) is not None:
                return sign
    return None


def _parse(line: str, found: re.Match[str]) -> Sign | None:
    """None if it exceeds the total."""
    parts = found.groupdict()
    start = found.start("done") if parts.get("done") else found.start()
    sign = Sign(line, start, has_count=True, remaining=parts.get("remaining"), elapsed=parts.get("elapsed"))
    if percent := parts.get("percent"):
        fraction = float(percent) / 100
        return sign._replace(has_count=False, fraction=fraction) if fraction <= 1 else None
    done, total = parts["done"], parts.get("total")
    part = _amount(done, _scale_of_done(parts))
    if total is None or total == "?":
        return sign._replace(done=part)
    whole = _amount(total, parts.get("total_scale"))
    if not whole or part > whole:
        return None
    return sign._replace(fraction=part / whole, done=part, total=whole)


def _scale_of_done(parts: Mapping[str, str | None]) -> str | None:
    """`45.2/100.0 MB` names the unit once, for both."""
    if parts.get("total_unit") and not parts.get("done_scale") and not parts.get("done_unit"):
        return parts.get("total_scale")
    return parts.get("done_scale")


def _amount(number: str, scale: str | None) -> float:
    return float(number.replace(",", "")) * _SCALES[(scale or "").upper()]


# Steps

# `step 12`, `step=100`, `"global_step": 12`, `iter 100:`, `{'loss': 1.2, 'epoch': 0.31}`, `| total_timesteps | 2048 |`.
_STEP: Final = compiled(
    r"(?<![\w/.\-])(?:(?:global|current|train|training|total|optimizer|consumed|num|n)[_ ])?"
    r"(?P<word>(?:time)?step|iter(?:ation)?|epoch|batch|episode|sample|(?<=num_)update|(?<=n_)update)(?:s|es|_num|_idx)?"
    rf"[\"']?[ \t]{{0,16}}[:=#|(\[]?[ \t]{{0,16}}[\"'\[(]?(?P<number>{_NUMBER})"
    # Not a duration, a rate or a share, and not part of a longer number or word.
    r"(?![\w%\-]|[.:]\d|[ ]?(?:[munk]?s|secs?|seconds|mins?|minutes|hours?|%|ms|it/s)\b)"
)
_ESCAPE: Final = re.compile(r"\x1b\[[0-?]{0,32}[ -/]{0,4}[@-~]")
_LINE_END: Final = re.compile(r"[\r\n]+")
# Times are printed as seconds since "the epoch".
_MOST_EPOCHS: Final = 1e7
# Bars are searched for only in the last lines: their patterns are slow.
_LINES_WITH_BARS: Final = 30
_MOST_COUNTS: Final = 64


class StepCounter:
    """Counts steps in output that arrives in pieces. A number counts if it exceeds all earlier numbers of the same
    kind, such as `epoch`, `step`, or `of 1000`. Repeated steps do not count, nor do ranks that alternate between
    different ones. A number that falls to half or less starts over, as in the next epoch.
    """

    def __init__(self) -> None:
        self._highest: dict[str, float] = {}

    def feed(self, text: str) -> int:
        """The number of steps in the text."""
        steps = 0
        for kind, value in step_numbers(text):
            highest = self._highest.pop(kind, None)
            if highest is None and len(self._highest) >= _MOST_COUNTS:
                del self._highest[next(iter(self._highest))]
            if highest is None or value <= highest / 2:
                self._highest[kind] = value
                continue
            steps += value > highest
            self._highest[kind] = max(value, highest)
        return steps


def step_numbers(text: str) -> Iterator[tuple[str, float]]:
    """The kinds and values of all step numbers in a text."""
    lines = [line for line in _LINE_END.split(_ESCAPE.sub("", text)) if len(line) <= LONGEST_LINE]
    for line in lines:
        for found in _STEP.finditer(line):
            word, value = found["word"].lower(), _amount(found["number"], None)
            if word != "epoch" or value <= _MOST_EPOCHS:
                yield word, value
    for line in lines[-_LINES_WITH_BARS:]:
        sign = sign_in(line)
        if sign is None:
            continue
        if sign.done is not None:
            yield f"of {sign.total}", sign.done
        elif sign.fraction is not None and MARK in sign.line:
            yield "share", sign.fraction
