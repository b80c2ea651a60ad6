"""`/metrics` and `/healthz`: what Prometheus and a supervisor of services see."""

import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from stoker.queue.explanation import Why
from stoker.queue.model import Attempt, ClusterNode, Job, WorkerGpu
from stoker.status.model import GpuHours, Health, Machine, Progress, RunningJob, Snapshot
from tests.support.api_site import ApiSite, Client, site

__all__ = ["site"]

NOW = 1_800_000_000.0
GIB = 2**30


def card(index: int = 0, **fields: Any) -> WorkerGpu:
    known: dict[str, Any] = {
        "memory_total": 80 * GIB, "memory_used": 8 * GIB, "utilization": 0.5, "state": "job", "user": "alice",
        "since": NOW - 600, "note": "", "jobs": (),
    }  # fmt: skip
    return WorkerGpu(uuid=f"GPU-{index}", index=index, name="A100", **{**known, **fields})


def machine(*gpus: WorkerGpu, **fields: Any) -> Machine:
    known: dict[str, Any] = {
        "worker": "box-1", "host": "gpu-box", "there": True, "seen": NOW, "started": NOW, "paused": False,
        "problem": None, "simulated": False,
    }  # fmt: skip
    return Machine(**{**known, **fields}, gpus=gpus)


def running(name: str = "train-17", progress: Progress | None = None) -> RunningJob:
    job = Job(
        id="0a0a0a0a", name=name, command="true", state="running", position=1.0, submitted=NOW, started=NOW, ended=None,
        not_before=0.0, retries_left=0, attempts=1, attempt="a", exit_code=None, reason="", link="",
        cancel_requested=None, origin=None,
    )  # fmt: skip
    attempt = Attempt(id="a", job=job.id, worker="box-1", number=1, gpus=(), started=NOW - 90, lease_expires=NOW + 60)
    why = Why("running", "", "runs")
    return RunningJob(job=job, attempt=attempt, host="gpu-box", gpus=(), why=why, progress=progress, last_line="")


def snapshot(*machines: Any, **fields: Any) -> Snapshot:
    known: dict[str, Any] = {
        "now": NOW, "place": "here", "paused": False, "counts": {"queued": 3, "failed": 1}, "machines": machines,
        "running": (), "waiting": (), "ended": (), "health": Health(level="good", headline="All is well"),
        "hours": GpuHours(since=NOW - 600, jobs=1.5, saved=2.0),
    }  # fmt: skip
    return Snapshot(**{**known, **fields})


