"""Which start of a Slurm job has an attempt, and what the shim takes an end of its job for."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.engines.attempt import AttemptResult, lease_clock
from stoker.engines.execution import STOPPED
from stoker.engines.slurm import shim
from stoker.engines.slurm.execution import SlurmExecution
from stoker.engines.slurm.leader import Nodes
from stoker.engines.slurm.record import VOID, NodeGroup, Owner, SlurmAttemptRecord
from stoker.engines.slurm.step import SrunStep
from stoker.runs.processes.signals import SignalStream
from stoker.runs.record import Status
from tests.support.waiting import wait_for


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmAttemptRecord:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    return SlurmAttemptRecord(tmp_path)


def own(record: SlurmAttemptRecord) -> Owner | None:
    spec = SimpleNamespace(lease=600.0, fitting=None, log_limit=1000)
    return shim._own(record, spec, ("node1",))  # type: ignore[arg-type]


def test_owner_that_cannot_be_read_is_never_replaced_by_another(record: SlurmAttemptRecord) -> None:
    (record.directory / "owner.json").write_text("{")
    with pytest.raises(OSError, match="cannot be read yet"):
        record.take(VOID)


def test_second_start_has_the_attempt_though_slurm_forgot_that_there_was_a_first(record: SlurmAttemptRecord) -> None:
    first = own(record)
    record.write_status(Status(state="ended", ending="machine"))
    second = own(record)
    assert first is not None
    assert second is not None
    assert (first.slurm_job, first.restart, first.host) == (second.slurm_job, second.restart, second.host)
    assert record.owner() == second != first, "by that the first one sees that it is to stop"


def test_second_start_waits_for_the_first_regardless_of_the_restart_count(
    record: SlurmAttemptRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    own(record)
    os.utime(record.directory / "owner.json", (1000, 1000))
    before = record.life_version()
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        assert record.life_version() != before, "the worker sees that somebody is there"
        record.write_status(Status(state="ended", ending="supervisor killed"))

    monkeypatch.setattr("stoker.engines.slurm.shim.time.sleep", wait)
    assert own(record) is not None
    assert len(waited) == 1


@pytest.mark.parametrize("result", [None, AttemptResult("succeeded", 0, "")])
def test_job_that_came_to_its_end_is_not_started_again(
    record: SlurmAttemptRecord, result: AttemptResult | None
) -> None:
    own(record)
    record.write_status(Status(state="ended", ending="exited", exit_code=0))
    if result is not None:
        record.write_result(result)
    assert own(record) is None


def execution(signals: SignalStream, ran_for: float = 0.0) -> SlurmExecution:
    found = object.__new__(SlurmExecution)
    found._signals = signals
    found._reaper = SimpleNamespace(owns=lambda _: False, pid=os.getpid())  # type: ignore[assignment]
    found._began_at = lease_clock() - ran_for
    found._attempt_spec = SimpleNamespace(kill_wait=5.0)  # type: ignore[assignment]
    found._shared = SimpleNamespace(stop_order=lambda: None)  # type: ignore[assignment]
    found._owner = found._mine = Owner(7, start="this")
    return found


def test_job_killed_by_the_signal_of_slurm_did_not_exit_by_itself() -> None:
    with SignalStream([signal.SIGTERM]) as signals:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        request = execution(signals).on_exit(STOPPED)
        signals.read()
    assert request is not None
    assert request.ending == "machine"


@pytest.mark.parametrize("code", [0, 1])
def test_job_that_handles_the_signal_of_slurm_did_not_exit_by_itself(code: int) -> None:
    with SignalStream([signal.SIGTERM]) as signals:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        request = execution(signals, ran_for=60.0).on_exit(code)
        signals.read()
    assert request is not None
    assert request.ending == "machine"


def test_end_of_a_short_job_waits_for_the_signal_pending_at_the_reaper() -> None:
    blocked = ["env", "--block-signal=TERM", "sleep", "60"]
    with SignalStream([signal.SIGTERM]) as signals, subprocess.Popen(blocked) as reaper:
        wait_for(lambda: "sleep" in Path(f"/proc/{reaper.pid}/comm").read_text(), named="its start")
        reaper.terminate()
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        found = execution(signals)
        found._reaper = SimpleNamespace(owns=lambda _: False, pid=reaper.pid)  # type: ignore[assignment]
        request = found.on_exit(0)
        signals.read()  # what was not taken would end this process
        reaper.kill()
    assert request is not None
    assert request.ending == "machine"


def test_end_of_a_job_is_not_taken_for_its_time_limit_and_a_short_one_is_not_held_up() -> None:
    with SignalStream([signal.SIGTERM, signal.SIGUSR2]) as signals:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
        assert execution(signals, ran_for=60.0).on_exit(0) is None
        assert execution(signals).signal_delay(0) == pytest.approx(0.0, abs=0.01)
        assert execution(signals, ran_for=86400.0).signal_delay(0) <= 0.1


def test_shim_has_time_to_die_of_the_signal_that_killed_its_job() -> None:
    with SignalStream([signal.SIGTERM]) as signals:
        began = time.monotonic()
        assert execution(signals).on_exit(128 + signal.SIGKILL) is None
        assert time.monotonic() - began >= 0.5


def test_job_that_was_killed_alone_ended_by_itself() -> None:
    with SignalStream([signal.SIGTERM]) as signals:
        assert execution(signals).on_exit(STOPPED) is None
        assert execution(signals).on_exit(3) is None


def test_job_has_the_signal_of_slurm_only_if_all_processes_got_it() -> None:
    """`scancel --batch` signals the batch script alone; what `scancel` ends gets the signal everywhere."""
    with subprocess.Popen(["env", "--block-signal=TERM", "sleep", "600"]) as reaper:
        found: Any = object.__new__(SlurmExecution)
        found._reaper, found._killed_at = SimpleNamespace(pid=reaper.pid), None
        wait_for(lambda: "sleep" in Path(f"/proc/{reaper.pid}/comm").read_text(), named="its start")
        reaper.terminate()
        assert not found.job_has_signal(signal.SIGTERM), "the shim itself got none"
        found._killed_at = 1.0
        assert found.job_has_signal(signal.SIGTERM)
        assert not found.job_has_signal(signal.SIGUSR1)
        reaper.kill()
    assert not found.job_has_signal(signal.SIGTERM)


def test_leader_may_look_at_the_other_nodes_between_two_runs(record: SlurmAttemptRecord) -> None:
    """A job that ran out of memory runs again, and requests to stop it are handled in between."""
    group = NodeGroup(
        start="this",
        run=1,
        names=("node1", "node2"),
        master_addr="node1",
        master_port=29500,
        command=("true",),
        environment={},
        slurm={},
        directory=None,
    )
    spec: Any = SimpleNamespace(lease=600.0, plan=SimpleNamespace(grace=1.0))
    leader: Any = SimpleNamespace()
    nodes = Nodes(record, spec, group, (), leader)
    nodes.step = SrunStep(["true"], {"PATH": os.environ["PATH"]})
    nodes.close()
    assert nodes.check() is None
