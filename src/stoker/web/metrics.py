"""`/metrics`: the newest overview in the words of Prometheus. A scrape costs no query.

What is not known is left out, never zero: a rule like `stoker_gpu_utilization_ratio < 0.05` must not fire for a GPU
that nobody can read.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final, get_args

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from stoker.queue.fields import State
from stoker.queue.model import GpuUse
from stoker.status.model import Machine, Snapshot
from stoker.version import __version__
from stoker.web.app_state import app_state_of

router = APIRouter()

_GPU: Final = ("host", "gpu", "index", "name")
_HOUR: Final = 3600.0


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    snapshot_cache = app_state_of(request).snapshot_cache
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(Figures(snapshot_cache.latest if snapshot_cache.problem is None else None))
    encode, media_type = _encoder(request.headers.get("accept", ""))
    return Response(encode(registry), media_type=media_type)


def _encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    try:
        return choose_encoder(accept)
    except TypeError:
        # A version that is no number cannot be compared with those that there are.
        return choose_encoder("")


class Figures(Collector):
    """The figures of one overview; of None, that the queue cannot be read."""

    def __init__(self, snapshot: Snapshot | None) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("stoker_build", "The Stoker that tells this.", {"version": __version__})
        is_there = self._snapshot is not None
        yield _single(
            "stoker_queue_up", "Whether the queue can be read; the rest is left out when not.", float(is_there)
        )
        if self._snapshot is not None:
            yield from _of_queue(self._snapshot)
            yield from _of_jobs(self._snapshot)
            yield from _of_workers(self._snapshot.machines)
            yield from _of_gpus([machine for machine in self._snapshot.machines if _can_be_read(machine)])
            yield from _of_time(self._snapshot)


def _of_queue(snapshot: Snapshot) -> Iterator[Metric]:
    jobs = GaugeMetricFamily("stoker_queue_jobs", "Jobs that the queue knows, by their state.", labels=["state"])
    for state in get_args(State):
        jobs.add_metric([state], snapshot.counts.get(state, 0))
    yield jobs
    yield _single("stoker_queue_paused", "Whether the queue is paused, so that nothing is started.", snapshot.paused)


def _of_jobs(snapshot: Snapshot) -> Iterator[Metric]:
    labels = ["job", "name", "host"]
    seconds = GaugeMetricFamily("stoker_job_running_seconds", "How long a job has been running.", labels=labels)
    progress = GaugeMetricFamily(
        "stoker_job_progress_ratio", "How far a job is by its own progress bar, of 1.", labels=labels
    )
    snoozed = GaugeMetricFamily(
        "stoker_job_snoozed_until_timestamp_seconds",
        "Until when a job is left alone, whatever its GPUs do.",
        labels=labels,
    )
    for one in snapshot.running:
        values = [one.job.id, one.job.name, one.host]
        if one.attempt is not None:
            seconds.add_metric(values, max(0.0, snapshot.now - one.attempt.started))
        if one.progress is not None and one.progress.fraction is not None:
            progress.add_metric(values, one.progress.fraction)
        if one.snoozed_until is not None:
            snoozed.add_metric(values, one.snoozed_until)
    yield from (seconds, progress, snoozed)


def _of_workers(machines: Iterable[Machine]) -> Iterator[Metric]:
    labels = ["host", "worker"]
    up = GaugeMetricFamily("stoker_worker_up", "Whether a worker was heard of lately.", labels=labels)
    seen = GaugeMetricFamily(
        "stoker_worker_last_seen_timestamp_seconds", "When a worker was last heard of.", labels=labels
    )
    paused = GaugeMetricFamily("stoker_worker_paused", "Whether a worker starts nothing more.", labels=labels)
    for machine in machines:
        values = [machine.host, machine.worker]
        up.add_metric(values, machine.there)
        seen.add_metric(values, machine.seen)
        paused.add_metric(values, machine.paused)
    yield from (up, seen, paused)


def _can_be_read(machine: Machine) -> bool:
    return machine.there and machine.problem is None


def _of_gpus(machines: Iterable[Machine]) -> Iterator[Metric]:
    utilization = GaugeMetricFamily("stoker_gpu_utilization_ratio", "How busy a GPU is, of 1.", labels=_GPU)
    used = GaugeMetricFamily("stoker_gpu_memory_used_bytes", "Memory of a GPU that is in use.", labels=_GPU)
    total = GaugeMetricFamily("stoker_gpu_memory_total_bytes", "Memory that a GPU has.", labels=_GPU)
    state = GaugeMetricFamily(
        "stoker_gpu_state", "What a GPU does: 1 for the state that it is in.", labels=[*_GPU, "state"]
    )
    since = GaugeMetricFamily(
        "stoker_gpu_state_since_timestamp_seconds", "Since when a GPU does what it does.", labels=_GPU
    )
    filled: Counter[tuple[str, str]] = Counter()
    for machine in machines:
        for gpu in machine.gpus:
            values = [machine.host, gpu.uuid, str(gpu.index), gpu.name]
            _add(utilization, values, gpu.utilization)
            _add(used, values, gpu.memory_used)
            _add(total, values, gpu.memory_total)
            _add(since, values, gpu.since)
            for doing in get_args(GpuUse):
                state.add_metric([*values, doing], float(gpu.state == doing))
            if gpu.state == "background":
                filled[machine.host, gpu.user] += 1
    yield from (utilization, used, total, state, since)
    yield _of_fill(filled)


def _of_fill(filled: Counter[tuple[str, str]]) -> Metric:
    fill = GaugeMetricFamily(
        "stoker_fill_gpus", "GPUs that a background program keeps busy, by program.", labels=["host", "program"]
    )
    for (host, program), gpus in filled.items():
        fill.add_metric([host, program], gpus)
    return fill


def _of_time(snapshot: Snapshot) -> Iterator[Metric]:
    """Gauges: the stretch moves on with the clock, so these may fall."""
    hours = snapshot.hours
    spent = GaugeMetricFamily(
        "stoker_gpu_recent_seconds",
        "GPU time since stoker_gpu_recent_start_timestamp_seconds, by what it was for.",
        labels=["state"],
    )
    by_doing: dict[GpuUse, float] = {
        "job": hours.jobs,
        "background": hours.background,
        "somebody": hours.others,
        "free": hours.idle,
        "unknown": hours.unknown,
    }
    for doing, amount in by_doing.items():
        spent.add_metric([doing], amount * _HOUR)
    yield spent
    yield _single(
        "stoker_gpu_recent_saved_seconds",
        "GPU time that stopping idle jobs saved since then, by estimate.",
        hours.saved * _HOUR,
    )
    yield _single("stoker_gpu_recent_start_timestamp_seconds", "When the recent stretch begins.", hours.since)


def _add(family: GaugeMetricFamily, labels: list[str], value: float | None) -> None:
    if value is not None:
        family.add_metric(labels, value)


def _single(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=float(value))
