"""Builds a snapshot with few queries, fast enough for several a second. Each query uses an index, for any number of
jobs. Values that change slowly, or whose cost grows with the history, are queried rarely and cached.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from stoker.queue.explanation import QueueContext, explain, gpu_names, read_context, with_names
from stoker.queue.fields import State
from stoker.queue.groups import Group
from stoker.queue.listing import MOST_QUEUED
from stoker.queue.model import ENDED, Failure, Job
from stoker.status import usage as hours
from stoker.status.forecast import Forecaster
from stoker.status.health import RECENT, HealthInputs, assess
from stoker.status.machines import ClockCorrection, machines_of
from stoker.status.model import (
    MOST_ENDED,
    MOST_RUNNING,
    MOST_WAITING,
    EndedJob,
    GpuHours,
    RunningJob,
    Snapshot,
    WaitingJob,
)
from stoker.status.progress import NO_OUTPUT, last_metrics, last_outputs

if TYPE_CHECKING:
    from stoker.queue import Store

# Totals of a week change slowly.
_HOURS_EVERY: Final = 20.0


class SnapshotBuilder:
    """Builds snapshots of one queue, with caches."""

    def __init__(self, home: Path) -> None:
        """`home`: the state directory of this machine."""
        self._home = home
        self._all_counts = ThrottledCache[dict[State, int]]()
        self._failed = _Failures("failed")
        self._stopped = _Failures("stopped")
        self._hours = ThrottledCache[GpuHours](_HOURS_EVERY)
        self._clock_correction = ClockCorrection()
        self._forecaster = Forecaster()

    def observe(self, store: "Store") -> Snapshot:
        context = read_context(store)
        counts = self._counts(store)
        running_jobs = store.jobs.find(states=["running"], order="newest", limit=MOST_RUNNING)
        machines = machines_of(
            context.workers, context.running.values(), {job.id: job for job in running_jobs}, context.now
        )
        machines = self._clock_correction.apply(machines, context.now)
        running = self._running(store, running_jobs, context)
        waiting = _waiting(store, context, running_jobs, self._forecaster)
        since = context.now - RECENT
        failed, failures = self._failed.read(store, since)
        stopped, stops = self._stopped.read(store, since)
        ended = _ended(store, store.jobs.ended_since(0.0, MOST_ENDED), context)
        health = assess(
            HealthInputs(
                now=context.now,
                paused=context.paused,
                counts=counts,
                machines=machines,
                running=running,
                waiting=waiting,
                failed=failed,
                failures=failures,
                stopped=stopped,
                stops=stops,
                stopped_for="" if stopped is None else _stopped_for(store, [stopped])[stopped.id],
            )
        )
        return Snapshot(
            now=context.now,
            place=store.place,
            paused=context.paused,
            counts=counts,
            pending=sum(attempt.pending for attempt in context.running.values()),
            machines=machines,
            running=running,
            waiting=waiting,
            groups=_groups(store, [*(one.job for one in running), *(one.job for one in waiting)]),
            ended=ended,
            health=health,
            hours=self._hours.get(lambda: _hours(store, context.now)),
        )

    def _counts(self, store: "Store") -> dict[State, int]:
        """With very many jobs, counts of ended and queued jobs may be some seconds old."""
        if self._all_counts.is_due():
            return dict(self._all_counts.get(store.jobs.counts))
        kept, fresh = self._all_counts.get(store.jobs.counts), store.jobs.unfinished_counts()
        if fresh.get("queued", 0) >= MOST_QUEUED:
            fresh["queued"] = max(fresh["queued"], kept.get("queued", 0))
        return fresh | {state: kept[state] for state in ENDED if state in kept}

    def _running(self, store: "Store", jobs: Sequence[Job], context: QueueContext) -> tuple[RunningJob, ...]:
        attempts = {job.id: context.running[job.id] for job in jobs if job.id in context.running}
        outputs = last_outputs(store, self._home, list(attempts.values()))
        figures = last_metrics(store, jobs)
        snoozes = store.attempts.snoozes() if attempts else {}
        workers = {worker.id: worker for worker in context.workers}
        found = []
        for job in jobs:
            attempt = attempts.get(job.id)
            name = attempt.id if attempt is not None else ""
            worker = workers.get(attempt.worker) if attempt is not None else None
            output = outputs.get(name, NO_OUTPUT)
            found.append(
                RunningJob(
                    job=job,
                    attempt=attempt,
                    host=worker.host if worker is not None else f"worker {attempt.worker}" if attempt else "",
                    gpus=tuple(gpu_names(attempt.gpus, worker)) if attempt is not None else (),
                    why=explain(job, context),
                    progress=output.progress,
                    last_line=output.line,
                    figures=figures.get(job.id, {}),
                    snoozed_until=snoozes.get(name),
                    warning=context.warning_of(job.id),
                )
            )
        return tuple(found)


def _ended(store: "Store", jobs: Sequence[Job], context: QueueContext) -> tuple[EndedJob, ...]:
    stopped = _stopped_for(store, jobs)
    return tuple(EndedJob(job=job, why=explain(job, context), stopped=stopped[job.id]) for job in jobs)


def _stopped_for(store: "Store", jobs: Sequence[Job]) -> dict[str, str]:
    """The kind of the verdict that stopped each job; empty if no rule stopped it."""
    causes = store.attempts.causes({job.attempt for job in jobs if job.attempt is not None})
    found = {job.id: causes.get(job.attempt or "") for job in jobs}
    return {job: one.cause if one is not None and one.rule else "" for job, one in found.items()}


def _waiting(
    store: "Store", context: QueueContext, running: Sequence[Job], forecaster: Forecaster
) -> tuple[WaitingJob, ...]:
    """The first queued and held jobs, in queue order."""
    queued = store.jobs.in_line(MOST_WAITING)
    held = store.jobs.find(states=["held"], order="queue", limit=MOST_WAITING)
    needs = store.jobs.needs_of([job.id for job in queued if job.after or job.after_any])
    line = forecaster.line(store, queued, running, context, needs, MOST_WAITING)
    first = sorted((*queued, *held), key=lambda job: (-job.priority, job.position, job.submitted, job.id))[
        :MOST_WAITING
    ]
    reasons = with_names(store, [line.explain(job, context, needs) for job in first])
    return tuple(WaitingJob(job=job, why=reason) for job, reason in zip(first, reasons, strict=True))


def _groups(store: "Store", jobs: Sequence[Job]) -> tuple[Group, ...]:
    names = dict.fromkeys(job.group for job in jobs if job.group)
    known = store.groups.several(names)
    return tuple(known[name] for name in names if name in known and known[name].total > 1)


def _hours(store: "Store", now: float) -> GpuHours:
    since = now - hours.WEEK
    return hours.gpu_hours(store.usage.totals(int(since // 60)), store.attempts.rule_stops(since), now)


T = TypeVar("T")

# A slow query takes at most this share of the time.
_SHARE: Final = 0.02
# Faster queries are never cached: a brief load must not make them look slow.
_CHEAP: Final = 0.01
# Something else may have delayed the query, so no answer is kept for longer.
_MAX_KEPT: Final = 30.0


class ThrottledCache(Generic[T]):
    """One cached answer: as fresh as its cost allows, and not queried again within `at_least` seconds."""

    def __init__(self, at_least: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._at_least = at_least
        self._clock = clock
        self._due = -math.inf
        self._kept: list[T] = []

    def is_due(self) -> bool:
        return self._clock() >= self._due

    def get(self, ask: Callable[[], T]) -> T:
        """The answer of `ask`, or a recent one."""
        if self._kept and not self.is_due():
            return self._kept[0]
        began = self._clock()
        answer = ask()
        self._kept = [answer]
        took = self._clock() - began
        worth = min(took / _SHARE, _MAX_KEPT) if took > _CHEAP else 0.0
        self._due = began + took + max(self._at_least, worth)
        return answer


# Counting failures anew takes at most this share of the time while no new one is known. Failures also decrease: with
# time, and when jobs are retried or deleted.
_RECOUNT_SHARE: Final = 0.001
_RECOUNTED_AFTER: Final = 10.0


class _Failures:
    """The newest failure of a kind, and their number; counting them reads all jobs that ended in that time."""

    def __init__(self, kind: Failure) -> None:
        self._kind: Failure = kind
        self._counted = ThrottledCache[int]()
        self._number = 0
        self._newest: tuple[str, float | None] | None = None
        self._recount_at = -math.inf

    def read(self, store: "Store", since: float) -> tuple[Job | None, int]:
        newest = next(iter(store.jobs.failures(self._kind, since, 1)), None)
        if newest is None:
            return None, 0
        which, began = (newest.id, newest.ended), time.monotonic()
        if (which != self._newest or began >= self._recount_at) and self._counted.is_due():
            self._newest = which
            self._number = self._counted.get(lambda: store.jobs.count_failures(self._kind, since))
            took = time.monotonic() - began
            self._recount_at = began + min(took / _RECOUNT_SHARE, _RECOUNTED_AFTER)
        return newest, self._number
