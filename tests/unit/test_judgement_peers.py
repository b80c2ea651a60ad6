"""The peers' rules on small jobs whose outcome their documentation states."""

import pytest

from bench.judgement_peers import (
    MINUTE,
    Device,
    Job,
    Sample,
    dstack,
    gpu_pruner,
    gpu_reaper,
    job_defense_shield,
    low_power_at_full_utilization,
    nccl_watchdog,
    no_output,
    nvrx_heartbeats,
    slurm_gpu_idle_killer,
)

ZERO = Device(0.0, 0.0, 0.1, 2**34, 1)
BUSY = Device(1.0, 0.9, 0.8, 2**34, 1)
HOLLOW = Device(1.0, 1.0, 0.2, 2**34, 1)
FREE = Device(0.0, 0.0, 0.1, 2**28, 0)
UNREADABLE = Device(None, None, None, 0, 0)


def a_job(
    *stretches: tuple[float, tuple[Device, ...]], step: float | None = 0.0, collective: float | None = None
) -> Job:
    """A sample a minute; a stretch is minutes and GPUs. Step, line and collective stay as given."""
    samples = []
    at = 0.0
    for minutes, devices in stretches:
        for _ in range(int(minutes)):
            at += MINUTE
            samples.append(Sample(at, devices, step, step, collective))
    return Job(0.0, samples, sends_heartbeats=True, alone=True)


def in_minutes(stop: float | None) -> float | None:
    return None if stop is None else stop / MINUTE


def test_job_defense_shield_cancels_what_never_worked_after_two_hours() -> None:
    assert in_minutes(job_defense_shield(a_job((400, (ZERO,))))) == pytest.approx(120, abs=2)


def test_job_defense_shield_gives_a_job_that_worked_five_hours() -> None:
    assert in_minutes(job_defense_shield(a_job((10, (BUSY,)), (400, (ZERO,))))) == pytest.approx(310, abs=2)


def test_gpu_pruner_needs_one_idle_gpu_for_half_an_hour() -> None:
    assert in_minutes(gpu_pruner(a_job((60, (BUSY, BUSY)), (60, (BUSY, ZERO))))) == pytest.approx(90, abs=2)


def test_gpu_pruner_passes_over_samples_that_are_missing() -> None:
    assert gpu_pruner(a_job((60, (BUSY,)), (20, (ZERO,)), (9, (UNREADABLE,)), (20, (ZERO,)))) is not None
    assert gpu_pruner(a_job((200, (UNREADABLE,)))) is None


def test_dstack_stops_below_ten_percent_for_an_hour() -> None:
    low = Device(0.2, 0.05, 0.2, 2**34, 1)
    assert in_minutes(dstack(a_job((30, (BUSY,)), (100, (low,))))) == pytest.approx(90, abs=2)


def test_gpu_reaper_cancels_after_four_hours_and_never_a_starved_job() -> None:
    assert in_minutes(gpu_reaper(a_job((30, (BUSY,)), (400, (ZERO,))))) == pytest.approx(291, abs=2)
    assert gpu_reaper(a_job((600, (Device(0.1, 0.05, 0.2, 2**34, 1),)))) is None


def test_slurm_gpu_idle_killer_spares_a_process_with_a_context() -> None:
    assert slurm_gpu_idle_killer(a_job((600, (ZERO,)))) is None
    assert in_minutes(slurm_gpu_idle_killer(a_job((600, (FREE,))))) == pytest.approx(10, abs=1)


def test_silence_and_heartbeats_are_timed_from_the_last_one() -> None:
    silent = a_job((200, (BUSY,)), step=0.0)
    assert in_minutes(no_output(silent)) == 15
    assert in_minutes(nvrx_heartbeats(silent)) == 45
    assert in_minutes(nvrx_heartbeats(a_job((200, (BUSY,)), step=None))) == 60


def test_nccl_watchdog_needs_a_pending_collective() -> None:
    assert nccl_watchdog(a_job((100, (HOLLOW,)))) is None
    assert in_minutes(nccl_watchdog(a_job((100, (HOLLOW,)), collective=30.0))) == 11


def test_low_power_rule_needs_full_utilization() -> None:
    assert in_minutes(low_power_at_full_utilization(a_job((5, (BUSY,)), (60, (HOLLOW,))))) == pytest.approx(16, abs=1)
    assert low_power_at_full_utilization(a_job((60, (ZERO,)))) is None
