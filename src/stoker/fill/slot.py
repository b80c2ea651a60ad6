"""When a background program may run: one seat per program and set of GPUs, as a small state machine without a clock.

It is told what is seen and what became of its program, and says what to do. All times are seconds on one clock.
"""

import math
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from stoker.fill.config import LONGEST_BACKOFF, Background
from stoker.units import format_duration

# A start costs whoever comes next a moment of his GPU: no program is started more often than this.
LEAST_BETWEEN_STARTS: Final = 60.0
# A program that ran this long did not die of how it was started.
HEALTHY_AFTER: Final = 60.0
# A driver that does not answer for a moment is no person. For longer than this nobody can tell whether one has come.
BLIND_FOR: Final = 30.0

Doing = Literal["away", "running", "stopping"]


class SlotView(NamedTuple):
    """What is seen of one GPU."""

    idle: bool | None
    """Whether nobody else is there; None when that cannot be told."""
    reason: str
    """`used by alice's python (pid 4242)`, `the driver did not answer in 5 s`; empty for an idle one."""


class StartProgram(NamedTuple):
    """Start the program."""


class StopProgram(NamedTuple):
    """Stop it, and why: a part of a sentence."""

    reason: str


class Slot:
    """One program and the GPUs that it runs on. `why` says at any time why it runs or does not."""

    def __init__(self, program: Background, gpus: tuple[str, ...], now: float) -> None:
        self.program = program
        self.gpus = gpus
        self.doing: Doing = "away"
        self.why = "it has just been looked at for the first time"
        self.since = now
        """Since when it does what it does."""
        self.gpu_seconds = 0.0
        self.preemptions = 0
        self.failures = 0
        """How often in a row it died at once."""
        self._idle_since = now
        self._blind_since: float | None = None
        self._is_held_up = False
        self._visited = False
        self._not_before = -math.inf
        self._not_before_why = ""

    def decide(self, now: float, seen: Mapping[str, SlotView], veto: str | None) -> StartProgram | StopProgram | None:
        """What is to be done now. `veto`: why nothing may run here at all, such as a person at a terminal."""
        taken, blind = self._obstacle(seen), self._blind(seen)
        self._is_held_up = taken is not None or blind is not None or veto is not None
        if self._is_held_up:
            self._idle_since = now
        self._blind_since = (now if self._blind_since is None else self._blind_since) if blind is not None else None
        if taken is not None and self.doing != "away":
            self._visited = True
        if self.doing == "running":
            return self._leave(now, taken or veto, blind)
        if self.doing == "away":
            return self._come(now, taken or veto or blind)
        return None

    def due(self, now: float) -> float:
        """When it decides otherwise if nothing changes; infinite when it does not."""
        if self.doing == "running":
            return self._blind_since + BLIND_FOR if self._blind_since is not None else math.inf
        if self.doing == "away" and not self._is_held_up:
            return max(now, self._idle_since + self._patience(), self._not_before)
        return math.inf

    # What became of the program

    def started(self, now: float) -> None:
        self._become("running", "the GPU was idle" if len(self.gpus) == 1 else "all its GPUs were idle", now)
        self._not_before = now + LEAST_BETWEEN_STARTS
        self._not_before_why = "it was started a moment ago"
        self._visited = False

    def stopping(self, now: float, reason: str) -> None:
        """It was asked to end."""
        self._account(now)
        self.preemptions += 1
        self._become("stopping", reason, now)

    def leaving(self, now: float) -> None:
        """Nobody came: the filler itself ends."""
        self._account(now)
        self._become("stopping", "nobody watches for people any more", now)

    def gone(self, now: float) -> None:
        """It was stopped, and nothing of it is left."""
        self.failures = 0
        self._become("away", self.why, now)

    def died(self, now: float, how: str) -> None:
        """It ended by itself. One that ends at once is not started again at once."""
        lasted = now - self.since
        self._account(now)
        self.failures = 0 if lasted >= HEALTHY_AFTER else self.failures + 1
        pause = min(LONGEST_BACKOFF, self.program.backoff * 2.0 ** min(self.failures - 1, 60)) if self.failures else 0.0
        self._become("away", how, now)
        if pause:
            self._not_before = max(self._not_before, now + pause)
            times = "" if self.failures == 1 else f", {self.failures} times in a row"
            self._not_before_why = f"after {format_duration(round(lasted))} it {how}{times}"

    def could_not_start(self, now: float, sentence: str) -> None:
        self.since = now
        self.died(now, f"could not be started: {sentence}")

    def setback(self, now: float) -> str | None:
        """Why it is not started again at once, and when it is; None when nothing holds it back."""
        if now >= self._not_before:
            return None
        return f"{self._not_before_why}: tried again in {format_duration(math.ceil(self._not_before - now))}"

    def given(self, now: float) -> float:
        """GPU-seconds that this program has had so far."""
        return self.gpu_seconds + (now - self.since) * len(self.gpus) * (self.doing == "running")

    # How it decides

    def _leave(self, now: float, reason: str | None, blind: str | None) -> StopProgram | None:
        if reason is not None:
            return StopProgram(reason)
        if blind is not None and self._blind_since is not None and now - self._blind_since >= BLIND_FOR:
            return StopProgram(f"whether anybody needs it cannot be seen: {blind}")
        return None

    def _come(self, now: float, reason: str | None) -> StartProgram | None:
        if reason is not None:
            self.why = reason
            return None
        rests = self._idle_since + self._patience() - now
        if rests > 0:
            self.why = f"idle, and given to {self.program.name} in {format_duration(math.ceil(rests))}"
            return None
        setback = self.setback(now)
        if setback is not None:
            self.why = setback
            return None
        return StartProgram()

    def _patience(self) -> float:
        """After a visit it may be longer: whoever was here may be back in a moment."""
        return self.program.idle_after_visitor if self._visited else self.program.idle_for

    def _obstacle(self, seen: Mapping[str, SlotView]) -> str | None:
        return next((seen[uuid].reason for uuid in self.gpus if uuid in seen and seen[uuid].idle is False), None)

    def _blind(self, seen: Mapping[str, SlotView]) -> str | None:
        for uuid in self.gpus:
            sight = seen.get(uuid)
            if sight is None:
                return "the GPU is not listed any more"
            if sight.idle is None:
                return sight.reason
        return None

    def _become(self, doing: Doing, why: str, now: float) -> None:
        self.doing = doing
        self.why = why
        self.since = now

    def _account(self, now: float) -> None:
        if self.doing == "running":
            self.gpu_seconds += (now - self.since) * len(self.gpus)
