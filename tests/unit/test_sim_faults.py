"""Faults of simulated GPUs: their effect on a look, and how they end."""

from pathlib import Path

import pytest

from stoker.errors import BadInputError
from stoker.gpus.model import NOT_SUPPORTED, DeviceHealth, Look, Maybe, Reading, Unknown, known
from stoker.gpus.sim.faults import FIELDS, FaultField, add_fault, clear_faults, parse_fault, read_faults
from stoker.gpus.sim.load import busy
from stoker.gpus.sim.source import HEALTHY
from tests.support.sim_world import GIB, SimWorld


@pytest.fixture
def world(tmp_path: Path) -> SimWorld:
    """A machine with a busy process on its first GPU."""
    world = SimWorld(tmp_path)
    world.run(7, [busy(0.9)])
    world.now += 10
    return world


def break_it(
    world: SimWorld, kind: str, argument: str | None = None, gpu: int | None = None, lasts: float | None = None
) -> None:
    add_fault(world.machine, parse_fault(kind, argument, gpu, world.now, lasts))


def look(world: SimWorld) -> Look:
    return world.source().look()


def part(reading: Reading, field: FaultField) -> Maybe[object]:
    return reading.memory_used if field == "memory" else getattr(reading, field)


def test_lost_gpu_is_unknown_and_the_others_are_read(world: SimWorld) -> None:
    break_it(world, "lost", gpu=0)
    lost, fine = look(world).readings
    why = Unknown("GPU is lost")
    assert (lost.utilization, lost.memory_used, lost.power, lost.processes) == (why, why, why, why)
    assert known(fine.utilization)


def test_lost_gpu_has_the_xid_of_its_loss(world: SimWorld) -> None:
    break_it(world, "xid", "48", gpu=0)
    break_it(world, "lost", gpu=0)
    lost, fine = look(world).readings
    why = Unknown("GPU is lost")
    assert lost.health == DeviceHealth((48, 79), why, why, why)
    assert fine.health == HEALTHY


def test_xids_and_memory_errors_are_in_the_health(world: SimWorld) -> None:
    for number in ("31", "13", "31"):
        break_it(world, "xid", number, gpu=0)
    break_it(world, "ecc", "2", gpu=1)
    first, second = look(world).readings
    assert first.health == HEALTHY._replace(xids=(13, 31))
    assert second.health == HEALTHY._replace(uncorrected=2, needs_reset=True)
    assert known(first.utilization)
    clear_faults(world.machine)
    assert [reading.health for reading in look(world).readings] == [HEALTHY, HEALTHY]


def test_fault_without_a_gpu_affects_all(world: SimWorld) -> None:
    break_it(world, "lost")
    assert all(isinstance(reading.memory_total, Unknown) for reading in look(world).readings)


@pytest.mark.parametrize("field", FIELDS)
def test_unsupported_field_is_unknown_and_the_others_are_read(world: SimWorld, field: FaultField) -> None:
    break_it(world, "unsupported", field, gpu=0)
    reading, other = look(world).readings
    for each in FIELDS:
        assert known(part(reading, each)) == (each != field)
        assert known(part(other, each))
    assert part(reading, field) == Unknown(NOT_SUPPORTED)


def test_unsupported_memory_is_unknown_for_gpu_and_processes(world: SimWorld) -> None:
    break_it(world, "unsupported", "memory", gpu=0)
    seen = look(world)
    assert [known(gpu.memory) for gpu in seen.gpus] == [False, True]
    processes = seen.readings[0].processes
    assert known(processes)
    assert processes[0].memory == Unknown(NOT_SUPPORTED)


@pytest.mark.parametrize("field", ["utilization", "memory", "power", "temperature"])
def test_absurd_value_is_unknown_with_the_reported_value(world: SimWorld, field: FaultField) -> None:
    break_it(world, "absurd", field, gpu=0)
    value = part(look(world).readings[0], field)
    assert isinstance(value, Unknown)
    assert "the driver reported" in value.reason


