"""The idle rule: the required number of GPUs stays below a threshold for a whole window.

The window is longer before the job has used a GPU, since downloads and preparation take hours, and while its processes
keep a CPU core busy, since an evaluation may run there. Unknown readings pause a clock for up to a minute; a longer
pause restarts it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

from stoker.errors import BadInputError
from stoker.gpus.model import JobProgress, Maybe, Unknown
from stoker.rules.rule import (
    DEFAULT_BELOW,
    DEFAULT_EVERY,
    LOOK_TAKES,
    Activity,
    Observation,
    Option,
    Policy,
    Rule,
    Verdict,
    duration_option,
    longest_unseen,
    percentage_option,
)
from stoker.units import format_duration, format_percent, list_all

Require = Literal["all", "any"] | int

# Longer than checkpoints, validation on the CPU and most compilations; a wasted half hour is cheaper than a killed run.
DEFAULT_WINDOW: Final = 1800.0
# The window starts after imports, data download and the first compilation.
DEFAULT_AFTER: Final = 600.0
# In windows: datasets of 100 GB take four to six hours before the first kernel runs.
UNUSED_WINDOWS: Final = 12.0
# The share of that if the job's processes did nothing at all, so that nothing is being prepared.
QUIET_SHARE: Final = 1 / 3
# In windows: evaluations on the CPU take up to an hour. An idle server may spin forever, so there is a limit.
CPU_WINDOWS: Final = 4.0
# Long enough for a driver reset or an intermittent failure.
LONGEST_PAUSE: Final = 60.0
# A window needs this many driver samples, and a short one a sample per usual interval of looks. Fewer momentary samples
# could all fall between the bursts of a busy job.
LEAST_SAMPLES: Final = 60
# Work that may be foreign counts as the job's use of a GPU only after this time and this share of the window. A health
# check is shorter.
_LONG_USE: Final = 300.0
_LONG_USE_SHARE: Final = 1 / 6
# From here on, the job's processes work on the CPU: in cores, and in bytes of I/O per second.
_WORKING_CORES: Final = 0.5
_WORKING_IO: Final = 1e6
# Progress that only a working job makes.
_STEPS: Final = ("call", "log")
# Below this, they do nothing; an idle notebook stays below.
_QUIET_CORES: Final = 0.05
_QUIET_IO: Final = 1e5
# Up to this many GPUs are listed by name; beyond it, "all 8 GPUs".
_MOST_NAMES: Final = 4


class IdlePolicy(Policy, frozen=True, kw_only=True):
    """The settings of the idle rule: `require` GPUs stay below `below` for all of `window`."""

    below: float = DEFAULT_BELOW
    window: float = DEFAULT_WINDOW
    after: float = DEFAULT_AFTER
    require: Require = "all"
    """All GPUs, any GPU, or a number of them; all if there are fewer."""
    arm_above: float | None = None
    """The rule is armed once a GPU stays at or above this for `arm_for`. None: armed from the start."""
    arm_for: float = 0.0
    unused_for: float | None = None
    """The window before the job has used a GPU; at least `window`. None: `UNUSED_WINDOWS` times `window`."""
    cpu_for: float | None = None
    """The window while the job's processes keep a core busy; at least `window`. None: `CPU_WINDOWS` times `window`."""

    @property
    def unused_window(self) -> float:
        return self.window * UNUSED_WINDOWS if self.unused_for is None else max(self.unused_for, self.window)

    @property
    def cpu_window(self) -> float:
        return self.window * CPU_WINDOWS if self.cpu_for is None else max(self.cpu_for, self.window)

    def check(self) -> None:
        durations = (self.window, self.after, self.every, self.arm_for, self.unused_for or 0.0, self.cpu_for or 0.0)
        if not all(map(math.isfinite, durations)):
            raise BadInputError(
                "--for, --after, --every, --arm-for, --unused-for and --cpu-for must be finite durations"
            )
        if min(self.unused_for or 0.0, self.cpu_for or 0.0) < 0:
            raise BadInputError("--unused-for and --cpu-for cannot be negative")
        if not 0 < self.below <= 1:
            raise BadInputError(f"--below {format_percent(self.below)} would never or always be idle: use 1% to 100%")
        if self.every <= 0 or self.window <= 0:
            raise BadInputError("--every and --for must be greater than zero")
        if self.window < self.every:
            raise BadInputError(
                f"--for {format_duration(self.window)} is shorter than --every {format_duration(self.every)}: "
                "not a single look would fit into the window"
            )
        if self.after < 0 or self.arm_for < 0:
            raise BadInputError("--after and --arm-for cannot be negative")
        if self.arm_above is not None and not 0 < self.arm_above <= 1:
            raise BadInputError(
                f"--arm-above {format_percent(self.arm_above)} is not a level of activity: use 1% to 100%"
            )
        if self.arm_above is None and self.arm_for:
            raise BadInputError("--arm-for needs --arm-above: how busy is active enough?")
        if isinstance(self.require, int) and self.require < 1:
            raise BadInputError("--require must be all, any or a number of GPUs from 1 on")
        super().check()

    def check_gpus(self, count: int) -> None:
        if isinstance(self.require, int) and self.require > count:
            raise BadInputError(f"--require {self.require} can never be: only {count} GPU(s) are watched")

    def in_words(self) -> str:
        if isinstance(self.require, int):
            who = f"at least {self.require} GPU{'s' if self.require > 1 else ''}"
        else:
            who = "all GPUs" if self.require == "all" else "any GPU"
        return f"{who} below {format_percent(self.below)} for {format_duration(self.window)}"

    def conditions(self) -> list[str]:
        found = [f"not in the first {format_duration(self.after)}"] if self.after else []
        if self.unused_window > self.window:
            found.append(f"{format_duration(self.unused_window)} before a GPU was used")
        if self.cpu_for is not None and self.cpu_window > self.window:
            found.append(f"{format_duration(self.cpu_window)} while the job works on the CPU")
        if self.arm_above is not None:
            length = f" for {format_duration(self.arm_for)}" if self.arm_for else ""
            found.append(f"armed once a GPU was at {format_percent(self.arm_above)} or more{length}")
        return found


