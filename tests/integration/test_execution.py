"""An attempt in a process that no worker and no fork server prepared, as in the allocation of a cluster."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from stoker.engines.attempt import ARCHIVE, AttemptRecord, AttemptSpec, lease_clock
from stoker.engines.slurm.record import SlurmAttemptRecord
from stoker.queue.code.archive import CodeSnapshot
from stoker.queue.code.packing import pack
from stoker.runs.plan import Plan
from tests.support.code_repository import CodeRepository
from tests.support.waiting import wait_for

# The simplest execution: SIGTERM cancels it, and its result is safe when it is in a file.
_BODY = """
import math, os, signal, sys
from pathlib import Path

import msgspec

from stoker.engines.attempt import AttemptRecord, AttemptSpec
from stoker.engines.execution import STOPPED, Execution, redirect_stderr
from stoker.gpus.prober import Prober
from stoker.gpus.spawn import forked
from stoker.runs.processes.reaper import fork_reaper
from stoker.runs.processes.signals import FORWARDED, SignalStream
from stoker.runs.run import record_orphan_stop
from stoker.runs.supervisor import StopRequest


class FileExecution(Execution):
    _readable, _ = os.pipe()
    cancelled = "cancelled" in sys.argv
    is_on_cluster = "on a cluster" in sys.argv

    def fileno(self):
        return self._readable

    def due(self):
        return math.inf

    def poll(self):
        return StopRequest("cancelled", "It was cancelled.", STOPPED) if self.cancelled else None

    def on_signal(self, received):
        if received.signal != signal.SIGTERM:
            return None
        return StopRequest("cancelled", "It was cancelled.", STOPPED)

    def max_grace(self):
        return math.inf

    def on_first_start(self):
        (self._record.directory / "started").touch(exist_ok=self.is_on_cluster)

    def announce(self, result):
        (self._record.directory / "result.json").write_bytes(msgspec.json.encode(result))

    def wait_until_recorded(self):
        assert self._write_outcome()


directory = Path(sys.argv[1])
spec = msgspec.json.decode((directory / "attempt.json").read_bytes(), type=AttemptSpec)
signals = SignalStream(FORWARDED)
executions = []
reaper = fork_reaper(
    orphaned=record_orphan_stop,
    helpers=lambda: tuple(pid for execution in executions for pid in execution.helpers()),
    keeps_output=True,
)
redirect_stderr(reaper)
prober = Prober(spec.plan.source, deadline=spec.plan.deadline, start=forked)
environment = os.environ | spec.environment
executions.append(FileExecution(AttemptRecord(directory), spec, signals, reaper, prober, "node1", environment))
executions[0].run()
reaper.close()
"""


class Attempt:
    """The directory of an attempt, and the process that runs it."""

    def __init__(self, directory: Path, *command: str, **changes: object) -> None:
        self.record = AttemptRecord(directory)
        spec = AttemptSpec(
            attempt="a",
            job="j",
            number=1,
            queue="/nowhere/queue.db",
            plan=Plan(command=command, directory=str(directory), source="sim:1", grace=5.0),
            environment={"GREETING": "hello"},
            lease=600.0,
            lease_until=lease_clock() + 600.0,
            log_limit=10_000,
            started=time.time(),
        )
        self.record.write_attempt(msgspec.structs.replace(spec, **changes))

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        directory = self.record.directory
        environment = os.environ | {"STOKER_HOME": str(directory), "STOKER_SIM_DIR": str(directory / "sim")}
        argv = [sys.executable, "-c", _BODY, str(directory), *words]
        return subprocess.Popen(argv, env=environment)

    def run(self, *words: str) -> None:
        assert self.start(*words).wait(60.0) == 0

    @property
    def result(self) -> dict[str, object]:
        return msgspec.json.decode((self.record.directory / "result.json").read_bytes(), type=dict[str, object])

    @property
    def output(self) -> str:
        return self.record.output.read_text()


def test_job_runs_in_the_given_environment_and_its_end_is_on_disk(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, "sh", "-c", 'echo "$GREETING from $STOKER_RUN_DIR"; exit 3')
    attempt.run()
    assert (attempt.result["outcome"], attempt.result["exit_code"]) == ("failed", 3)
    assert attempt.output == f"hello from {tmp_path}\n"
    assert (attempt.record.status().state, attempt.record.status().exit_code) == ("ended", 3)
    assert (tmp_path / "started").exists()
    assert (spec := attempt.record.spec()) is not None
    assert spec.command[0] == "sh"


def test_signal_that_the_engine_understands_stops_the_job(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, "sh", "-c", "touch running; exec sleep 60")
    process = attempt.start()
    wait_for((tmp_path / "running").exists)
    process.terminate()
    assert process.wait(60.0) == 0
    assert attempt.result["outcome"] == "cancelled"
    assert "stoker: It was cancelled: " in attempt.output


def test_attempt_that_is_stopped_before_its_start_runs_nothing(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, "touch", "ran")
    attempt.run("cancelled")
    assert attempt.result["outcome"] == "cancelled"
    assert attempt.record.status().ending == "cancelled"
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("present", [True, False], ids=["commit of the repository", "unknown commit"])
def test_pinned_job_runs_in_a_snapshot_of_its_commit(tmp_path: Path, present: bool) -> None:
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "main.txt").write_text("committed")
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    (repository / "main.txt").write_text("edited since")
    plan = Plan(command=("cat", "main.txt"), directory=str(repository), source="sim:1")
    attempt = Attempt(tmp_path, plan=plan, commit="HEAD" if present else "0123456789")
    attempt.run()
    if present:
        assert (attempt.result["outcome"], attempt.output) == ("succeeded", "committed")
    else:
        assert attempt.result["outcome"] == "failed"
        assert "commit 0123456789 is not in the repository" in str(attempt.result["reason"])
    assert not (tmp_path / "code").exists()


def test_start_after_a_killed_one_has_its_code_again_without_the_queue(tmp_path: Path) -> None:
    code = CodeRepository(tmp_path / "repository", {"part/main.txt": "committed"})
    code.write({"part/main.txt": "edited"})
    with pack(str(code.path / "part"), 2**20) as packed, (tmp_path / ARCHIVE).open("wb") as archive:
        packed.blobs[0].file.seek(0)
        shutil.copyfileobj(packed.blobs[0].file, archive)
    command = (
        "pwd; cat main.txt; echo used > main.txt; touch $STOKER_RUN_DIR/running; [ -e $STOKER_RUN_DIR/2 ] || sleep 60"
    )
    attempt = Attempt(tmp_path, "sh", "-c", command, code=packed.code)
    first = attempt.start("on a cluster")
    wait_for((tmp_path / "running").exists)
    first.kill()
    first.wait()
    (before,) = tmp_path.glob("code-*")
    (tmp_path / "2").touch()
    attempt.run("on a cluster")
    assert attempt.result["outcome"] == "succeeded"
    places = re.findall(rf"({tmp_path}/code-[0-9a-f]{{8}})/part\nedited", attempt.output)
    assert (len(places), places[0]) == (2, str(before))
    assert places[1] != places[0]
    assert list(tmp_path.glob("code-*")) == [before]
    SlurmAttemptRecord(tmp_path).begin_again(1)
    assert not before.exists()


def test_snapshot_that_is_not_there_leaves_the_job_to_another_attempt(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, "true", code=CodeSnapshot(digest=64 * "0", size=0, files=0))
    attempt.run("on a cluster")
    assert (attempt.result["outcome"], attempt.result["reason"]) == (
        "requeued",
        "It could not be started on node1: no such file or directory",
    )
