"""Workers as people know them: one machine each, however often it was started, and what each of its GPUs does."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from stoker.queue.explanation import spoken
from stoker.queue.model import Attempt, Job, Worker, WorkerGpu
from stoker.status.model import GpuCard, Machine

# Who wants to know of a machine that has been away for longer asks for it by name.
HIDDEN_AFTER: Final = 86400.0


def worker_home(worker: str) -> str:
    """What the ids of all starts of a worker in one home begin with."""
    return worker.rpartition("-")[0] or worker


def machines_of(
    workers: Iterable[Worker], attempts: Iterable[Attempt], jobs: Mapping[str, Job], now: float
) -> tuple[Machine, ...]:
    """Those that matter now, by host. `jobs` are those that run, by id: whose they are is told."""
    holding = {worker_home(attempt.worker) for attempt in attempts}
    newest: dict[tuple[str, str], Worker] = {}
    for worker in sorted(workers, key=lambda worker: worker.started):
        newest[worker.host, worker_home(worker.id)] = worker
    return tuple(
        _machine(worker, jobs, now)
        for (_host, home), worker in sorted(newest.items())
        if home in holding or now - worker.seen <= HIDDEN_AFTER
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


class ClockCorrection:
    """What a worker dates began between the first look that found it and the look before that one.

    What was there at the first look of all is taken as it is told."""

    def __init__(self) -> None:
        self._looked: dict[str, float] = {}
        """When each machine was last found to be there, by its worker's id."""
        self._dates: dict[str, dict[tuple[str, float], float]] = {}
        """By worker: when what it dates so on a GPU began, by the database's clock."""

    def dated(self, machines: Sequence[Machine], now: float) -> tuple[Machine, ...]:
        """The same by the database's clock, as is `now`."""
        dated = tuple(self._machine(machine, now) if machine.there else machine for machine in machines)
        kept = {machine.worker for machine in machines}
        self._looked = {worker: at for worker, at in self._looked.items() if worker in kept}
        self._dates = {worker: dates for worker, dates in self._dates.items() if worker in kept}
        return dated

    def _machine(self, machine: Machine, now: float) -> Machine:
        known, before = self._dates.get(machine.worker, {}), self._looked.get(machine.worker)
        dates = {
            (card.uuid, told): known.get((card.uuid, told), told if before is None else min(max(told, before), now))
            for card in machine.gpus
            for told in _dates_of(card)
        }
        self._dates[machine.worker], self._looked[machine.worker] = dates, now
        return msgspec.structs.replace(machine, gpus=tuple(_corrected(card, dates) for card in machine.gpus))


def _dates_of(card: GpuCard) -> Iterator[float]:
    if card.since is not None:
        yield card.since
    if card.unread_since is not None:
        yield card.unread_since


def _corrected(card: GpuCard, dates: dict[tuple[str, float], float]) -> GpuCard:
    return msgspec.structs.replace(
        card,
        since=None if card.since is None else dates[card.uuid, card.since],
        unread_since=None if card.unread_since is None else dates[card.uuid, card.unread_since],
    )
