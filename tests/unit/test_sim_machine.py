"""A simulated machine: its shape, directory and processes."""

from pathlib import Path

import pytest

from stoker.errors import BadInputError, StokerError
from stoker.gpus.sim import Shape, SimMachine, parse_shape
from stoker.gpus.sim.load import Use
from stoker.gpus.sim.machine import is_simulated, state_directory
from tests.support.sim_world import SimWorld

GIB = 2**30


@pytest.mark.parametrize(
    ("argument", "shape"),
    [
        ("4", Shape(4, 24 * GIB)),
        ("", Shape(4, 24 * GIB)),
        ("2x24GiB", Shape(2, 24 * GIB)),
        ("1x512MiB", Shape(1, 512 * 2**20)),
        ("8x80G@/tmp/somewhere", Shape(8, 80 * GIB)),
        ("8,switch=4,nvlink=2", Shape(8, 24 * GIB, (("nvlink", 2), ("switch", 4)))),
        ("8x80G,node=4@/tmp/somewhere", Shape(8, 80 * GIB, (("node", 4),))),
    ],
)
def test_common_spellings_of_a_shape_are_accepted(argument: str, shape: Shape) -> None:
    assert parse_shape(argument) == shape


@pytest.mark.parametrize(
    "argument",
    [
        *("x", "0", "65", "2x", "2x0GiB", "2x2TiB", "2xmuch", "-1", "4@", "2 x 24GiB x", "9" * 5000),
        *("4,", "4,nvlink", "4,nvlink=0", "4,nvlink=2,nvlink=4", "4,pcie=2", "4,nvlink=2x80GiB"),
    ],
)
def test_impossible_shape_is_refused_with_one_message(argument: str) -> None:
    with pytest.raises(BadInputError) as refused:
        parse_shape(argument)
    assert "\n" not in str(refused.value)


def test_gpus_are_the_same_in_every_process_with_unique_ids(tmp_path: Path) -> None:
    one = SimMachine(Shape(12, 24 * GIB), tmp_path)
    other = SimMachine(Shape(12, 24 * GIB), tmp_path / "elsewhere")
    assert one.gpus == other.gpus
    assert [gpu.index for gpu in one.gpus] == list(range(12))
    assert len({gpu.uuid for gpu in one.gpus}) == len({gpu.bus for gpu in one.gpus}) == 12
    assert all(gpu.minor != gpu.index for gpu in one.gpus)
    assert one.gpus[0].name == "Simulated 24 GiB"
    assert [len(part) for part in one.gpus[11].uuid.removeprefix("GPU-").split("-")] == [8, 4, 4, 4, 12]


def test_gpus_are_connected_as_the_shape_says(tmp_path: Path) -> None:
    machine = SimMachine.find(f"sim:8,nvlink=2,switch=4@{tmp_path}", {})
    number = {gpu.uuid: gpu.index for gpu in machine.gpus}
    assert [(number[uuid], link) for uuid, link in machine.gpus[2].links] == [
        *((0, "switch"), (1, "switch"), (3, "nvlink")),
        *((4, "system"), (5, "system"), (6, "system"), (7, "system")),
    ]
    assert machine.directory.name == "8x24GiB,nvlink=2,switch=4"
    assert SimMachine.find(machine.spec, {}).gpus == machine.gpus
    assert SimMachine.find("sim:8", {}).gpus[0].links == ()


@pytest.mark.parametrize(
    ("environment", "directory"),
    [
        ({"STOKER_SIM_DIR": "/a", "STOKER_HOME": "/b", "XDG_STATE_HOME": "/c", "HOME": "/d"}, "/a"),
        ({"STOKER_HOME": "/b", "XDG_STATE_HOME": "/c", "HOME": "/d"}, "/b/sim"),
        ({"XDG_STATE_HOME": "/c", "HOME": "/d"}, "/c/stoker/sim"),
        ({"HOME": "/d"}, "/d/.local/state/stoker/sim"),
    ],
)
def test_machine_directory_follows_the_environment(environment: dict[str, str], directory: str) -> None:
    assert state_directory(environment) == Path(directory)
    assert SimMachine.find("sim:2x24GiB", environment).directory == Path(directory) / "2x24GiB"


def test_directory_in_the_spec_takes_precedence_and_shapes_are_separate(tmp_path: Path) -> None:
    environment = {"STOKER_SIM_DIR": "/a"}
    machine = SimMachine.find(f"sim:4@{tmp_path}", environment)
    assert machine.directory == tmp_path / "4x24GiB"
    assert SimMachine.find(f"4x1.5GiB@{tmp_path}", environment).directory == tmp_path / "4x1536MiB"


def test_only_sim_sources_are_simulated() -> None:
    assert is_simulated("sim")
    assert is_simulated("sim:2")
    assert not is_simulated("simple")
    assert not is_simulated("auto")


def test_program_without_a_simulated_machine_gets_a_hint() -> None:
    with pytest.raises(StokerError, match="STOKER_GPUS=sim:4"):
        SimMachine.of_environment({"STOKER_GPUS": "nvml"})


@pytest.fixture
def world(tmp_path: Path) -> SimWorld:
    return SimWorld(tmp_path)


def test_only_live_processes_hold_memory(world: SimWorld) -> None:
    for pid, state in ((1, "R"), (2, "Z"), (3, "T"), (4, "X")):
        world.process(pid, state=state)
        world.load(pid, Use(1, 0, 0.0, memory=GIB))
    world.load(5, Use(1, 0, 0.0, memory=GIB))
    assert world.machine.held(0, world.machine.loads()) == 2 * GIB


def test_reused_pid_does_not_inherit_memory(world: SimWorld) -> None:
    world.process(1, started=99)
    world.load(1, Use(1, 0, 0.0, memory=GIB))
    assert world.machine.held(0, world.machine.loads()) == 0


def test_memory_is_counted_per_gpu(world: SimWorld) -> None:
    world.process(1)
    world.load(1, Use(1, 0, 0.0, memory=GIB), Use(2, 1, 0.0, memory=2 * GIB, context=7))
    loads = world.machine.loads()
    assert [world.machine.held(gpu, loads) for gpu in (0, 1)] == [GIB, 2 * GIB + 7]


def test_files_of_dead_processes_are_removed_under_the_lock(world: SimWorld) -> None:
    world.process(1)
    world.load(1, Use(1, 0, 0.0))
    world.load(2, Use(1, 0, 0.0))
    (world.machine.loads_directory / "3-50.json.new").write_text("{")
    (world.machine.loads_directory / "4-50.json").write_text("not json")
    with world.machine.locked() as loads:
        assert [found.identity for found in loads] == [(1, 50)]
    assert [path.name for path in world.machine.loads_directory.iterdir()] == ["1-50.json"]


def test_released_process_is_remembered_for_a_limited_time(world: SimWorld) -> None:
    world.load(2, Use(1, 0, 0.0, ended=world.now))
    world.now += 10
    with world.machine.locked() as loads:
        assert len(loads) == 1
    world.now += 60
    with world.machine.locked() as loads:
        assert loads == ()


def test_unwritable_directory_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    machine = SimMachine(Shape(2, 24 * GIB), tmp_path / "file")
    with pytest.raises(StokerError, match="STOKER_SIM_DIR"), machine.locked():
        pass


def test_unused_machine_is_read_without_creating_files(tmp_path: Path) -> None:
    machine = SimMachine(Shape(2, 24 * GIB), tmp_path / "new")
    assert machine.loads() == ()
    assert not (tmp_path / "new").exists()
