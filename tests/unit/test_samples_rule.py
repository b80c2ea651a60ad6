"""The rule that counts samples: what counts as idle, and what never does."""

from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.gpus.model import Look, Maybe, Unknown, Utilization, known
from stoker.rules.samples import Percents, SampleGatherer, SamplesPolicy, SamplesRule, UsageSample
from stoker.rules.scope import DeviceScope
from tests.support.looks import a_gpu, a_look, a_reading

UNKNOWN = Unknown("the driver did not answer")
PERCENTS = st.one_of(st.integers(0, 100), st.just(UNKNOWN))


def a_rule(threshold: int, samples: int, require: Literal["all", "any"] = "all") -> SamplesRule:
    return SamplesRule(SamplesPolicy(threshold=threshold, num_samples=samples, require=require))


def fed(rule: SamplesRule, *samples: Percents) -> list[tuple[str, ...]]:
    return [rule.count(sample) for sample in samples]


def is_below(percent: Maybe[int], threshold: int) -> bool:
    return known(percent) and percent < threshold


@given(
    readings=st.lists(st.tuples(PERCENTS, PERCENTS), max_size=30),
    threshold=st.integers(1, 100),
    samples=st.integers(1, 6),
    require=st.sampled_from(["all", "any"]),
)
def test_rule_fires_exactly_when_the_last_n_samples_were_below(
    readings: list[tuple[Maybe[int], Maybe[int]]],
    threshold: int,
    samples: int,
    require: Literal["all", "any"],
) -> None:
    rule = a_rule(threshold, samples, require)
    for taken, (a, b) in enumerate(readings, start=1):
        fired = rule.count({"a": a, "b": b})
        window = readings[max(taken - samples, 0) : taken]
        idle = [
            name
            for place, name in enumerate("ab")
            if len(window) == samples and all(is_below(s[place], threshold) for s in window)
        ]
        expected = idle if require == "any" or len(idle) == 2 else []
        assert list(fired) == expected


def test_rule_waits_for_n_samples() -> None:
    assert fed(a_rule(50, 3), {"a": 0}, {"a": 0}, {"a": 0}, {"a": 0}) == [(), (), ("a",), ("a",)]


def test_value_at_the_threshold_is_not_below_it() -> None:
    assert fed(a_rule(50, 1), {"a": 50}, {"a": 49}) == [(), ("a",)]


def test_one_sample_above_starts_the_window_again() -> None:
    idle: Percents = {"a": 0}
    assert fed(a_rule(1, 2), idle, {"a": 1}, idle, idle) == [(), (), (), ("a",)]


def test_unknown_sample_starts_the_window_again() -> None:
    idle: Percents = {"a": 0}
    assert fed(a_rule(1, 2), idle, {"a": UNKNOWN}, idle, idle) == [(), (), (), ("a",)]


def test_all_waits_for_every_gpu_and_any_names_the_idle_ones() -> None:
    sample: Percents = {"a": 0, "b": 90, "c": 0, "d": UNKNOWN}
    assert a_rule(50, 1, "all").count(sample) == ()
    assert a_rule(50, 1, "any").count(sample) == ("a", "c")


@pytest.mark.parametrize("require", ["all", "any"])
def test_no_gpu_at_all_is_not_idle(require: Literal["all", "any"]) -> None:
    assert fed(a_rule(50, 1, require), {}, {}) == [(), ()]


@pytest.mark.parametrize("require", ["all", "any"])
def test_gpu_that_disappears_starts_the_window_again(require: Literal["all", "any"]) -> None:
    both: Percents = {"a": 0, "b": 90}
    left: Percents = {"a": 0}
    assert fed(a_rule(50, 3, require), both, both, left, left, left) == [(), (), (), (), ("a",)]


def test_gpu_that_appears_must_be_idle_for_a_whole_window_too() -> None:
    one: Percents = {"a": 0}
    two: Percents = {"a": 0, "b": 0}
    assert fed(a_rule(50, 2), one, two, two) == [(), (), ("a", "b")]


def gathered(*looks: Look, longest_gap: float = 60.0) -> UsageSample:
    gatherer = SampleGatherer(longest_gap, 60.0)
    for look in looks:
        gatherer.add(DeviceScope().observe(look))
    return gatherer.take()


