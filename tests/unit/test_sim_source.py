"""The sim source, with a mock clock and /proc."""

from pathlib import Path

import msgspec
import pytest

from stoker.gpus.model import DeviceHealth, Look, Process, Reading, Unknown, Utilization, known
from stoker.gpus.sim.load import TRAFFIC, Use, burst, busy, idle, spin
from stoker.gpus.sim.source import BOOST_MHZ, IDLE_MHZ, IDLE_WATTS, LIMIT_WATTS
from tests.support.sim_world import GIB, SimWorld

# A valid load except for the inserted part.
USE = b'{"pid": 7, "started": 50, "uses": [{"number": 1, "gpu": 0, "start": 0, %s}]}'


@pytest.fixture
def world(tmp_path: Path) -> SimWorld:
    return SimWorld(tmp_path)


def used(look: Look, gpu: int = 0) -> Utilization:
    value = look.readings[gpu].utilization
    assert known(value)
    return value


def processes_of(reading: Reading) -> tuple[Process, ...]:
    assert known(reading.processes)
    return reading.processes


def test_unused_machine_is_idle_not_unknown(world: SimWorld) -> None:
    look = world.source().look()
    assert (look.source, look.problem, len(look.gpus)) == ("sim", None, 2)
    reading = look.readings[1]
    assert reading.uuid == look.gpus[1].uuid
    assert (reading.memory_used, reading.memory_total) == (0, 24 * GIB)
    assert (used(look, 1).peak, reading.power, reading.processes) == (0.0, IDLE_WATTS, ())


def test_load_is_seen_on_its_gpu_with_memory_power_and_process(world: SimWorld) -> None:
    world.run(7, [busy(0.9)], gpu=1, memory=8 * GIB)
    world.now += 10
    look = world.source().look()
    first, second = look.readings
    assert (first.memory_used, first.processes) == (0, ())
    assert second.memory_used == 8 * GIB
    assert used(look, 1).mean == pytest.approx(0.9)
    assert second.power == pytest.approx(IDLE_WATTS + 0.9 * (LIMIT_WATTS - IDLE_WATTS))
    (process,) = processes_of(second)
    assert (process.pid, process.started, process.memory) == (7, 50, 8 * GIB)
    assert process.utilization == pytest.approx(0.9)
    assert process.memory_activity == pytest.approx(0.9 * TRAFFIC)
    assert process.name == "a (strange) name"


def test_load_moves_memory_and_raises_the_clock(world: SimWorld) -> None:
    world.run(7, [burst(0.8, 0.5, 10.0)], gpu=1)
    world.now += 10.4
    resting, working = world.source().look().readings
    assert known(resting.memory_activity)
    assert (resting.memory_activity.peak, resting.sm_clock, resting.throttling) == (0.0, IDLE_MHZ, ("idle",))
    assert known(working.memory_activity)
    assert working.memory_activity.peak == pytest.approx(0.8 * TRAFFIC)
    assert (working.sm_clock, working.throttling) == (BOOST_MHZ, ())
    assert working.health == resting.health == DeviceHealth((), 0, needs_reset=False, remapping_failed=False)


def test_first_look_spans_a_second_and_later_ones_the_time_since(world: SimWorld) -> None:
    world.run(7, [busy(0.9)])
    world.now += 10
    source = world.source()
    assert source.look().readings[0].span == pytest.approx(1.0)
    world.now += 4
    look = source.look()
    assert look.at == world.now
    assert look.readings[0].span == pytest.approx(4.0)
    assert used(look).samples == 24


def test_burst_between_two_looks_is_seen(world: SimWorld) -> None:
    world.run(7, [idle(3.0), burst(0.8, 0.5, 10.0)])
    source = world.source()
    source.look()
    world.now += 5
    look = source.look()
    assert used(look).peak == pytest.approx(0.8)
    assert used(look).mean == pytest.approx(0.08, abs=1e-3)


def test_look_after_a_long_gap_spans_only_the_driver_buffer(world: SimWorld) -> None:
    world.run(7, [busy(1.0, 3600.0 - 60), idle()])
    source = world.source()
    source.look()
    world.now += 3600
    look = source.look()
    assert look.readings[0].span == pytest.approx(100 / 6)
    assert used(look).peak == 0.0
    energy = look.readings[0].energy
    assert energy == pytest.approx(LIMIT_WATTS * 3540 + IDLE_WATTS * 60, rel=1e-3)


def test_energy_counts_from_the_opening(world: SimWorld) -> None:
    world.run(7, [busy(1.0)])
    world.now += 100
    source = world.source()
    assert source.look().readings[0].energy == 0.0
    world.now += 10
    assert source.look().readings[0].energy == pytest.approx(10 * LIMIT_WATTS)


def test_spin_has_full_utilization_and_little_power(world: SimWorld) -> None:
    world.run(7, [spin()])
    world.now += 10
    look = world.source().look()
    assert used(look).mean == 1.0
    power = look.readings[0].power
    assert known(power)
    assert power < 0.3 * LIMIT_WATTS


