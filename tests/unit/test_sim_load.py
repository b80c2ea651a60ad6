"""Phases, scripts and their totals over time."""

import itertools
import math
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BadInputError
from stoker.gpus.sim.load import (
    HISTORY,
    SPIN_POWER,
    Load,
    Phase,
    Script,
    Totals,
    Use,
    burst,
    busy,
    idle,
    parse_phase,
    spin,
)

GIB = 2**30

fractions = st.floats(0, 1)
lengths = st.floats(0.01, 100)


@st.composite
def phases(draw: st.DrawFn) -> Phase:
    seconds = draw(lengths)
    match draw(st.sampled_from(["busy", "idle", "spin", "burst"])):
        case "busy":
            return busy(draw(fractions), seconds, power=draw(fractions))
        case "idle":
            return idle(seconds)
        case "spin":
            return spin(seconds)
        case _:
            period = draw(lengths)
            return burst(draw(fractions), period * draw(st.floats(0.01, 1)), period, seconds)


scripts = st.builds(
    Script,
    start=st.floats(0, 1e6),
    phases=st.lists(phases(), min_size=1, max_size=5).map(tuple),
    repeat=st.booleans(),
)


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        ("busy 90% 30s", busy(0.9, 30.0)),
        ("busy", busy(0.9)),
        ("busy 1m 50%", busy(0.5, 60.0)),
        ("idle 20s", idle(20.0)),
        ("spin 60s", spin(60.0)),
        ("burst 80% 0.5s/10s 60s", burst(0.8, 0.5, 10.0, 60.0)),
        ("burst 80% 0.5s/10s", burst(0.8, 0.5, 10.0)),
        ("busy 30m", busy(0.9, 1800.0)),
    ],
)
def test_common_spellings_of_a_phase_are_accepted(text: str, phase: Phase) -> None:
    assert parse_phase(text) == phase


@pytest.mark.parametrize(
    "text",
    [
        "",
        "sleep 3s",
        "busy 90% 20% 3s",
        "busy 30s 40s",
        "busy soon",
        "busy 120% 3s",
        "idle 90% 3s",
        "idle 0s",
        "spin 0.5s/1s",
        "busy 90% 2GiB 30s",
        "grow 2GiB 20GiB 30s",
        "burst 80% 60s",
        "burst 80% 10s/0.5s 60s",
        "burst 80% 0s/10s 60s",
    ],
)
def test_invalid_phase_is_refused_with_one_message(text: str) -> None:
    with pytest.raises(BadInputError) as refused:
        parse_phase(text)
    assert "\n" not in str(refused.value)


@settings(deadline=None)
@given(phases())
def test_phase_survives_a_round_trip_through_text(phase: Phase) -> None:
    assert parse_phase(str(phase)).kind == phase.kind


def test_busy_phase_uses_its_share_and_draws_power_in_proportion() -> None:
    script = Script(100.0, (busy(0.9, 10.0),))
    total = script.totals(104.0)
    assert (total.work, total.effort) == pytest.approx((3.6, 3.6))


def test_script_does_nothing_before_its_start_and_after_its_end() -> None:
    script = Script(100.0, (busy(1.0, 10.0),))
    assert script.totals(50.0) == Totals()
    assert script.totals(1000.0) == script.totals(110.0)
    assert script.phase_at(99.0) is None
    assert script.phase_at(110.0) is None


def test_spin_is_full_utilization_at_a_fifth_of_the_power() -> None:
    total = Script(0.0, (spin(10.0),)).totals(10.0)
    assert (total.work, total.effort) == pytest.approx((10.0, 10.0 * SPIN_POWER))


def test_burst_is_active_only_at_the_start_of_each_period() -> None:
    script = Script(0.0, (burst(0.8, 0.5, 10.0),))
    assert script.totals(0.5).work == pytest.approx(0.4)
    assert script.totals(10.0).work == pytest.approx(0.4)
    assert script.totals(10.25).work == pytest.approx(0.6)
    assert script.totals(3600.0).work == pytest.approx(0.4 * 360)


