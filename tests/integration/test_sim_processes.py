"""Real processes on a simulated machine: what they hold, what they may not, and what is left of them."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker.errors import BadInputError, StokerError
from stoker.gpus.model import Look, Unknown, known
from stoker.gpus.prober import Prober
from stoker.gpus.sim import SimMachine, SimulatedOutOfMemoryError, SimulatedProcess, open_source
from stoker.gpus.sim.faults import add_fault, clear_faults, parse_fault

GIB = 2**30

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimMachine:
    """Two GPUs of 4 GiB, which STOKER_GPUS names."""
    monkeypatch.setenv("STOKER_GPUS", "sim:2x4GiB")
    return SimMachine.of_environment(os.environ)


@pytest.fixture
def start(machine: SimMachine) -> Iterator[Start]:
    """Starts Python programs that are ended with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(program: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


HOLDER = """
from stoker.gpus.sim import SimulatedProcess
with SimulatedProcess.attach(gpu=0) as gpu:
    gpu.allocate(3 * 2**30)
    gpu.work(utilization=0.9)
    print("ready", flush=True)
    input()
"""


def line(process: "subprocess.Popen[str]") -> str:
    """What a program says next: the event that the test waits for."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def release(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def held(machine: SimMachine, gpu: int = 0) -> int:
    return machine.held(gpu, machine.loads())


def look(machine: SimMachine) -> Look:
    source = open_source(Path("/"), "2x4GiB")
    try:
        return source.look()
    finally:
        source.close()


def test_memory_is_allocated_freed_and_released_on_close(machine: SimMachine) -> None:
    with SimulatedProcess.attach(gpu=0) as gpu:
        gpu.allocate(3 * GIB)
        assert (gpu.memory, gpu.free_memory, held(machine)) == (3 * GIB, GIB, 3 * GIB)
        gpu.free(2 * GIB)
        assert held(machine) == GIB
    assert held(machine) == 0


def test_context_uses_memory_from_the_start(machine: SimMachine) -> None:
    with SimulatedProcess.attach(gpu=0, context=300 * 2**20) as gpu:
        assert (gpu.memory, held(machine)) == (0, 300 * 2**20)
        with pytest.raises(SimulatedOutOfMemoryError):
            gpu.allocate(4 * GIB)


def test_failed_allocation_has_the_message_of_pytorch_and_uses_no_memory(machine: SimMachine) -> None:
    with SimulatedProcess.attach(gpu=1) as gpu:
        gpu.allocate(2 * GIB)
        with pytest.raises(RuntimeError) as failed:
            gpu.allocate(3 * GIB)
        assert str(failed.value) == (
            "CUDA out of memory. Tried to allocate 3.00 GiB. "
            "GPU 1 has a total capacity of 4.00 GiB of which 2.00 GiB is free."
        )
        assert failed.value.args == (str(failed.value),)
        assert gpu.memory == 2 * GIB
        gpu.allocate(2 * GIB)


def test_negative_allocation_is_refused(machine: SimMachine) -> None:
    with SimulatedProcess.attach() as gpu:
        gpu.allocate(GIB)
        for change, amount in ((gpu.free, 2 * GIB), (gpu.free, -1), (gpu.allocate, -1)):
            with pytest.raises(ValueError):
                change(amount)
        assert gpu.memory == GIB


def test_process_can_use_several_gpus_and_close_them_separately(machine: SimMachine) -> None:
    with SimulatedProcess.attach(gpu=1) as second:
        second.allocate(2 * GIB)
        with SimulatedProcess.attach(gpu=0) as first:
            first.allocate(GIB)
            seen = look(machine)
            assert [reading.memory_used for reading in seen.readings] == [GIB, 2 * GIB]
            assert [len(r.processes) if known(r.processes) else 0 for r in seen.readings] == [1, 1]
        assert [held(machine, gpu) for gpu in (0, 1)] == [0, 2 * GIB]
        with pytest.raises(StokerError, match="not attached"):
            first.allocate(1)


@pytest.mark.parametrize("visible", ["1", "GPU-51000000-0000-4000-8000-000000000001"])
def test_gpus_are_counted_as_cuda_counts_them(
    machine: SimMachine, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with SimulatedProcess.attach(gpu=0) as gpu:
        gpu.allocate(GIB)
        assert gpu.gpu.index == 1
        assert [held(machine, index) for index in (0, 1)] == [0, GIB]
    with pytest.raises(BadInputError, match="CUDA_VISIBLE_DEVICES"):
        SimulatedProcess.attach(gpu=1)


def test_missing_gpu_is_refused(machine: SimMachine) -> None:
    with pytest.raises(BadInputError, match="has 2"):
        SimulatedProcess.attach(gpu=2)


def test_state_is_visible_to_another_process(machine: SimMachine, start: Start) -> None:
    child = start(HOLDER)
    assert line(child) == "ready"
    reading = look(machine).readings[0]
    assert reading.memory_used == 3 * GIB
    assert known(reading.processes)
    assert [(process.pid, process.memory) for process in reading.processes] == [(child.pid, 3 * GIB)]
    with SimulatedProcess.attach(gpu=0) as gpu, pytest.raises(SimulatedOutOfMemoryError):
        gpu.allocate(2 * GIB)


def test_killed_process_releases_memory_before_it_is_reaped(machine: SimMachine, start: Start) -> None:
    child = start(HOLDER)
    line(child)
    child.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert held(machine) == 0
    with SimulatedProcess.attach(gpu=0) as gpu:
        gpu.allocate(4 * GIB)
    assert not list(machine.loads_directory.glob(f"{child.pid}-*"))


RACER = """
from stoker.gpus.sim import SimulatedOutOfMemoryError, SimulatedProcess
with SimulatedProcess.attach(gpu=0) as gpu:
    print("ready", flush=True)
    input()
    got = 0
    for _ in range(20):
        try:
            gpu.allocate(2**28)
            got += 1
        except SimulatedOutOfMemoryError:
            break
    print(got, flush=True)
    input()
"""


def test_racing_allocations_use_exactly_the_available_memory(machine: SimMachine, start: Start) -> None:
    racers = [start(RACER) for _ in range(4)]
    for racer in racers:
        assert line(racer) == "ready"
    for racer in racers:
        release(racer)
    assert sum(int(line(racer)) for racer in racers) == 16
    assert held(machine) == 4 * GIB


BUSY_WRITER = """
import select, sys
from stoker.gpus.sim import SimulatedProcess
with SimulatedProcess.attach(gpu=0) as gpu:
    gpu.allocate(2**30)
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        gpu.work(utilization=0.5)
        gpu.work(utilization=1.0)
"""


def test_sample_never_sees_a_partial_change(machine: SimMachine, start: Start) -> None:
    writer = start(BUSY_WRITER)
    assert line(writer) == "ready"
    source = open_source(Path("/"), "2x4GiB")
    seen = [source.look().readings[0] for _ in range(40)]
    source.close()
    release(writer)
    assert writer.wait(60) == 0
    assert {reading.memory_used for reading in seen} == {GIB}
    assert all(known(reading.utilization) for reading in seen)


FORKER = """
import os
from stoker.errors import StokerError
from stoker.gpus.sim import SimulatedProcess
with SimulatedProcess.attach(gpu=0) as gpu:
    gpu.allocate(2**30)
    child = os.fork()
    if child == 0:
        try:
            gpu.allocate(1)
        except StokerError as error:
            print(error, flush=True)
        raise SystemExit
    os.waitpid(child, 0)
    print(gpu.memory, flush=True)
"""


def test_forked_child_can_neither_use_nor_lose_its_parents_gpu(start: Start) -> None:
    parent = start(FORKER)
    assert "forked process" in line(parent)
    assert line(parent) == str(GIB)


def test_timed_work_ends_after_its_duration(machine: SimMachine) -> None:
    with SimulatedProcess.attach(gpu=0) as gpu:
        gpu.work(0.8, seconds=0.05)
        (found,) = machine.loads()
        assert found.load is not None
        (use,) = found.load.uses
        assert use.phase_at(use.scripts[0].start + 0.04) is not None
        assert use.phase_at(use.scripts[0].start + 0.06) is None


def test_closing_on_a_removed_machine_does_not_recreate_it(machine: SimMachine, tmp_path: Path) -> None:
    with SimulatedProcess.attach(gpu=0):
        machine.directory.rename(tmp_path / "away")
    assert not machine.directory.exists()


def test_prober_reads_the_machine_and_reports_a_hang_as_unknown(machine: SimMachine) -> None:
    with SimulatedProcess.attach(gpu=0) as gpu, Prober("sim:2x4GiB", deadline=60.0) as prober:
        gpu.allocate(GIB)
        assert prober.look().readings[0].memory_used == GIB
        add_fault(machine, parse_fault("hang", None, None, machine.clock(), None))
        prober.deadline = 0.2
        hung = prober.look()
        assert hung.problem is not None or all(isinstance(r.memory_used, Unknown) for r in hung.readings)
        clear_faults(machine)
        prober.deadline = 60.0
        assert prober.look().readings[0].memory_used == GIB
