"""The rule of gpu_idle_timeout: a GPU is idle when each of its last n samples was below the threshold."""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from stoker.errors import BadInputError
from stoker.gpus.model import Maybe, Unknown, known
from stoker.rules.rule import LOOK_TAKES, Activity, Observation, Policy, Rule, Verdict, longest_unseen
from stoker.units import format_duration

Percents = Mapping[str, Maybe[int]]


class SamplesPolicy(Policy, frozen=True, kw_only=True):
    """The settings of gpu_idle_timeout. `every` divides `sample_freq`: several looks make a sample."""

    threshold: int = 1
    """Percent; a sample at the threshold is not below it."""
    sample_freq: int = 5
    num_samples: int = 60
    delay_samples: int = 12
    require: Literal["all", "any"] = "all"

    @property
    def window(self) -> float:
        return float(self.sample_freq * self.num_samples)

    @property
    def below(self) -> float:
        return self.threshold / 100

    @property
    def looks_per_sample(self) -> int:
        return max(round(self.sample_freq / self.every), 1)

    def check(self) -> None:
        super().check()
        if not 1 <= self.threshold <= 100 or min(self.sample_freq, self.num_samples) < 1 or self.delay_samples < 0:
            raise BadInputError("threshold, sample_freq and num_samples must be greater than zero")

    def in_words(self) -> str:
        who = "all GPUs" if self.require == "all" else "any GPU"
        return f"{who} below {self.threshold}% in {self.num_samples} samples, {self.sample_freq}s apart"


class UsageSample(NamedTuple):
    """The peak utilization of each GPU since the previous sample, by uuid, in whole percent."""

    percents: Percents
    problem: str | None = None
    """Why it has no GPUs."""


class SamplesRule(Rule):
    """Counts looks: after the first one, every `looks_per_sample` looks complete a sample."""

    def __init__(self, policy: SamplesPolicy, _begun: float = 0.0, look_takes: float = LOOK_TAKES) -> None:
        self._policy = policy
        self._gatherer = SampleGatherer(policy.longest_gap, longest_unseen(policy.every, look_takes))
        self._looks = 0
        self._below: dict[str, int] = {}
        """The number of consecutive samples below the threshold, by uuid."""
        self._not_before = -math.inf
        self.sample: UsageSample | None = None
        """The sample completed by the last observation."""

    def observe(self, observation: Observation) -> Verdict:
        self._gatherer.add(observation)
        samples, between = divmod(self._looks, self._policy.looks_per_sample)
        self._looks += 1
        self.sample = None
        if between:
            return Verdict("waiting", "the sample is not complete")
        sample = self._gatherer.take()
        if samples == 0 or observation.at < self._not_before:
            return Verdict("waiting", "what was before the first look is not the command's doing")
        if samples < self._policy.delay_samples:
            left = (self._policy.delay_samples - samples) * self._policy.sample_freq
            return Verdict("arming", f"waiting for delay samples. {left} seconds left")
        self.sample = sample
        return self._judge(observation, self.count(sample.percents))

    def count(self, percents: Percents) -> tuple[str, ...]:
        """The uuids of the idle GPUs if there are enough, otherwise none."""
        if not self._below.keys() <= percents.keys():
            # The job may have worked on a GPU that fell off the bus, so earlier samples do not count.
            self._below = {}
        self._below = {
            uuid: self._below.get(uuid, 0) + 1 if known(percent) and percent < self._policy.threshold else 0
            for uuid, percent in percents.items()
        }
        idle = tuple(uuid for uuid, count in self._below.items() if count >= self._policy.num_samples)
        if self._policy.require == "all" and len(idle) < len(percents):
            return ()
        return idle

    def due(self) -> float | None:
        return None

    def snooze(self, until: float) -> None:
        self._not_before = until
        self._below = {}

    def rearm(self, at: float) -> None:  # noqa: ARG002 - samples are counted, not timed
        self._below = {}

    def _judge(self, observation: Observation, idle: tuple[str, ...]) -> Verdict:
        policy = self._policy
        if idle:
            reason = (
                f"usage for {policy.require} GPUs: {list(idle)} was below threshhold {policy.threshold}% "
                f"for last {policy.window:.0f} seconds."
            )
            since = observation.at - policy.window
            return Verdict(
                "idle", reason, "act", cause="its GPUs stayed idle", quiet=True, since=since, progress=1.0, gpus=idle
            )
        if observation.unknown or not observation.activities:
            return Verdict("unknown", observation.problem or "a GPU could not be read")
        return Verdict("busy", f"a GPU was at {policy.threshold}% or more")


class SampleGatherer:
    """Builds a sample from one or more looks: the peak of each GPU, or unknown if any look was.

    After a gap between two looks, the later one counts as unknown.
    """

    def __init__(self, longest_gap: float, longest_unseen: float) -> None:
        """`longest_unseen`: the longest time between two looks that the later one may leave uncovered."""
        self._longest_gap = longest_gap
        self._longest_unseen = longest_unseen
        self._percents: dict[str, Maybe[int]] | None = None
        self._problem: str | None = None
        self._last: float | None = None

    def add(self, observation: Observation) -> None:
        gap = 0.0 if self._last is None else observation.at - self._last
        self._last = observation.at
        self._problem = observation.problem
        before = self._percents
        now = {activity.uuid: self._percent(activity, gap) for activity in observation.activities}
        self._percents = now if before is None else {uuid: _higher(before.get(uuid), now[uuid]) for uuid in now}

    def take(self) -> UsageSample:
        """Returns the sample, and starts the next one."""
        percents, self._percents = self._percents or {}, None
        return UsageSample(percents, None if percents else self._problem or "there is no GPU to read")

    def _percent(self, activity: Activity, gap: float) -> Maybe[int]:
        if gap > self._longest_gap or gap - activity.span > self._longest_unseen:
            return Unknown(f"nobody looked for {format_duration(gap)}")
        # Rounded up to whole percent, so that the displayed value is judged and a little work counts.
        return math.ceil(round(activity.peak * 100, 6)) if known(activity.peak) else activity.peak


def _higher(before: Maybe[int] | None, now: Maybe[int]) -> Maybe[int]:
    if before is None:
        return Unknown("it was not there all the time")
    if not known(before) or not known(now):
        return now if known(before) else before
    return max(before, now)
