"""Measurements of one probe: the memory of its processes on each GPU, and its training speed from its output."""

import re
import statistics
from collections import deque
from collections.abc import Callable, Collection
from typing import Final

from stoker.errors import BadInputError
from stoker.gpus.model import Look, Reading, known

# PyTorch allocates blocks of 2 MiB and 20 MiB from the driver, so one more block does not count as growth.
BLOCK: Final = 20 * 2**20
# Temporary workspaces move the peak by less than this share.
WITHIN: Final = 0.01
# An optimizer's state appears at the first or second step, a scaler's and a compiler's within a few more.
FLAT_STEPS: Final = 5
# At least ten looks, even with fast steps.
_FLAT_LEAST: Final = 1.0
# A program that rarely prints its steps is watched for at most this many times `flat_for`.
_SELDOM: Final = 3.0
DIFFERENCE_NOTE: Final = (
    "the driver does not report memory per process here, so all memory that was taken on the GPU since the probe began "
    "counts as the probe's"
)


class MemoryTracker:
    """Tracks the memory of a probe over looks at its machine."""

    def __init__(self, before: Look, expected: Collection[str], owns: Callable[[int], bool]) -> None:
        """`expected`: the GPUs on which unattributed memory counts as the probe's."""
        self._before = {reading.uuid: reading for reading in before.readings}
        self._expected = frozenset(expected)
        self._owns = owns
        self.peaks: dict[str, int] = {}
        """Peaks by uuid, for each GPU that the probe used."""
        self.pids: set[int] = set()
        """Processes of the probe that were seen on a GPU."""
        self.note = ""
        self.blind: str | None = None
        """Why the last look did not show the probe's memory."""
        self.works = False
        """A GPU of the probe was busy or unknown in the last look."""

    @property
    def peak(self) -> int:
        """The peak on the GPU with the most use."""
        return max(self.peaks.values(), default=0)

    def see(self, look: Look) -> str | None:
        """Updates the peaks. Returns a reason if the memory is unknown."""
        self.works = False
        self.blind = None
        for reading in look.readings:
            held = self._held(reading)
            if held > self.peaks.get(reading.uuid, 0):
                self.peaks[reading.uuid] = held
            if held and (not known(reading.utilization) or reading.utilization.peak > 0):
                self.works = True
        return self.blind

    def _held(self, reading: Reading) -> int:
        """The memory that the probe holds on a GPU now."""
        if known(reading.processes):
            own = [one for one in reading.processes if known(one.started) and self._owns(one.pid)]
            self.pids |= {one.pid for one in own}
            amounts = [one.memory for one in own if known(one.memory)]
            if len(amounts) == len(own) and (own or all(one.is_identified for one in reading.processes)):
                return sum(amounts)
        return self._difference(reading) if reading.uuid in self._expected else 0

    def _difference(self, reading: Reading) -> int:
        before = self._before.get(reading.uuid)
        if not known(reading.memory_used):
            self.blind = reading.memory_used.reason
            return 0
        if before is None or not known(before.memory_used):
            return 0
        more = reading.memory_used - before.memory_used
        if more <= BLOCK:
            return 0  # the windows of a desktop vary this much
        self.note = DIFFERENCE_NOTE
        return more


class Plateau:
    """Detects that the peak has stopped rising. A program that only loads data so far does not count."""

    def __init__(self, flat_for: float) -> None:
        self._flat_for = flat_for
        self._level = 0
        self._since = 0.0
        self._steps = 0
        self._worked = False

    def see(self, at: float, peak: int, steps: int, works: bool) -> None:
        if peak > self._level + self._level * WITHIN + (BLOCK if self._level else 0):
            self._level, self._since, self._steps = peak, at, steps
            self._worked = False
        self._worked = self._worked or works

    def reached(self, at: float, steps: int) -> bool:
        """`steps`: the number of steps in the output; 0 if unknown."""
        if not self._level:
            return False
        stayed = at - self._since
        if not steps:
            return self._worked and stayed >= self._flat_for
        return (steps - self._steps >= FLAT_STEPS and stayed >= _FLAT_LEAST) or stayed >= self._flat_for * _SELDOM


# The first steps compile and warm up, so only the last readings count.
KEPT: Final = 20
# The kept part of an unfinished line.
_LONGEST_LINE: Final = 4096
_NUMBER: Final = r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
_BREAKS: Final = re.compile(r"[\r\n]")
# Progress bars of something other than steps.
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
# A bar shows how many steps are done; a line about step 12 is printed when step 12 is done, and the first may be 0.
_BAR: Final = re.compile(r"(?<![\d/.])([0-9]+)/([0-9]+)\s*(?:\[|━)")
_LINE: Final = re.compile(
    r"\b(?:global[_ ]?step|step|iter|iteration|batch)\b\s*(?:[:=#\[]\s*)?([0-9]+)(?![\d.]|\s*(?:it|ms|s|B|MB|GB)\b)",
    re.IGNORECASE,
)
_EPOCH: Final = re.compile(r"\bepoch\b.{0,20}?\[\s*([0-9]+)\s*/\s*([0-9]+)", re.IGNORECASE)


class Rates:
    """Derives the speed of a program from the last readings in its output."""

    def __init__(self, pattern: str | None = None) -> None:
        """`pattern`: its first group is the number of examples per second."""
        self._pattern = None if pattern is None else _compiled(pattern)
        self._rest = ""
        # A program may draw several bars at a time, which differ by their totals.
        self._counters: dict[tuple[re.Pattern[str], str], _Counter] = {}
        # Each converts a batch size into examples per second.
        self._readings: deque[Callable[[int], float]] = deque(maxlen=KEPT)
        self._moments: deque[tuple[float, int]] = deque(maxlen=KEPT)

    @property
    def steps_seen(self) -> int:
        """Steps since the first one in the output."""
        return max((counter.made for counter in self._counters.values()), default=0)

    def feed(self, text: str, now: float | None = None) -> None:
        """Processes output. `now`: seconds on any clock, for the speed of output that only counts steps."""
        *lines, rest = _BREAKS.split(self._rest + text)
        self._rest = rest[-_LONGEST_LINE:]
        for line in lines:
            self._read(line[-_LONGEST_LINE:])
        if now is not None and (not self._moments or self.steps_seen > self._moments[-1][1]):
            self._moments.append((now, self.steps_seen))

    def rate(self, size: int) -> float | None:
        """Examples per second with batches of that size; None if the output does not show it."""
        # The first of few readings belongs to a cold start.
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
    """A kind of step counter, which may start anywhere and restarts with each epoch."""

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
    return lambda _: number


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
