"""The stalled rule: GPUs are fully used without doing work, in a job that has stopped making steps.

A collective that waits for a lost rank spins: utilization stays at 100 % forever. Power alone cannot tell that from
light work, so every board is compared with its own history in this run: its memory, tensor cores and power while the
job made steps. The rule acts only on a job that has made steps before and makes none now.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from stoker.errors import BadInputError
from stoker.gpus.model import JobProgress, Maybe, Process, Reading, known
from stoker.gpus.nvidia import RESET_XIDS
from stoker.rules.rule import (
    LOOK_TAKES,
    Activity,
    Observation,
    Option,
    Policy,
    Rule,
    Verdict,
    duration_option,
)
from stoker.units import format_duration, format_percent, list_all, parse_length

# Longer than evaluations and checkpoint saves in which other ranks wait in a barrier.
DEFAULT_WINDOW: Final = 3600.0
# The window is shorter after a rank's process has died, since it does not come back.
LOST_RANK_SHARE: Final = 1 / 6
# A step may be this late, and three times the longest interval of steps so far.
SHORTEST_SILENCE: Final = 600.0
LATE: Final = 3.0
# The absence of steps is meaningful only after this many.
LEAST_STEPS: Final = 3
# The utilization of a fully used board; spinning kernels never leave a gap. Single driver samples may be lower: then
# half is enough, if all known counters show no activity.
_FULL: Final = 0.95
_HALF: Final = 0.5
# Above this share of the power limit, or of the peak power at steps without a limit, a board certainly works.
_MOST_POWER: Final = 0.55
# The activity of memory or tensor cores that counts as none, and the least that proves a working counter.
_STILL: Final = 0.02
_ALIVE: Final = 0.03
# If only power is known: the share of the range from the board's idle power to its typical power. The two must differ
# by this share of the limit to be meaningful.
_POWER_SHARE: Final = 0.15
_LEAST_RANGE: Final = 0.08
# Below these shares of the typical value a board works lightly or not at all. This weak evidence must last longer than
# light evaluations.
_LOW_ACTIVITY_SHARE: Final = 0.2
_LOW_POWER_SHARE: Final = 0.45
_WEAK_WINDOWS: Final = 3.0
# The weakest evidence: a counter at half of its typical value, together with low power.
_HALF_ACTIVITY_SHARE: Final = 0.5
_FAINT_WINDOWS: Final = 4.0
# An interruption of the window up to this time and share, such as a health check, only pauses it.
_LONGEST_PAUSE: Final = 300.0
_PAUSE_SHARE: Final = 1 / 4
# The same limit for unknown readings, such as during a driver reset.
_LONGEST_UNKNOWN: Final = 60.0
# The CPU cores of a waiting rank: its main thread and the collective's own may spin.
_SPINNING_CORES: Final = 1.3
_CPU_WINDOWS: Final = 3.0
# In windows: a live rank with an unused board may prepare data for the others, for up to an hour and a half.
_ABSENT_RANK_WINDOWS: Final = 2.0
# A foreign process with this share of a board makes its counters useless.
_FOREIGN_SHARE: Final = 0.05
_MOST_VALUES: Final = 128
# The share of a stretch of strong evidence in which it may be weaker, or the CPU busier, as for a health check.
_OTHER_SHARE: Final = 0.05
_ALL_WINDOWS: Final = (LOST_RANK_SHARE, 1.0, _ABSENT_RANK_WINDOWS, _CPU_WINDOWS, _FAINT_WINDOWS)


class StalledPolicy(Policy, frozen=True, kw_only=True):
    """The settings of the stalled rule: GPUs spin without work, and no step is made, for all of `window`."""

    window: float = DEFAULT_WINDOW
    unseen_for: float | None = None
    """The limit for a job without visible progress or without any step; None only warns."""

    def check(self) -> None:
        if not (math.isfinite(self.window) and self.window > 0):
            raise BadInputError("--stalled-for must be greater than zero")
        if self.unseen_for is not None and not (math.isfinite(self.unseen_for) and self.unseen_for > 0):
            raise BadInputError("--stalled-unseen-for must be greater than zero, or off")
        super().check()

    def in_words(self) -> str:
        return f"hung at full utilization for {format_duration(self.window)}"


STALLED_OPTIONS: Final = (
    duration_option("--stalled-for", "window", "How long GPUs may be fully used without work while no step is made"),
    Option(
        "--stalled-unseen-for",
        "unseen_for",
        "duration",
        lambda text: None if text.strip().lower() == "off" else parse_length(text),
        "DURATION|off",
        "The same for a job whose steps cannot be seen, or that made none; off: only warn",
        lambda seconds: "off" if seconds is None else format_duration(seconds),
    ),
)


# The certainty that a board does no work: it works; no evidence of work; faint and weak evidence of no work; certain.
_WORKS, _SUSPECT, _FAINT, _WEAK, _SURE = range(5)


_LONG_WINDOWS: Final = {_FAINT: _FAINT_WINDOWS, _WEAK: _WEAK_WINDOWS}


class _Typical:
    """The median of a counter over a long time, from a bounded number of values."""

    def __init__(self) -> None:
        self._values: list[float] = []
        self._every = 1
        self._skipped = 0
        self.median: float | None = None

    def add(self, value: float) -> None:
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self._values.append(value)
        if len(self._values) == _MOST_VALUES:
            self._values = self._values[::2]
            self._every *= 2
        self.median = sorted(self._values)[len(self._values) // 2]


class _Work:
    """A counter's values while the job works: at looks with a step, or at all looks if those are too few."""

    def __init__(self) -> None:
        self._at_steps, self._always = _Typical(), _Typical()
        self._steps = 0

    def add(self, value: float, *, stepped: bool) -> None:
        self._always.add(value)
        if stepped:
            self._at_steps.add(value)
            self._steps += 1

    @property
    def median(self) -> float | None:
        return self._at_steps.median if self._steps >= LEAST_STEPS else self._always.median


