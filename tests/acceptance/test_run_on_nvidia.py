"""`stoker run` on the mock NVIDIA driver: what only a driver's own lists can show."""

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.support.command import stoker, stoker_command
from tests.support.mock_nvml import MockMachine
from tests.support.waiting import wait_for

QUICK = ("--after", "0s", "--every", "100ms", "--for", "1s", "--below", "5%", "--grace", "60s")


# How long it waits for memory is made for real drivers.
IMPATIENT = """
from stoker.cli import main
from stoker.runs import supervisor
supervisor.MEMORY_PATIENCE = 1.0
main()
"""


def start(
    nvidia: MockMachine, tmp_path: Path, *, program: Sequence[str] = (stoker_command(),)
) -> tuple[subprocess.Popen[str], int]:
    """A job that does nothing, and its pid. It is not idle before the test says so: the GPUs work at first."""
    for gpu in nvidia.gpus:
        gpu.utilization = 70
    place = tmp_path / "pid"
    command = f"echo $$ > {place}.new; mv {place}.new {place}; exec sleep 300"
    run = subprocess.Popen([*program, "run", *QUICK, "--", "sh", "-c", command], stderr=subprocess.PIPE, text=True)
    return run, int(wait_for(lambda: place.read_text() if place.exists() else None))


def test_memory_not_released_is_reported_with_its_holder(nvidia: MockMachine, tmp_path: Path) -> None:
    run, job = start(nvidia, tmp_path, program=(sys.executable, "-c", IMPATIENT))
    nvidia.gpus[1].add_process(job, memory=2**30)
    nvidia.gpus[1].utilization = 0
    _out, err = run.communicate(timeout=60)
    assert run.returncode == 124
    assert f"GPU 1 is still held by process (pid {job})" in err
    summary = stoker("show", "--json").json()
    assert summary["left"] == [f"GPU 1 is still held by process (pid {job})"]
    assert summary["used"] == [nvidia.gpus[1].uuid]


def test_run_ends_once_the_memory_is_released(nvidia: MockMachine, tmp_path: Path) -> None:
    run, job = start(nvidia, tmp_path)
    nvidia.gpus[0].add_process(job, memory=2**30)
    nvidia.gpus[0].utilization = 0

    def take_back_later() -> None:
        wait_for(lambda: not psutil.pid_exists(job))
        looked = nvidia.calls("nvmlDeviceGetTemperature")
        wait_for(lambda: nvidia.calls("nvmlDeviceGetTemperature") > looked + 2)  # it was seen to be held still
        nvidia.gpus[0].remove_process(job)

    driver = threading.Thread(target=take_back_later)
    driver.start()
    _out, err = run.communicate(timeout=60)
    driver.join()
    assert run.returncode == 124
    assert "still held" not in err
    assert stoker("show", "--json").json()["left"] == []


def test_load_of_others_on_another_gpu_does_not_keep_an_idle_job_running(nvidia: MockMachine, tmp_path: Path) -> None:
    run, job = start(nvidia, tmp_path)
    nvidia.gpus[0].add_process(job, memory=2**30, sm=70)
    wait_for(lambda: stoker("show", "--json").json()["used"] == [nvidia.gpus[0].uuid])
    assert stoker("show", "--json").json()["verdict"] == "busy"
    nvidia.gpus[0].utilization = 0
    nvidia.gpus[0].set_process_utilization(job, sm=0)
    nvidia.gpus[1].utilization = 99  # load of another user on a GPU that the job does not use
    wait_for(lambda: not psutil.pid_exists(job))
    nvidia.gpus[0].remove_process(job)
    run.communicate(timeout=60)
    assert run.returncode == 124
