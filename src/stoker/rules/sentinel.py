"""The sentinel: armed by activity, it fires once when the activity stops, and must be armed again."""

import math
from collections.abc import Callable
from enum import Enum

from stoker.errors import BadInputError


class SentinelState(Enum):
    """`SAFE` and `IDLE` are two names of one state: not armed."""

    IDLE = 0
    SAFE = IDLE
    ARMED = 1


class Sentinel:
    """Watches a stream of values, one per tick. It has no clock: whoever ticks it once a second counts seconds."""

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
        """Ticks that are left until the state changes, if the values stay as they should be for that."""

    def tick(self, current_value: float | None) -> None:
        """Takes the next value. None and NaN are unknown: they neither arm nor kill, and the count starts again."""
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
        # Before the call: if it raises, nothing was done, and it is due again after as long a time.
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
