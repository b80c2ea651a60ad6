"""The progress of a job by the progress bars in its output. Pure; it never raises, whatever the text.

Only unambiguous progress counts: a drawn bar, a count next to a word that training programs use, or a percentage in
brackets. `loss 3/4`, a date or a version does not.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from stoker.logs.reader import local_tail
from stoker.logs.terminal import plain_text
from stoker.queue.model import Attempt
from stoker.status.model import Progress

if TYPE_CHECKING:
    from stoker.queue import Store

# A bar is near the end; one further up is finished.
_MOST_LINES: Final = 30
# Longer lines are not bars. It also limits the work of the patterns.
_LONGEST_LINE: Final = 1000
_LONGEST_TEXT: Final = 160

_SCALES: Final = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_SECONDS: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}

# Replaces a drawn bar; plain text never contains it.
_MARK: Final = "\0"
_DRAWING: Final = re.compile(
    r"(?<=%)\|[^|]*(?:\||$)"  # tqdm, with any characters
    r"|\[[=#>.\-*█▒░━ ]{3,}\]"  # keras, wget, pip
    r"|[━╸╺█▉▊▋▌▍▎▏░▒▓■□▰▱](?:[━╸╺█▉▊▋▌▍▎▏░▒▓■□▰▱ ]*[━╸╺█▉▊▋▌▍▎▏░▒▓■□▰▱])"  # rich
)

_PERCENT: Final = r"(?<![\d.])(?P<percent>\d{1,3}(?:\.\d{1,6})?) ?%"
_NUMBER: Final = r"\d{1,15}(?:,\d{3}){0,4}(?:\.\d{1,6})?"
# A letter after a blank is a scale only with bytes: `step 3/4 m=0.9` does not mean millions.
_BLANK: Final = r"(?: (?=[kMGTPE]?(?:i?B|bytes)\b))?"
_COUNT: Final = (
    rf"(?<![\w./:-])(?P<done>{_NUMBER}){_BLANK}(?P<done_scale>[kMGTPE]?)(?P<done_unit>i?B|bytes)? *(?:/|of) *"
    rf"(?P<total>{_NUMBER}){_BLANK}(?P<total_scale>[kMGTPE]?)(?P<total_unit>i?B|bytes)?(?![\w/:]|\.\d)"
)
_TIME: Final = r"(?:\d{1,4} days?, )?(?:\d{1,5}:)?\d{1,3}:\d{2}"
_UNITS: Final = r"(?:\d{1,6}(?:\.\d{1,3})? ?[dhms](?![a-z]) ?){1,4}"
_WORDS: Final = (
    r"(?:steps?|iter(?:ation)?s?|batch(?:es)?|epochs?|episodes?|trials?|rounds?|updates?|samples?|examples?|images?"
    r"|files?|shards?|chunks?|parts?|tasks?|items?|documents?|docs|sequences?|progress|train(?:ing)?|validation)"
)


def _of(pattern: str) -> re.Pattern[str]:
    # ASCII only: other scripts have digits that match and cannot be looked up.
    return re.compile(pattern, re.IGNORECASE | re.ASCII)


# Most lines fail this quick check.
_COULD_BE: Final = re.compile(r"[/%]|\bof\b")

# What progress looks like, the surest first. Of several in one line the last counts: steps come after their epoch.
_SIGNS: Final = (
    # tqdm: `317/1000 [02:11<04:40, …`, also with a unit: `45.2MB/1.20GB [`.
    _of(
        rf"(?<![\w./:-])(?P<done>{_NUMBER})(?P<done_scale>[kMGTPE]?)[^\s/\[\]\d]{{0,12}}/"
        rf"(?P<total>{_NUMBER}|\?)(?P<total_scale>[kMGTPE]?)[^\s/\[\]\d]{{0,12}} *"
        rf"\[(?P<elapsed>{_TIME})<(?P<remaining>{_TIME}|\?)"
    ),
    # The same when it does not know how much there is: `317it [02:11, 2.44it/s]`.
    _of(rf"(?<![\w./:-]){_NUMBER}[kMGTPE]? ?[^\s/\[\]\d]{{0,12}} *\[{_TIME}, +(?:\?|{_NUMBER})[^\s/\[\]]{{0,12}}/"),
    _of(rf"{_MARK} *(?:\d{{1,3}}(?:\.\d+)?%)? *{_COUNT}"),
    _of(rf"{_COUNT} *(?:\d{{1,3}}(?:\.\d+)?%)? *{_MARK}"),
    _of(rf"{_PERCENT} *{_MARK}"),
    _of(rf"{_MARK} *{_PERCENT}"),
    # `Epoch 3/10: 317/1000`.
    _of(rf"\bepochs?\b[ :=]*[\[(]?[ ]*\d{{1,9}} ?/ ?\d{{1,9}}[^\w/]{{1,6}}{_COUNT}"),
    # `step 317/1000`, `Epoch: [3][317/1000]`, `Train Epoch: 3 [20480/60000 (34%)]`.
    _of(rf"(?<![-/.]){_WORDS}\b[ \t]*[:=#]?[ \t]*(?:\[\d{{1,9}}\]|\d{{1,9}}(?= *[\[(]))?[ \t]*[\[(]?[ \t]*{_COUNT}"),
    _of(rf"{_COUNT} +{_WORDS}\b"),
    # `[317/1000] Building …`, unless a time says that it is a date.
    _of(rf"^\W{{0,3}}\[ *{_COUNT} *\](?! *\d{{1,2}}:)"),
    _of(rf"\[ *{_PERCENT} *\]"),
    _of(rf"\bprogress\b[ :=]*{_PERCENT}"),
    _of(rf"{_PERCENT} +(?:complete|completed|done|finished)\b"),
)
# How much longer it takes, the surest first.
_REMAINING: Final = (
    _of(rf"\b(?:eta|remaining)\b[ :=]*(?P<remaining>{_TIME}|{_UNITS})"),
    _of(rf"(?P<elapsed>{_TIME}) *[•·] *(?P<remaining>{_TIME})"),
)
# A bar within an epoch is not the whole: `Epoch 3/10: 317/1000`, or the epoch on a line of its own above it.
_EPOCH: Final = _of(r"\bepochs?\b[ :=]*[\[(]?[ ]*(?P<epoch>\d{1,6}) ?/ ?(?P<epochs>\d{1,6})(?![\w/.:]*\d)")
_EPOCH_ALONE: Final = _of(rf"^\W*{_EPOCH.pattern}[\W]*$")
_BEHIND_BAR: Final = _of(rf"(?:{_MARK}|{_MARK} *\d{{1,3}}(?:\.\d+)?%) +(?P<remaining>{_TIME}|\d{{1,6}}s)(?! *[•·])")
_ONE_UNIT: Final = _of(r"(\d{1,6}(?:\.\d{1,3})?) ?([dhms])")
_PERCENT_BESIDE_BAR: Final = re.compile(
    rf"\d{{1,3}}(?:\.\d{{1,6}})? ?% *(?={_MARK})|(?<={_MARK}) *\d{{1,3}}(?:\.\d+)?%"
)


class _Sign(NamedTuple):
    """One sign of progress in a line."""

    fraction: float | None
    has_count: bool
    remaining: str | None
    elapsed: str | None = None
    start: int = 0
    """Where in its line its own figures begin."""


class _Part(NamedTuple):
    """What the bar itself shows, which may be one epoch of several."""

    fraction: float | None
    remaining: float | None
    elapsed: float | None


def progress_in(text: str) -> Progress | None:
    """The last progress in the text, if any."""
    lines = [line for line in plain_text(text).split("\n") if line.strip()]
    recent = lines[-_MOST_LINES:]
    for number, line in reversed(list(enumerate(recent))):
        if len(line) <= _LONGEST_LINE and _COULD_BE.search(line):
            plain = _DRAWING.sub(f" {_MARK} ", line)
            if (sign := _sign_in(plain)) is not None:
                part = _Part(sign.fraction, *_times(plain, sign))
                epoch = _epoch_of(plain, sign, recent[:number])
                fraction, remaining = part[:2] if epoch is None else _of_all(part, *epoch)
                return Progress(fraction=fraction, text=_figures(plain, sign), remaining=remaining)
    return None


def _epoch_of(line: str, sign: _Sign, above: Sequence[str]) -> tuple[int, int] | None:
    """The bar's epoch and the number of epochs; None if unknown, or if the bar counts the epochs."""
    found = _EPOCH.search(line)
    if found is None:
        if _of_epochs(line):
            return None
        alone = (_EPOCH_ALONE.match(other) for other in reversed(above) if len(other) <= _LONGEST_TEXT)
        found = next(filter(None, alone), None)
    elif found.end() > sign.start:
        return None
    if found is None:
        return None
    epoch, epochs = int(found["epoch"]), int(found["epochs"])
    return (epoch, epochs) if epoch <= epochs and epochs > 0 else None


