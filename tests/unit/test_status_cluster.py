"""How people see a cluster: its GPUs counted, jobs that are pending there, and where jobs run."""

from typing import Any

import pytest

from stoker.cli.tables.jobs import summed_up
from stoker.cli.top.screen import UNCUT, TopView, frame, whole
from stoker.queue.explanation import QueueContext, Why
from stoker.queue.model import ClusterNode, View
from stoker.status.health import HealthInputs, assess
from stoker.status.job_columns import JobRow, gpus_text, lasted_text, since_text, state_text
from stoker.status.machines import cluster_gpus, machines_of, partitions_of
from stoker.status.model import GpuHours, Health, Machine, RunningJob, Snapshot
from stoker.web.pages.sections import render
from tests.support.status_parts import NOW, attempt, job, machine, running, worker

HOSTILE = "<script>alert(1)</script>"


def node(name: str = "node1", **changes: Any) -> ClusterNode:
    usual: dict[str, Any] = {
        "partitions": ("main",),
        "state": "mixed",
        "gpus": 4,
        "gpus_allocated": 3,
        "own": 1,
        "gpu_model": "a100",
        "cpus": 64,
        "cpus_allocated": 48,
        "memory": 512 * 2**30,
        "jobs": ("0a0a0a0a",),
    }
    return ClusterNode(name=name, **{**usual, **changes})


DOWN = node("node2", state="drained", available=False, reason="bad fan", gpus_allocated=1, own=0, jobs=())
IDLE = node("node3", partitions=("main", "spare"), state="idle", gpus_allocated=0, own=0, jobs=())


def cluster(*nodes: ClusterNode, **changes: Any) -> Machine:
    return machine(**{"host": "login1", "cluster": "hpc", "nodes": nodes, **changes})


def pending(**changes: Any) -> RunningJob:
    return RunningJob(
        job=job("running", id="0b0b0b0b", **changes),
        attempt=attempt(job="0b0b0b0b", gpus=(), pending=True, where="Slurm job 4711"),
        host="login1",
        gpus=(),
        why=Why("pending", "", "waits in Slurm: jobs of higher priority come first"),
        progress=None,
        last_line="",
    )


def on_cluster() -> RunningJob:
    return running(attempt=attempt(gpus=(), where="Slurm job 4710 on node1"))


def snapshot(**changes: Any) -> Snapshot:
    usual: dict[str, Any] = {
        "now": NOW,
        "place": "queue.db",
        "paused": False,
        "counts": {"running": 2},
        "pending": 1,
        "machines": (cluster(node(), DOWN, IDLE),),
        "running": (on_cluster(), pending()),
        "waiting": (),
        "ended": (),
        "health": Health(level="good", headline="All is well"),
        "hours": GpuHours(since=NOW - 7 * 86400),
    }
    return Snapshot(**{**usual, **changes})


def test_gpus_of_a_cluster_are_allocated_free_or_down() -> None:
    found = cluster_gpus((node(), DOWN, IDLE))
    assert (found.total, found.allocated, found.own, found.free, found.down) == (12, 4, 1, 5, 3)
    assert str(found) == "12 GPUs: 4 allocated (1 by this queue), 5 free, 3 down"
    assert str(cluster_gpus(())) == "no GPUs"
    assert str(cluster_gpus((node(gpus=1, gpus_allocated=0, own=0),))) == "1 GPU: 0 allocated, 1 free"


def test_node_is_in_each_of_its_partitions() -> None:
    assert {name: [one.name for one in nodes] for name, nodes in partitions_of((node(), IDLE)).items()} == {
        "main": ["node1", "node3"],
        "spare": ["node3"],
    }


def test_nodes_of_a_lost_worker_are_unknown() -> None:
    view = View(cluster="hpc", nodes=(node(),))
    for ago, names in ((2.0, ["node1"]), (500.0, [])):
        (found,) = machines_of([worker(ago=ago, view=view)], [], {}, NOW)
        assert (found.cluster, [one.name for one in found.nodes]) == ("hpc", names)


def test_pending_job_is_not_counted_as_running() -> None:
    assert (snapshot().begun, snapshot().pending) == (1, 1)
    around = QueueContext(now=NOW, running={"a": attempt(), "b": attempt(pending=True)})
    assert summed_up({"running": 2, "queued": 3}, around).startswith("1 running, 1 pending, 3 queued;")


