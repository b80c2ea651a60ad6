"""GPU usage: hours over a week including savings by rules, and charts of an hour to a month. Savings are an estimate: a
hung job holds its GPUs until a person looks, probably the next morning. Each stop by a rule therefore saved the time
since the stop, at most `UNTIL_SOMEBODY_LOOKS`, on each GPU of the job.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from stoker.queue.model import Attempt, GpuUse, Job, Outcome, Usage
from stoker.status.job_text import job_label
from stoker.status.model import GpuHours

if TYPE_CHECKING:
    from stoker.queue import Store

WEEK: Final = 7 * 86400.0
# From an evening to the next morning.
UNTIL_SOMEBODY_LOOKS: Final = 12 * 3600.0


def gpu_hours(totals: Mapping[GpuUse, float], stops: Iterable[tuple[float, int]], now: float) -> GpuHours:
    """`totals` are GPU-seconds since `now - WEEK`; `stops` contain the times of stops by rules and the freed GPUs."""
    since = now - WEEK
    saved = sum(_saved(now - ended) * gpus for ended, gpus in stops if ended >= since)
    return GpuHours(
        since=since,
        jobs=_hours(totals.get("job", 0.0)),
        background=_hours(totals.get("background", 0.0)),
        others=_hours(totals.get("somebody", 0.0)),
        idle=_hours(totals.get("free", 0.0)),
        unknown=_hours(totals.get("unknown", 0.0)),
        saved=_hours(saved),
    )


def _saved(ago: float) -> float:
    # Clocks may differ: a stop in the future has saved nothing yet.
    return min(max(0.0, ago), UNTIL_SOMEBODY_LOOKS)


def _hours(seconds: float) -> float:
    return seconds / 3600.0


# The main state of a minute is the first of these in it.
_IN_ORDER: Final[tuple[GpuUse, ...]] = ("job", "background", "somebody", "unknown", "free")


class GpuSeries(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU over the times of a history; None without a reading. A point of several minutes is their mean."""

    host: str
    gpu: str
    """Its uuid."""
    utilization: tuple[float | None, ...]
    """A fraction of 1."""
    memory: tuple[int | None, ...]
    """Bytes."""
    state: tuple[GpuUse | None, ...]
    """Its main state."""
    power: tuple[float | None, ...]
    """Watts."""
    utilization_peak: tuple[float | None, ...]
    """Of the minutes of each point."""
    memory_peak: tuple[int | None, ...]
    power_peak: tuple[float | None, ...]


class JobSpan(msgspec.Struct, frozen=True, kw_only=True):
    """The time in which a job had the GPU: one attempt. Times are seconds since the epoch."""

    job: str
    name: str
    attempt: int
    """Its number, from 1."""
    started: float
    ended: float | None
    outcome: Outcome | None
    """None while it runs."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs over the same times; the last point is not over."""

    times: tuple[int, ...]
    """Start of each point, in seconds since the epoch."""
    step: int
    """Minutes per point."""
    gpus: tuple[GpuSeries, ...]
    jobs: tuple[JobSpan, ...] = ()
    """Jobs that had the GPU, newest first, at most 100; empty for several GPUs, except in a job's history."""


# Attempts of a worker to search for those on one GPU: with more short jobs, there is no room for marks.
_MOST_SEARCHED: Final = 2000
_MOST_SPANS: Final = 100
_MOST_ATTEMPTS: Final = 20
# A job may have begun this long before the shown time: the history is stored for as long.
_LONGEST_JOB: Final = 31 * 86400.0


