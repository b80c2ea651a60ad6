"""The guard: a driver that blocks or crashes costs the caller a deadline, and nothing else."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from stoker.errors import BadInputError
from stoker.gpus.model import Look, Unknown, known
from stoker.gpus.prober import Prober
from stoker.gpus.source import AbsentError
from tests.support.mock_nvml import MockMachine
from tests.support.waiting import wait_for

HELPER = "stoker.gpus.helper"


def helpers() -> list[psutil.Process]:
    """The helper processes that this test started, ended ones that nobody reaped included."""
    return [child for child in psutil.Process().children() if _is_helper(child)]


def _is_helper(process: psutil.Process) -> bool:
    """Also one that has ended and was not waited for: of that its command cannot be read any more."""
    try:
        return HELPER in str(process.cmdline())
    except psutil.ZombieProcess:
        return True
    except psutil.NoSuchProcess:
        return False


def problem(look: Look) -> str:
    assert look.problem is not None
    return look.problem.reason


def test_a_blocked_driver_makes_looks_unknown_in_time_with_one_helper_and_one_call(nvidia: MockMachine) -> None:
    with Prober("nvml", deadline=0.4) as prober:
        assert prober.look().problem is None
        nvidia.fault("nvmlDeviceGetSamples", hang=60)
        begun = time.monotonic()
        look = prober.look()
        assert 0.4 <= time.monotonic() - begun < 1.5
        assert problem(look) == "the driver did not answer in 0.4 s"
        assert [gpu.uuid for gpu in look.gpus] == [gpu.uuid for gpu in nvidia.gpus]
        assert all(isinstance(reading.utilization, Unknown) for reading in look.readings)
        threads = threading.active_count()
        for _ in range(20):
            again = time.monotonic()
            assert "has not answered for" in problem(prober.look())
            assert time.monotonic() - again < 0.3  # the deadline was already over: no reason to wait again
        assert len(helpers()) == 1
        assert threading.active_count() == threads
        assert nvidia.max_in_flight == 1
        nvidia.clear_faults()


def test_it_recovers_by_itself_when_the_driver_does(nvidia: MockMachine) -> None:
    with Prober("nvml", deadline=0.2) as prober:
        prober.look()
        nvidia.fault("nvmlDeviceGetSamples", hang=60)
        assert prober.look().problem is not None
        nvidia.clear_faults()
        nvidia.gpus[0].utilization = 55
        look = wait_for(lambda: _good(prober.look()), named="a good look")
        assert known(look.readings[0].utilization)
        assert nvidia.calls("nvmlInitWithFlags") == 1


def _good(look: Look) -> Look | None:
    return look if look.problem is None else None


def test_a_driver_that_blocks_at_its_opening_is_guarded_too(nvidia: MockMachine) -> None:
    nvidia.fault("nvmlInitWithFlags", hang=60)
    with Prober("nvml", deadline=0.3) as prober:
        assert problem(prober.look()) == "the driver did not answer in 0.3 s"
        nvidia.clear_faults()
        assert len(wait_for(lambda: _good(prober.look())).gpus) == 2


def test_signals_are_heard_while_the_driver_blocks(nvidia: MockMachine) -> None:
    nvidia.fault("nvmlDeviceGetSamples", hang=60)
    heard: list[float] = []
    previous = signal.signal(signal.SIGALRM, lambda *_: heard.append(time.monotonic()))
    try:
        with Prober("nvml", deadline=3) as prober:
            threading.Thread(target=_ring_when_it_hangs, args=[nvidia]).start()
            prober.look()
            returned = time.monotonic()
            nvidia.clear_faults()
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert heard
    assert returned - heard[0] > 1  # heard in the middle of the wait, not after it


def _ring_when_it_hangs(machine: MockMachine) -> None:
    machine.wait_until_hanging()
    os.kill(os.getpid(), signal.SIGALRM)


def test_a_crash_inside_the_driver_is_told_and_a_new_helper_takes_over(nvidia: MockMachine) -> None:
    with Prober("nvml", deadline=5) as prober:
        prober.look()
        (helper,) = helpers()
        helper.send_signal(signal.SIGSEGV)
        looks = [prober.look()]
        assert problem(looks[0]) == "the helper that reads the GPUs was killed by SIGSEGV; it is started again"
        assert len(looks[0].readings) == 2
        assert wait_for(lambda: _good(prober.look())).gpus == looks[0].gpus
        assert len(helpers()) == 1


def test_closing_leaves_nothing_behind(nvidia: MockMachine) -> None:
    with Prober("nvml") as prober:
        prober.look()
        assert len(helpers()) == 1
    assert helpers() == []
    assert nvidia.calls("nvmlShutdown") == 1


def test_closing_while_the_driver_blocks_does_not_wait_for_it(nvidia: MockMachine) -> None:
    prober = Prober("nvml", deadline=0.2)
    nvidia.fault("nvmlDeviceGetSamples", hang=60)
    prober.look()
    begun = time.monotonic()
    prober.close()
    assert time.monotonic() - begun < 2
    nvidia.clear_faults()
    wait_for(lambda: all(p.status() == psutil.STATUS_ZOMBIE for p in helpers()), named="the helper's end")


def test_the_helper_of_a_killed_program_goes_by_itself(nvidia: MockMachine) -> None:
    program = (
        "import os, signal; from stoker.gpus.prober import Prober; p = Prober('nvml'); p.look();"
        "print(p._helper.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stdout
    wait_for(lambda: not psutil.pid_exists(int(out)), named="the helper's end")


def test_no_gpu_here_is_said_with_what_was_tried(tmp_path: Path) -> None:
    with Prober("auto", root=str(tmp_path)) as prober, pytest.raises(AbsentError) as caught:
        prober.look()
    sentence = str(caught.value)
    assert sentence.startswith("no GPU was found (nvml: ")
    assert "nvidia-smi: " in sentence
    assert "drm: " in sentence
    assert "STOKER_GPUS=sim:4" in sentence


@pytest.mark.parametrize("spec", ["cuda", "nvml:1", "sim:", "sim:0", "sim:x", ""])
def test_a_source_that_is_none_is_refused_before_anything_starts(spec: str) -> None:
    if spec == "sim:":
        Prober(spec).close()  # four GPUs, as everywhere
        return
    with pytest.raises(BadInputError):
        Prober(spec)


def test_auto_takes_the_library_and_says_so(nvidia: MockMachine) -> None:
    with Prober("auto") as prober:
        prober.look()
        assert [(choice.source, choice.taken) for choice in prober.choices] == [("nvml", True)]
