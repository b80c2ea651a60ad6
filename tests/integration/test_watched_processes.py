"""What the processes that count for a watch do on the CPU: real processes and sessions."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from stoker.actions.whose import ProcessMeter, judged_processes
from stoker.procfs import Identity, identify
from stoker.runs.processes.usage import ProcessUsage
from tests.support.waiting import wait_for

SPIN = "while True: pass"


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    found: list[subprocess.Popen[str]] = []
    yield found
    for process in found:
        os.killpg(process.pid, signal.SIGKILL)
        with process:
            pass


def start(started: list[subprocess.Popen[str]], program: str) -> Identity:
    """A process in a session that only its descendants share."""
    process = subprocess.Popen(
        [sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE, text=True
    )
    started.append(process)
    who = identify(process.pid)
    assert who is not None
    return who


def cores(meter: ProcessMeter, listed: set[Identity]) -> float:
    meter(time.monotonic(), listed)
    time.sleep(0.5)
    return meter(time.monotonic(), listed).cpu or 0.0


def everyone() -> ProcessMeter:
    return ProcessMeter(judged_processes("all", (), "root"))


def not_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test is the parent of what it starts, and a watcher's own children do not count."""
    monkeypatch.setattr("stoker.actions.whose.own_processes", lambda _seen: {os.getpid()})


def test_nothing_is_known_at_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    not_own(monkeypatch)
    assert everyone()(time.monotonic(), set()) == ProcessUsage()


def test_cpu_time_of_a_child_of_a_listed_process_counts(
    started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    not_own(monkeypatch)
    parent = start(started, f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])")
    meter = everyone()
    wait_for(lambda: cores(meter, {parent}) > 0.1, named="the child's work")


def test_sleeping_process_does_nothing(started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    not_own(monkeypatch)
    sleeper = start(started, "print(flush=True); import time; time.sleep(60)")
    start(started, SPIN)
    assert started[0].stdout is not None
    started[0].stdout.readline()
    assert cores(everyone(), {sleeper}) < 0.05


def test_session_of_a_process_that_left_its_gpu_still_counts(
    started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep: the process of one trial has ended, and the next prepares its data."""
    not_own(monkeypatch)
    program = f"""
import subprocess, sys
trial = subprocess.Popen(["sleep", "60"])
print(trial.pid, flush=True)
trial.wait()
subprocess.run([sys.executable, "-c", {SPIN!r}])
"""
    start(started, program)
    assert started[0].stdout is not None
    trial = identify(int(started[0].stdout.readline()))
    assert trial is not None
    meter = everyone()
    meter(time.monotonic(), {trial})
    os.kill(trial.pid, signal.SIGKILL)
    wait_for(lambda: cores(meter, set()) > 0.1, named="the work of the next process")


def test_all_processes_of_the_user_count_while_none_is_listed(
    started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    not_own(monkeypatch)
    start(started, SPIN)
    wait_for(lambda: cores(everyone(), set()) > 0.1, named="the work")
    nobody = ProcessMeter(judged_processes("4711", (), "root"))
    assert cores(nobody, set()) == 0.0


def test_others_do_not_count_any_more_once_one_is_listed(
    started: list[subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    not_own(monkeypatch)
    sleeper = start(started, "print(flush=True); import time; time.sleep(60)")
    start(started, SPIN)
    assert started[0].stdout is not None
    started[0].stdout.readline()
    meter = everyone()
    wait_for(lambda: cores(meter, set()) > 0.1, named="the work of all")
    assert cores(meter, {sleeper}) < 0.05


def test_own_children_of_the_watcher_do_not_count(started: list[subprocess.Popen[str]]) -> None:
    child = start(started, SPIN)
    assert child not in judged_processes("all", (), "root").on_cpu({child})