def _parse_require(text: str) -> Require:
    written = text.strip().lower()
    if written == "all":
        return "all"
    if written == "any":
        return "any"
    if written.isascii() and written.isdigit() and len(written) < 10 and int(written) >= 1:
        return int(written)
    raise BadInputError(f"{text!r} is not a number of GPUs: write all, any or a number from 1 on")


def _or(default: str) -> Callable[[Any], str]:
    return lambda seconds: default if seconds is None else format_duration(seconds)


IDLE_OPTIONS: Final = (
    percentage_option("--below", "below", "A GPU is idle while its utilization stays below this"),
    duration_option("--for", "window", "How long it must stay idle without a break"),
    duration_option("--after", "after", "Start-up delay: the window begins after this"),
    Option("--require", "require", "number of GPUs", _parse_require, "all|any|N", "How many of the GPUs must be idle"),
    percentage_option(
        "--arm-above",
        "arm_above",
        "Do nothing before some GPU was at or above this once",
        lambda share: "always armed" if share is None else format_percent(share),
    ),
    duration_option("--arm-for", "arm_for", "For how long it must have been, in one stretch"),
    duration_option(
        "--unused-for",
        "unused_for",
        "The window before the job has used a GPU",
        _or(f"{UNUSED_WINDOWS:g} times --for"),
    ),
    duration_option(
        "--cpu-for", "cpu_for", "The window while the job works on the CPU", _or(f"{CPU_WINDOWS:g} times --for")
    ),
)


class _IdleClock:
    """Measures how long one GPU has been idle without a break, leaving out unknown time."""

    def __init__(self) -> None:
        self.idle_since: float | None = None
        self.samples = 0
        """The number of driver samples since then."""
        self.fresh = True
        """It has been used since the rule last fired, if ever."""
        self.paused_at: float | None = None
        """The time of the last readable look, during unreadable ones."""
        self._last: float | None = None

    def observe(self, at: float, activity: Activity, policy: IdlePolicy, unseen: float, earliest: float) -> None:
        last, self._last = self._last, at
        gap = _is_gap(last, at, policy.longest_gap)
        if gap:
            self.idle_since = self.paused_at = None
        if isinstance(activity.peak, Unknown):
            self._pause(last, at)
            return
        if last is not None and at - last - activity.span > unseen:
            gap = True  # a momentary sample does not cover the time before it
        paused_at, self.paused_at = self.paused_at, None
        if not _is_idle(activity.peak, policy.below):
            self.idle_since = None
            self.fresh = True
            return
        seen_from = at if gap else _seen_from(last, at, activity.span, policy.longest_gap)
        if gap or self.idle_since is None:
            self.idle_since = max(seen_from, earliest)
            self.samples = 0
        elif paused_at is not None:
            self.idle_since += seen_from - paused_at
        self.samples += _samples(activity)

    def _pause(self, last: float | None, at: float) -> None:
        if self.paused_at is None:
            self.paused_at = at if last is None else last
        if at - self.paused_at > LONGEST_PAUSE:
            self.idle_since = None

    def restart(self) -> None:
        """Discards the idle time so far, but keeps the time of the last look."""
        self.idle_since = None

    def rearm(self) -> None:
        """Notes that the rule has fired. If this GPU was idle, it must be used before the rule fires for it again."""
        self.fresh = self.fresh and (self.idle_since is None or self.paused_at is not None)
        self.restart()