def test_columns_of_a_pending_job() -> None:
    row = JobRow(job=pending(gpus=2).job, now=NOW, why=pending().why, host="login1", where="Slurm job 4711")
    assert (state_text(row), gpus_text(row), lasted_text(row)) == ("pending", "2", "")
    assert since_text(row) == "1h ago", "it was submitted then"


def test_columns_of_a_job_on_a_cluster() -> None:
    item = on_cluster()
    row = JobRow(job=item.job, now=NOW, why=item.why, host="login1", gpus=("-",), where=item.where)
    assert (gpus_text(row), lasted_text(row)) == ("Slurm job 4710 on node1", "10m")


@pytest.mark.parametrize(
    ("jobs", "headline"),
    [
        ((), "All is well: hpc is there"),
        ((on_cluster(),), "All is well: 1 job runs on hpc"),
        ((on_cluster(), pending()), "All is well: 1 job runs on hpc, 1 is pending"),
        ((pending(), pending()), "All is well: 2 jobs are pending on hpc"),
    ],
)
def test_headline_of_a_cluster_counts_the_jobs_of_this_queue(jobs: tuple[RunningJob, ...], headline: str) -> None:
    counts = {"running": len(jobs)}
    found = assess(HealthInputs(now=NOW, counts=counts, machines=(cluster(node()),), running=jobs))  # type: ignore[arg-type]  # a state
    assert found.headline == headline


def test_cluster_that_cannot_be_read_is_bad() -> None:
    away = cluster(problem="the controller does not answer")
    found = assess(HealthInputs(now=NOW, machines=(away,)))
    assert [point.message for point in found.points if point.level == "bad"] == [
        "login1 cannot read the cluster hpc: the controller does not answer"
    ]


def test_top_shows_nodes_and_pending_jobs() -> None:
    text = "\n".join(line.plain for line in whole(snapshot(), UNCUT))
    assert "login1  cluster hpc  3 nodes, 12 GPUs: 4 allocated (1 by this queue), 5 free, 3 down" in text
    assert "  node1                ###-     1 of 4 free   main             0a0a0a0a" in text
    assert "drained: bad fan" in text
    assert "running (1)" in text
    assert "Slurm job 4710 on node1" in text
    assert "pending (1)" in text
    assert "1 GPU     pending  waits in Slurm: jobs of higher priority come first" in text


def test_cluster_of_many_nodes_is_one_line_on_a_small_terminal() -> None:
    many = snapshot(machines=(cluster(*(node(f"node{number}") for number in range(40))),))
    lines = [line.plain for line in frame(many, TopView(), 100, 30)]
    assert sum("node" in line for line in lines) == 1 + 1, "the cluster, and the job on one of its nodes"
    assert any("cluster hpc  40 nodes, 160 GPUs" in line for line in lines)


def test_page_shows_partitions_nodes_and_pending_jobs() -> None:
    sections = render(snapshot(), "operator")
    machine_html = sections["machine-box-1"]
    for text in ("Cluster hpc · 3 nodes, 12 GPUs", "1 of 4 free", "drained", "bad fan", '<a href="/jobs/0a0a0a0a">'):
        assert text in machine_html
    assert machine_html.count('<i class="somebody"></i>') == 3
    assert 'Running <span class="count">1</span>' in sections["running"]
    assert 'Pending <span class="count">1</span>' in sections["running"]
    assert "Waits in Slurm: jobs of higher priority come first" in sections["running"]
    assert "Slurm job 4710 on node1" in sections["running"]
    assert "<strong>1</strong> pending" in sections["health"]


def test_text_of_a_cluster_cannot_become_part_of_the_page() -> None:
    odd = node(HOSTILE, partitions=(HOSTILE,), state=HOSTILE, reason=HOSTILE, gpu_model=HOSTILE, available=False)
    item = running(attempt=attempt(where=HOSTILE))
    sections = render(snapshot(machines=(cluster(odd, cluster=HOSTILE),), running=(item, pending())), "operator")
    assert all("<script" not in html for html in sections.values())


def test_page_without_a_cluster_has_no_pending_jobs() -> None:
    sections = render(snapshot(machines=(machine(),), running=(running(),), pending=0), "viewer")
    assert "Pending" not in sections["running"]
    assert "pending" not in sections["health"]
