"""The progress of a job, from progress bars in its output. Pure; never raises."""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from stoker.logs.metrics import last_figures
from stoker.logs.reader import local_tail
from stoker.logs.steps import MARK, TIME, UNITS, Sign, compiled, sign_in
from stoker.logs.terminal import plain_text
from stoker.queue.model import Attempt, Job
from stoker.status.model import Progress

if TYPE_CHECKING:
    from stoker.queue import Store

# A current bar is near the end; bars further up are finished.
_MOST_LINES: Final = 30
_LONGEST_TEXT: Final = 160

_SECONDS: Final = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}

# Patterns of the remaining time, the most reliable first.
_REMAINING: Final = (
    compiled(rf"\b(?:eta|remaining)\b[ :=]*(?P<remaining>{TIME}|{UNITS})"),
    compiled(rf"(?P<elapsed>{TIME}) *[•·] *(?P<remaining>{TIME})"),
)
# A bar within an epoch is not the total: `Epoch 3/10: 317/1000`, or the epoch on a line of its own above it.
_EPOCH: Final = compiled(r"\bepochs?\b[ :=]*[\[(]?[ ]*(?P<epoch>\d{1,6}) ?/ ?(?P<epochs>\d{1,6})(?![\w/.:]*\d)")
_EPOCH_ALONE: Final = compiled(rf"^\W*{_EPOCH.pattern}[\W]*$")
_BEHIND_BAR: Final = compiled(rf"(?:{MARK}|{MARK} *\d{{1,3}}(?:\.\d+)?%) +(?P<remaining>{TIME}|\d{{1,6}}s)(?! *[•·])")
_ONE_UNIT: Final = compiled(r"(\d{1,6}(?:\.\d{1,3})?) ?([dhms])")
_PERCENT_BESIDE_BAR: Final = re.compile(rf"\d{{1,3}}(?:\.\d{{1,6}})? ?% *(?={MARK})|(?<={MARK}) *\d{{1,3}}(?:\.\d+)?%")


class _Part(NamedTuple):
    """The bar's own progress, possibly of one epoch of several."""

    fraction: float | None
    remaining: float | None
    elapsed: float | None


def progress_in(text: str) -> Progress | None:
    """The last progress in the text, if any."""
    lines = [line for line in plain_text(text).split("\n") if line.strip()]
    recent = lines[-_MOST_LINES:]
    for number, line in reversed(list(enumerate(recent))):
        if (sign := sign_in(line)) is not None:
            part = _Part(sign.fraction, *_times(sign))
            epoch = _epoch_of(sign, recent[:number])
            fraction, remaining = part[:2] if epoch is None else _of_all(part, *epoch)
            return Progress(fraction=fraction, text=_figures(sign), remaining=remaining)
    return None


def _epoch_of(sign: Sign, above: Sequence[str]) -> tuple[int, int] | None:
    """The bar's epoch and the number of epochs; None if unknown, or if the bar counts the epochs."""
    found = _EPOCH.search(sign.line)
    if found is None:
        if _of_epochs(sign.line):
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
    """Progress over all epochs, and the remaining time if each takes as long as this one."""
    # Most programs count from one. Counting from zero is visible only in the first epoch, and one too low afterwards.
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


def _times(sign: Sign) -> tuple[float | None, float | None]:
    """Remaining and elapsed seconds."""
    if sign.remaining is not None:
        return _seconds(sign.remaining), None if sign.elapsed is None else _seconds(sign.elapsed)
    found = next(filter(None, (pattern.search(sign.line) for pattern in _REMAINING)), None)
    if found is not None:
        elapsed = found.groupdict().get("elapsed")
        return _seconds(found["remaining"]), None if elapsed is None else _seconds(elapsed)
    beside = _BEHIND_BAR.search(sign.line)
    seconds = None if beside is None else _seconds(beside["remaining"])
    # After a full bar, some programs print the elapsed time.
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


def _figures(sign: Sign) -> str:
    """The line without the drawn bar, and without a percentage where there is a count."""
    shown = _PERCENT_BESIDE_BAR.sub(" ", sign.line) if sign.has_count else sign.line
    text = " ".join(shown.replace(MARK, " ").split())
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"


# A few screens of a terminal.
TAIL_SIZE: Final = 4096
_LAST_LINE_WIDTH: Final = 300


# Lines of output that a phone shows before the log.
_LAST_LINES: Final = 4
# Enough for figures that do not appear in every line.
_FIGURES_SIZE: Final = 16384
# Nobody reads figures of more jobs at once, and tails of more jobs are megabytes.
_MOST_WITH_FIGURES: Final = 500


class LastOutput(NamedTuple):
    """The last output of a job."""

    progress: Progress | None
    lines: tuple[str, ...]
    """A few lines that are not blank."""

    @property
    def line(self) -> str:
        return self.lines[-1].strip() if self.lines else ""


NO_OUTPUT: Final = LastOutput(None, ())


def last_metrics(store: "Store", jobs: Iterable[Job]) -> dict[str, dict[str, float | None]]:
    """The newest metrics of the first 500 jobs that have some, by id, from the tails in the queue."""
    having = (job for job in jobs if job.metrics and job.attempt is not None)
    wanted = {job.attempt or "": job for job in islice(having, _MOST_WITH_FIGURES)}
    tails = store.logs.tails(wanted, _FIGURES_SIZE) if wanted else {}
    return {wanted[name].id: dict(_figures_of(text, wanted[name].metrics)) for name, text in tails.items()}


@lru_cache(maxsize=512)
def _figures_of(text: str, names: tuple[str, ...]) -> tuple[tuple[str, float | None], ...]:
    return tuple(last_figures(text, names).items())


def last_outputs(store: "Store", home: Path, attempts: Sequence[Attempt]) -> dict[str, LastOutput]:
    """By attempt id: from logs on this machine, or from the tails in the queue."""
    local = {attempt.id: local_tail(home, attempt, TAIL_SIZE) for attempt in attempts}
    elsewhere = [name for name, text in local.items() if text is None]
    tails = store.logs.tails(elsewhere, TAIL_SIZE) if elsewhere else {}
    found = tails | {name: text for name, text in local.items() if text is not None}
    return {name: last_output(text) for name, text in found.items()}


# Most tails are unchanged since the last snapshot.
@lru_cache(maxsize=512)
def last_output(text: str) -> LastOutput:
    lines = [line.rstrip() for line in plain_text(text).split("\n") if line.strip()][-_LAST_LINES:]
    cut = [line if len(line) <= _LAST_LINE_WIDTH else f"{line[: _LAST_LINE_WIDTH - 1]}…" for line in lines]
    return LastOutput(progress_in(text), tuple(cut))