def test_absurd_processes_are_listed_with_unknown_values(world: SimWorld) -> None:
    break_it(world, "absurd", "processes", gpu=0)
    processes = look(world).readings[0].processes
    assert known(processes)
    assert processes[0].pid == 7
    assert not known(processes[0].memory)
    assert not known(processes[0].utilization)


def test_absent_machine_is_a_problem_without_gpus(world: SimWorld) -> None:
    break_it(world, "absent")
    seen = look(world)
    assert seen.problem is not None
    assert (seen.gpus, seen.readings) == ((), ())


def test_hang_blocks_a_look_for_its_duration(world: SimWorld) -> None:
    break_it(world, "hang", "30s")
    seen = look(world)
    assert world.slept == pytest.approx(30.0)
    assert known(seen.readings[0].utilization)


def test_hang_without_a_duration_lasts_until_it_is_cleared(world: SimWorld) -> None:
    break_it(world, "hang", lasts=45.0)
    look(world)
    assert world.slept == pytest.approx(45.0, abs=0.1)


def test_cleared_hang_ends_promptly(world: SimWorld) -> None:
    break_it(world, "hang")
    source = world.source()
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 10:
            clear_faults(world.machine)

    source._sleep = nap
    source.look()
    assert len(naps) == 10
    assert max(naps) <= 0.05


def test_fault_with_a_duration_expires(world: SimWorld) -> None:
    break_it(world, "lost", gpu=0, lasts=30.0)
    world.now += 29
    assert not known(look(world).readings[0].utilization)
    world.now += 2
    assert known(look(world).readings[0].utilization)


def test_fault_from_before_a_reboot_is_over(world: SimWorld) -> None:
    break_it(world, "lost")
    world.now = 5.0
    assert read_faults(world.machine, world.now) == ()


def test_same_fault_again_replaces_the_one_before(world: SimWorld) -> None:
    break_it(world, "hang", "30s")
    break_it(world, "hang", "1s")
    look(world)
    assert world.slept == pytest.approx(1.0)


def test_faults_are_cleared_together_by_kind_or_by_gpu(world: SimWorld) -> None:
    def start() -> None:
        clear_faults(world.machine)
        break_it(world, "lost", gpu=0)
        break_it(world, "lost", gpu=1)
        break_it(world, "absurd", "power", gpu=1)

    def left() -> list[str]:
        faults = read_faults(world.machine, world.now)
        assert not isinstance(faults, Unknown)
        return [str(fault) for fault in faults]

    start()
    clear_faults(world.machine, "lost")
    assert left() == ["GPU 1: power absurd"]
    start()
    clear_faults(world.machine, gpu=1)
    assert left() == ["GPU 0: lost"]
    start()
    assert len(clear_faults(world.machine)) == 3
    assert left() == []


@pytest.mark.parametrize("content", [b"", b"[{", b"\xff", b"{}", b'[{"kind": "strange", "since": 0}]'])
def test_broken_fault_file_is_a_problem_until_it_is_cleared(world: SimWorld, content: bytes) -> None:
    (world.machine.directory / "faults.json").write_bytes(content)
    seen = look(world)
    assert seen.problem is not None
    assert "faults.json" in seen.problem.reason
    clear_faults(world.machine)
    assert look(world).readings[0].memory_used == GIB


@pytest.mark.parametrize(
    ("kind", "argument", "gpu"),
    [
        ("broken", None, None),
        ("lost", "power", None),
        ("absent", None, 1),
        ("absent", "power", None),
        ("unsupported", None, None),
        ("unsupported", "colour", None),
        ("absurd", None, None),
        ("hang", "soon", None),
    ],
)
def test_invalid_fault_is_refused_with_one_message(kind: str, argument: str | None, gpu: int | None) -> None:
    with pytest.raises(BadInputError) as refused:
        parse_fault(kind, argument, gpu, 0.0, None)
    assert "\n" not in str(refused.value)


def test_unknown_kind_of_fault_cannot_be_cleared(world: SimWorld) -> None:
    with pytest.raises(BadInputError):
        clear_faults(world.machine, "broken")
