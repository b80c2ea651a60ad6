"""A job that no engine of the queue can run is refused by everything that submits or edits jobs."""

from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

import stoker
from stoker.engines import ENGINES
from stoker.engines.admission import check_edits, check_jobs
from stoker.errors import BadInputError, InvalidFieldsError
from stoker.feeds.intake import FeedLog, Intake
from stoker.feeds.text_file import FileFeed
from stoker.queue import JobSpec, Store, View, open_queue
from stoker.queue.model import ClusterNode
from stoker.web.submission import jobs_of
from tests.support.either_queue import queue, url

__all__ = ["queue", "url"]

NEEDS_TWO = "nodes: a job over several machines needs a worker with --engine slurm"
ON_TWO = JobSpec(command="true", nodes=2)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that runs jobs on up to three machines."""
    monkeypatch.setitem(ENGINES, "scripted", "tests.support.scripted_engine")


def test_engine_of_the_settings_counts_without_a_worker(queue: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    check_jobs(queue, [replace(ON_TWO, nodes=1)])
    with pytest.raises(InvalidFieldsError, match=NEEDS_TWO):
        check_jobs(queue, [ON_TWO])
    monkeypatch.setenv("STOKER_ENGINE", "scripted")
    check_jobs(queue, [ON_TWO])


def test_engines_of_live_workers_count(queue: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_ENGINE", "scripted")
    queue.workers.heartbeat("w1", "box", View(engine="local"))
    with pytest.raises(InvalidFieldsError, match=NEEDS_TWO):
        check_jobs(queue, [ON_TWO])
    queue.workers.heartbeat("w2", "login", View(engine="scripted"))
    check_jobs(queue, [ON_TWO])
    with pytest.raises(BadInputError, match=r"--engine slurm \(local\); nodes: .* not on 4 \(scripted\)"):
        check_jobs(queue, [replace(ON_TWO, nodes=4)])


def test_worker_that_left_counts_until_another_is_there(queue: Store) -> None:
    queue.workers.heartbeat("w1", "login", View(engine="scripted"))
    queue.workers.farewell("w1")
    check_jobs(queue, [ON_TWO])
    queue.workers.heartbeat("w2", "box", View(engine="local"))
    with pytest.raises(InvalidFieldsError, match=NEEDS_TWO):
        check_jobs(queue, [ON_TWO])


def test_engine_that_is_not_installed_here_may_run_it(queue: Store) -> None:
    queue.workers.heartbeat("w1", "login", View(engine="elsewhere"))
    check_jobs(queue, [ON_TWO])


def test_nodes_that_workers_report_count(queue: Store) -> None:
    small, large = (ClusterNode(name=name, gpus=gpus) for name, gpus in (("a", 2), ("b", 8)))
    queue.workers.heartbeat("w1", "login", View(engine="slurm", cluster="hpc", nodes=(small,)))
    queue.workers.heartbeat("w2", "login", View(engine="slurm", cluster="hpc", nodes=(small,)))
    wide = JobSpec(command="true", gpus=4)
    with pytest.raises(InvalidFieldsError) as refused:
        check_jobs(queue, [wide])
    assert str(refused.value) == "gpus: no node of the cluster has 4 GPUs (at most 2)"
    queue.workers.heartbeat("w2", "login", View(engine="slurm", cluster="other", nodes=(large,)))
    check_jobs(queue, [wide])


def test_edit_must_not_make_a_job_impossible(queue: Store) -> None:
    before = replace(ON_TWO, nodes=1)
    with pytest.raises(InvalidFieldsError, match=NEEDS_TWO):
        check_edits(queue, [(before, ON_TWO)])
    # It was impossible before: its priority may be changed.
    check_edits(queue, [(ON_TWO, replace(ON_TWO, priority=5))])


def test_page_and_api_refuse_it_beside_the_field(queue: Store) -> None:
    with pytest.raises(InvalidFieldsError) as refused:
        jobs_of(queue, {"command": "true", "directory": "/tmp", "nodes": "2"})
    assert list(refused.value.mistakes) == ["nodes"]


def test_client_refuses_it(queue: Store, url: str) -> None:
    with stoker.Queue(url) as client, pytest.raises(InvalidFieldsError, match=NEEDS_TWO):
        client.submit("true", nodes=2)
    assert queue.jobs.counts() == {}


def test_feed_ends_with_the_reason_and_is_not_asked_again(queue: Store, url: str, tmp_path: Path) -> None:
    lines = tmp_path / "jobs.txt"
    lines.write_text("one\n")

    def feed(pattern: JobSpec) -> FileFeed:
        return FileFeed(lines, None, Intake(pattern), None, lambda: open_queue(url), FeedLog())

    with closing(feed(ON_TWO)) as refused, pytest.raises(InvalidFieldsError, match=NEEDS_TWO):
        refused.run_once()
    assert queue.jobs.counts() == {}
    queue.workers.heartbeat("w1", "login", View(engine="scripted"))
    with closing(feed(ON_TWO)) as admitted:
        admitted.run_once()
        # A worker of another engine comes while that of the cluster is restarted.
        queue.workers.farewell("w1")
        queue.workers.heartbeat("w2", "box", View(engine="local"))
        lines.write_text("one\ntwo\n")
        admitted.run_once()
    assert queue.jobs.counts() == {"queued": 2}
