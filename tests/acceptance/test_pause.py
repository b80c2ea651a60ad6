"""`stoker pause` and `stoker resume`: start no jobs, on all workers or on one."""

from stoker.queue import Store, View
from tests.support.command import stoker
from tests.support.queue_jobs import submit


def test_no_job_of_a_paused_queue_is_claimed(queue: Store) -> None:
    (job,) = submit(queue, "a")
    assert stoker("pause").out == f"the queue {queue.place}: paused\n"
    assert queue.attempts.claim([job], "w", [], 60.0) is None
    assert stoker("resume").out == f"the queue {queue.place}: resumed\n"
    assert queue.attempts.claim([job], "w", [], 60.0) is not None


def test_pausing_twice_succeeds(queue: Store) -> None:
    stoker("pause")
    again = stoker("pause")
    assert (again.code, again.out) == (0, "")
    assert "it is paused already" in again.err
    assert stoker("pause", "--json").json() == {
        "verb": "pause",
        "queue": queue.place,
        "dry_run": False,
        "changed": [],
        "unchanged": [{"id": "queue", "name": queue.place, "why": "it is paused already"}],
    }
    stoker("resume")
    assert "it was not paused" in stoker("resume").err


def test_worker_is_paused_by_host_or_id(queue: Store) -> None:
    job, other = submit(queue, "a", "b")
    queue.workers.heartbeat("worker-1", "alpha", View())
    queue.workers.heartbeat("worker-2", "beta", View())
    queue.workers.heartbeat("worker-12", "gamma", View())
    assert stoker("pause", "--worker", "alpha").out == "worker worker-1 on alpha: paused\n"
    assert queue.attempts.claim([job], "worker-1", [], 60.0) is None
    assert queue.attempts.claim([job], "worker-2", [], 60.0) is not None
    assert stoker("resume", "--worker", "worker-1", "--json").json()["changed"] == [
        {"id": "worker-1", "name": "alpha", "what": "resumed"}
    ]
    assert queue.attempts.claim([other], "worker-1", [], 60.0) is not None


def test_unknown_or_ambiguous_worker_is_refused(queue: Store) -> None:
    assert "none was ever started" in stoker("pause", "--worker", "alpha").err
    queue.workers.heartbeat("worker-1", "alpha", View())
    queue.workers.heartbeat("worker-2", "beta", View())
    unknown = stoker("pause", "--worker", "gamma")
    assert (unknown.code, unknown.err.count("\n")) == (2, 1)
    assert "there are some on alpha, beta" in unknown.err
    assert "fits several workers" in stoker("pause", "--worker", "worker").err
    queue._driver.fetch_text("UPDATE stoker_workers SET seen = seen - 7200 WHERE host = 'alpha'", {})
    gone = stoker("pause", "--worker", "alpha")
    assert (gone.code, "last seen 2h ago" in gone.err) == (1, True)
    assert not any(worker.paused for worker in queue.workers.all())


def test_dry_run_pauses_nothing(queue: Store) -> None:
    queue.workers.heartbeat("worker-1", "alpha", View())
    assert stoker("pause", "--dry-run").out == f"the queue {queue.place}: would be paused\n"
    assert stoker("pause", "--worker", "alpha", "--dry-run").out == "worker worker-1 on alpha: would be paused\n"
    assert not queue.paused()
    assert not queue.workers.all()[0].paused