class _Board:
    """One GPU's history in this run, and its current state."""

    def __init__(self) -> None:
        self.label = ""
        self.had_process = False
        """A process of the job was on it while the job made steps."""
        self.lost_process = False
        self.steps_without = 0
        """The number of steps since a process of the job was last on it."""
        self.is_broken = False
        """The driver has reported a fatal error."""
        self.steps_since_fault = 0
        """The number of steps since the fault, which may pass."""
        self._most_power = 0.0
        """The peak power at a step in watts."""
        self.floor: float | None = None
        """The idle power in watts."""
        self._power, self._memory, self._dram, self._tensor = _Work(), _Work(), _Work(), _Work()

    def note_fault(self, reading: Reading | None, *, stepped: bool) -> None:
        """Notes a fault. One more step may be seen after it; further steps mean that the fault has passed."""
        has_fault = self.is_broken or _is_broken(reading)
        if stepped and has_fault:
            self.steps_since_fault += 1
        self.is_broken = has_fault and self.steps_since_fault < LEAST_STEPS

    def learn(self, reading: Reading, *, stepped: bool) -> None:
        """Updates the history of working values."""
        if stepped and known(reading.power):
            self._most_power = max(self._most_power, reading.power)
        for typical, value in (
            (self._power, reading.power),
            (self._memory, _memory_mean(reading)),
            (self._dram, reading.pipes.dram if known(reading.pipes) else reading.pipes),
            (self._tensor, reading.pipes.tensor if known(reading.pipes) else reading.pipes),
        ):
            if known(value):
                typical.add(value, stepped=stepped)

    def learn_floor(self, reading: Reading) -> None:
        if known(reading.power) and known(reading.utilization) and reading.utilization.peak == 0:
            self.floor = reading.power if self.floor is None else min(self.floor, reading.power)

    def hollowness(self, reading: Reading) -> int:
        """The certainty that it is fully used without doing work."""
        used, power, limit = reading.utilization, reading.power, reading.power_limit
        if not known(used) or used.mean < _HALF:
            return _WORKS
        most = limit if known(limit) and limit > 0 else self._most_power
        if known(power) and 0 < most * _MOST_POWER < power:
            return _WORKS
        pipes, memory = reading.pipes, _memory_mean(reading)
        piped = [(pipes.dram, self._dram), (pipes.tensor, self._tensor)] if known(pipes) else []
        counters = _working(piped) or _working([(memory, self._memory)])
        if used.mean < _FULL:
            dead = bool(counters) and all(value <= _STILL * used.mean for value, _typical in counters)
            return _SURE if dead and self._power_is_low(power) else _WORKS
        if counters:
            stillness = min(_stillness(value, typical) for value, typical in counters)
            return _WORKS if stillness == _FAINT and not self._power_is_low(power) else stillness
        shown = [value for value in (memory, *(value for value, _history in piped)) if known(value)]
        return self._hollowness_by_power(power, limit) or (_SUSPECT if shown and max(shown) <= _STILL else _WORKS)

    def _hollowness_by_power(self, power: Maybe[float], limit: Maybe[float]) -> int:
        if self._power_is_near_the_floor(power, limit):
            return _SURE
        return _WEAK if self._power_is_low(power) else _WORKS

    def _power_is_near_the_floor(self, power: Maybe[float], limit: Maybe[float]) -> bool:
        typical = self._power.median
        if not known(power) or typical is None or self.floor is None:
            return False
        least = limit * _LEAST_RANGE if known(limit) else self.floor * 0.5
        return typical - self.floor >= least and power <= self.floor + (typical - self.floor) * _POWER_SHARE

    def _power_is_low(self, power: Maybe[float]) -> bool:
        typical = self._power.median
        return known(power) and typical is not None and power <= typical * _LOW_POWER_SHARE

    def describe(self, reading: Reading) -> str:
        """`GPU 0: 100 % used at 112 W of 700 W, memory 0 % (38 % while it worked)`."""
        said = [format_percent(reading.utilization.mean) + " used"] if known(reading.utilization) else []
        if known(reading.power):
            of = f" of {reading.power_limit:.0f} W" if known(reading.power_limit) else ""
            said.append(f"{reading.power:.0f} W{of}{_while_working(self._power, '{:.0f} W')}")
        if known(reading.pipes) and known(reading.pipes.dram):
            said.append(f"memory {format_percent(reading.pipes.dram)}{_while_working(self._dram)}")
        elif known(memory := _memory_mean(reading)):
            said.append(f"memory {format_percent(memory)}{_while_working(self._memory)}")
        return f"{self.label}: {', '.join(said)}"


