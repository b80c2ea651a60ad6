"""Decides when a background program runs: one slot per program and set of GPUs, a state machine without a clock.

Its input is the state of GPUs and events of its program, its output is an action. All times are seconds on one clock.
"""

import math
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from stoker.fill.config import LONGEST_BACKOFF, Background
from stoker.units import format_duration

# The shortest interval of starts, each of which delays the next user of the GPU for a moment.
LEAST_BETWEEN_STARTS: Final = 60.0
# A program that ran this long did not fail at its start.
HEALTHY_AFTER: Final = 60.0
# A driver may be silent for a moment, but after this long another user may be there unseen.
BLIND_FOR: Final = 30.0

SlotState = Literal["waiting", "running", "stopping"]


class SlotView(NamedTuple):
    """The state of one GPU."""

    idle: bool | None
    """True without other users; None if unknown."""
    reason: str
    """`used by alice's python (pid 4242)`, `the driver did not answer in 5 s`; empty for an idle GPU."""


class StartProgram(NamedTuple):
    """Start the program."""


class StopProgram(NamedTuple):
    """Stop the program, with a reason that is part of a sentence."""

    reason: str


class Slot:
    """One program and its GPUs. `why` always explains its state."""

    def __init__(self, program: Background, gpus: tuple[str, ...], now: float) -> None:
        self.program = program
        self.gpus = gpus
        self.state: SlotState = "waiting"
        self.why = "the GPU was looked at for the first time just now"
        self.since = now
        """The start of its state."""
        self.gpu_seconds = 0.0
        self.preemptions = 0
        self.failures = 0
        """The number of consecutive deaths right after the start."""
        self._idle_since = now
        self._blind_since: float | None = None
        self._is_held_up = False
        self._visited = False
        self._not_before = -math.inf
        self._not_before_why = ""

    def decide(self, now: float, seen: Mapping[str, SlotView], veto: str | None) -> StartProgram | StopProgram | None:
        """The next action, if any. `veto`: why no program may run now, such as a person at a terminal."""
        taken, blind = self._obstacle(seen), self._blind(seen)
        self._is_held_up = taken is not None or blind is not None or veto is not None
        if self._is_held_up:
            self._idle_since = now
        self._blind_since = (now if self._blind_since is None else self._blind_since) if blind is not None else None
        if taken is not None and self.state != "waiting":
            self._visited = True
        if self.state == "running":
            return self._leave(now, taken or veto, blind)
        if self.state == "waiting":
            return self._come(now, taken or veto or blind)
        return None

    def due(self, now: float) -> float:
        """When the decision changes without events; infinite if it does not."""
        if self.state == "running":
            return self._blind_since + BLIND_FOR if self._blind_since is not None else math.inf
        if self.state == "waiting" and not self._is_held_up:
            return max(now, self._idle_since + self._patience(), self._not_before)
        return math.inf

    # What became of the program

    def started(self, now: float) -> None:
        self._become("running", "the GPU was idle" if len(self.gpus) == 1 else "all its GPUs were idle", now)
        self._not_before = now + LEAST_BETWEEN_STARTS
        self._not_before_why = "it was started a moment ago"
        self._visited = False

    def stopping(self, now: float, reason: str, *, preempted: bool = True) -> None:
        """Notes a stop of the program; `preempted`: for another user."""
        self._account(now)
        self.preemptions += preempted
        self._become("stopping", reason, now)

    def gone(self, now: float) -> None:
        """Notes the end of a stopped program with all its processes."""
        self.failures = 0
        self._become("waiting", self.why, now)

    def died(self, now: float, how: str) -> None:
        """Notes that the program ended by itself. After an early death the next start waits."""
        lasted = now - self.since
        self._account(now)
        self.failures = 0 if lasted >= HEALTHY_AFTER else self.failures + 1
        pause = min(LONGEST_BACKOFF, self.program.backoff * 2.0 ** min(self.failures - 1, 60)) if self.failures else 0.0
        self._become("waiting", how, now)
        if pause:
            self._not_before = max(self._not_before, now + pause)
            times = "" if self.failures == 1 else f", {self.failures} times in a row"
            self._not_before_why = f"after {format_duration(round(lasted))} it {how}{times}"

    def could_not_start(self, now: float, reason: str) -> None:
        self.since = now
        self.died(now, f"could not be started: {reason}")

    def setback(self, now: float) -> str | None:
        """Why and until when its next start waits; None if it does not."""
        if now >= self._not_before:
            return None
        return f"{self._not_before_why}: tried again in {format_duration(math.ceil(self._not_before - now))}"

    def given(self, now: float) -> float:
        """The program's GPU-seconds so far."""
        return self.gpu_seconds + (now - self.since) * len(self.gpus) * (self.state == "running")

    # How it decides

    def _leave(self, now: float, reason: str | None, blind: str | None) -> StopProgram | None:
        if reason is not None:
            return StopProgram(reason)
        if blind is not None and self._blind_since is not None and now - self._blind_since >= BLIND_FOR:
            return StopProgram(f"it is unknown whether another user needs it: {blind}")
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
        """The required idle time, longer after another user, who may return."""
        settle = self.program.settle if self._visited else None
        return self.program.idle_for if settle is None else settle

    def _obstacle(self, seen: Mapping[str, SlotView]) -> str | None:
        return next((seen[uuid].reason for uuid in self.gpus if uuid in seen and seen[uuid].idle is False), None)

    def _blind(self, seen: Mapping[str, SlotView]) -> str | None:
        for uuid in self.gpus:
            view = seen.get(uuid)
            if view is None:
                return "the GPU is no longer listed"
            if view.idle is None:
                return view.reason
        return None

    def _become(self, state: SlotState, why: str, now: float) -> None:
        self.state = state
        self.why = why
        self.since = now

    def _account(self, now: float) -> None:
        if self.state == "running":
            self.gpu_seconds += (now - self.since) * len(self.gpus)
