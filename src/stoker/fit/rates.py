"""How fast a program trains and how many steps it has made, read from its output."""

import re
import statistics
from collections import deque
from collections.abc import Callable
from typing import Final

from stoker.errors import BadInputError

# The first steps compile and warm up: of the readings only so many of the last count.
KEPT: Final = 20
# A line that never ends is a program that draws without line breaks; what is needed of it is its end.
_LONGEST_LINE: Final = 4096
_NUMBER: Final = r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
_BREAKS: Final = re.compile(r"[\r\n]")
# Bars that count something else than steps.
_NOT_TRAINING: Final = re.compile(
    r"^\W*(?:map|filter|download\w*|load\w*|tokeni\w*|generating|fetch\w*|resolv\w*|extract\w*|sav\w*|cast\w*"
    r"|preprocess\w*|prepar\w*|pars\w*|cach\w*|read\w*)\b",
    re.IGNORECASE,
)
_EXAMPLES: Final = re.compile(
    _NUMBER + r"\s*(?:examples?|samples?|images?|imgs?|sequences?|seqs?)\s*(?:/|per\s+)\s*s(?:ec(?:ond)?)?\b",
    re.IGNORECASE,
)
_STEPS_A_SECOND: Final = re.compile(
    _NUMBER + r"\s*(?:it|iters?|iterations?|steps?|batch(?:es)?)/s(?:ec)?\b", re.IGNORECASE
)
_SECONDS_A_STEP: Final = re.compile(_NUMBER + r"\s*(ms|s)/(?:it|iter|step|batch)\b", re.IGNORECASE)
_TIMED_STEP: Final = re.compile(
    r"\b(?:iter|step)\w*\s*:?\s*[0-9]+\b.*\btime:?\s*" + _NUMBER + r"\s*(ms|s)\b", re.IGNORECASE
)
# A bar has done as many steps as it shows; a line about step 12 comes when step 12 is done, and the first may be 0.
_BAR: Final = re.compile(r"(?<![\d/.])([0-9]+)/([0-9]+)\s*(?:\[|━)")
_LINE: Final = re.compile(
    r"\b(?:global[_ ]?step|step|iter|iteration|batch)\b\s*(?:[:=#\[]\s*)?([0-9]+)(?![\d.]|\s*(?:it|ms|s|B|MB|GB)\b)",
    re.IGNORECASE,
)
_EPOCH: Final = re.compile(r"\bepoch\b.{0,20}?\[\s*([0-9]+)\s*/\s*([0-9]+)", re.IGNORECASE)


class Rates:
    """Fed with output as it comes; the last readings say how fast the program is."""

    def __init__(self, pattern: str | None = None) -> None:
        """`pattern`: its first group is a number, of examples per second; or of what its second group names,
        `it/s` or `s/it`."""
        self._pattern = None if pattern is None else _compiled(pattern)
        self._rest = ""
        # A program may draw several bars at a time: they are told apart by where they end.
        self._counters: dict[tuple[re.Pattern[str], str], _Counter] = {}
        # Each says for a size of the batch how many examples there were in a second.
        self._readings: deque[Callable[[int], float]] = deque(maxlen=KEPT)
        self._moments: deque[tuple[float, int]] = deque(maxlen=KEPT)

    @property
    def steps_seen(self) -> int:
        """Steps that were made since the first that the output told of."""
        return max((counter.made for counter in self._counters.values()), default=0)

    def feed(self, text: str, now: float | None = None) -> None:
        """More output; `now`, in seconds of any clock, serves where the output counts steps and tells no speed."""
        *lines, rest = _BREAKS.split(self._rest + text)
        self._rest = rest[-_LONGEST_LINE:]
        for line in lines:
            self._read(line[-_LONGEST_LINE:])
        if now is not None and (not self._moments or self.steps_seen > self._moments[-1][1]):
            self._moments.append((now, self.steps_seen))

    def rate(self, size: int) -> float | None:
        """Examples per second with batches of that size; None when nothing told."""
        # The first of few readings is that of a cold start.
        readings = list(self._readings)[1 if 2 < len(self._readings) < KEPT else 0 :]
        if readings:
            return statistics.median(reading(size) for reading in readings)
        moments = [moment for moment in self._moments if moment[1] > 0]
        if self._pattern is not None or len(moments) < 2 or moments[-1][0] <= moments[0][0]:
            return None
        return size * (moments[-1][1] - moments[0][1]) / (moments[-1][0] - moments[0][0])

    def _read(self, line: str) -> None:
        if _NOT_TRAINING.match(line) and _BAR.search(line):
            return
        for kind in (_BAR, _EPOCH, _LINE):
            if found := kind.search(line):
                end = found[2] if kind.groups > 1 else ""
                self._counters.setdefault((kind, end), _Counter(shows_done=kind is _BAR)).shows(int(found[1]))
        reading = _default(line) if self._pattern is None else _asked_for(self._pattern, line)
        if reading is not None and reading(1) > 0:
            self._readings.append(reading)


class _Counter:
    """One way of counting steps, which may begin anywhere and begins anew with each epoch."""

    def __init__(self, shows_done: bool) -> None:
        self.made = 0
        self._last: int | None = None
        self._first_step = 0 if shows_done else 1

    def shows(self, number: int) -> None:
        if self._last is None:
            self.made = self._first_step
        elif number > self._last:
            self.made += number - self._last
        elif number < self._last:
            self.made += self._first_step
        self._last = number


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise BadInputError(f"--rate {pattern!r} is not a regular expression: {error}") from None
    if compiled.groups < 1:
        raise BadInputError(f"--rate {pattern!r} has no group: put the number into parentheses")
    return compiled


def _asked_for(pattern: re.Pattern[str], line: str) -> Callable[[int], float] | None:
    found = pattern.search(line)
    if found is None:
        return None
    try:
        number = float(found[1].replace(",", ""))
    except (ValueError, AttributeError):
        return None
    unit = (found[2] or "") if pattern.groups > 1 else ""
    if unit in ("s/it", "s/step"):
        return _steps(1 / number) if number > 0 else None
    return _steps(number) if unit in ("it/s", "step/s", "steps/s") else lambda _: number


def _default(line: str) -> Callable[[int], float] | None:
    if found := _EXAMPLES.search(line):
        number = float(found[1])
        return lambda _: number
    if found := _STEPS_A_SECOND.search(line):
        return _steps(float(found[1]))
    if (found := _SECONDS_A_STEP.search(line) or _TIMED_STEP.search(line)) and float(found[1]) > 0:
        seconds = float(found[1]) / (1000 if found[2].lower() == "ms" else 1)
        return _steps(1 / seconds)
    return None


def _steps(a_second: float) -> Callable[[int], float]:
    return lambda size: a_second * size
