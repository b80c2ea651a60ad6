"""Jobs, machines and GPUs of a snapshot, without a queue."""

from typing import Any, Final

from stoker.queue.explanation import ReasonKind, Why
from stoker.queue.model import Attempt, Job, View, Worker, WorkerGpu
from stoker.status.model import EndedJob, Machine, RunningJob, WaitingJob

NOW: Final = 1_700_000_000.0
GIB: Final = 2**30


def job(state: str = "queued", **changes: Any) -> Job:
    usual: dict[str, Any] = {
        "id": "0a0a0a0a",
        "command": "python train.py",
        "name": "train-17",
        "position": 1.0,
        "submitted": NOW - 3600,
        "started": None,
        "ended": None,
        "not_before": 0.0,
        "retries_left": 0,
        "attempts": 0,
        "attempt": None,
        "exit_code": None,
        "reason": "",
        "link": "",
        "cancel_requested": None,
        "origin": None,
    }
    return Job(state=state, **{**usual, **changes})  # type: ignore[arg-type]  # tests pass the state by name


def attempt(**changes: Any) -> Attempt:
    usual: dict[str, Any] = {
        "id": "a" * 32,
        "job": "0a0a0a0a",
        "worker": "box-1",
        "number": 1,
        "gpus": ("GPU-0",),
        "started": NOW - 600,
        "lease_expires": NOW + 300,
    }
    return Attempt(**{**usual, **changes})


def card(index: int = 0, **changes: Any) -> WorkerGpu:
    usual: dict[str, Any] = {
        "memory_total": 80 * GIB,
        "memory_used": 10 * GIB,
        "utilization": 0.9,
        "state": "job",
        "user": "",
        "since": NOW - 3600,
        "note": "",
        "jobs": (),
    }
    return WorkerGpu(uuid=f"GPU-{index}", index=index, name="A100", **{**usual, **changes})


def machine(*gpus: WorkerGpu, **changes: Any) -> Machine:
    usual: dict[str, Any] = {
        "worker": "box-1",
        "host": "gpu-box",
        "there": True,
        "seen": NOW - 2,
        "started": NOW - 9000,
        "paused": False,
        "problem": None,
        "simulated": False,
    }
    return Machine(gpus=gpus, **{**usual, **changes})


def running(kind: ReasonKind = "running", **changes: Any) -> RunningJob:
    tried = changes.pop("attempt", None) or attempt()
    warning = changes.pop("warning", None)
    return RunningJob(
        job=job("running", started=NOW - 600, **changes),
        attempt=tried,
        host="gpu-box",
        gpus=("0",),
        why=Why(kind, "", "running"),
        progress=None,
        last_line="",
        warning=warning,
    )


def waiting(kind: ReasonKind = "waits", **changes: Any) -> WaitingJob:
    return WaitingJob(job=job("held" if kind == "held" else "queued", **changes), why=Why(kind, "", "waits"))


def ended(**changes: Any) -> EndedJob:
    stopped = changes.pop("stopped", "")
    found = job("failed", started=NOW - 600, ended=NOW - 60, **changes)
    return EndedJob(job=found, why=Why("ended", "", "failed"), stopped=stopped)


def worker(name: str = "box-1", *, ago: float = 2.0, started: float = NOW - 9000, view: View | None = None) -> Worker:
    return Worker(id=name, host="gpu-box", view=view or View(), started=started, seen=NOW - ago, paused=False)


def worker_gpu(index: int = 0, **changes: Any) -> WorkerGpu:
    usual: dict[str, Any] = {"memory_total": 80 * GIB, "memory_used": 10 * GIB, "utilization": 0.9, "state": "job"}
    return WorkerGpu(uuid=f"GPU-{index}", index=index, name="A100", **{**usual, **changes})
