"""Jobs in the states that a worker would have brought them to, without a worker."""

from pathlib import Path

from stoker.paths import private_directory, state_home
from stoker.queue import Attempt, JobSpec, Outcome, Store, View, WorkerGpu

LONG = 600.0
WORKER = "w1"
HOST = "gpu-box"


def submit(queue: Store, *commands: str, **asked: object) -> list[str]:
    return queue.jobs.submit([JobSpec(command=command, **asked) for command in commands])  # type: ignore[arg-type]  # by name


def be_there(queue: Store, waiting: dict[str, str] | None = None, gpus: int = 2) -> None:
    """A worker says that it is alive."""
    cards = tuple(WorkerGpu(uuid=f"GPU-{index}", index=index, name="A100") for index in range(gpus))
    queue.workers.heartbeat(WORKER, HOST, View(gpus=cards, waiting=waiting or {}))


def start(queue: Store, job: str, *gpus: str) -> Attempt:
    attempt = queue.attempts.claim([job], WORKER, gpus, LONG)
    assert attempt is not None
    return attempt


def run(queue: Store, job: str, outcome: Outcome, exit_code: int | None = None, sentence: str = "") -> Attempt:
    attempt = start(queue, job)
    assert queue.attempts.finish(attempt.id, outcome, exit_code, sentence)
    return attempt


def place_of(attempt: Attempt) -> Path:
    """Its directory on this machine, as if it had run here."""
    place = state_home() / "attempts" / f"{attempt.job}-{attempt.number}"
    private_directory(place)
    return place
