"""Estimates starts of waiting jobs by simulating the line, from durations of similar jobs and time limits. `estimates`
is pure. It places jobs in order as workers do, with GPUs reserved for the first job that does not fit, but knows only
what the queue knows: GPUs with their holders, CPUs, RAM, caps, begin times and dependencies. An unknown duration is
never a number: its GPUs do not become free, and jobs that need them have no estimate.
"""

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from stoker.gpus.model import is_model
from stoker.queue.commands import pattern_of
from stoker.queue.explanation import (
    MOST_AHEAD,
    NEVER_HERE,
    Estimate,
    Needs,
    QueueContext,
    Why,
    explain,
    read_context,
    with_names,
)
from stoker.queue.model import Job, Worker, WorkerGpu, is_host
from stoker.status.model import MOST_WAITING

if TYPE_CHECKING:
    from stoker.queue import Store

MOST_SIMULATED: Final = 300
"""Number of simulated jobs; the others have only a place."""
_MOST_RUNNING: Final = 1000
_MOST_PATTERNS: Final = 200
# A single job does not show how much they differ.
_FEWEST_ALIKE: Final = 2
# Jobs are not alike if their middle half differs by more than this factor and by more than these seconds.
_LARGEST_FACTOR: Final = 2.0
_SAME_SECONDS: Final = 30.0
# A job with a stop request, or over its limit, ends soon.
_MOMENT: Final = 1.0
_KEPT_SECONDS: Final = 5.0

Durations = Mapping[str, Sequence[float]]
"""Durations of similar jobs in seconds, by pattern."""


class _End(NamedTuple):
    """When a job ends, or how long it takes."""

    at: float
    """Infinite if unknown."""
    is_bound: bool
    """Whether it may well be sooner: the time is from a time limit only, or unknown."""


_UNKNOWN: Final = _End(math.inf, True)