@pytest.mark.parametrize(
    ("fraction", "percent"), [(0.0, 0), (0.07, 7), (0.29, 29), (0.004, 1), (0.195, 20), (0.5, 50), (1.0, 100)]
)
def test_usage_is_rounded_up_to_whole_percents(fraction: float, percent: int) -> None:
    assert gathered(a_look(fraction)).percents == {"GPU-00000000": percent}


def test_highest_of_several_looks_counts() -> None:
    sample = gathered(a_look(0.1, 0.0, at=10), a_look(0.9, 0.2, at=20), a_look(0.0, 0.1, at=30))
    assert list(sample.percents.values()) == [90, 20]


def test_one_unknown_look_makes_the_sample_unknown() -> None:
    orders: list[list[Maybe[float]]] = [[0.0, UNKNOWN, 0.0], [UNKNOWN, 0.0, 0.0], [0.0, 0.0, UNKNOWN]]
    for order in orders:
        looks = [a_look(used, at=10 * place) for place, used in enumerate(order)]
        assert gathered(*looks).percents == {"GPU-00000000": UNKNOWN}


def test_each_sample_starts_empty() -> None:
    gatherer = SampleGatherer(60, 60)
    gatherer.add(DeviceScope().observe(a_look(0.9, at=10)))
    gatherer.take()
    gatherer.add(DeviceScope().observe(a_look(0.1, at=20)))
    assert gatherer.take().percents == {"GPU-00000000": 10}


def test_gap_between_looks_is_unknown() -> None:
    gatherer = SampleGatherer(30, 60)
    gatherer.add(DeviceScope().observe(a_look(0.0, at=10)))
    gatherer.take()
    gatherer.add(DeviceScope().observe(a_look(0.0, at=3610)))
    assert gatherer.take().percents == {"GPU-00000000": Unknown("nobody looked for 1h")}
    gatherer.add(DeviceScope().observe(a_look(0.0, at=3620)))
    assert gatherer.take().percents == {"GPU-00000000": 0}


@pytest.mark.parametrize(("samples", "percent"), [(6, 0), (0, 0), (1, Unknown("nobody looked for 25s"))])
def test_momentary_sample_does_not_cover_a_stall_before_it(samples: int, percent: Maybe[int]) -> None:
    gatherer = SampleGatherer(30, 10)
    for at in (10, 35):
        gatherer.take()
        reading = msgspec.structs.replace(a_reading(span=25.0), utilization=Utilization(0.0, 0.0, samples))
        gatherer.add(DeviceScope().observe(a_look(gpus=(a_gpu(),), readings=(reading,), at=at)))
    assert gatherer.take().percents == {"GPU-00000000": percent}


def test_unreadable_machine_is_a_sample_without_gpus() -> None:
    nothing = a_look(problem=UNKNOWN)
    assert gathered(nothing) == UsageSample({}, UNKNOWN.reason)
    assert gathered(a_look(0.0, at=10), nothing) == UsageSample({}, UNKNOWN.reason)
    assert gathered(nothing, a_look(0.0)).percents == {"GPU-00000000": Unknown("it was not there all the time")}


def test_gpu_that_was_missing_in_between_is_unknown() -> None:
    first, second = a_gpu(0), a_gpu(1)
    one = a_look(gpus=(first,), readings=(a_reading(first),))
    both = a_look(gpus=(first, second), readings=(a_reading(first), a_reading(second)))
    assert gathered(one, both).percents == {first.uuid: 0, second.uuid: Unknown("it was not there all the time")}
    assert gathered(both, one).percents == {first.uuid: 0}  # and the rule notices that it is gone


def test_several_looks_make_a_sample_and_the_rule_waits_for_its_delay() -> None:
    policy = SamplesPolicy(every=5.0, sample_freq=10, num_samples=2, delay_samples=2)
    rule = SamplesRule(policy)
    verdicts = [rule.observe(DeviceScope().observe(a_look(0.0, at=5.0 * number, span=5.0))) for number in range(7)]
    assert [verdict.kind for verdict in verdicts] == [
        "waiting", "waiting", "arming", "waiting", "busy", "waiting", "idle",
    ]  # fmt: skip
    assert (verdicts[-1].effect, verdicts[-1].gpus, verdicts[-1].since) == ("act", ("GPU-00000000",), 10.0)