def _while_working(typical: _Work, form: str = "") -> str:
    median = typical.median
    if median is None:
        return ""
    return f" ({form.format(median) if form else format_percent(median)} while it worked)"


def _memory_mean(reading: Reading) -> Maybe[float]:
    return reading.memory_activity.mean if known(reading.memory_activity) else reading.memory_activity


def _working(counters: Sequence[tuple[Maybe[float], _Work]]) -> list[tuple[float, float]]:
    """Current and typical values of working counters. Some boards always report zero."""
    return [
        (value, typical)
        for value, history in counters
        if known(value) and (typical := history.median) is not None and typical >= _ALIVE
    ]


def _stillness(value: float, typical: float) -> int:
    if value <= _STILL:
        return _SURE
    if value <= typical * _LOW_ACTIVITY_SHARE:
        return _WEAK
    return _FAINT if value <= typical * _HALF_ACTIVITY_SHARE else _WORKS


class _Steps:
    """The steps of the job, and the delay of the next one."""

    def __init__(self) -> None:
        self.count = 0
        self.last_at: float | None = None
        self.longest_gap = 0.0
        self.trust = "none"
        self._seen: int | None = None

    def observe(self, progress: JobProgress) -> bool:
        """True if there was a new step."""
        if progress.steps is None or progress.since is None:
            return False
        if progress.trust != self.trust:
            # Counts of different sources are not comparable, so the new one starts over.
            self.trust, self._seen, self.count = progress.trust, None, 0
        before, self._seen = self._seen, progress.steps
        if before is None or before == progress.steps:
            return False
        if self.last_at is not None:
            self.longest_gap = max(self.longest_gap, progress.since - self.last_at)
        self.last_at = progress.since
        self.count += 1
        return True

    @property
    def are_seen(self) -> bool:
        return self.count >= LEAST_STEPS

    def is_late(self, at: float) -> bool:
        """True if the next step is later than any before, so that current activity may not be work."""
        return self.are_seen and self.last_at is not None and at - self.last_at > max(self.longest_gap, 60.0)

    def overdue_at(self, window: float) -> float:
        """The time after which no further step is expected."""
        shortest = min(SHORTEST_SILENCE, window)
        return (self.last_at or 0.0) + max(shortest, LATE * self.longest_gap)