def typical(seconds: Sequence[float], longer_than: float = 0.0) -> float | None:
    """The median duration of similar jobs that took longer; None if there is too little data."""
    found = sorted(seconds)
    if len(found) < _FEWEST_ALIKE:
        return None
    low, high = found[len(found) // 4], found[(3 * len(found) - 1) // 4]
    if high > _LARGEST_FACTOR * low and high - low > _SAME_SECONDS:
        return None
    longer = [one for one in found if one > longer_than]
    if not longer:
        return None
    from statistics import median  # costs a short command milliseconds

    return median(longer)


def _lasts(job: Job, took: Durations) -> _End:
    limit = math.inf if job.time_limit is None else job.time_limit
    alike = typical(took.get(pattern_of(job.command, job.gpus), ()))
    return _End(min(alike, limit), False) if alike is not None else _End(limit, True)


def _ends(job: Job, now: float, took: Durations) -> _End:
    """When a running job ends."""
    if job.cancel_requested is not None:
        return _End(now + _MOMENT, False)
    started = now if job.started is None else job.started
    limit = math.inf if job.time_limit is None else started + job.time_limit
    alike = typical(took.get(pattern_of(job.command, job.gpus), ()), now - started)
    if alike is not None and not job.is_pending:
        return _End(max(now + _MOMENT, min(started + alike, limit)), False)
    return _End(max(now + _MOMENT, limit), True) if math.isfinite(limit) else _UNKNOWN


class _Holder(NamedTuple):
    """A job on a GPU."""

    end: _End
    shared: int | None
    """Its memory if it shares the GPU; None: it has the whole GPU."""
    preemptible: bool


class _Gpu:
    def __init__(self, gpu: WorkerGpu) -> None:
        self.uuid, self.name, self.memory = gpu.uuid, gpu.name, gpu.memory_total
        self.holders: dict[str, _Holder] = {}

    def fits(self, job: Job) -> bool:
        """Whether the job could have it if nobody else did."""
        if job.gpu_model is not None and not is_model(self.name, job.gpu_model):
            return False
        asked = max(job.memory or 0, job.gpu_memory or 0)
        return self.memory is None or self.memory >= asked

    def others(self, job: Job) -> list[_Holder]:
        """The holders in the way of this job."""
        if not self.holders:
            return []
        holders = [one for one in self.holders.values() if job.preemptible or not one.preemptible]
        wanted = _shared(job)
        if wanted is None or self.memory is None or any(one.shared is None for one in holders):
            return holders
        return holders if sum(one.shared or 0 for one in holders) + wanted > self.memory else []

    def free_at(self, job: Job) -> float:
        return max((one.end.at for one in self.others(job)), default=-math.inf)


def _shared(job: Job) -> int | None:
    return job.memory if job.share else None


class _Machine:
    def __init__(self, worker: Worker) -> None:
        view = worker.view
        self.id, self.host, self.labels = worker.id, worker.host, view.labels
        self.gpus = [_Gpu(gpu) for gpu in view.gpus if _is_usable(gpu)]
        self.cpus = math.inf if view.cpus is None else float(view.cpus)
        self.ram = math.inf if view.ram is None else float(view.ram)
        self.total_cpus, self.total_ram = self.cpus, self.ram
        self.waits = view.waiting
        self.reserved: set[str] = set()
        self.free_for_reserved = math.inf

    def suits(self, job: Job) -> bool:
        """Whether it satisfies the job's requests when empty."""
        return (
            (job.machine is None or is_host(self.host, job.machine))
            and not any(is_host(self.host, other) for other in job.exclude_machines)
            and all(label in self.labels for label in job.labels)
            and (job.cpus or 0) <= self.total_cpus
            and (job.ram or 0) <= self.total_ram
            and sum(gpu.fits(job) for gpu in self.gpus) >= job.gpus
        )

    def room(self, job: Job, now: float) -> list[_Gpu] | None:
        """The GPUs on which the job starts now; None if it does not."""
        if (job.cpus and job.cpus > self.cpus) or (job.ram and job.ram > self.ram):
            return None
        limit = math.inf if job.time_limit is None else job.time_limit
        may_use_reserved = now + limit <= self.free_for_reserved < math.inf
        free = [
            gpu
            for gpu in self.gpus
            if gpu.fits(job) and (may_use_reserved or gpu.uuid not in self.reserved) and not gpu.others(job)
        ]
        if len(free) < job.gpus:
            return None
        return sorted(free, key=lambda gpu: len(gpu.holders))[: job.gpus]

    def soonest(self, job: Job) -> list[tuple[float, str]]:
        """The GPUs that are free for the job first, and when."""
        return sorted((gpu.free_at(job), gpu.uuid) for gpu in self.gpus if gpu.fits(job))[: job.gpus]

    def hold(self, job: Job, gpus: Iterable[_Gpu], end: _End) -> list[str]:
        """The jobs preempted for it."""
        out: list[str] = []
        for gpu in gpus:
            if not job.preemptible:
                out += [name for name, holder in gpu.holders.items() if holder.preemptible]
                gpu.holders = {name: holder for name, holder in gpu.holders.items() if not holder.preemptible}
            gpu.holders[job.id] = _Holder(end, _shared(job), job.preemptible)
        self.cpus -= job.cpus or 0
        self.ram -= job.ram or 0
        return out

    def release(self, job: Job) -> None:
        for gpu in self.gpus:
            gpu.holders.pop(job.id, None)
        self.cpus += job.cpus or 0
        self.ram += job.ram or 0


def _is_usable(gpu: WorkerGpu) -> bool:
    """Whether the GPU is free, has jobs of the queue, or background programs, which yield."""
    return gpu.state in {"free", "job", "background"} and not gpu.quarantine


def estimates(
    line: Sequence[Job],
    running: Sequence[Job],
    context: QueueContext,
    needs: Needs,
    took: Durations,
    *,
    is_whole: bool = True,
) -> dict[str, Estimate]:
    """Estimated starts of the first queued jobs in order; jobs without an estimate are absent. `is_whole`: whether
    these are all queued jobs. Otherwise preemptible jobs, which come last, have no estimate.
    """
    workers = [worker for worker in context.there() if not worker.paused and worker.view.problem is None]
    # A cluster manager decides itself what to start next.
    if context.paused or any(worker.view.cluster or worker.view.engine != "local" for worker in workers):
        return {}
    simulated = [job for job in line if job.gpus and job.nodes == 1 and (is_whole or not job.preemptible)]
    return _Simulation(workers, simulated, running, context, needs, took).run()


class _Simulation:
    def __init__(
        self,
        workers: Sequence[Worker],
        line: Sequence[Job],
        running: Sequence[Job],
        context: QueueContext,
        needs: Needs,
        took: Durations,
    ) -> None:
        self._now = context.now
        self._needs = needs
        self._took = took
        self._machines = [_Machine(worker) for worker in workers]
        numbers: dict[object, int] = {}
        self._shapes = {job.id: numbers.setdefault(_shape(job), len(numbers)) for job in line}
        self._jobs = {job.id: job for job in (*running, *line)}
        self._where: dict[str, _Machine] = {}
        self._ends: list[tuple[float, str]] = []
        self._ended: set[str] = set()
        self._group_counts = {name: number for name, (number, _at_most) in context.capped.items()}
        self._suits: dict[int, list[_Machine]] = {}
        self._is_bound = any(gpu.state in {"somebody", "unknown"} for worker in workers for gpu in worker.view.gpus)
        self._found: dict[str, Estimate] = {}
        # Workers consider preemptible jobs last.
        self._waiting = sorted((job for job in line if self._suiting(job)), key=lambda job: job.preemptible)
        self._left_of = Counter(self._shapes[job.id] for job in self._waiting)
        self._occupy(context)

    def _occupy(self, context: QueueContext) -> None:
        """Places the running jobs."""
        machines = {machine.id: machine for machine in self._machines}
        for attempt in context.running.values():
            job, machine = self._jobs.get(attempt.job), machines.get(attempt.worker)
            end = _UNKNOWN if job is None else _ends(job, self._now, self._took)
            self._plan_end(attempt.job, end)
            if machine is None:
                continue
            self._is_bound |= end.is_bound and attempt.gpus != ()
            for gpu in machine.gpus:
                if gpu.uuid in attempt.gpus:
                    shared = None if job is None else _shared(job)
                    gpu.holders[attempt.job] = _Holder(end, shared, job is not None and job.preemptible)
            if job is not None:
                self._where[job.id] = machine
                machine.cpus -= job.cpus or 0
                machine.ram -= job.ram or 0

    def run(self) -> dict[str, Estimate]:
        now = self._now
        begins = sorted({job.not_before for job in self._waiting if job.not_before > now}, reverse=True)
        while self._waiting:
            self._start_all(now)
            while begins and begins[-1] <= now:
                begins.pop()
            soonest = min(self._ends[0][0] if self._ends else math.inf, begins[-1] if begins else math.inf)
            if not math.isfinite(soonest):
                break
            now = max(now, soonest)
            while self._ends and self._ends[0][0] <= now:
                self._end(heapq.heappop(self._ends)[1])
        return self._found

    def _end(self, name: str) -> None:
        self._ended.add(name)
        job, machine = self._jobs[name], self._where.pop(name, None)
        if machine is not None:
            machine.release(job)
        if job.group in self._group_counts:
            self._group_counts[job.group] -= 1

    def _start_all(self, now: float) -> None:
        """One turn. Room only shrinks within it: of equal jobs, none is tried after the first that does not fit."""
        failed: set[int] = set()
        is_reserved = False
        for machine in self._machines:
            machine.reserved, machine.free_for_reserved = set(), math.inf
        left = []
        for place, job in enumerate(self._waiting):
            if len(failed) == len(self._left_of):
                left += self._waiting[place:]
                break
            shape = self._shapes[job.id]
            if shape in failed or not self._is_ready(job, now):
                left.append(job)
            elif self._start(job, now):
                self._left_of[shape] -= 1
                if not self._left_of[shape]:
                    del self._left_of[shape]
            else:
                left.append(job)
                failed.add(shape)
                if not is_reserved:
                    is_reserved = self._reserve(job)
        self._waiting = left

    def _is_ready(self, job: Job, now: float) -> bool:
        if job.not_before > now or not self._ended.issuperset(self._needs.of(job.id)):
            return False
        return job.at_most is None or self._group_counts.get(job.group, 0) < job.at_most

    def _suiting(self, job: Job) -> list[_Machine]:
        shape = self._shapes[job.id]
        if shape not in self._suits:
            self._suits[shape] = [machine for machine in self._machines if machine.suits(job)]
        # A worker's reason applies to this job only, not to equal jobs.
        return [m for m in self._suits[shape] if not m.waits.get(job.id, "").startswith(NEVER_HERE)]

    def _start(self, job: Job, now: float) -> bool:
        for machine in self._suiting(job):
            # Its worker considered it and let it wait for a reason unknown here.
            if now == self._now and job.id in machine.waits:
                continue
            gpus = machine.room(job, now)
            if gpus is None:
                continue
            lasts = _lasts(job, self._took)
            end = _End(now + lasts.at, lasts.is_bound)
            for preempted in machine.hold(job, gpus, end):
                self._preempt(preempted)
            self._where[job.id] = machine
            self._plan_end(job.id, end)
            self._found[job.id] = Estimate(now, self._is_bound and now > self._now)
            self._is_bound |= end.is_bound
            if job.at_most is not None:
                self._group_counts[job.group] = self._group_counts.get(job.group, 0) + 1
            return True
        return False

    def _plan_end(self, name: str, end: _End) -> None:
        if math.isfinite(end.at):
            heapq.heappush(self._ends, (end.at, name))

    def _preempt(self, name: str) -> None:
        """It returns to the line, and its end is unknown."""
        self._ends = [one for one in self._ends if one[1] != name]
        heapq.heapify(self._ends)
        if (machine := self._where.pop(name, None)) is not None:
            machine.release(self._jobs[name])

    def _reserve(self, job: Job) -> bool:
        """Reserves the GPUs that are free first, on the machine where the job starts soonest."""
        offers = [
            (soonest[-1][0], sum(math.isinf(at) and at > 0 for at, _uuid in soonest), number, soonest, machine)
            for number, machine in enumerate(self._suiting(job))
            if (soonest := machine.soonest(job))
        ]
        if not offers:
            return False
        at, _missing, _number, soonest, machine = min(offers, key=lambda offer: offer[:3])
        machine.reserved = {uuid for _at, uuid in soonest}
        machine.free_for_reserved = at
        return True


def _shape(job: Job) -> object:
    asked = (job.gpus, job.memory, job.share, job.gpu_model, job.gpu_memory, job.machine, job.labels)
    return (*asked, job.exclude_machines, job.cpus, job.ram, job.time_limit, job.preemptible)


class WaitingLine(msgspec.Struct, frozen=True):
    """The first queued jobs in order, and their estimated starts."""

    places: Mapping[str, int]
    """The number of jobs before each, for a thousand jobs."""
    starts: Mapping[str, Estimate]

    def explain(self, job: Job, context: QueueContext, needs: Needs) -> Why:
        last = min(len(self.places), MOST_AHEAD)
        return explain(job, context, needs, self.places.get(job.id, last), self.starts.get(job.id))


class Forecaster:
    """Forecasts for one screen. Estimates are kept for some seconds while the line and the running jobs stay the
    same."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._took: Durations = {}
        self._asked: frozenset[str] = frozenset()
        self._took_until = -math.inf
        self._known: tuple[object, WaitingLine] = (None, WaitingLine({}, {}))
        self._until = -math.inf

    def line(
        self,
        store: "Store",
        queued: Sequence[Job],
        running: Sequence[Job],
        context: QueueContext,
        needs: Needs,
        most: int,
    ) -> WaitingLine:
        """From the first `most` queued jobs and the running jobs, which are already read."""
        if not queued:
            return WaitingLine({}, {})
        workers = tuple((worker.id, worker.paused) for worker in context.there())
        ids, runs = tuple(job.id for job in queued), tuple(one.id for one in context.running.values())
        same = (ids, runs, workers, context.paused)
        if self._known[0] != same or self._clock() >= self._until:
            took = self._durations(store, (*running, *queued))
            starts = estimates(queued, running, context, needs, took, is_whole=len(queued) < most)
            self._known = same, WaitingLine({name: place for place, name in enumerate(ids)}, starts)
            self._until = self._clock() + _KEPT_SECONDS
        return self._known[1]

    def _durations(self, store: "Store", jobs: Iterable[Job]) -> Durations:
        wanted = dict.fromkeys(pattern_of(job.command, job.gpus) for job in jobs)
        patterns = frozenset(list(wanted)[:_MOST_PATTERNS])
        if self._clock() >= self._took_until or not patterns <= self._asked:
            self._took, self._asked = store.jobs.durations(patterns), patterns
            self._took_until = self._clock() + _KEPT_SECONDS
        return self._took


def read_line(store: "Store", context: QueueContext, shown: Iterable[str]) -> WaitingLine:
    """Places of the first thousand jobs, and estimates for these jobs if they are among the first."""
    places = {name: place for place, name in enumerate(store.jobs.first_ids(MOST_AHEAD))}
    last = max((places[name] for name in shown if places.get(name, MOST_SIMULATED) < MOST_SIMULATED), default=None)
    if last is None:
        return WaitingLine(places, {})
    # Jobs further back may start earlier.
    most = min(MOST_SIMULATED, max(MOST_WAITING, last + 1))
    queued = store.jobs.in_line(most)
    running = store.jobs.find(states=["running"], limit=_MOST_RUNNING)
    needs = store.jobs.needs_of([job.id for job in queued if job.after or job.after_any])
    return WaitingLine(places, Forecaster().line(store, queued, running, context, needs, most).starts)


def reasons_of(store: "Store", jobs: Sequence[Job], context: QueueContext) -> list[Why]:
    """Why these jobs are in their states, with the names of other jobs."""
    queued = [job for job in jobs if job.state == "queued"]
    line = read_line(store, context, (job.id for job in queued)) if queued else WaitingLine({}, {})
    needs = store.jobs.needs_of([job.id for job in queued if job.after or job.after_any])
    return with_names(store, [line.explain(job, context, needs) for job in jobs])


def why(store: "Store", job: Job) -> Why:
    """Why this job is in its state."""
    return reasons_of(store, [job], read_context(store))[0]