def minutes_per_point(minutes: int, points: int) -> int:
    """Minutes per point such that at most `points` cover the time; the first and the last may be incomplete."""
    return 1 if minutes <= points else -(-minutes // max(1, points - 1))


def usage_history(rows: Sequence[Usage], now: float, minutes: int = 60, step: int = 1) -> History:
    """The last minutes of every GPU in the rows, by host and uuid; `step`: minutes per point, as in the rows."""
    last = int(now // 60)
    points = range((last - minutes + 1) // step, last // step + 1)
    by_gpu: dict[tuple[str, str], dict[int, Usage]] = {}
    for row in rows:
        if row.minute // step in points:
            by_gpu.setdefault((row.host, row.gpu), {})[row.minute // step] = row
    return History(
        times=tuple(point * step * 60 for point in points),
        step=step,
        gpus=tuple(
            _one(host, gpu, [by_point.get(point) for point in points])
            for (host, gpu), by_point in sorted(by_gpu.items())
        ),
    )


def _one(host: str, gpu: str, rows: Sequence[Usage | None]) -> GpuSeries:
    def peak(row: Usage | None, name: str) -> float | None:
        highest: float | None = getattr(row, f"{name}_peak", None)
        return getattr(row, name, None) if highest is None else highest

    return GpuSeries(
        host=host,
        gpu=gpu,
        utilization=tuple(None if row is None else row.utilization for row in rows),
        memory=tuple(None if row is None else row.memory for row in rows),
        state=tuple(None if row is None else _mostly(row) for row in rows),
        power=tuple(None if row is None else row.power for row in rows),
        utilization_peak=tuple(peak(row, "utilization") for row in rows),
        memory_peak=tuple(None if (most := peak(row, "memory")) is None else int(most) for row in rows),
        power_peak=tuple(peak(row, "power") for row in rows),
    )


def read_history(store: "Store", minutes: int, points: int, host: str | None = None, gpu: str | None = None) -> History:
    """The last minutes of all GPUs, a machine's GPUs or one GPU; for one GPU with its jobs."""
    now = store.clock()
    step = minutes_per_point(minutes, points)
    since = (int(now // 60) - minutes + 1) // step * step
    history = usage_history(store.usage.read(since, host, gpu, step=step), now, minutes, step)
    if host is None or gpu is None:
        return history
    started = store.attempts.of_workers(store.workers.of_host(host), since * 60.0 - _LONGEST_JOB, _MOST_SEARCHED)
    shown = [one for one in started if gpu in one.gpus and (one.ended is None or one.ended >= since * 60)]
    jobs = {job.id: job for job in store.jobs.with_ids(list({one.job for one in shown[:_MOST_SPANS]}))}
    return msgspec.structs.replace(history, jobs=_spans(shown[:_MOST_SPANS], jobs))


def read_job_history(store: "Store", job: Job, minutes: int | None, points: int) -> History:
    """A job's GPUs during its attempts, over the whole run or its last minutes."""
    hosts = {worker.id: worker.host for worker in store.workers.all()}
    attempts = [one for one in store.attempts.of(job.id) if not one.pending][-_MOST_ATTEMPTS:]
    now = store.clock()
    ends = [now if one.ended is None else one.ended for one in attempts]
    last = int(max(ends, default=now) // 60)
    first = int(min((one.started for one in attempts), default=now) // 60)
    minutes = min(last - first + 1, int(_LONGEST_JOB // 60), minutes or 2**31)
    step = minutes_per_point(minutes, points)
    since = (last - minutes + 1) // step * step
    rows = []
    for attempt, end in zip(attempts, ends, strict=True):
        begin, until = max(since, int(attempt.started // 60)), int(end // 60) + 1
        if attempt.worker in hosts and begin < until:
            for gpu in attempt.gpus:
                rows += store.usage.read(begin, hosts[attempt.worker], gpu, until_minute=until, step=step)
    history = usage_history(rows, last * 60.0, minutes, step)
    return msgspec.structs.replace(history, jobs=_spans(reversed(attempts), {job.id: job}))


def _spans(attempts: Iterable[Attempt], jobs: Mapping[str, Job]) -> tuple[JobSpan, ...]:
    return tuple(
        JobSpan(
            job=one.job,
            name=job_label(jobs[one.job]),
            attempt=one.number,
            started=one.started,
            ended=one.ended,
            outcome=one.outcome,
        )
        for one in attempts
        if one.job in jobs
    )


def _mostly(row: Usage) -> GpuUse | None:
    longest = max(_IN_ORDER, key=lambda state: row.seconds.get(state, 0.0))
    return longest if row.seconds.get(longest, 0.0) > 0.0 else None
