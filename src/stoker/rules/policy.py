"""The rule that a person asked for: when GPUs count as idle, for how long, and from when on."""

import math
from typing import Final, Literal

import msgspec

from stoker.errors import BadInputError
from stoker.units import format_duration, format_percent

Require = Literal["all", "any"] | int

# Below one whole percent nothing ran that the driver could see: a job that does anything at all is left alone.
DEFAULT_BELOW: Final = 0.01
# Longer than checkpoints, validation on the CPU and most compilations; a wasted half hour is cheaper than a killed run.
DEFAULT_WINDOW: Final = 1800.0
# Imports, data download and the first compilation: the window begins after that.
DEFAULT_AFTER: Final = 600.0
DEFAULT_EVERY: Final = 5.0
DEFAULT_WARN_AT: Final = 0.5
# Looks that are this many times further apart than asked for leave a hole that nobody saw: the window starts again.
GAP_LOOKS: Final = 3
# One look may take its whole deadline without having missed anything.
GAP_ALLOWANCE: Final = 10.0
# How long a look may take unless somebody said otherwise: the deadline of a prober.
LOOK_TAKES: Final = 5.0


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Idle means: as many GPUs as required stayed below `below` for all of `window`."""

    below: float = DEFAULT_BELOW
    window: float = DEFAULT_WINDOW
    after: float = DEFAULT_AFTER
    every: float = DEFAULT_EVERY
    require: Require = "all"
    """All of the GPUs, any one of them, or that many; where there are fewer than that many, all of them."""
    arm_above: float | None = None
    """Nothing is done before some GPU was at or above this for `arm_for` in one stretch. None: armed from the start."""
    arm_for: float = 0.0
    warn_at: float | None = DEFAULT_WARN_AT
    """The share of the window after which a person is warned."""

    @property
    def longest_gap(self) -> float:
        return self.every * GAP_LOOKS + GAP_ALLOWANCE

    def check(self) -> None:
        """Refuses what cannot be meant, with a sentence."""
        if not all(map(math.isfinite, (self.window, self.after, self.every, self.arm_for))):
            raise BadInputError("--for, --after, --every and --arm-for must be lengths of time that end")
        if not 0 < self.below <= 1:
            raise BadInputError(f"--below {format_percent(self.below)} would never or always be idle: use 1% to 100%")
        if self.every <= 0 or self.window <= 0:
            raise BadInputError("--every and --for must be longer than nothing")
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
        if self.warn_at is not None and not 0 < self.warn_at < 1:
            raise BadInputError("--warn-at must be between 0% and 100% of the window")
        if isinstance(self.require, int) and self.require < 1:
            raise BadInputError("--require must be all, any or a number of GPUs from 1 on")

    def in_words(self) -> str:
        """`all GPUs below 1% for 30m`."""
        if isinstance(self.require, int):
            who = f"at least {self.require} GPU{'s' if self.require > 1 else ''}"
        else:
            who = "all GPUs" if self.require == "all" else "any GPU"
        return f"{who} below {format_percent(self.below)} for {format_duration(self.window)}"


def longest_unseen(every: float, look_takes: float) -> float:
    """How much of the time between two looks the later one may leave out.

    Between two samples of a moment lie one distance and a look that took all of its time.
    """
    return every + look_takes
