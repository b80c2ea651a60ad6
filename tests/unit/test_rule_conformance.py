"""What every registered rule must do: the conformance suite of the `Rule` seam, with each rule's default policy."""

from collections.abc import Iterator

import msgspec
import pytest

from stoker.gpus.model import JobProgress, Maybe, Reading, Unknown, Utilization
from stoker.rules.judge import Judge
from stoker.rules.registry import RuleType, rule_types
from stoker.rules.rule import Activity, Observation, Verdict

LOST = Unknown("the GPU is lost")
# What leads each rule to act, as the utilization of the GPU; most rules look for one that is not used.
WASTED = {"stalled": 1.0}
# Long enough to arm any rule.
USED_SECONDS = 600.0


def a_reading(peak: Maybe[float], works: bool) -> Reading:
    """Its memory and power show whether it works."""
    unknown = Reading.unknown("GPU-0", "not read")
    if isinstance(peak, Unknown):
        return unknown
    return msgspec.structs.replace(
        unknown,
        utilization=Utilization(peak, peak, 30),
        memory_activity=Utilization(0.5, 0.4, 30) if works else Utilization(0.0, 0.0, 30),
        power=350.0 if works else 90.0,
        power_limit=700.0,
    )


class Job:
    """A rule that looks at one GPU and its job at the usual interval."""

    def __init__(self, rule_type: RuleType) -> None:
        self.policy = rule_type.policy()
        self.wasted = WASTED.get(rule_type.name, 0.0)
        self.rule = rule_type.begin(self.policy, 0.0, 5.0)
        self.at = 0.0
        self._steps = 0
        self._step_at = 0.0

    def look(self, peak: Maybe[float] | None, after: float | None = None) -> Verdict:
        """None: the machine cannot be read. A GPU that is used makes a step, unless it is wasted."""
        span = self.policy.every if after is None else after
        self.at += span
        works = isinstance(peak, float) and 0 < peak < 1
        if works:
            self._steps, self._step_at = self._steps + 1, self.at
        progress = JobProgress(self._steps, self._step_at, "log")
        activities = (
            [] if peak is None else [Activity("GPU-0", "GPU 0", self.policy.every, peak, a_reading(peak, works))]
        )
        problem = "the driver does not answer" if peak is None else None
        return self.rule.observe(Observation(self.at, activities, problem, progress))

    def looks(self, peak: Maybe[float] | None, seconds: float) -> Iterator[Verdict]:
        end = self.at + seconds
        while self.at < end:
            yield self.look(peak)

    def use(self) -> list[Verdict]:
        return list(self.looks(0.95, USED_SECONDS))

    def act(self) -> float:
        """Wastes the GPU until the rule acts; returns how long that took."""
        begun = self.at
        assert any(acts(verdict) for verdict in self.looks(self.wasted, 3 * self.policy.window))
        return self.at - begun


@pytest.fixture(params=rule_types(), ids=lambda rule_type: str(rule_type.name))
def job(request: pytest.FixtureRequest) -> Job:
    return Job(request.param)


def acts(verdict: Verdict) -> bool:
    return verdict.effect == "act"


def test_used_gpu_leads_to_no_action(job: Job) -> None:
    assert not any(map(acts, job.use()))


def test_wasted_gpu_leads_to_action_after_the_whole_window(job: Job) -> None:
    job.use()
    took = job.act()
    assert job.policy.window - 2 * job.policy.every <= took <= job.policy.window + 2 * job.policy.every


def test_acting_verdict_has_its_evidence(job: Job) -> None:
    job.use()
    fired = next(verdict for verdict in job.looks(job.wasted, 3 * job.policy.window) if acts(verdict))
    assert fired.reason
    assert fired.cause
    assert fired.since is not None
    assert fired.since < job.at
    assert fired.progress == 1.0


@pytest.mark.parametrize("peak", [LOST, None], ids=["lost GPU", "unreadable machine"])
def test_unknown_never_leads_to_action(job: Job, peak: Unknown | None) -> None:
    job.use()
    verdicts = list(job.looks(peak, 3 * job.policy.window))
    assert not any(map(acts, verdicts))
    assert verdicts[-1].kind == "unknown"


def test_gap_in_the_looks_starts_the_window_again(job: Job) -> None:
    job.use()
    for _ in job.looks(job.wasted, 0.9 * job.policy.window):
        pass
    assert not acts(job.look(job.wasted, after=10 * job.policy.longest_gap))
    assert job.act() >= 0.9 * job.policy.window


def test_snoozed_rule_does_not_act(job: Job) -> None:
    job.use()
    job.rule.snooze(job.at + 3 * job.policy.window)
    assert not any(map(acts, job.looks(job.wasted, 3 * job.policy.window - job.policy.every)))


def test_rule_that_acted_acts_again_after_the_gpu_was_used(job: Job) -> None:
    job.use()
    job.act()
    job.rule.rearm(job.at)
    assert not acts(job.look(job.wasted))
    job.use()
    job.act()


def test_rule_is_due_in_the_future_or_unknown(job: Job) -> None:
    job.use()
    job.look(job.wasted)
    due = job.rule.due()
    assert due is None or due > job.at


def test_policy_describes_itself(job: Job) -> None:
    job.policy.check()
    job.policy.check_gpus(1)
    assert job.policy.in_words()
    assert all(job.policy.conditions())
    assert 0 < job.policy.below <= 1


def test_judge_of_all_rules_describes_and_drives_them() -> None:
    policies = [rule_type.policy() for rule_type in rule_types()]
    judge = Judge(policies, 0.0, "stop the job")
    assert judge.every == min(policy.every for policy in policies)
    assert all(policy.in_words() in judge.in_words() for policy in policies)
    assert set(judge.conditions()) == {condition for policy in policies for condition in policy.conditions()}
    judge.snooze(100.0)
    for at in range(1, 100):
        assert not judge.observe(Observation(float(at), [Activity("GPU-0", "GPU 0", 1.0, 0.0)])).fired
    due = judge.due()
    assert due is None or due >= 99.0