def test_processes_on_one_gpu_share_it_and_are_measured_separately(world: SimWorld) -> None:
    world.run(7, [busy(0.8)], memory=GIB)
    world.run(8, [busy(0.8)], memory=2 * GIB)
    world.now += 10
    look = world.source().look()
    assert used(look).mean == 1.0
    assert look.readings[0].memory_used == 3 * GIB
    processes = processes_of(look.readings[0])
    assert [(process.pid, process.memory) for process in processes] == [(7, GIB), (8, 2 * GIB)]
    assert [process.utilization for process in processes] == pytest.approx([0.8, 0.8])


def test_process_on_two_gpus_is_listed_on_both(world: SimWorld) -> None:
    world.process(7)
    world.load(7, Use(1, 0, 0.0, memory=GIB), Use(2, 1, 0.0, memory=2 * GIB))
    readings = world.source().look().readings
    assert [processes_of(reading)[0].memory for reading in readings] == [GIB, 2 * GIB]


def test_killed_process_releases_memory_at_once_and_its_last_work_counts(world: SimWorld) -> None:
    world.run(7, [busy(0.9)])
    source = world.source()
    source.look()
    world.now += 5
    world.kill(7)
    look = source.look()
    assert (look.readings[0].memory_used, look.readings[0].processes) == (0, ())
    assert used(look).peak == pytest.approx(0.9)
    world.now += 5
    assert used(source.look()).peak == 0.0


def test_work_of_a_killed_process_counts_after_its_file_was_removed(world: SimWorld) -> None:
    world.run(7, [busy(0.9)])
    source = world.source()
    source.look()
    world.now += 5
    world.kill(7)
    with world.machine.locked() as loads:
        assert loads == ()
    assert used(source.look()).peak == pytest.approx(0.9)
    world.now += 5
    assert used(source.look()).peak == 0.0


def test_old_file_of_a_killed_process_is_not_work(world: SimWorld) -> None:
    world.run(7, [busy(0.9)])
    world.kill(7)
    world.now += 1
    assert used(world.source().look()).peak == 0.0


def test_work_started_and_ended_between_two_looks_is_seen(world: SimWorld) -> None:
    source = world.source()
    source.look()
    world.now += 1
    use = world.run(7, [busy(0.9)])
    world.now += 1
    world.load(7, msgspec.structs.replace(use, memory=0, ended=world.now))
    world.kill(7)
    world.now += 2
    look = source.look()
    assert used(look).peak == pytest.approx(0.9)
    assert used(look).mean == pytest.approx(0.225, abs=1e-3)
    assert look.readings[0].processes == ()


def test_stopped_process_holds_its_memory_and_is_idle(world: SimWorld) -> None:
    world.run(7, [busy(0.9)])
    source = world.source()
    source.look()
    world.process(7, state="T")
    peaks = []
    for _ in range(3):
        world.now += 5
        peaks.append(used(source.look()).peak)
    world.process(7, state="S")
    world.now += 5
    look = source.look()
    assert peaks == [pytest.approx(0.9), 0.0, 0.0]
    assert used(look).peak == pytest.approx(0.9)
    assert look.readings[0].memory_used == GIB


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"pid": 7, "started": 50, "uses": [{"number"',
        b"\xff\xfe",
        b"[]",
        USE % b'"memory": -5',
        USE % b'"scripts": [{"start": 0, "phases": [], "repeat": true}]',
        USE % b'"scripts": [{"start": 0, "phases": [{"kind": "burst", "burst": 1, "period": 0}]}]',
    ],
)
def test_broken_file_of_a_live_process_makes_the_gpus_unknown_not_idle(world: SimWorld, content: bytes) -> None:
    world.run(7, [busy(0.9)])
    source = world.source()
    (world.machine.loads_directory / "7-50.json").write_bytes(content)
    look = source.look()
    assert look.problem is None
    assert all(isinstance(reading.utilization, Unknown) for reading in look.readings)
    assert all(isinstance(reading.memory_used, Unknown) for reading in look.readings)


def test_broken_file_of_a_dead_process_and_other_files_are_ignored(world: SimWorld) -> None:
    world.run(7, [busy(0.9)])
    world.now += 5
    for name in ("8-50.json", "notes.txt", "7-50.json.new"):
        (world.machine.loads_directory / name).write_text("{")
    assert used(world.source().look()).peak == pytest.approx(0.9)


def test_unreadable_machine_is_a_problem_not_idle(world: SimWorld) -> None:
    world.machine.directory.mkdir(parents=True)
    world.machine.loads_directory.write_text("a file where the directory should be")
    problem = world.source().look().problem
    assert problem is not None
    assert "cannot be read" in problem.reason


def test_look_changes_no_files(world: SimWorld) -> None:
    world.run(7, [busy(0.9)])
    world.kill(7)
    source = world.source()
    source.look()
    source.close()
    assert [path.name for path in world.machine.loads_directory.iterdir()] == ["7-50.json"]