class _Stretch:
    """Measures the time for which the evidence has required at most this number of windows."""

    def __init__(self, windows: float) -> None:
        self.windows = windows
        self.since = 0.0
        self._other = 0.0
        """Seconds since then that required more windows."""

    def begin(self, at: float) -> None:
        self.since, self._other = at, 0.0

    def observe(self, at: float, passed: float, windows: float) -> None:
        if windows > self.windows:
            self._other += passed
        if self._other > (at - self.since) * _OTHER_SHARE:
            self.begin(at)


class _Look(NamedTuple):
    """The state of the boards at one look."""

    hollow: Sequence[Activity]
    surely: int
    """The certainty of the hollow ones."""
    absent: bool
    """A live process of the job is on an unused board."""
    working: Sequence[Activity]
    unknown: Sequence[Activity]
    """Unknown boards, except broken ones."""


class StalledRule(Rule):
    """The stalled rule, which compares each board with its own history and waits for steps."""

    def __init__(self, policy: StalledPolicy, begun: float, _look_takes: float = LOOK_TAKES) -> None:
        policy.check()
        self.policy = policy
        self._boards: dict[str, _Board] = {}
        self._steps = _Steps()
        self._not_before = begun
        self._snoozed_until = begun
        self._last: float | None = None
        self._since: float | None = None
        """Since when boards have been hollow and none has worked, except for interruptions."""
        self._stretches = [_Stretch(windows) for windows in _ALL_WINDOWS]
        self._interrupted_at: float | None = None
        self._interruptions = 0.0
        """Seconds of past interruptions."""
        self._unknown_only = False
        self._spent = False
        self._due: float | None = None

    def observe(self, observation: Observation) -> Verdict:
        at = observation.at
        last, self._last = self._last, at
        if last is not None and not 0 <= at - last <= self.policy.longest_gap:
            self._restart()
        stepped = self._steps.observe(observation.progress)
        self._boards = {a.uuid: self._boards.get(a.uuid) or _Board() for a in observation.activities}
        look = self._sort(at, observation.activities, stepped=stepped)
        self._find_lost_ranks(observation.activities, stepped=stepped)
        windows = self._windows(look, observation.progress)
        self._spent = self._spent and not stepped and not look.working
        if stepped:
            self._restart()
        else:
            self._advance(at, last, look, windows)
        verdict = self._verdict(at, look, windows)
        # None while no decision is due; otherwise looks would follow each other immediately.
        self._due = at + verdict.left if verdict.left > 0 else None
        return verdict

    def due(self) -> float | None:
        return self._due

    def snooze(self, until: float) -> None:
        self._snoozed_until = until
        self._restart()

    def rearm(self, at: float) -> None:
        self._spent = True
        self._steps = _Steps()
        self._not_before = max(self._not_before, at)
        self._restart()

    # State

    @property
    def _earliest(self) -> float:
        return max(self._not_before, self._snoozed_until)

    def _restart(self) -> None:
        self._since = self._interrupted_at = self._due = None
        self._interruptions = 0.0

    def _sort(self, at: float, activities: Sequence[Activity], *, stepped: bool) -> _Look:
        hollow, working, unknown = [], [], []
        surely, absent = _SURE, False
        for activity in activities:
            board = self._boards[activity.uuid]
            board.label = activity.label
            reading = activity.reading
            board.note_fault(reading, stepped=stepped)
            if reading is None or not known(activity.peak) or not known(reading.utilization):
                if not board.is_broken:
                    unknown.append(activity)
                continue
            board.learn_floor(reading)
            if activity.peak == 0:
                absent = absent or bool(activity.processes)
                continue
            if _foreign_share(reading, activity.processes) >= _FOREIGN_SHARE:
                working.append(activity)
                continue
            hollowness = _WORKS if stepped else board.hollowness(reading)
            if hollowness == _SUSPECT and self._steps.are_seen:
                hollowness = _WORKS
            if hollowness != _WORKS:
                hollow.append(activity)
                surely = min(surely, hollowness)
            elif reading.utilization.mean >= self.policy.below:
                working.append(activity)
            if (hollowness == _WORKS and not self._steps.is_late(at)) or stepped:
                board.learn(reading, stepped=stepped)
        return _Look(hollow, surely, absent, working, unknown)

    def _find_lost_ranks(self, activities: Sequence[Activity], *, stepped: bool) -> None:
        for activity in activities:
            board = self._boards[activity.uuid]
            if activity.processes:
                board.had_process = board.had_process or stepped
                board.steps_without = 0
            elif stepped:
                # One more step of the others may be seen after the process has ended. Further steps do without it.
                board.steps_without += 1
                board.had_process = board.had_process and board.steps_without < LEAST_STEPS
            is_known = activity.reading is not None and known(activity.reading.processes)
            if stepped or is_known:
                board.lost_process = board.had_process and not stepped and not activity.processes

    def _advance(self, at: float, last: float | None, look: _Look, windows: float) -> None:
        if at < self._earliest:
            self._restart()
        elif look.unknown or look.working or not look.hollow:
            if self._since is None:
                return
            if self._interrupted_at is None:
                self._interrupted_at = at if last is None else last
                self._unknown_only = True
            self._unknown_only = self._unknown_only and not look.working and bool(look.unknown)
            longest = min(_LONGEST_PAUSE, self.policy.window * _PAUSE_SHARE)
            # A job that works now and then is not hung, so all pauses together must be a small part of the time.
            most = max(longest, (self._interrupted_at - self._since) * _PAUSE_SHARE)
            passed = at - self._interrupted_at
            if passed > (_LONGEST_UNKNOWN if self._unknown_only else longest) or passed + self._interruptions > most:
                self._restart()
        elif self._since is None:
            self._since = max(at - self._covered(at, last, look), self._earliest)
            for stretch in self._stretches:
                stretch.begin(self._since)
        elif self._interrupted_at is not None:
            pause = max(at - self._covered(at, last, look), self._interrupted_at) - self._interrupted_at
            self._since += pause
            self._interruptions += pause
            for stretch in self._stretches:
                stretch.since += pause
            self._interrupted_at = None
        elif last is not None:
            for stretch in self._stretches:
                stretch.observe(at, at - last, windows)

    def _covered(self, at: float, last: float | None, look: _Look) -> float:
        """Seconds before this look that its readings cover."""
        span = min(activity.span for activity in look.hollow)
        return 0.0 if last is None else max(min(span, at - last), 0.0)

    # Verdicts

    def _verdict(self, at: float, look: _Look, windows: float) -> Verdict:
        if self._spent:
            return Verdict("arming", "it has fired: not armed until the GPUs work again")
        if self._since is None or self._interrupted_at is not None:
            return self._not_stalled(look)._replace(is_paused=self._since is not None)
        ends, certain = self._ends(windows)
        over = at >= ends
        acts = over and certain
        labels = [activity.label for activity in look.hollow]
        return Verdict(
            "stalled" if acts else "waiting",
            self._in_words(at, labels, certain=certain, over=over),
            "act" if acts else "warn" if over else "none",
            cause="it hangs: its GPUs are fully used without doing work",
            quiet=True,
            hang=True,
            since=self._since,
            progress=0.0 if not certain else 1.0 if over else max(at - self._since, 0.0) / (ends - self._since),
            left=max(ends - at, 0.0),
            gpus=tuple(activity.uuid for activity in look.hollow),
            evidence=self._evidence(at, look),
        )

    def _ends(self, windows: float) -> tuple[float, bool]:
        """When the boards will have been hollow long enough, and whether the rule may act."""
        policy = self.policy
        if not self._steps.are_seen:
            window = policy.window if policy.unseen_for is None else policy.unseen_for
            return (self._since or 0.0) + window, policy.unseen_for is not None
        stretches = [stretch for stretch in self._stretches if stretch.windows >= windows]
        ends = min(stretch.since + policy.window * stretch.windows for stretch in stretches)
        return max(ends, self._steps.overdue_at(policy.window)), True

    def _windows(self, look: _Look, progress: JobProgress) -> float:
        """The number of windows that the current evidence requires."""
        if look.surely in _LONG_WINDOWS:
            return _LONG_WINDOWS[look.surely]
        if any(board.lost_process or board.is_broken for board in self._boards.values()):
            return LOST_RANK_SHARE
        ranks = sum(max(len(activity.processes), 1) for activity in look.hollow)
        if progress.cpu is not None and progress.cpu > ranks * _SPINNING_CORES + 1.0:
            return _CPU_WINDOWS
        return _ABSENT_RANK_WINDOWS if look.absent else 1.0

    def _not_stalled(self, look: _Look) -> Verdict:
        if look.unknown and not look.working:
            first = look.unknown[0]
            reason = first.peak.reason if not known(first.peak) else "its utilization is unknown"
            return Verdict("unknown", f"{first.label} is unknown: {reason}")
        if not self._boards:
            return Verdict("unknown", "there is no GPU to judge by")
        if look.working:
            return Verdict("busy", f"{look.working[0].label} works")
        return Verdict("waiting", "no GPU spins without doing work")

    def _in_words(self, at: float, labels: Sequence[str], *, certain: bool, over: bool) -> str:
        since = self._since if self._since is not None else at
        spin = "has" if len(labels) == 1 else "have"
        said = f"{list_all(labels)} {spin} been fully used without doing work for {format_duration(at - since)}"
        if self._steps.are_seen and self._steps.last_at is not None:
            said += f" and the job made no step for {format_duration(at - self._steps.last_at)}"
        elif not certain:
            said += "; the job may hang, but its steps cannot be seen"
            said += ": call stoker.step() in its loop, or stop such jobs with --stalled-unseen-for 2h" if over else ""
        lost = [board.label for board in self._boards.values() if board.lost_process]
        broken = [board.label for board in self._boards.values() if board.is_broken]
        said += f"; the process on {list_all(lost)} is gone" if lost else ""
        return f"{said}; {list_all(broken)} reported a fatal error" if broken else said

    def _evidence(self, at: float, look: _Look) -> tuple[str, ...]:
        lines = [
            self._boards[activity.uuid].describe(activity.reading)
            for activity in look.hollow
            if activity.reading is not None
        ]
        steps = self._steps
        if steps.are_seen and steps.last_at is not None:
            gap = f"; the longest pause before was {format_duration(steps.longest_gap)}" if steps.longest_gap else ""
            seen_by = SEEN_BY.get(steps.trust, steps.trust)
            lines.append(f"no step for {format_duration(at - steps.last_at)}{gap} (seen by {seen_by})")
        else:
            lines.append("steps of the job cannot be seen, or it has made none")
        lines += [
            f"{board.label}: " + ("it reported a fatal error" if board.is_broken else "the job's process on it is gone")
            for board in self._boards.values()
            if board.lost_process or board.is_broken
        ]
        return tuple(lines)


SEEN_BY: Final = {
    "call": "calls of stoker.step()",
    "log": "step counts in its log",
    "events": "the event files of its tracker",
    "checkpoint": "its checkpoint files",
    "output": "its output",
}


def _is_broken(reading: Reading | None) -> bool:
    return reading is not None and known(reading.health) and not RESET_XIDS.isdisjoint(reading.health.xids)


def _foreign_share(reading: Reading, own: Sequence[Process]) -> float:
    """The share of foreign processes on the board, if the job's own are known."""
    if not own or not known(reading.processes):
        return 0.0
    pids = {process.pid for process in own}
    foreign = [process.utilization for process in reading.processes if process.pid not in pids]
    return sum(share if known(share) else 1.0 for share in foreign)