def scraped(
    site: ApiSite, told: Snapshot | None, problem: str | None = None
) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples by their names, after the parser of Prometheus has taken all of it."""
    site.snapshot_cache.latest, site.snapshot_cache._problem = told, problem
    answer = site.client("viewer", "prometheus").get("/metrics")
    assert answer.status_code == 200, answer.text
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(answer.text):
        assert f"# HELP {family.name}" in answer.text
        assert f"# TYPE {family.name}" in answer.text
        assert family.documentation.endswith(".")
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


@pytest.mark.parametrize("version", ["abc", "1.x", "..", "1.0.0", ""])
@pytest.mark.parametrize("kind", ["application/openmetrics-text", "text/plain"])
def test_metrics_are_served_for_any_requested_version(site: ApiSite, kind: str, version: str) -> None:
    headers = {"Accept": f"{kind};version={version}"}
    answer = site.client("viewer", "prometheus").get("/metrics", headers=headers)
    assert answer.status_code == 200
    assert "stoker_queue_up" in answer.text


GPU = {"host": "gpu-box", "gpu": "GPU-0", "index": "0", "name": "A100"}


def test_gpu_metrics_contain_state_and_utilization(site: ApiSite) -> None:
    told = scraped(site, snapshot(machine(card(0, utilization=0.25, state="background", user="miner"))))
    assert told["stoker_gpu_utilization_ratio"] == [(GPU, 0.25)]
    assert told["stoker_gpu_memory_used_bytes"] == [(GPU, 8 * GIB)]
    assert told["stoker_gpu_memory_total_bytes"] == [(GPU, 80 * GIB)]
    assert "stoker_gpu_memory_activity_ratio" not in told
    assert "stoker_gpu_xid_errors" not in told
    states = {labels["state"]: value for labels, value in told["stoker_gpu_state"]}
    assert states == {"job": 0, "background": 1, "somebody": 0, "free": 0, "unknown": 0}
    assert told["stoker_fill_gpus"] == [({"host": "gpu-box", "program": "miner"}, 1)]


def test_activity_clock_and_errors_of_gpus_are_exported(site: ApiSite) -> None:
    told = scraped(site, snapshot(machine(card(0, memory_activity=0.0, sm_clock=1410.0, xids=(31, 79, 31)))))
    assert told["stoker_gpu_quarantined"] == [(GPU, 0)]
    assert told["stoker_gpu_memory_activity_ratio"] == [(GPU, 0.0)]
    assert told["stoker_gpu_sm_clock_hertz"] == [(GPU, 1.41e9)]
    assert told["stoker_gpu_xid_errors"] == [({**GPU, "xid": "31"}, 2), ({**GPU, "xid": "79"}, 1)]


def test_zero_is_exported_and_unknown_is_omitted(site: ApiSite) -> None:
    dark = card(1, utilization=None, memory_used=None, memory_total=None, since=None, state="unknown")
    told = scraped(site, snapshot(machine(card(0, utilization=0.0), dark)))
    assert told["stoker_gpu_utilization_ratio"] == [(GPU, 0.0)]
    assert [labels["gpu"] for labels, _value in told["stoker_gpu_memory_used_bytes"]] == ["GPU-0"]
    unknown = [labels["gpu"] for labels, value in told["stoker_gpu_state"] if labels["state"] == "unknown" and value]
    assert unknown == ["GPU-1"]


@pytest.mark.parametrize("fields", [{"there": False}, {"problem": "the driver is gone"}])
def test_unreadable_machine_exports_no_gpu_metrics(site: ApiSite, fields: dict[str, Any]) -> None:
    told = scraped(site, snapshot(machine(card(), **fields)))
    assert "stoker_gpu_utilization_ratio" not in told
    assert "stoker_gpu_state" not in told
    ((labels, up),) = told["stoker_worker_up"]
    assert (labels["host"], up) == ("gpu-box", float(fields.get("there", True)))
    assert len(told["stoker_worker_last_seen_timestamp_seconds"]) == 1


def test_queue_and_jobs_are_exported(site: ApiSite) -> None:
    bar = Progress(fraction=0.5, text="5/10")
    told = scraped(site, snapshot(paused=True, running=(running(progress=bar),)))
    assert {labels["state"]: value for labels, value in told["stoker_queue_jobs"]} == {
        "queued": 3, "held": 0, "running": 0, "succeeded": 0, "failed": 1, "cancelled": 0, "pending": 0,
    }  # fmt: skip
    assert told["stoker_queue_paused"] == [({}, 1)]
    ((labels, seconds),) = told["stoker_job_running_seconds"]
    assert (labels["job"], labels["name"], seconds) == ("0a0a0a0a", "train-17", 90)
    assert told["stoker_job_progress_ratio"][0][1] == 0.5
    assert "stoker_job_snoozed_until_timestamp_seconds" not in told
    spent = {labels["state"]: value for labels, value in told["stoker_gpu_recent_seconds"]}
    assert spent["job"] == 5400
    assert told["stoker_gpu_recent_saved_seconds"] == [({}, 7200)]


def test_odd_names_stay_one_label(site: ApiSite) -> None:
    odd = 'a"b\\c\nd{e}'
    told = scraped(site, snapshot(running=(running(odd),)))
    assert told["stoker_job_running_seconds"][0][0]["name"] == odd


def test_unreachable_queue_exports_only_queue_up(site: ApiSite) -> None:
    for told in (scraped(site, None), scraped(site, snapshot(machine(card())), problem="it is away")):
        assert told["stoker_queue_up"] == [({}, 0)]
        assert [name for name in told if name.startswith(("stoker_gpu", "stoker_queue_jobs", "stoker_worker"))] == []
    assert scraped(site, snapshot())["stoker_queue_up"] == [({}, 1)]


def test_openmetrics_format_is_served_on_request(site: ApiSite) -> None:
    site.snapshot_cache.latest = snapshot()
    answer = site.client().get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_metrics_need_a_token_and_health_does_not(site: ApiSite) -> None:
    stranger = Client(site.secured)
    assert stranger.get("/metrics").status_code == 401
    assert stranger.get("/healthz").status_code == 200


def test_healthz_returns_one_word(site: ApiSite) -> None:
    stranger = Client(site.secured)
    assert (stranger.get("/healthz").status_code, stranger.get("/healthz").text) == (200, "ok\n")
    site.snapshot_cache._problem = "away for a moment"
    assert stranger.get("/healthz").status_code == 200
    site.snapshot_cache.read_at = time.monotonic() - 31
    assert (stranger.get("/healthz").status_code, stranger.get("/healthz").text) == (503, "queue unavailable\n")
    site.snapshot_cache.latest = None
    assert (stranger.get("/healthz").status_code, stranger.get("/healthz").text) == (503, "starting\n")


def test_gpus_of_a_cluster_are_counted_by_state(site: ApiSite) -> None:
    nodes = (
        ClusterNode(name="node1", gpus=4, gpus_allocated=3, own=1),
        ClusterNode(name="node2", gpus=4, gpus_allocated=1, available=False),
    )
    told = scraped(site, snapshot(machine(host="login1", cluster="hpc", nodes=nodes), pending=2))
    assert {labels["state"]: value for labels, value in told["stoker_cluster_gpus"]} == {
        "allocated": 4, "free": 1, "down": 3,
    }  # fmt: skip
    ((labels, own),) = told["stoker_cluster_own_gpus"]
    assert (labels["host"], labels["cluster"], own) == ("login1", "hpc", 1)
    assert {labels["state"]: value for labels, value in told["stoker_queue_jobs"]}["pending"] == 2