class _CpuClock:
    """Measures the CPU work of the job's processes since its GPUs became idle."""

    def __init__(self) -> None:
        self._worked = 0.0
        self._quiet_since: float | None = None
        self._last: float | None = None
        self._steps: int | None = None
        self.step_at: float | None = None
        """The time of the job's last trusted step."""

    def observe(self, at: float, progress: JobProgress, longest_gap: float, *, idle: bool) -> None:
        last, self._last = self._last, at
        if progress.trust in _STEPS and progress.steps != self._steps:
            self._steps, self.step_at = progress.steps, progress.since
        passed = 0.0 if last is None or _is_gap(last, at, longest_gap) else at - last
        cpu, io = progress.cpu, progress.io or 0.0
        if not idle:
            self._worked = 0.0
        elif cpu is not None and (cpu >= _WORKING_CORES or io >= _WORKING_IO):
            self._worked += passed
        if cpu is None or cpu > _QUIET_CORES or io > _QUIET_IO or not idle or not passed:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = last

    def works(self, idle_for: float) -> bool:
        """True if they worked for at least half of the time."""
        return self._worked > 0 and self._worked >= idle_for / 2

    def quiet_since(self) -> float | None:
        """The start of their inactivity, if any."""
        return self._quiet_since


class _ArmingClock:
    """Measures how long some GPU has been active at every look.

    A peak proves activity at only one moment before its look. The stretch therefore starts with the first active look,
    so that a short burst between two looks never counts as a long one.
    """

    def __init__(self, policy: IdlePolicy) -> None:
        self._policy = policy
        self._active_since: float | None = None
        self._last: float | None = None
        self.armed = policy.arm_above is None

    def observe(self, at: float, activities: Sequence[Activity]) -> None:
        if self.armed or self._policy.arm_above is None:
            return
        gap = _is_gap(self._last, at, self._policy.longest_gap)
        self._last = at
        level = self._policy.arm_above
        if not any(not isinstance(a.peak, Unknown) and a.peak >= level for a in activities):
            self._active_since = None
            return
        if self._active_since is None or gap:
            self._active_since = at
        self.armed = at >= self._active_since + self._policy.arm_for


