"""Machines: the newest worker per home and host, with its GPUs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from stoker.queue.explanation import spoken
from stoker.queue.model import Attempt, ClusterNode, Job, Worker, WorkerGpu
from stoker.status.model import Machine

# Machines unseen for longer are not shown.
HIDDEN_AFTER: Final = 86400.0


def worker_home(worker: str) -> str:
    """The part of a worker's id that survives restarts."""
    return worker.rpartition("-")[0] or worker


def machines_of(
    workers: Iterable[Worker], attempts: Iterable[Attempt], jobs: Mapping[str, Job], now: float
) -> tuple[Machine, ...]:
    """Machines that are present, were present recently or have jobs, by host. `jobs`: the running ones, by id."""
    holding = {worker_home(attempt.worker) for attempt in attempts}
    newest: dict[tuple[str, str], Worker] = {}
    for worker in sorted(workers, key=lambda worker: worker.started):
        newest[worker.host, worker_home(worker.id)] = worker
    return tuple(
        _machine(worker, jobs, now)
        for (_host, home), worker in sorted(newest.items())
        if home in holding or (now - worker.seen <= HIDDEN_AFTER and not worker.view.removed)
    )


def _machine(worker: Worker, jobs: Mapping[str, Job], now: float) -> Machine:
    there = worker.is_there(now)
    gpus = [_with_submitters(gpu if there else _unseen(gpu, worker, now), jobs) for gpu in worker.view.gpus]
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
        gpus=tuple(sorted(gpus, key=lambda gpu: gpu.index)),
        cluster=worker.view.cluster,
        nodes=worker.view.nodes if there else (),
        engine=worker.view.engine,
        version=worker.view.version,
        labels=worker.view.labels,
        cpus=worker.view.cpus,
        cpus_taken=worker.view.cpus_taken if there else 0,
        ram=worker.view.ram,
        ram_taken=worker.view.ram_taken if there else 0,
    )


def _unseen(gpu: WorkerGpu, worker: Worker, now: float) -> WorkerGpu:
    """A GPU whose worker is lost: its state is unknown."""
    return WorkerGpu(
        uuid=gpu.uuid,
        index=gpu.index,
        name=gpu.name,
        memory_total=gpu.memory_total,
        jobs=gpu.jobs,
        note=f"its worker was last seen {spoken(now - worker.seen)} ago",
        since=worker.seen,
    )


def _with_submitters(gpu: WorkerGpu, jobs: Mapping[str, Job]) -> WorkerGpu:
    submitters = dict.fromkeys(jobs[name].submitter for name in gpu.jobs if name in jobs and jobs[name].submitter)
    return msgspec.structs.replace(gpu, user=", ".join(submitters)) if submitters else gpu


class ClusterGpus(msgspec.Struct, frozen=True):
    """Counts of the GPUs of cluster nodes."""

    total: int
    allocated: int
    own: int
    """GPUs of this queue's jobs."""
    free: int
    down: int

    def __str__(self) -> str:
        """`160 GPUs: 96 allocated (12 by this queue), 56 free, 8 down`."""
        if not self.total:
            return "no GPUs"
        own = f" ({self.own} by this queue)" if self.own else ""
        parts = [f"{self.allocated} allocated{own}", f"{self.free} free"] + ([f"{self.down} down"] if self.down else [])
        return f"{self.total} {'GPU' if self.total == 1 else 'GPUs'}: {', '.join(parts)}"


def cluster_gpus(nodes: Iterable[ClusterNode]) -> ClusterGpus:
    known = list(nodes)
    return ClusterGpus(
        total=sum(node.gpus for node in known),
        allocated=sum(node.gpus_allocated for node in known),
        own=sum(node.own for node in known),
        free=sum(node.gpus_free for node in known),
        down=sum(node.gpus_down for node in known),
    )


def partitions_of(nodes: Iterable[ClusterNode]) -> dict[str, list[ClusterNode]]:
    """The nodes of each partition by name. A node may be in several."""
    found: dict[str, list[ClusterNode]] = {}
    for node in nodes:
        for name in node.partitions:
            found.setdefault(name, []).append(node)
    return dict(sorted(found.items()))


class ClockCorrection:
    """Replaces times of workers, whose clocks may be off by minutes, with the database's. A state began between the
    first snapshot that shows it and the previous one. Times in the first snapshot are used unchanged."""

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        """Last heartbeat of each machine, by its worker's id."""
        self._dates: dict[str, dict[tuple[str, float], float]] = {}
        """By worker: the corrected time of each GPU and reported time."""

    def apply(self, machines: Sequence[Machine], now: float) -> tuple[Machine, ...]:
        """The machines with corrected times; `now` is the database's."""
        corrected = tuple(self._machine(machine, now) if machine.there else machine for machine in machines)
        kept = {machine.worker for machine in machines}
        self._seen = {worker: at for worker, at in self._seen.items() if worker in kept}
        self._dates = {worker: dates for worker, dates in self._dates.items() if worker in kept}
        return corrected

    def _machine(self, machine: Machine, now: float) -> Machine:
        known, before = self._dates.get(machine.worker, {}), self._seen.get(machine.worker)
        dates: dict[tuple[str, float], float] = {}

        def corrected(gpu: str, reported: float | None) -> float | None:
            if reported is None:
                return None
            first_seen = reported if before is None else min(max(reported, before), now)
            dates[gpu, reported] = known.get((gpu, reported), first_seen)
            return dates[gpu, reported]

        gpus = tuple(
            msgspec.structs.replace(
                gpu, since=corrected(gpu.uuid, gpu.since), unread_since=corrected(gpu.uuid, gpu.unread_since)
            )
            for gpu in machine.gpus
        )
        self._dates[machine.worker], self._seen[machine.worker] = dates, now
        return msgspec.structs.replace(machine, gpus=gpus)
