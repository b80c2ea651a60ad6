"""`stoker demo`: simulated GPUs at work, and nothing of them left afterwards."""

import signal
import subprocess

import psutil
import pytest

from tests.support.command import stoker, stoker_command


def test_it_says_that_the_gpus_are_simulated_and_shows_them_at_work() -> None:
    done = stoker("demo", "--every", "200ms", "--for", "3s")
    assert done.code == 0
    assert "these GPUs are simulated" in done.err
    assert "busy" in done.out
    assert "Simulated 24 GiB" in done.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_its_programs_end_with_it(number: signal.Signals) -> None:
    demo = subprocess.Popen([stoker_command(), "demo", "--every", "100ms"], stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    while "busy" not in demo.stdout.readline():
        pass
    programs = psutil.Process(demo.pid).children(recursive=True)
    assert len(programs) >= 3
    demo.send_signal(number)
    demo.communicate(timeout=10)
    assert demo.returncode == 0
    _gone, alive = psutil.wait_procs(programs, timeout=5)
    assert alive == []
