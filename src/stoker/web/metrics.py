"""`/metrics`: the newest snapshot for Prometheus. A scrape runs no query. Unknown values are omitted, never zero: an
alert like `stoker_gpu_utilization_ratio < 0.05` must not fire for a GPU that cannot be read.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, get_args

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from stoker.queue.fields import State
from stoker.queue.model import GpuUse, WorkerGpu
from stoker.status.machines import cluster_gpus
from stoker.status.model import Machine, RunningJob, Snapshot
from stoker.version import __version__
from stoker.web.app_state import app_state_of

router = APIRouter()

_GPU: Final = ("host", "gpu", "index", "name")
_HOUR: Final = 3600.0
_MEGA: Final = 1e6


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
        # The client requests a version that is not a number.
        return choose_encoder("")


Samples = Iterable[tuple[list[str], float | None]]
"""Values with their labels; None is omitted."""


class Figures(Collector):
    """The figures of a snapshot; None if the queue cannot be read."""

    def __init__(self, snapshot: Snapshot | None) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("stoker_build", "The version of Stoker.", {"version": __version__})
        is_there = self._snapshot is not None
        yield _single(
            "stoker_queue_up", "Whether the queue is readable; otherwise the other metrics are omitted.", is_there
        )
        if self._snapshot is not None:
            yield from _of_queue(self._snapshot)
            yield from _of_jobs(self._snapshot)
            yield from _of_workers(self._snapshot.machines)
            readable = [machine for machine in self._snapshot.machines if machine.there and machine.problem is None]
            yield from _of_gpus(readable)
            yield from _of_clusters(readable)
            yield from _of_time(self._snapshot)


def _of_queue(snapshot: Snapshot) -> Iterator[Metric]:
    counts = {state: snapshot.counts.get(state, 0) for state in get_args(State)}
    counts |= {"running": snapshot.begun, "pending": snapshot.pending}
    by_state = (([state], count) for state, count in counts.items())
    yield _gauge("stoker_queue_jobs", "Jobs in the queue by state.", ["state"], by_state)
    yield _single("stoker_queue_paused", "Whether the queue is paused.", snapshot.paused)


def _of_jobs(snapshot: Snapshot) -> Iterator[Metric]:
    def gauge(name: str, documentation: str, value: Callable[[RunningJob], float | None]) -> Metric:
        samples = (([one.job.id, one.job.name, one.host], value(one)) for one in snapshot.running)
        return _gauge(name, documentation, ["job", "name", "host"], samples)

    def running_seconds(one: RunningJob) -> float | None:
        if one.attempt is None or one.attempt.pending:
            return None
        return max(0.0, snapshot.now - one.attempt.started)

    yield gauge("stoker_job_running_seconds", "How long a job has been running.", running_seconds)
    yield gauge(
        "stoker_job_progress_ratio",
        "The progress of a job by its own progress bar, from 0 to 1.",
        lambda one: None if one.progress is None else one.progress.fraction,
    )
    yield gauge(
        "stoker_job_snoozed_until_timestamp_seconds",
        "End of a job's snooze.",
        lambda one: one.snoozed_until,
    )


def _of_workers(machines: Iterable[Machine]) -> Iterator[Metric]:
    def gauge(name: str, documentation: str, value: Callable[[Machine], float]) -> Metric:
        samples = (([machine.host, machine.worker], value(machine)) for machine in machines)
        return _gauge(name, documentation, ["host", "worker"], samples)

    yield gauge("stoker_worker_up", "Whether a worker sent a recent heartbeat.", lambda machine: machine.there)
    yield gauge(
        "stoker_worker_last_seen_timestamp_seconds",
        "Time of the last heartbeat of a worker.",
        lambda machine: machine.seen,
    )
    yield gauge("stoker_worker_paused", "Whether a worker is paused.", lambda machine: machine.paused)


def _of_gpus(machines: Iterable[Machine]) -> Iterator[Metric]:
    gpus = [(machine.host, gpu) for machine in machines for gpu in machine.gpus]

    def labels(host: str, gpu: WorkerGpu) -> list[str]:
        return [host, gpu.uuid, str(gpu.index), gpu.name]

    def gauge(name: str, documentation: str, value: Callable[[WorkerGpu], float | None]) -> Metric:
        return _gauge(name, documentation, _GPU, ((labels(host, gpu), value(gpu)) for host, gpu in gpus))

    yield gauge("stoker_gpu_utilization_ratio", "The utilization of a GPU, from 0 to 1.", lambda gpu: gpu.utilization)
    yield gauge(
        "stoker_gpu_memory_activity_ratio",
        "Share of time in which the memory of a GPU was read or written, from 0 to 1.",
        lambda gpu: gpu.memory_activity,
    )
    yield gauge(
        "stoker_gpu_sm_clock_hertz",
        "The SM clock of a GPU.",
        lambda gpu: None if gpu.sm_clock is None else gpu.sm_clock * _MEGA,
    )
    xids = (
        ([*labels(host, gpu), str(xid)], float(count)) for host, gpu in gpus for xid, count in Counter(gpu.xids).items()
    )
    yield _gauge("stoker_gpu_xid_errors", "XID errors of a GPU since its worker started.", [*_GPU, "xid"], xids)
    yield gauge("stoker_gpu_memory_used_bytes", "The memory of a GPU that is in use.", lambda gpu: gpu.memory_used)
    yield gauge("stoker_gpu_memory_total_bytes", "The memory of a GPU.", lambda gpu: gpu.memory_total)
    yield gauge("stoker_gpu_state_since_timestamp_seconds", "Start of a GPU's state.", lambda gpu: gpu.since)
    yield gauge("stoker_gpu_quarantined", "Whether a GPU is out of rotation.", lambda gpu: bool(gpu.quarantine))
    states = (([*labels(host, gpu), use], float(gpu.state == use)) for host, gpu in gpus for use in get_args(GpuUse))
    yield _gauge("stoker_gpu_state", "The state of a GPU: 1 for the current one.", [*_GPU, "state"], states)
    filled = Counter((host, gpu.user) for host, gpu in gpus if gpu.state == "background")
    yield _gauge(
        "stoker_fill_gpus",
        "GPUs that a background program uses.",
        ["host", "program"],
        ((list(which), count) for which, count in filled.items()),
    )


def _of_clusters(machines: Iterable[Machine]) -> Iterator[Metric]:
    labels = ["host", "worker", "cluster"]
    clusters = [([one.host, one.worker, one.cluster], cluster_gpus(one.nodes)) for one in machines if one.cluster]
    states = (
        ([*which, state], amount)
        for which, gpus in clusters
        for state, amount in (("allocated", gpus.allocated), ("free", gpus.free), ("down", gpus.down))
    )
    yield _gauge("stoker_cluster_gpus", "GPUs of a cluster by state.", [*labels, "state"], states)
    own = ((which, gpus.own) for which, gpus in clusters)
    yield _gauge("stoker_cluster_own_gpus", "GPUs of a cluster that jobs of this queue hold.", labels, own)


def _of_time(snapshot: Snapshot) -> Iterator[Metric]:
    """Gauges: the period moves on with the clock, so these may fall."""
    hours = snapshot.hours
    by_use: dict[GpuUse, float] = {
        "job": hours.jobs,
        "background": hours.background,
        "somebody": hours.others,
        "free": hours.idle,
        "unknown": hours.unknown,
    }
    yield _gauge(
        "stoker_gpu_recent_seconds",
        "GPU time since stoker_gpu_recent_start_timestamp_seconds by state.",
        ["state"],
        (([use], amount * _HOUR) for use, amount in by_use.items()),
    )
    saved = hours.saved * _HOUR
    yield _single("stoker_gpu_recent_saved_seconds", "Estimated GPU time saved by rules.", saved)
    yield _single("stoker_gpu_recent_start_timestamp_seconds", "Start of the recent period.", hours.since)


def _gauge(name: str, documentation: str, labels: Sequence[str], samples: Samples) -> Metric:
    family = GaugeMetricFamily(name, documentation, labels=labels)
    for values, value in samples:
        if value is not None:
            family.add_metric(values, value)
    return family


def _single(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(name, documentation, value=float(value))
