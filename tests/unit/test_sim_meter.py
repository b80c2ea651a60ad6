"""Samples, power, energy and temperature of a simulated GPU."""

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.gpus.sim.load import SPIN_POWER, Phase, Script, Use, burst, busy, idle, spin
from stoker.gpus.sim.source import (
    COOL,
    HOT,
    IDLE_WATTS,
    LIMIT_WATTS,
    LONGEST_SPAN,
    SimMeter,
    UseKey,
    shares,
    span_of,
    utilization,
    watts,
)

BOOT = 50_000.0


def using(*phases: Phase, start: float = BOOT, repeat: bool = False) -> Use:
    return Use(1, 0, start, scripts=(Script(start, phases, repeat),))


def uses(*each: Use) -> dict[UseKey, Use]:
    return {(number, 0, 1): use for number, use in enumerate(each)}


def test_second_has_six_samples_equal_under_steady_work() -> None:
    seen = utilization(shares(uses(using(busy(0.9))), BOOT + 1, BOOT + 2))
    assert (seen.peak, seen.mean, seen.samples) == (0.9, 0.9, 6)


def test_short_burst_raises_the_peak_and_hardly_the_mean() -> None:
    seen = utilization(shares(uses(using(burst(0.8, 0.5, 10.0))), BOOT, BOOT + 10))
    assert seen.peak == pytest.approx(0.8)
    assert seen.mean == pytest.approx(0.04)
    assert seen.samples == 60


@settings(deadline=None)
@given(st.floats(0.05, 15), st.floats(0, 10))
def test_burst_between_two_looks_is_measured(every: float, offset: float) -> None:
    bursts = uses(using(burst(0.8, 0.5, 10.0)))
    looks = [BOOT + offset + every * number for number in range(int(22 / every) + 2)]
    peaks = [utilization(shares(bursts, before, after)).peak for before, after in itertools.pairwise(looks)]
    assert max(peaks) > 0.3


def test_long_gap_is_covered_only_as_far_as_the_samples_reach() -> None:
    assert span_of(BOOT, BOOT + 3600) == LONGEST_SPAN
    samples = shares(uses(using(busy(0.9))), BOOT + 3600 - LONGEST_SPAN, BOOT + 3600)
    assert len(samples) == 100


def test_two_looks_at_the_same_moment_still_give_a_sample() -> None:
    seen = utilization(shares(uses(using(busy(0.9))), BOOT + 5, BOOT + 5))
    assert seen.peak == pytest.approx(0.9)
    assert seen.samples == 1


def test_total_use_of_several_processes_is_capped_at_the_whole_gpu() -> None:
    both = uses(using(busy(0.7, 5.0), idle()), using(busy(0.7)))
    assert utilization(shares(both, BOOT, BOOT + 5)).mean == 1.0
    assert utilization(shares(both, BOOT + 5, BOOT + 10)).mean == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("phase", "share"),
    [(idle(), 0.0), (busy(1.0), 1.0), (busy(0.5), 0.5), (spin(), SPIN_POWER), (busy(1.0, power=0.3), 0.3)],
)
def test_power_lies_between_the_idle_draw_and_the_limit(phase: Phase, share: float) -> None:
    drawn = watts(shares(uses(using(phase)), BOOT, BOOT + 1))
    assert drawn == pytest.approx(IDLE_WATTS + (LIMIT_WATTS - IDLE_WATTS) * share)


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 300), min_size=1, max_size=20))
def test_energy_counter_does_not_depend_on_how_often_it_is_read(gaps: list[float]) -> None:
    here = uses(using(busy(0.8, 7.0), idle(3.0), burst(0.4, 0.5, 2.0, 10.0), repeat=True))
    often, once = SimMeter(BOOT), SimMeter(BOOT)
    at = BOOT
    for gap in gaps:
        at += gap
        often.advance(here, at)
    once.advance(here, at)
    assert often.joules == pytest.approx(once.joules, rel=1e-3)


def test_energy_is_power_times_time() -> None:
    meter = SimMeter(BOOT)
    meter.advance(uses(using(busy(1.0))), BOOT + 3600)
    assert meter.joules == pytest.approx(LIMIT_WATTS * 3600, rel=1e-6)


def test_energy_of_a_replaced_script_is_not_lost() -> None:
    meter = SimMeter(BOOT)
    use = using(busy(1.0))
    meter.advance(uses(use), BOOT + 1)
    for second in range(10, 300, 10):
        use = use.with_script(Script(BOOT + second, (busy(1.0),)))
    meter.advance(uses(use), BOOT + 300)
    assert meter.joules == pytest.approx(LIMIT_WATTS * 300, rel=1e-6)


def test_energy_of_a_process_between_two_looks_is_not_lost() -> None:
    meter = SimMeter(BOOT)
    meter.advance({}, BOOT + 1)
    use = using(busy(1.0), start=BOOT + 2)
    for second in range(10, 100, 10):
        use = use.with_script(Script(BOOT + second, (busy(1.0),)))
    ended = msgspec.structs.replace(use, ended=BOOT + 102)
    meter.advance(uses(ended), BOOT + 111)
    assert meter.joules == pytest.approx(LIMIT_WATTS * 100 + IDLE_WATTS * 11, rel=1e-6)


def test_temperature_rises_and_falls_slowly() -> None:
    meter = SimMeter(BOOT)
    meter.advance({}, BOOT + 1)
    assert meter.celsius == COOL
    work = uses(using(busy(1.0, 600.0)))
    degrees: list[float] = []
    for second in (10, 100, 600, 610, 1200):
        meter.advance(work, BOOT + second)
        assert meter.celsius is not None
        degrees.append(meter.celsius)
    warming, warm, hot, cooling, cool = degrees
    assert COOL < warming < warm < hot <= HOT
    assert hot == pytest.approx(HOT, abs=1)
    assert COOL < cooling < HOT
    assert cool == pytest.approx(COOL, abs=1)
