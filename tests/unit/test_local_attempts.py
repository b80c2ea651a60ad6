"""Attempts left by an earlier worker: an attempt ends only with proof that its supervisor ended."""

import contextlib
import errno
import math
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.engines.attempt import ATTEMPT_TAG, AttemptResult
from stoker.engines.engine import CannotTellError
from stoker.engines.identity import WorkerIdentity
from stoker.engines.local import attempts
from stoker.engines.local.attempts import LocalAttempt, find_attempts, is_supervised
from stoker.engines.local.record import SHIM_NAME, AttemptProcesses, LocalAttemptRecord, ResultRecorded, ShimChannel
from stoker.errors import StokerError
from stoker.procfs import Identity, boot_id, identify, is_alive
from stoker.queue.model import Attempt
from stoker.runs.processes.syscalls import set_name
from stoker.runs.record import Status
from tests.support.waiting import wait_for
from tests.unit.test_shim import attempt_spec_of

# No database: attempts are found without it.
AWAY = "postgresql://nobody@127.0.0.1:1/nothing"
GONE = Identity(os.getpid(), 1)
"""This pid, of a process that started with the machine."""


@pytest.fixture
def home(tmp_path: Path) -> Iterator[WorkerIdentity]:
    found = WorkerIdentity(tmp_path / "home")
    yield found
    found.leave()


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def sleeper(processes: list[subprocess.Popen[bytes]], **environment: str) -> Identity:
    """A process of an attempt without a supervising ancestor."""
    process = subprocess.Popen(["sleep", "600"], env={**os.environ, **environment})
    processes.append(process)
    who = identify(process.pid)
    assert who is not None
    return who


def myself() -> Identity:
    who = identify(os.getpid())
    assert who is not None
    return who


def leave_behind(home: WorkerIdentity, processes: AttemptProcesses, status: Status | None = None) -> LocalAttemptRecord:
    record = LocalAttemptRecord(home.directory / "attempts" / "j-1")
    record.directory.mkdir()
    record.write_attempt(attempt_spec_of(queue=AWAY, host=home.host, boot=boot_id(), processes=processes))
    if status is not None:
        record.write_status(status)
    return record


def failing(number: int) -> Any:
    def fail(*_arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM, errno.EACCES])
