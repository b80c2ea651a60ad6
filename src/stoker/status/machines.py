"""Workers as people know them: one machine each, however often it was started, and what each of its GPUs does."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from stoker.queue.explanation import spoken
from stoker.queue.model import Attempt, Job, Worker, WorkerGpu
from stoker.status.model import GpuCard, Machine

# Who wants to know of a machine that has been away for longer asks for it by name.
FORGOTTEN_AFTER: Final = 86400.0


def home_of(worker: str) -> str:
    """What the ids of all starts of a worker in one home begin with."""
    return worker.rpartition("-")[0] or worker


def machines_of(
    workers: Iterable[Worker], attempts: Iterable[Attempt], jobs: Mapping[str, Job], now: float
) -> tuple[Machine, ...]:
    """Those that matter now, by host. `jobs` are those that run, by id: whose they are is told."""
    holding = {home_of(attempt.worker) for attempt in attempts}
    newest: dict[tuple[str, str], Worker] = {}
    for worker in sorted(workers, key=lambda worker: worker.started):
        newest[worker.host, home_of(worker.id)] = worker
    return tuple(
        _machine(worker, jobs, now)
        for (_host, home), worker in sorted(newest.items())
        if home in holding or now - worker.seen <= FORGOTTEN_AFTER
    )


def _machine(worker: Worker, jobs: Mapping[str, Job], now: float) -> Machine:
    there = worker.is_there(now)
    cards = worker.view.gpus if there else tuple(_unseen(gpu, worker, now) for gpu in worker.view.gpus)
    return Machine(
        worker=worker.id,
        host=worker.host,
        there=there,
        left=worker.view.left,
        seen=worker.seen,
        started=worker.started,
        paused=worker.paused,
        problem=worker.view.problem,
        simulated=worker.view.simulated,
        absent=worker.view.absent,
        gpus=tuple(_card(gpu, jobs) for gpu in sorted(cards, key=lambda gpu: gpu.index)),
    )


def _unseen(gpu: WorkerGpu, worker: Worker, now: float) -> WorkerGpu:
    """What is known of a GPU whose worker is away: what it is, and not what it does."""
    return WorkerGpu(
        uuid=gpu.uuid,
        index=gpu.index,
        name=gpu.name,
        memory_total=gpu.memory_total,
        jobs=gpu.jobs,
        note=f"its worker was last heard of {spoken(now - worker.seen)} ago",
        since=worker.seen,
    )


def _card(gpu: WorkerGpu, jobs: Mapping[str, Job]) -> GpuCard:
    return GpuCard(
        uuid=gpu.uuid,
        index=gpu.index,
        name=gpu.name,
        memory_total=gpu.memory_total,
        memory_used=gpu.memory_used,
        utilization=gpu.utilization,
        state=gpu.state,
        user=_submitters(gpu.jobs, jobs) or gpu.user,
        since=gpu.since,
        note=gpu.note,
        jobs=gpu.jobs,
        unread_since=gpu.unread_since,
        kept_for=gpu.kept_for,
    )


def _submitters(ids: Sequence[str], jobs: Mapping[str, Job]) -> str:
    """Everybody once, in the order of the jobs."""
    return ", ".join(dict.fromkeys(jobs[name].submitter for name in ids if name in jobs and jobs[name].submitter))
