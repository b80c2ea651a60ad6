"""Snapshots of a queue that events are made from, and sent notices in memory."""

from typing import Any

import msgspec

from stoker.notifications.events import Event, EventKind
from stoker.queue.model import Attempt, Job, View, Worker, WorkerGpu

NOW = 1_700_000_000.0


class MemoryNotes:
    """Noted events, shared by several notifiers."""

    def __init__(self) -> None:
        self.told: set[str] = set()

    def note_once(self, key: str) -> bool:
        fresh = key not in self.told
        self.told.add(key)
        return fresh

    def forget_note(self, key: str) -> bool:
        there = key in self.told
        self.told.discard(key)
        return there


def job(name: str = "train", **changes: Any) -> Job:
    usual = Job(
        id="0000beef",
        command="python train.py",
        name=name,
        state="failed",
        position=1.0,
        submitted=NOW - 500,
        started=NOW - 400,
        ended=NOW - 10,
        not_before=0.0,
        retries_left=0,
        attempts=1,
        attempt=f"attempt-of-{name}",
        exit_code=1,
        reason="",
        link="",
        cancel_requested=None,
        origin=None,
    )
    return msgspec.structs.replace(usual, **changes)


def attempt(job: Job, worker: str) -> Attempt:
    return Attempt(
        id=job.attempt or "", job=job.id, worker=worker, number=1, gpus=(), started=NOW - 400, lease_expires=NOW + 400
    )


def worker(
    name: str = "w1", host: str = "node7", seen: float = NOW, started: float = NOW - 9000, **view: Any
) -> Worker:
    return Worker(id=name, host=host, view=View(**view), started=started, seen=seen, paused=False)


def gpu(index: int = 0, **changes: Any) -> WorkerGpu:
    return msgspec.structs.replace(WorkerGpu(uuid=f"GPU-{index}", index=index, name="A100", state="free"), **changes)


def event(name: str, kind: EventKind = "failed") -> Event:
    return Event(
        kind=kind, key=f"{kind}:{name}", name=name, message=f"Job {name} failed.", path="/", hint="stoker list"
    )
