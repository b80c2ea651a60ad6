"""The processes that look after a job at a work site, and the job's own: to be killed, or to be found gone."""

import os
import signal
from pathlib import Path

from stoker.engines.local.record import AttemptProcesses, LocalAttemptRecord
from stoker.procfs import identify, is_alive
from stoker.runs.processes.tree import send
from tests.support.waiting import wait_for
from tests.support.work_site import WorkSite


def record_of(site: WorkSite, job: str, number: int = 1) -> LocalAttemptRecord:
    return LocalAttemptRecord(site.home / "attempts" / f"{job}-{number}")


def processes_of_attempt(site: WorkSite, job: str, number: int = 1) -> AttemptProcesses:
    """Of an attempt whose outcome the queue does not have."""
    # A job runs, for the queue, a moment before that is written down.
    return wait_for(record_of(site, job, number).attempt_spec, named="its attempt spec").processes


def kill_shim(processes: AttemptProcesses, how: signal.Signals = signal.SIGKILL) -> None:
    who = processes.shim
    assert Path(f"/proc/{who.pid}/comm").read_text() == "stoker-shim\n"
    assert send(who, how)


def kill_reaper(processes: AttemptProcesses) -> None:
    who = processes.reaper
    assert Path(f"/proc/{who.pid}/comm").read_text() == "stoker-reaper\n"
    assert send(who, signal.SIGKILL)


def kill_both(processes: AttemptProcesses) -> None:
    """So that neither has the time to do anything about the other's death."""
    assert send(processes.shim, signal.SIGSTOP)
    kill_reaper(processes)
    kill_shim(processes)
    wait_for(lambda: not is_alive(processes.shim) and not is_alive(processes.reaper))


def processes_of(record: LocalAttemptRecord) -> list[int]:
    """Everything that was started by the job."""
    mark = f"STOKER_RUN_DIR={record.directory}".encode()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and mark in _environment(int(name))]  # noqa: PTH208 - one call


def kill_job(record: LocalAttemptRecord) -> None:
    for pid in processes_of(record):
        who = identify(pid)
        if who is not None:
            send(who, signal.SIGKILL)


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