class IdleRule(Rule):
    """The idle rule, with one clock per GPU and one for arming."""

    def __init__(self, policy: IdlePolicy, begun: float, look_takes: float = LOOK_TAKES) -> None:
        policy.check()
        self.policy = policy
        self._longest_unseen = longest_unseen(policy.every, look_takes)
        self._not_before = begun + policy.after
        self._snoozed_until: float | None = None
        self._clocks: dict[str, _IdleClock] = {}
        self._arming = _ArmingClock(policy)
        self._cpu = _CpuClock()
        self._at = begun
        self._used = False
        """The job has used a GPU."""
        self._momentary = False
        """The driver reports single samples, which miss most of the time."""
        self._in_use = 0.0
        """Seconds with a GPU in use, perhaps by others."""
        self._fulfilled = False

    def observe(self, observation: Observation) -> Verdict:
        at, activities = observation.at, observation.activities
        passed, self._at = at - self._at, at
        self._arming.observe(at, activities)
        self._note_use(activities, passed)
        self._momentary = any(_samples(activity) == 1 for activity in activities)
        clocks = {a.uuid: self._clocks.get(a.uuid) or _IdleClock() for a in activities}
        earliest = self._earliest
        for activity in activities:
            clocks[activity.uuid].observe(at, activity, self.policy, self._longest_unseen, earliest)
        self._clocks = clocks
        # A paused clock continues later, so earlier CPU work of the job still counts.
        idle = sum(clock.idle_since is not None for clock in clocks.values()) >= max(self._required(len(clocks)), 1)
        self._cpu.observe(at, observation.progress, self.policy.longest_gap, idle=idle)
        verdict = self._verdict(at, activities)
        self._fulfilled = verdict.effect == "act"
        return verdict

    def _note_use(self, activities: Sequence[Activity], passed: float) -> None:
        busy = [a for a in activities if not isinstance(a.peak, Unknown) and a.peak >= self.policy.below]
        if busy and not self._used:
            self._in_use += min(max(passed, 0.0), self.policy.longest_gap)
            long_use = min(_LONG_USE, self.policy.window * _LONG_USE_SHARE)
            self._used = any(a.processes for a in busy) or self._in_use >= long_use

    def snooze(self, until: float) -> None:
        self._snoozed_until = until
        self._fulfilled = False
        for clock in self._clocks.values():
            clock.restart()

    def rearm(self, at: float) -> None:
        self._not_before = max(at, self._not_before)
        self._arming = _ArmingClock(self.policy)
        self._fulfilled = False
        for clock in self._clocks.values():
            clock.rearm()

    @property
    def spent(self) -> bool:
        """True if it has fired, was rearmed, and no GPU has been used since."""
        return bool(self._clocks) and not any(clock.fresh for clock in self._clocks.values())

    def due(self) -> float | None:
        """The end of the window; None while too few GPUs are idle, and after the end.

        Looks in quick succession after the end would not make up for missing samples.
        """
        if self._fulfilled or not self._arming.armed:
            return None
        since = self._idle_since(self._required(len(self._clocks)))
        ends = since + self._window(since) if since is not None else self._at
        return ends if ends > self._at else None

    def _window(self, since: float) -> float:
        """The current window of GPUs that have been idle since then."""
        policy = self.policy
        if self._used and self._momentary and self._at - (self._cpu.step_at or -math.inf) < policy.window:
            return policy.unused_window  # the job works in bursts that the samples miss
        if self._used:
            return policy.cpu_window if self._cpu.works(self._at - since) else policy.window
        quiet_since = self._cpu.quiet_since()
        if quiet_since is None:
            return policy.unused_window
        quiet_window = max(policy.unused_window * QUIET_SHARE, policy.window)
        return min(policy.unused_window, max(quiet_since - since, 0.0) + quiet_window)

    def _idle_gpus(self, at: float) -> tuple[str, ...]:
        """All GPUs that have been idle for a whole window at `at`."""
        since = {uuid: clock.idle_since for uuid, clock in self._clocks.items() if clock.paused_at is None}
        return tuple(uuid for uuid, begun in since.items() if begun is not None and at >= begun + self._window(begun))

    @property
    def _earliest(self) -> float:
        return self._not_before if self._snoozed_until is None else max(self._not_before, self._snoozed_until)

    def _idle_since(self, required: int) -> float | None:
        """Since when the required number of GPUs have been idle, one of them used since the rule last fired."""
        clocks = [clock for clock in self._clocks.values() if clock.paused_at is None]
        idle = [(clock.idle_since, clock.fresh) for clock in clocks if clock.idle_since is not None]
        fresh = [since for since, is_fresh in idle if is_fresh]
        if not fresh or len(idle) < required:
            return None
        return max(sorted(idle)[required - 1][0], min(fresh))

    def _required(self, count: int) -> int:
        """The required number of idle GPUs, at most all of them; 0 without GPUs."""
        if self.policy.require == "all":
            return count
        return min(1 if self.policy.require == "any" else self.policy.require, count)

    def _verdict(self, at: float, activities: Sequence[Activity]) -> Verdict:
        if not activities:
            return Verdict("unknown", "there is no GPU to judge by")
        if at < self._earliest:
            return Verdict("waiting", self._why_not_yet(at))
        if self.spent:
            return Verdict("arming", "it has fired: not armed until the GPUs are used again")
        if not self._arming.armed:
            return Verdict("arming", self._why_not_armed())
        idle_since = self._idle_since(self._required(len(activities)))
        if idle_since is None:
            return self._not_idle(activities)
        window = self._window(idle_since)
        ends = idle_since + window
        # The same sum as in `due`: a difference would round differently, and a look at the due time would be too early.
        over = at >= ends
        fulfilled = over and self._has_samples(idle_since)
        return Verdict(
            "idle" if fulfilled else "waiting",
            self._idle_in_words(activities, idle_since, at - idle_since, window, fulfilled=fulfilled, over=over),
            "act" if fulfilled else "none",
            cause="its GPUs stayed idle" if self._used else "it never used its GPUs",
            quiet=True,
            since=idle_since,
            progress=1.0 if fulfilled else min((at - idle_since) / window, 1.0),
            left=max(ends - at, 0.0),
            gpus=self._idle_gpus(at),
        )

    def _has_samples(self, idle_since: float) -> bool:
        counts = [clock.samples for uuid, clock in self._clocks.items() if self._is_idle_since(uuid, idle_since)]
        return min(counts, default=0) >= min(LEAST_SAMPLES, int(self.policy.window / DEFAULT_EVERY))

    def _not_idle(self, activities: Sequence[Activity]) -> Verdict:
        """Busy, or unknown if unreadable GPUs would make the difference."""
        unknown = [(a.label, a.peak.reason) for a in activities if isinstance(a.peak, Unknown)]
        idle = sum(clock.idle_since is not None and clock.paused_at is None for clock in self._clocks.values())
        if unknown and idle + len(unknown) >= self._required(len(activities)):
            reason = unknown[0][1]
            names = [label for label, why in unknown if why == reason]
            verb = "is" if len(names) == 1 else "are"
            is_paused = any(
                clock.paused_at is not None and clock.idle_since is not None for clock in self._clocks.values()
            )
            return Verdict(
                "unknown", f"{_listed(names, len(activities))} {verb} unknown: {reason}", is_paused=is_paused
            )
        peak, label = max((a.peak, a.label) for a in activities if not isinstance(a.peak, Unknown))
        return Verdict("busy", f"{label} was at {format_percent(peak)}")

    def _why_not_yet(self, at: float) -> str:
        if self._snoozed_until is not None and at < self._snoozed_until:
            return f"snoozed for another {format_duration(self._snoozed_until - at)}"
        return f"start-up delay: the window begins in {format_duration(self._earliest - at)}"

    def _why_not_armed(self) -> str:
        level = format_percent(self.policy.arm_above or 0.0)
        length = f" for {format_duration(self.policy.arm_for)}" if self.policy.arm_for else ""
        return f"not armed: no GPU has been at {level} or more{length} yet"

    def _idle_in_words(
        self,
        activities: Sequence[Activity],
        idle_since: float,
        idle_for: float,
        window: float,
        *,
        fulfilled: bool,
        over: bool,
    ) -> str:
        names = _listed([a.label for a in activities if self._is_idle_since(a.uuid, idle_since)], len(activities))
        whole = format_duration(window)
        done = whole if fulfilled else f"{format_duration(idle_for)} of {whole}"
        stayed = f"{names} stayed below {format_percent(self.policy.below)} for {done}"
        if not self._used and window > self.policy.window:
            stayed += " and had not been used before"
        elif self._used and window > self.policy.window:
            stayed += " while the job worked on the CPU"
        return f"{stayed}, but the driver gave too few samples to be sure" if over and not fulfilled else stayed

    def _is_idle_since(self, uuid: str, moment: float) -> bool:
        since = self._clocks[uuid].idle_since
        return since is not None and since <= moment


