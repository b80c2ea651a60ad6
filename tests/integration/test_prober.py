"""The guard: a driver that blocks or crashes costs the caller a deadline, and nothing else."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from stoker.errors import BadInputError
from stoker.gpus import prober
from stoker.gpus.helper import HEADER, REQUEST
from stoker.gpus.model import Look, Unknown, known
from stoker.gpus.prober import HelperProcess, Prober
from stoker.gpus.sim import SimulatedProcess
from stoker.gpus.sim.machine import SimMachine
from stoker.gpus.source import AbsentError
from stoker.gpus.spawn import Helper
from stoker.procfs import identify, is_alive
from tests.support.mock_nvml import MockMachine
from tests.support.waiting import wait_for

HELPER = "stoker.gpus.helper"


_earlier: list[psutil.Process] = []


@pytest.fixture(autouse=True)
def _only_of_this_test() -> None:
    """A helper that was slow to leave at the end of another test may still be there, if only as a zombie."""
    _earlier[:] = psutil.Process().children()


def helpers() -> list[psutil.Process]:
    """The helper processes that this test started, ended ones that nobody reaped included."""
    return [child for child in psutil.Process().children() if child not in _earlier and _is_helper(child)]


def _is_helper(process: psutil.Process) -> bool:
    """Includes a zombie, whose command line cannot be read."""
    try:
        return HELPER in str(process.cmdline())
    except psutil.ZombieProcess:
        return True
    except psutil.NoSuchProcess:
        return False


def started(deadline: float) -> Prober:
    """A prober with this deadline whose helper runs: the start of one takes longer than that on a busy machine."""
    prober = Prober("nvml", deadline=60)
    assert prober.look().problem is None
    prober.deadline = deadline
    return prober


def problem(look: Look) -> str:
    assert look.problem is not None
    return look.problem.reason


def test_blocked_driver_yields_unknown_in_time_with_one_helper_and_one_call(nvidia: MockMachine) -> None:
    with started(deadline=0.4) as prober:
        look, took = _blocked_look(nvidia, prober)
        for _ in range(2):
            if took < 1.5:
                break
            # The machine was busy, or this is how long it takes: the next try decides.
            nvidia.clear_faults()
            wait_for(lambda: _good(prober.look()), named="a good look")
            look, took = _blocked_look(nvidia, prober)
        assert 0.4 <= took < 1.5
        assert problem(look) == "the driver did not answer in 0.4 s"
        assert [gpu.uuid for gpu in look.gpus] == [gpu.uuid for gpu in nvidia.gpus]
        assert all(isinstance(reading.utilization, Unknown) for reading in look.readings)
        threads = threading.active_count()
        times = []
        for _ in range(20):
            again = time.monotonic()
            assert "has not answered for" in problem(prober.look())
            times.append(time.monotonic() - again)
        # The deadline was already over: no reason to wait again. The middle one: the machine may stand still at some.
        assert sorted(times)[10] < 0.3
        assert len(helpers()) == 1
        assert threading.active_count() <= threads
        assert wait_for(lambda: nvidia.max_in_flight, named="the blocked call") == 1
        nvidia.clear_faults()


def _blocked_look(machine: MockMachine, prober: Prober) -> tuple[Look, float]:
    """A look while the driver blocks, and how long it took."""
    machine.fault("nvmlDeviceGetSamples", hang=600)
    begun = time.monotonic()
    return prober.look(), time.monotonic() - begun


def test_prober_recovers_with_the_driver(nvidia: MockMachine) -> None:
    with started(deadline=0.2) as prober:
        nvidia.fault("nvmlDeviceGetSamples", hang=600)
        assert prober.look().problem is not None
        nvidia.wait_until_hanging()
        nvidia.clear_faults()
        nvidia.gpus[0].utilization = 55
        look = wait_for(lambda: _good(prober.look()), named="a good look")
        assert known(look.readings[0].utilization)
        assert nvidia.calls("nvmlInitWithFlags") == 1


def _good(look: Look) -> Look | None:
    return look if look.problem is None else None


def test_driver_that_blocks_while_opening_yields_unknown_in_time(nvidia: MockMachine) -> None:
    nvidia.fault("nvmlInitWithFlags", hang=600)
    with Prober("nvml", deadline=0.3) as prober:
        assert problem(prober.look()) == "the driver did not answer in 0.3 s"
        nvidia.wait_until_hanging()
        nvidia.clear_faults()
        assert len(wait_for(lambda: _good(prober.look())).gpus) == 2


def test_signals_are_handled_while_the_driver_blocks(nvidia: MockMachine) -> None:
    nvidia.fault("nvmlDeviceGetSamples", hang=600)
    received = threading.Event()
    previous = signal.signal(signal.SIGUSR1, lambda *_: received.set())
    signaller = threading.Thread(target=_signal_when_it_hangs, args=[nvidia, received])
    try:
        with Prober("nvml", deadline=200) as prober:
            signaller.start()
            # The driver continues once the signal was handled: during the wait, not after it.
            assert prober.look().problem is None
    finally:
        signaller.join()
        signal.signal(signal.SIGUSR1, previous)


def _signal_when_it_hangs(machine: MockMachine, received: threading.Event) -> None:
    machine.wait_until_hanging()
    os.kill(os.getpid(), signal.SIGUSR1)
    if received.wait(60):
        machine.clear_faults()


def test_driver_crash_is_reported_and_a_new_helper_starts(nvidia: MockMachine) -> None:
    with started(deadline=60) as prober:
        (helper,) = helpers()
        helper.send_signal(signal.SIGSEGV)
        wait_for(lambda: helper.status() == psutil.STATUS_ZOMBIE, named="the crash")
        looks = [prober.look()]
        assert problem(looks[0]) == "the helper that reads the GPUs was killed by SIGSEGV; it is started again"
        assert len(looks[0].readings) == 2
        assert wait_for(lambda: _good(prober.look())).gpus == looks[0].gpus
        assert len(helpers()) == 1


def test_closing_leaves_no_process(nvidia: MockMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not what this is about: a helper that takes longer to leave is asked by a signal, and leaves without a goodbye.
    monkeypatch.setattr(prober, "_GOODBYE", 60.0)
    with started(deadline=60):
        assert len(helpers()) == 1
    assert helpers() == []
    assert nvidia.calls("nvmlShutdown") == 1


def test_closing_while_the_driver_blocks_does_not_wait_for_it(nvidia: MockMachine) -> None:
    prober = started(deadline=0.2)
    (helper,) = helpers()
    nvidia.fault("nvmlDeviceGetSamples", hang=600)
    prober.look()
    nvidia.wait_until_hanging()
    begun = time.monotonic()
    prober.close()
    assert time.monotonic() - begun < 60
    assert nvidia.in_flight == 1
    nvidia.clear_faults()
    wait_for(lambda: os.waitpid(helper.pid, os.WNOHANG)[0] == helper.pid, named="the helper's end")


def test_helper_exits_when_its_program_is_killed(nvidia: MockMachine) -> None:
    program = (
        "import os, signal; from stoker.gpus.prober import Prober; p = Prober('nvml', deadline=60); p.look();"
        "print(p._helper.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stdout
    helper = identify(int(out))
    wait_for(lambda: helper is None or not is_alive(helper), named="the helper's end")


def test_missing_gpu_is_reported_with_the_sources_tried(tmp_path: Path) -> None:
    with Prober("auto", deadline=60, root=str(tmp_path)) as prober, pytest.raises(AbsentError) as caught:
        prober.look()
    sentence = str(caught.value)
    assert sentence.startswith("no GPU was found (nvml: ")
    assert "nvidia-smi: " in sentence
    assert "drm: " in sentence
    assert "STOKER_GPUS=sim:4" in sentence


@pytest.mark.parametrize("spec", ["cuda", "nvml:1", "sim:", "sim:0", "sim:x", ""])
def test_unknown_source_is_refused_before_the_start(spec: str) -> None:
    if spec == "sim:":
        Prober(spec).close()  # four GPUs, as everywhere
        return
    with pytest.raises(BadInputError):
        Prober(spec)


def test_auto_selects_nvml_and_reports_it(nvidia: MockMachine) -> None:
    with Prober("auto", deadline=60) as prober:
        prober.look()
        assert [(choice.source, choice.taken) for choice in prober.choices] == [("nvml", True)]


def test_reply_to_a_request_that_was_replaced_is_dropped() -> None:
    mine, its = socket.socketpair()
    with its:
        helper = HelperProcess(Helper("sim", os.getpid(), mine.detach(), is_shared=True))
        for _ in range(2):
            helper.ask(0.0, 0.0)
        numbers = [number for number, *_ in REQUEST.iter_unpack(its.recv(1000))]
        its.send(
            b"".join(HEADER.pack(3, number) + body for number, body in zip(numbers, (b"old", b"new"), strict=True))
        )
        assert helper.receive() == b"new"
        assert helper.receive() is None
        # In pieces, as a long one comes.
        helper.ask(0.0, 0.0)
        whole = HEADER.pack(4, numbers[-1] + 1) + b"long"
        its.send(whole[:6])
        assert helper.receive() is None
        its.send(whole[6:])
        assert helper.receive() == b"long"
        helper.release()


def test_narrowed_look_contains_selected_gpus_and_gpus_with_unknown_processes(tmp_path: Path) -> None:
    spec = f"sim:4@{tmp_path}"
    with Prober(spec, deadline=60) as prober:
        gpus = prober.look().gpus
        prober.narrow(frozenset({gpus[2].uuid}), frozenset())
        assert _indices(prober.look()) == [2]
        machine = SimMachine.of_environment({"STOKER_GPUS": spec})
        with SimulatedProcess.attach(0, machine=machine):
            assert _indices(prober.look()) == [0, 2]
            me = identify(os.getpid())
            assert me is not None
            prober.narrow(frozenset({gpus[2].uuid}), frozenset({me}))
            assert _indices(prober.look()) == [2]
            with SimulatedProcess.attach(2, machine=machine):
                look = prober.look()
        assert _indices(look) == [2]
        assert known(look.readings[0].processes)
        assert [process.pid for process in look.readings[0].processes] == [os.getpid()]
        assert _indices(prober.look()) == [2]


def _indices(look: Look) -> list[int]:
    assert [gpu.uuid for gpu in look.gpus] == [reading.uuid for reading in look.readings]
    return [gpu.index for gpu in look.gpus]
