"""`stoker demo`: simulated GPUs at work, and nothing of them left afterwards."""

import signal
import subprocess

import psutil
import pytest

from tests.support.command import stoker, stoker_command


def test_demo_says_that_gpus_are_simulated_and_ends_after_its_duration() -> None:
    done = stoker("demo", "--every", "200ms", "--for", "500ms")
    assert done.code == 0
    assert "these GPUs are simulated" in done.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_demo_shows_busy_gpus_and_its_programs_end_with_it(number: signal.Signals) -> None:
    demo = subprocess.Popen([stoker_command(), "demo", "--every", "100ms"], stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    assert any("Simulated 24 GiB  busy" in line for line in iter(demo.stdout.readline, ""))
    programs = psutil.Process(demo.pid).children(recursive=True)
    assert len(programs) >= 3
    demo.send_signal(number)
    demo.communicate(timeout=60)
    assert demo.returncode == 0
    _gone, alive = psutil.wait_procs(programs, timeout=60)
    assert alive == []
