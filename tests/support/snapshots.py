"""Overviews for screens, without a queue."""

from typing import Any

from stoker.queue.explanation import Why
from stoker.queue.model import WorkerGpu
from stoker.status.model import (
    EndedJob,
    GpuHours,
    Health,
    HealthIssue,
    Machine,
    Progress,
    RunningJob,
    Snapshot,
    WaitingJob,
)
from tests.support.notification_parts import NOW, attempt, job


def card(index: int, **changes: Any) -> WorkerGpu:
    usual: dict[str, Any] = {
        "memory_total": 40 * 2**30,
        "memory_used": 18 * 2**30,
        "utilization": 0.96,
        "state": "job",
        "user": "alice",
        "since": NOW - 600,
        "note": "",
        "jobs": (),
    }
    return WorkerGpu(uuid=f"GPU-{index}", index=index, name="NVIDIA A100", **(usual | changes))


def machine(host: str = "node7", gpus: int = 2, **changes: Any) -> Machine:
    usual: dict[str, Any] = {"there": True, "paused": False, "problem": None, "simulated": False}
    cards = changes.pop("cards", tuple(card(number) for number in range(gpus)))
    return Machine(worker=f"{host}-1", host=host, seen=NOW - 2, started=NOW - 9000, gpus=cards, **(usual | changes))


def running(number: int, **changes: Any) -> RunningJob:
    fraction = changes.pop("fraction", 0.5)
    found = job(
        changes.pop("name", f"run-{number}"),
        id=f"{number:08x}",
        state="running",
        ended=None,
        started=NOW - 90,
        **changes,
    )
    progress = None if fraction is None else Progress(fraction=fraction, text="5/10 [00:10<00:10]")
    return RunningJob(
        job=found,
        attempt=attempt(found, "w"),
        host="node7",
        gpus=(str(number),),
        why=Why("running", "", "running"),
        progress=progress,
        last_line="loss=0.25",
    )


def waiting(number: int, **changes: Any) -> WaitingJob:
    found = job(
        changes.pop("name", f"wait-{number}"),
        id=f"{256 + number:08x}",
        **({"state": "queued", "ended": None} | changes),
    )
    return WaitingJob(job=found, why=Why("waits", "", "waits for 2 GPUs with 20 GiB"))


def ended(number: int, **changes: Any) -> EndedJob:
    found = job(changes.pop("name", f"end-{number}"), id=f"{512 + number:08x}", reason="no space left", **changes)
    return EndedJob(job=found, why=Why("ended", "", "failed"), stopped="")


def snapshot(**changes: Any) -> Snapshot:
    usual: dict[str, Any] = {
        "now": NOW,
        "place": "/home/alice/queue.db",
        "paused": False,
        "machines": (machine(),),
        "running": tuple(running(number) for number in range(2)),
        "waiting": tuple(waiting(number) for number in range(3)),
        "ended": tuple(ended(number) for number in range(2)),
        "health": Health(
            level="attention",
            headline="1 thing needs attention",
            points=(HealthIssue(level="bad", message="job end-0 failed"),),
        ),
        "hours": GpuHours(since=NOW - 604800),
    }
    values = usual | changes
    counts = {"running": len(values["running"]), "queued": len(values["waiting"]), "failed": len(values["ended"])}
    return Snapshot(**({"counts": counts} | values))
