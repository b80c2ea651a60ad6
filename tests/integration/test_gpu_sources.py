"""What every GPU source must do, checked on each of them through the helper process, as the product uses them."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stoker.errors import BadInputError
from stoker.gpus.model import Look, Reading, Unknown, known
from stoker.gpus.prober import Prober
from stoker.gpus.report import state_of
from stoker.gpus.source import AbsentError, check_spec, sources
from stoker.gpus.visible import VENDORS, device_nodes, set_visible_gpus, visible_gpus
from tests.support.gpu_machines import MACHINES, GpuMachine

AUTOMATIC = [entry.name for entry in sources() if entry.auto]


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuMachine:
    return MACHINES[request.param](tmp_path, monkeypatch)


@pytest.fixture(params=["no", "start"], ids=["private", "shared"])
def prober(machine: GpuMachine, request: pytest.FixtureRequest) -> Iterator[Prober]:
    with Prober(machine.spec, deadline=60, root=str(machine.root), sharing=request.param) as prober:
        yield prober


def test_all_sources_are_in_this_suite() -> None:
    assert set(MACHINES) == {entry.name for entry in sources()}


def test_each_gpu_has_an_identity_and_a_reading(machine: GpuMachine, prober: Prober) -> None:
    look = prober.look()
    assert look.source == machine.spec.partition(":")[0]
    assert [gpu.index for gpu in look.gpus] == list(range(machine.gpus))
    assert len({gpu.uuid for gpu in look.gpus} - {""}) == machine.gpus
    assert [reading.uuid for reading in look.readings] == [gpu.uuid for gpu in look.gpus]
    assert look.problem is None


def test_second_sample_covers_the_time_since_the_first(prober: Prober) -> None:
    first, second = prober.look(), prober.look()
    assert second.at > first.at
    assert second.gpus == first.gpus
    for reading in second.readings:
        assert 0 < reading.span <= second.at - first.at + 1e-6


def test_every_value_is_read_or_has_a_reason(prober: Prober) -> None:
    """A field that a source has forgotten would say "not recorded", which is what a recording says."""
    for reading in prober.look().readings:
        values = [getattr(reading, name) for name in Reading.__struct_fields__]
        values += [*reading.health] if known(reading.health) else []
        values += [*reading.pipes] if known(reading.pipes) else []
        values += [p.memory_activity for p in reading.processes] if known(reading.processes) else []
        reasons = [value.reason for value in values if isinstance(value, Unknown)]
        assert all(reason and reason != "not recorded" for reason in reasons)


def test_broken_driver_makes_gpus_unknown_and_never_idle(machine: GpuMachine, prober: Prober) -> None:
    before = prober.look()
    machine.break_driver()
    broken = prober.look()
    assert [gpu.uuid for gpu in broken.gpus] == [gpu.uuid for gpu in before.gpus]
    assert [state_of(reading)[0] for reading in broken.readings] == ["unknown"] * machine.gpus
    assert all(state_of(reading)[1] for reading in broken.readings)


def test_repaired_driver_is_read_again(machine: GpuMachine, prober: Prober) -> None:
    prober.look()
    machine.break_driver()
    prober.look()
    machine.repair()
    prober.look()
    repaired = prober.look()
    assert repaired.problem is None
    assert known(repaired.readings[0].utilization)


def test_sample_survives_serialization(prober: Prober) -> None:
    look = prober.look()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(look), type=Look) == look


def test_program_with_one_gpu_sees_that_gpu(machine: GpuMachine, prober: Prober) -> None:
    gpus = prober.look().gpus
    for gpu in gpus:
        environment: dict[str, str] = {}
        set_visible_gpus(environment, [gpu], gpus)
        assert environment
        assert gpu in visible_gpus(gpus, environment)
        assert gpu.vendor in VENDORS
    assert device_nodes(gpus, machine.root).keys() == {gpu.uuid for gpu in gpus}


@pytest.mark.parametrize("name", AUTOMATIC)
def test_auto_selects_the_source_and_explains_the_rejected_ones(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = MACHINES[name](tmp_path, monkeypatch)
    with Prober("auto", deadline=60, root=str(machine.root)) as prober:
        assert prober.look().source == machine.spec
    *left, taken = prober.choices
    assert (taken.source, taken.taken) == (machine.spec, True)
    assert all(choice.reason and not choice.taken for choice in left)


@pytest.mark.parametrize("name", AUTOMATIC)
def test_source_without_gpus_is_unavailable(name: str, tmp_path: Path) -> None:
    with Prober(name, deadline=60, root=str(tmp_path)) as prober, pytest.raises(AbsentError):
        prober.look()


def test_source_argument_is_validated_before_the_start() -> None:
    for entry in sources():
        with pytest.raises(BadInputError):
            check_spec(f"{entry.name}:nonsense")
