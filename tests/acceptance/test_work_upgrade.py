"""Stoker's files are replaced while a job runs, as an upgrade does it."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import stoker
from stoker.queue import JobSpec, init_queue
from tests.support.waiting import wait_for


def test_job_survives_its_worker_and_the_removal_of_the_installation(tmp_path: Path) -> None:
    installed = tmp_path / "installed"
    shutil.copytree(Path(stoker.__file__).parent, installed / "stoker", ignore=shutil.ignore_patterns("__pycache__"))
    hint = tmp_path / "end"
    with init_queue() as queue:
        (job,) = queue.jobs.submit([JobSpec(command=f"until [ -e {hint} ]; do sleep 0.05; done; exit 3", gpus=0)])
        worker = subprocess.Popen(
            [sys.executable, "-c", "import sys; from stoker.cli import main; sys.exit(main())", "work"],
            env={**os.environ, "PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            wait_for(lambda: queue.jobs.get(job).state == "running", named="the start of the job")
            wait_for(lambda: list((tmp_path / "stoker-home" / "attempts").glob("*/socket")), named="its shim")
        finally:
            os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
        shutil.rmtree(installed)
        hint.touch()
        wait_for(lambda: queue.jobs.get(job).state == "failed", named="the outcome")
        assert queue.jobs.get(job).exit_code == 3
