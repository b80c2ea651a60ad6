"""Drives the rules of one run or watch, and reports news: one judge for every loop."""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from stoker.rules.registry import begin_rule, conditions, in_words, type_of
from stoker.rules.rule import DEFAULT_EVERY, LOOK_TAKES, Observation, Policy, Rule, Verdict
from stoker.units import format_duration

# A driver that is being reset or updated is back by then.
UNKNOWN_PATIENCE: Final = 300.0
_NO_RULE: Final = Verdict("waiting", "no rule is on")


class LogMessage(NamedTuple):
    """A message for people."""

    text: str
    urgent: bool = False
    """It deserves a notification."""
    is_warning: bool = False
    """It announces that a rule will act soon."""


class Judgement(NamedTuple):
    """The judgement of one observation."""

    verdict: Verdict
    """The most important verdict."""
    messages: tuple[LogMessage, ...]
    warned: Verdict | None = None
    """The verdict that started the current warning; None without a warning."""
    acts_in: float | None = None
    """Seconds until that rule acts if nothing changes; None if it only warns."""
    new_warnings: tuple[Verdict, ...] = ()
    """Verdicts that start a warning with this observation."""

    @property
    def fired(self) -> bool:
        """True if a rule asks for action."""
        return self.verdict.effect == "act"


class Judge:
    """Applies all rules at once, and reports warnings, armed rules and persistently unknown readings once."""

    def __init__(
        self,
        policies: Sequence[Policy],
        begun: float,
        intention: str,
        *,
        look_takes: float = LOOK_TAKES,
        unless: str = "that changes",
        dry_run: bool = False,
        unknown_patience: float = UNKNOWN_PATIENCE,
    ) -> None:
        """`intention`: the action of a rule, such as `stop the job`. `unless`: what prevents it."""
        self.policies = tuple(policies)
        self._intention = f"would {intention}" if dry_run else intention
        self._unless = unless
        self._dry_run = dry_run
        self._rules = [_Judged(policy, begin_rule(policy, begun, look_takes)) for policy in policies]
        self._unknown_patience = unknown_patience
        self._unknown_since: float | None = None
        self._logged_unknown = ""

    @property
    def every(self) -> float:
        return min((policy.every for policy in self.policies), default=DEFAULT_EVERY)

    def in_words(self) -> str:
        return in_words(self.policies)

    def conditions(self) -> list[str]:
        return conditions(self.policies)

    def observe(self, observation: Observation) -> Judgement:
        messages: list[LogMessage] = []
        verdicts = [one.observe(observation) for one in self._rules]
        new_warnings: list[Verdict] = []
        for one, verdict in zip(self._rules, verdicts, strict=True):
            news = list(one.news(verdict, self._intention, self._unless, dry_run=self._dry_run))
            messages += news
            new_warnings += [verdict] * any(message.is_warning for message in news)
        messages += self._unknown_news(observation)
        judgement = Judgement(_foremost(verdicts), tuple(messages), new_warnings=tuple(new_warnings))
        warned = [(verdict, one) for verdict, one in zip(verdicts, self._rules, strict=True) if one.warned]
        if not warned:
            return judgement
        verdict, one = max(warned, key=lambda each: _urgency(each[0]))
        return judgement._replace(warned=one.warned, acts_in=one.acts_in)

    def due(self) -> float | None:
        """The latest time for the next look."""
        return min((due for one in self._rules if (due := one.rule.due()) is not None), default=None)

    def snooze(self, until: float) -> None:
        for one in self._rules:
            one.rule.snooze(until)

    def rearm(self, at: float) -> None:
        """Continues after acting: the GPUs must be used again before the next time."""
        for one in self._rules:
            one.rearm(at)

    def _unknown_news(self, observation: Observation) -> Iterable[LogMessage]:
        unknown = observation.unknown
        if observation.activities and not unknown:
            self._unknown_since = None
            if self._logged_unknown:
                yield LogMessage(f"{self._logged_unknown} can be read again")
                self._logged_unknown = ""
            return
        if self._unknown_since is None:
            self._unknown_since = observation.at
        unknown_for = observation.at - self._unknown_since
        if self._logged_unknown or unknown_for < self._unknown_patience:
            return
        self._logged_unknown = ", ".join(label for label, _ in unknown) or "the GPUs"
        reason = unknown[0][1] if unknown else observation.problem or "there is no GPU to judge by"
        yield LogMessage(
            f"{self._logged_unknown} could not be read for {format_duration(unknown_for)}: {reason}; what is unknown "
            "never counts against a job",
            urgent=True,
        )


class _Judged:
    """One rule, with its warning to people."""

    def __init__(self, policy: Policy, rule: Rule) -> None:
        self.rule = rule
        self._policy = policy
        self._name = type_of(policy).name
        self.warned: Verdict | None = None
        """The verdict that started the current warning."""
        self.acts_in: float | None = None
        """Seconds until the rule acts, as of the last look."""
        self._arming = False
        self._fired = False

    def observe(self, observation: Observation) -> Verdict:
        verdict = self.rule.observe(observation)._replace(rule=self._name)
        if observation.problem is not None and not observation.activities:
            return verdict._replace(reason=observation.problem)
        return verdict

    def rearm(self, at: float) -> None:
        self.rule.rearm(at)
        self._arming = True
        self.warned, self._fired = None, False

    def news(self, verdict: Verdict, intention: str, unless: str, *, dry_run: bool) -> Iterable[LogMessage]:
        if self._is_armed_now(verdict):
            yield LogMessage("armed: GPUs have been active")
        if verdict.effect == "act":
            if not self._fired:
                yield LogMessage(f"{verdict.reason}; dry run: {intention} now" if dry_run else verdict.reason)
            self._fired = True
            return
        share = self._policy.warn_at
        late = verdict.effect == "warn" or (share is not None and verdict.progress >= share)
        if late:
            self.acts_in = max(verdict.left, 0.0) if verdict.effect == "none" else None
        if late and self.warned is None:
            self.warned = verdict
            ahead = (
                "" if self.acts_in is None else f"; in {format_duration(self.acts_in)}, unless {unless}: {intention}"
            )
            yield LogMessage(verdict.reason + ahead, urgent=True, is_warning=True)
        elif self.warned is not None and not late and not verdict.is_paused:
            self.warned = None
            yield LogMessage(f"the warning is over: {verdict.reason}")
        self._fired = self._fired and verdict.progress > 0

    def _is_armed_now(self, verdict: Verdict) -> bool:
        before = self._arming
        self._arming = verdict.kind == "arming" or (before and verdict.kind == "unknown")
        return before and not self._arming


def _foremost(verdicts: Sequence[Verdict]) -> Verdict:
    """The first verdict that acts, or warns, or is nearest to its end, in this order of preference."""
    return max(verdicts, key=_urgency, default=_NO_RULE)


def _urgency(verdict: Verdict) -> tuple[int, float]:
    return {"act": 2, "warn": 1, "none": 0}[verdict.effect], verdict.progress