def test_unreachable_supervisor_is_not_dead(home: WorkerIdentity, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    record = leave_behind(home, AttemptProcesses(myself(), myself()))
    with contextlib.closing(record.listen()):
        with monkeypatch.context() as trouble:
            trouble.setattr(LocalAttemptRecord, "connect", failing(number))
            (found,) = find_attempts(home, AWAY).attempts
        assert (found.result, found.channel) == (None, None)
        assert found.retry_at < math.inf
        found.connect()
        assert found.channel is not None
        assert (found.result, found.retry_at) == (None, math.inf)
        found.channel.close()


def test_worker_with_few_descriptors_keeps_them_for_other_work(
    home: WorkerIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = leave_behind(home, AttemptProcesses(myself(), myself()))
    opened = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - one call
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (opened + 10, opened + 10))
    with contextlib.closing(record.listen()):
        (found,) = find_attempts(home, AWAY).attempts
    assert (found.result, found.channel) == (None, None)


def test_unwatchable_reaper_is_not_dead(home: WorkerIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_behind(home, AttemptProcesses(GONE, myself()))
    with monkeypatch.context() as trouble:
        trouble.setattr(os, "pidfd_open", failing(errno.EMFILE))
        (found,) = find_attempts(home, AWAY).attempts
    assert (found.result, found.reaper_exit) == (None, -1)
    found.connect()
    assert found.result is None
    assert found.reaper_exit >= 0
    os.close(found.reaper_exit)


def test_attempt_is_not_concluded_while_its_processes_cannot_be_scanned(
    home: WorkerIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_behind(home, AttemptProcesses(GONE, GONE), Status(state="ended", ending="exited", exit_code=0))
    with monkeypatch.context() as trouble:
        trouble.setattr(LocalAttemptRecord, "checked_status", failing(errno.EMFILE))
        (found,) = find_attempts(home, AWAY).attempts
        assert not found.result
    found.connect()
    assert found.result == AttemptResult("succeeded", 0, "")


def test_unreadable_attempts_are_read_again_later(home: WorkerIdentity, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_behind(home, AttemptProcesses(GONE, GONE))
    with monkeypatch.context() as trouble:
        trouble.setattr(LocalAttemptRecord, "attempt_spec", failing(errno.EMFILE))
        assert find_attempts(home, AWAY) == ((), False)
    with monkeypatch.context() as trouble:
        trouble.setattr(attempts, "find_orphans", failing(errno.EMFILE))
        assert find_attempts(home, AWAY) == ((), False)
    found = find_attempts(home, AWAY)
    assert (len(found.attempts), found.complete) == (1, True)


@pytest.mark.parametrize("mark", ["STOKER_RUN_DIR", ATTEMPT_TAG])
def test_orphans_are_killed_before_the_queue_is_needed(
    home: WorkerIdentity, processes: list[subprocess.Popen[bytes]], mark: str
) -> None:
    record = leave_behind(home, AttemptProcesses(GONE, GONE))
    orphan = sleeper(processes, **{mark: str(record.directory) if mark == "STOKER_RUN_DIR" else "a"})
    (found,) = find_attempts(home, AWAY).attempts
    assert found.result is not None
    assert found.result.outcome == "lost"
    assert not is_alive(orphan)


def test_orphans_with_deleted_files_are_killed(home: WorkerIdentity, processes: list[subprocess.Popen[bytes]]) -> None:
    directory = home.directory / "attempts"
    orphan = sleeper(processes, STOKER_RUN_DIR=str(directory / "j-1"))
    stranger = sleeper(processes, STOKER_RUN_DIR=str(directory.with_name("attempts of another") / "j-1"))
    assert find_attempts(home, AWAY) == ((), True)
    assert not is_alive(orphan)
    assert is_alive(stranger)


def claimed(home: WorkerIdentity) -> Attempt:
    """An attempt that an earlier worker of this home claimed."""
    return Attempt(id="a", job="j", worker=f"{home.key}-earlier", number=1, gpus=(), started=0.0, lease_expires=0.0)


def test_running_attempt_with_deleted_files_is_not_released(
    home: WorkerIdentity, processes: list[subprocess.Popen[bytes]]
) -> None:
    attempt = claimed(home)
    place = home.directory / "attempts" / "j-1"
    place.mkdir()
    ready, wake = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        set_name(SHIM_NAME)
        LocalAttemptRecord(place).hold_open()
        os.write(wake, b"x")
        signal.pause()
    try:
        assert os.read(ready, 1) == b"x"
        shutil.rmtree(home.directory / "attempts")
        assert is_supervised(home, attempt)
    finally:
        os.kill(supervisor, signal.SIGKILL)
        os.waitpid(supervisor, 0)
        os.close(ready)
        os.close(wake)
    orphan = sleeper(processes, **{ATTEMPT_TAG: "a"})
    assert not is_supervised(home, attempt)
    wait_for(lambda: not is_alive(orphan))


def test_claim_is_not_released_while_its_processes_cannot_be_scanned(
    home: WorkerIdentity, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = claimed(home)
    with monkeypatch.context() as trouble:
        trouble.setattr(attempts, "has_shim", failing(errno.EMFILE))
        with pytest.raises(CannotTellError):
            is_supervised(home, attempt)
    assert not is_supervised(home, attempt)


def test_second_worker_is_refused_after_the_home_was_recreated(home: WorkerIdentity) -> None:
    for _ in range(3):
        shutil.rmtree(home.directory)
        home.directory.mkdir()
        with pytest.raises(StokerError, match=rf"another worker \(pid {os.getpid()}\) runs in"):
            WorkerIdentity(home.directory)
    home.tidy()  # without the directory of attempts


def test_worker_resumes_a_supervisor_suspended_by_sigstop(
    home: WorkerIdentity, processes: list[subprocess.Popen[bytes]]
) -> None:
    process = sleeper(processes)
    record = leave_behind(home, AttemptProcesses(process, myself()))
    with contextlib.closing(record.listen()):
        (found,) = find_attempts(home, AWAY).attempts
    os.kill(process.pid, signal.SIGSTOP)
    wait_for(lambda: _state(process) == "T")
    found.check_shim()
    wait_for(lambda: _state(process) == "S")
    assert found.channel is not None
    found.channel.close()


def test_supervisor_that_ignores_a_stop_is_killed(
    home: WorkerIdentity, processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process = sleeper(processes)
    record = leave_behind(home, AttemptProcesses(process, myself()))
    with contextlib.closing(record.listen()):
        (found,) = find_attempts(home, AWAY).attempts
    found.stop("cancelled", "It was cancelled.")
    found.check_shim()
    assert is_alive(process)
    clock = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: clock + 600.0)
    found.check_shim()
    monkeypatch.undo()
    wait_for(lambda: not is_alive(process))
    assert found.channel is not None
    found.channel.close()


def test_supervisor_learns_once_that_its_result_is_recorded_when_the_worker_waits(tmp_path: Path) -> None:
    """Twice would be taken for the result of its next attempt."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        attempt = LocalAttempt(LocalAttemptRecord(tmp_path), attempt_spec_of(), ShimChannel(here))
        supervisor = ShimChannel(there)
        attempt.acknowledge()
        assert supervisor.receive() is None
        attempt.send_acknowledgement()
        attempt.send_acknowledgement()
        assert supervisor.receive() == ResultRecorded()
        assert supervisor.receive() is None


def _state(who: Identity) -> str:
    return Path(f"/proc/{who.pid}/stat").read_text().rpartition(")")[2].split()[0]