def test_phases_follow_each_other() -> None:
    script = Script(0.0, (busy(0.5, 10.0), idle(20.0), spin()))
    kinds = [running.kind for at in (0.0, 9.9, 10.0, 29.9, 30.0, 1e6) if (running := script.phase_at(at))]
    assert kinds == ["busy", "busy", "idle", "idle", "spin", "spin"]


def test_repeated_script_adds_up_over_months_as_over_one_cycle() -> None:
    script = Script(0.0, (busy(0.5, 10.0), idle(10.0)), repeat=True)
    assert script.totals(20.0 * 100_000).work == pytest.approx(5.0 * 100_000)
    assert script.end == math.inf


@settings(deadline=None)
@given(scripts, st.lists(st.floats(0, 1e4), min_size=2, max_size=8).map(sorted))
def test_use_over_any_span_is_between_zero_and_full(script: Script, offsets: list[float]) -> None:
    at = [script.start + offset for offset in offsets]
    for before, after in itertools.pairwise(at):
        used = script.totals(after) - script.totals(before)
        assert -1e-6 <= used.work <= after - before + 1e-6
        assert -1e-6 <= used.effort <= after - before + 1e-6


@settings(deadline=None)
@given(scripts, st.floats(0, 500))
def test_repeated_script_is_the_same_as_its_phases_written_out(script: Script, offset: float) -> None:
    once = Script(script.start, script.phases)
    at = script.start + min(offset, 3 * once.cycle)
    repeated = Script(script.start, script.phases, repeat=True)
    unrolled = Script(script.start, script.phases * 4)
    assert repeated.totals(at).work == pytest.approx(unrolled.totals(at).work, abs=1e-5)


def test_new_script_replaces_the_previous_one() -> None:
    use = Use(1, 0, 0.0).with_script(Script(0.0, (busy(1.0),))).with_script(Script(5.0, (idle(),)))
    assert use.totals(4.0).work == pytest.approx(4.0)
    assert use.totals(60.0).work == pytest.approx(5.0)
    assert use.phase_at(4.9) == busy(1.0)
    assert use.phase_at(5.0) == idle()


def test_released_process_does_no_work() -> None:
    use = Use(1, 0, 0.0, memory=5, context=2, scripts=(Script(0.0, (busy(1.0),)),))
    ended = msgspec.structs.replace(use, ended=10.0)
    assert (use.held(), ended.held()) == (7, 0)
    assert ended.totals(100.0).work == pytest.approx(10.0)
    assert ended.phase_at(11.0) is None


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 30), fractions), min_size=1, max_size=60))
def test_compacting_old_scripts_keeps_the_totals(steps: list[tuple[float, float]]) -> None:
    use = Use(1, 0, 0.0)
    at = expected = 0.0
    for seconds, share in steps:
        use = use.with_script(Script(at, (busy(share),)))
        at += seconds
        expected += seconds * share
    assert use.totals(at).work == pytest.approx(expected, abs=1e-6)
    assert all(script.start >= at - HISTORY - 61 for script in use.scripts)


def test_load_survives_a_round_trip() -> None:
    use = Use(1, 3, 10.0, memory=GIB).with_script(Script(11.5, (burst(0.8, 0.5, 10.0), idle(2.0)), True))
    load = Load(17, 4711).with_use(use)
    assert msgspec.json.decode(msgspec.json.encode(load), type=Load) == load


def test_uses_that_ended_long_ago_are_forgotten() -> None:
    old = Use(1, 0, 0.0, ended=1.0)
    recent = Use(2, 0, 0.0, ended=90.0)
    present = Use(3, 0, 0.0)
    load = Load(1, 1, (old, recent, present))
    assert load.lately(100.0).uses == (recent, present)


@pytest.mark.parametrize(
    "make",
    [lambda: busy(1.5), lambda: busy(0.5, power=-0.1), lambda: burst(0.5, 2.0, 1.0)],
)
def test_impossible_share_is_refused(make: Callable[[], Phase]) -> None:
    with pytest.raises(BadInputError):
        make()
