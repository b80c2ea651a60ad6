"""The rule of GPU Sentinel: armed by activity, it acts once when the activity stops, and must be armed again."""

import math
from collections.abc import Callable
from enum import Enum

from stoker.errors import BadInputError
from stoker.gpus.model import known
from stoker.rules.rule import LOOK_TAKES, Observation, Policy, Rule, Verdict
from stoker.units import format_percent


class SentinelState(Enum):
    """`SAFE` and `IDLE` are two names of one state: not armed."""

    IDLE = 0
    SAFE = IDLE
    ARMED = 1


class Sentinel:
    """Watches a stream of values, one per tick. It has no clock: one tick a second counts seconds."""

    def __init__(
        self,
        arm_duration: int,
        arm_threshold: float,
        kill_duration: int,
        kill_threshold: float,
        kill_fn: Callable[[], object],
    ) -> None:
        """Armed by `arm_duration` ticks in a row above `arm_threshold`; `kill_fn` is called after `kill_duration`
        ticks in a row below `kill_threshold`. An `arm_duration` of 0 is armed by the first value, whatever it is.
        """
        _check(arm_duration, arm_threshold, kill_duration, kill_threshold)
        self.arm_duration = arm_duration
        self.arm_threshold = arm_threshold
        self.kill_duration = kill_duration
        self.kill_threshold = kill_threshold
        self.kill_fn = kill_fn
        self.state = SentinelState.IDLE
        self.seconds_to_transition = arm_duration
        """The remaining ticks until the state changes, if the values stay on the same side."""

    def tick(self, current_value: float | None) -> None:
        """Processes a value. None and NaN are unknown: they neither arm nor kill, and restart the count."""
        if self.state is SentinelState.IDLE:
            self._tick_idle(current_value)
        else:
            self._tick_armed(current_value)

    def _tick_idle(self, value: float | None) -> None:
        if value is None or not math.isfinite(value):
            self.seconds_to_transition = self.arm_duration
            return
        self._count(value > self.arm_threshold, self.arm_duration)
        if self.seconds_to_transition <= 0:
            self.state = SentinelState.ARMED
            self.seconds_to_transition = self.kill_duration

    def _tick_armed(self, value: float | None) -> None:
        self._count(value is not None and math.isfinite(value) and value < self.kill_threshold, self.kill_duration)
        if self.seconds_to_transition > 0:
            return
        # Set before the call: if that raises, it is repeated after the same number of ticks.
        self.seconds_to_transition = self.kill_duration
        self.kill_fn()
        self.state = SentinelState.IDLE
        self.seconds_to_transition = self.arm_duration

    def _count(self, fulfilled: bool, duration: int) -> None:
        self.seconds_to_transition = self.seconds_to_transition - 1 if fulfilled else duration


def _check(arm_duration: float, arm_threshold: float, kill_duration: float, kill_threshold: float) -> None:
    if arm_duration < 0:
        raise BadInputError(f"arm_duration {arm_duration} is negative: give a number of ticks, 0 to be armed at once")
    if kill_duration < 1:
        raise BadInputError(f"kill_duration {kill_duration} would fire at any value: give a number of ticks from 1 on")
    for name, threshold in (("arm_threshold", arm_threshold), ("kill_threshold", kill_threshold)):
        if not math.isfinite(threshold):
            raise BadInputError(f"{name} {threshold} is no level that a value can be above or below: give a number")


class SentinelPolicy(Policy, frozen=True, kw_only=True):
    """The settings of GPU Sentinel, with durations in ticks of `every`."""

    every: float = 1.0
    arm_duration: int = 30
    arm_threshold: float = 0.8
    kill_duration: int = 30
    kill_threshold: float = 0.7

    @property
    def window(self) -> float:
        return self.kill_duration * self.every

    @property
    def below(self) -> float:
        return self.kill_threshold

    def check(self) -> None:
        super().check()
        _check(self.arm_duration, self.arm_threshold, self.kill_duration, self.kill_threshold)

    def in_words(self) -> str:
        return f"the mean GPU usage below {format_percent(self.kill_threshold)} for {self.kill_duration} seconds"

    def conditions(self) -> list[str]:
        return [f"armed once it was above {format_percent(self.arm_threshold)} for {self.arm_duration} seconds"]


class _FiredError(Exception):
    """Leaves the sentinel armed, since the action may fail and is then due again."""


class SentinelRule(Rule):
    """The sentinel with one tick per observation, the mean of the GPUs' peaks."""

    def __init__(self, policy: SentinelPolicy, _begun: float = 0.0, _look_takes: float = LOOK_TAKES) -> None:
        self._policy = policy
        self.sentinel = Sentinel(
            policy.arm_duration, policy.arm_threshold, policy.kill_duration, policy.kill_threshold, self._fire
        )
        self._last: float | None = None
        self._snoozed_until = -math.inf

    def observe(self, observation: Observation) -> Verdict:
        last, self._last = self._last, observation.at
        if last is not None and observation.at - last > self._policy.longest_gap:
            self.sentinel.tick(math.nan)  # the gap is unknown, so the count restarts
        if observation.at < self._snoozed_until:
            return Verdict("waiting", "snoozed")
        usage = _mean_peak(observation)
        try:
            self.sentinel.tick(usage)
        except _FiredError:
            since = observation.at - self._policy.window
            uuids = tuple(activity.uuid for activity in observation.activities)
            reason = f"the mean GPU usage was {self._policy.in_words().partition(' usage ')[2]}"
            return Verdict(
                "idle", reason, "act", cause="its GPUs stayed idle", quiet=True, since=since, progress=1.0, gpus=uuids
            )
        if math.isnan(usage):
            return Verdict("unknown", observation.problem or "the usage of a GPU is unknown")
        if self.sentinel.state is SentinelState.IDLE:
            return Verdict("arming", f"not armed for another {self.sentinel.seconds_to_transition} seconds of activity")
        done = self._policy.kill_duration - self.sentinel.seconds_to_transition
        progress = done / self._policy.kill_duration
        left = self.sentinel.seconds_to_transition * self._policy.every
        kind = "waiting" if done else "busy"
        return Verdict(kind, f"the mean GPU usage was {format_percent(usage)}", progress=progress, left=left)

    @property
    def armed(self) -> bool:
        return self.sentinel.state is SentinelState.ARMED

    def due(self) -> float | None:
        return None

    def snooze(self, until: float) -> None:
        self._snoozed_until = until
        self.sentinel.tick(math.nan)

    def rearm(self, at: float) -> None:  # noqa: ARG002 - it counts ticks
        self.sentinel.state = SentinelState.IDLE
        self.sentinel.seconds_to_transition = self._policy.arm_duration

    def _fire(self) -> None:
        raise _FiredError


def _mean_peak(observation: Observation) -> float:
    """The mean of the peaks; NaN if any is unknown."""
    peaks = [activity.peak if known(activity.peak) else math.nan for activity in observation.activities]
    return math.fsum(peaks) / len(peaks) if peaks else math.nan