def _of_epochs(line: str) -> bool:
    return re.search(r"\bepochs?\b", line, re.IGNORECASE) is not None


def _of_all(part: _Part, epoch: int, epochs: int) -> tuple[float | None, float | None]:
    """Progress over all epochs, and the time left if each takes as long as this one."""
    # Most programs count from one. Counting from zero shows only in the first epoch, and is one short after that.
    done, total = (epoch - 1, epochs) if epoch else (0, epochs + 1)
    if part.fraction is None:
        return None, None
    remaining, left = part.remaining, total - done - 1
    if remaining is not None and left:
        if part.elapsed is not None:
            remaining += left * (part.elapsed + remaining)
        else:
            remaining = remaining + left * remaining / (1 - part.fraction) if part.fraction < 1 else None
    return (done + part.fraction) / total, remaining


def _sign_in(line: str) -> _Sign | None:
    for pattern in _SIGNS:
        for found in reversed(list(pattern.finditer(line))):
            if (sign := _parse(found.groupdict())) is not None:
                start = found.start("done") if "done" in pattern.groupindex and found["done"] else found.start()
                return sign._replace(elapsed=found.groupdict().get("elapsed"), start=start)
    return None


def _parse(parts: Mapping[str, str | None]) -> _Sign | None:
    """None if it is more than the whole."""
    remaining = parts.get("remaining")
    if percent := parts.get("percent"):
        fraction = float(percent) / 100
        return _Sign(fraction, has_count=False, remaining=remaining) if fraction <= 1 else None
    done, total = parts.get("done"), parts.get("total")
    if done is None or total is None or total == "?":
        return _Sign(None, has_count=True, remaining=remaining)
    whole, part = _amount(total, parts.get("total_scale")), _amount(done, _scale_of_done(parts))
    if not whole or part > whole:
        return None
    return _Sign(part / whole, has_count=True, remaining=remaining)