def _is_idle(peak: Maybe[float], below: float) -> bool:
    """True for an idle peak. Negative numbers and NaN are invalid, and not idle."""
    return not isinstance(peak, Unknown) and 0 <= peak < below


def _samples(activity: Activity) -> int:
    """The number of driver samples of an activity. A counter that covers all the time is worth a whole window."""
    used = activity.reading.utilization if activity.reading is not None else None
    if used is None or isinstance(used, Unknown):
        return LEAST_SAMPLES
    return used.samples or LEAST_SAMPLES


def _is_gap(last: float | None, at: float, longest_gap: float) -> bool:
    """True if the last look was too long ago, or time went backwards."""
    return last is not None and not 0 <= at - last <= longest_gap


def _seen_from(last: float | None, at: float, span: float, longest_gap: float) -> float:
    """The start of the time that a reading covers.

    It is never before the previous look, whatever the reading's span: the first reading after a hung driver spans all
    the unknown time.
    """
    if last is None:
        return at - span if 0 <= span <= longest_gap else at
    return max(at - max(span, 0.0), last)


def _listed(names: Sequence[str], of: int) -> str:
    """`GPU 0`, `GPU 0 and GPU 1`, `GPU 0, GPU 1 and GPU 2`, `all 8 GPUs`."""
    if len(names) == of > _MOST_NAMES:
        return f"all {of} GPUs"
    return list_all(names)
