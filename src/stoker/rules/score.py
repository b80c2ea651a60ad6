"""Scores rules on labelled traces.

Stopping a healthy or unknown job is a false kill at any time. Stopping an idle or stalled job is right from the moment
when it will not resume by itself; an earlier stop is a false kill, too, and the job counts as missed.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple, get_args

from stoker.gpus.model import Look
from stoker.rules.judge import Judge
from stoker.rules.rule import Policy
from stoker.rules.scope import Scope

Label = Literal["healthy", "unknown", "idle", "stalled"]
LABELS: Final[tuple[Label, ...]] = get_args(Label)
_HOUR: Final = 3600.0


class FirstStop(NamedTuple):
    """The first stop by rules on a trace."""

    at: float | None
    """The time of the stop; None without one."""
    warned: bool
    rule: str = ""
    """The rule that requested it."""


class TraceOutcome(NamedTuple):
    """The result of rules on one trace."""

    rule: str
    """The name of the tool or rule."""
    trace: str
    of: str
    """The class of the trace."""
    label: Label
    half: str
    stopped: float | None
    """The time of the stop, in hours after the start of the job."""
    right_from: float | None
    """The time from which a stop is right, in the same hours; None if it never is."""
    warned: bool = False
    by: str = ""
    """The rule that requested the stop."""

    @property
    def is_false_kill(self) -> bool:
        return self.stopped is not None and (self.right_from is None or self.stopped < self.right_from)

    @property
    def is_missed(self) -> bool:
        return self.right_from is not None and (self.stopped is None or self.stopped < self.right_from)


class Score(NamedTuple):
    """The score of rules on many traces."""

    healthy: int = 0
    healthy_killed: int = 0
    unknown: int = 0
    unknown_killed: int = 0
    idle: int = 0
    idle_missed: int = 0
    stalled: int = 0
    stalled_missed: int = 0
    killed_early: int = 0
    """Idle and stalled jobs that were stopped while they still worked; they also count as missed."""


def first_stop(looks: Iterable[Look], policies: Sequence[Policy], scope: Scope, begun: float) -> FirstStop:
    """The first stop by rules that start at `begun`."""
    judge = Judge(policies, begun, "stop the job")
    warned = False
    for look in looks:
        judgement = judge.observe(scope.observe(look))
        warned = warned or bool(judgement.new_warnings)
        if judgement.fired:
            return FirstStop(look.at, warned, judgement.verdict.rule)
    return FirstStop(None, warned)


def hours_after(begun: float, at: float | None) -> float | None:
    return None if at is None else (at - begun) / _HOUR


def score(outcomes: Sequence[TraceOutcome]) -> Score:
    total = Counter(outcome.label for outcome in outcomes)
    killed = Counter(outcome.label for outcome in outcomes if outcome.is_false_kill)
    missed = Counter(outcome.label for outcome in outcomes if outcome.is_missed)
    return Score(
        total["healthy"], killed["healthy"], total["unknown"], killed["unknown"], total["idle"], missed["idle"],
        total["stalled"], missed["stalled"], killed["idle"] + killed["stalled"],
    )  # fmt: skip


def class_in_words(outcomes: Sequence[TraceOutcome]) -> str:
    """`8 traces, 0 killed wrongly, 1 missed (1 of them warned of)`."""
    wrong = sum(one.is_false_kill for one in outcomes)
    words = f"{len(outcomes)} traces, {wrong} killed wrongly"
    if not outcomes or outcomes[0].right_from is None:
        return words
    missed = [one for one in outcomes if one.is_missed]
    return f"{words}, {len(missed)} missed ({sum(one.warned for one in missed)} of them warned of)"