def _scale_of_done(parts: Mapping[str, str | None]) -> str | None:
    """`45.2/100.0 MB` names the unit once, for both."""
    if parts.get("total_unit") and not parts.get("done_scale") and not parts.get("done_unit"):
        return parts.get("total_scale")
    return parts.get("done_scale")


def _amount(number: str, scale: str | None) -> float:
    return float(number.replace(",", "")) * _SCALES[(scale or "").upper()]


def _times(line: str, sign: _Sign) -> tuple[float | None, float | None]:
    """Remaining and elapsed seconds."""
    if sign.remaining is not None:
        return _seconds(sign.remaining), None if sign.elapsed is None else _seconds(sign.elapsed)
    found = next(filter(None, (pattern.search(line) for pattern in _REMAINING)), None)
    if found is not None:
        elapsed = found.groupdict().get("elapsed")
        return _seconds(found["remaining"]), None if elapsed is None else _seconds(elapsed)
    beside = _BEHIND_BAR.search(line)
    seconds = None if beside is None else _seconds(beside["remaining"])
    # After a full bar, some programs write how long it took.
    return (None if seconds and sign.fraction == 1.0 else seconds), None


def _seconds(text: str) -> float | None:
    """`04:40`, `1:02:03`, `1 day, 3:04:05`, `1h 20m`; None for `?`."""
    if ":" not in text:
        units = _ONE_UNIT.findall(text)
        return sum(float(number) * _SECONDS[unit.lower()] for number, unit in units) if units else None
    days, _, clock = text.rpartition(",")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = seconds * 60 + float(part)
    return seconds + 86400.0 * float(days.split()[0] if days else 0)


def _figures(line: str, sign: _Sign) -> str:
    """The line without the drawn bar, and without a percentage where there is a count."""
    shown = _PERCENT_BESIDE_BAR.sub(" ", line) if sign.has_count else line
    text = " ".join(shown.replace(_MARK, " ").split())
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


# A few screens of a terminal.
TAIL_SIZE: Final = 4096
_LAST_LINE_WIDTH: Final = 300


class LastOutput(NamedTuple):
    """What a job printed last."""

    progress: Progress | None
    line: str


NO_OUTPUT: Final = LastOutput(None, "")


def last_outputs(store: "Store", home: Path, attempts: Sequence[Attempt]) -> dict[str, LastOutput]:
    """By the ids of the attempts: from their logs on this machine, or from the tails in the queue."""
    local = {attempt.id: local_tail(home, attempt, TAIL_SIZE) for attempt in attempts}
    elsewhere = [name for name, text in local.items() if text is None]
    tails = store.logs.tails(elsewhere, TAIL_SIZE) if elsewhere else {}
    found = tails | {name: text for name, text in local.items() if text is not None}
    return {name: last_output(text) for name, text in found.items()}


# Most tails are the same as in the last snapshot.
@lru_cache(maxsize=512)
def last_output(text: str) -> LastOutput:
    lines = [line for line in plain_text(text).split("\n") if line.strip()]
    last = lines[-1].strip() if lines else ""
    return LastOutput(progress_in(text), last if len(last) <= _LAST_LINE_WIDTH else f"{last[: _LAST_LINE_WIDTH - 1]}…")
