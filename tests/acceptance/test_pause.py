"""`stoker pause` and `stoker resume`: whether anything is started, by all workers or by one."""

from stoker.queue import Store, View
from tests.support.command import stoker
from tests.support.queue_jobs import submit


def test_a_paused_queue_gives_nothing_away_until_it_is_resumed(queue: Store) -> None:
    (job,) = submit(queue, "a")
    assert stoker("pause").out == f"the queue {queue.place} is paused\n"
    assert queue.claim(job, "w", [], 60.0) is None
    assert stoker("resume").out == f"the queue {queue.place} is resumed\n"
    assert queue.claim(job, "w", [], 60.0) is not None


def test_pausing_twice_is_no_mistake(queue: Store) -> None:
    stoker("pause")
    again = stoker("pause")
    assert (again.code, again.out) == (0, "")
    assert "it is paused already" in again.err
    assert stoker("pause", "--json").json() == {
        "verb": "pause",
        "dry_run": False,
        "changed": [],
        "unchanged": [{"queue": queue.place, "why": "it is paused already"}],
    }
    stoker("resume")
    assert "it was not paused" in stoker("resume").err


def test_one_worker_is_paused_by_its_host_or_its_id(queue: Store) -> None:
    job, other = submit(queue, "a", "b")
    queue.heartbeat("worker-1", "alpha", View())
    queue.heartbeat("worker-2", "beta", View())
    assert stoker("pause", "--worker", "alpha").out == "worker worker-1 on alpha is paused\n"
    assert queue.claim(job, "worker-1", [], 60.0) is None
    assert queue.claim(job, "worker-2", [], 60.0) is not None
    assert stoker("resume", "--worker", "worker-1", "--json").json()["changed"] == [
        {"id": "worker-1", "host": "alpha", "what": "resumed"}
    ]
    assert queue.claim(other, "worker-1", [], 60.0) is not None


def test_a_worker_that_is_not_there_or_not_clear_is_a_sentence(queue: Store) -> None:
    assert "none was ever started" in stoker("pause", "--worker", "alpha").err
    queue.heartbeat("worker-1", "alpha", View())
    queue.heartbeat("worker-2", "beta", View())
    unknown = stoker("pause", "--worker", "gamma")
    assert (unknown.code, unknown.err.count("\n")) == (2, 1)
    assert "there are some on alpha, beta" in unknown.err
    assert "fits several workers" in stoker("pause", "--worker", "worker").err
    queue._driver.fetch_text("UPDATE stoker_workers SET seen = seen - 7200 WHERE host = 'alpha'", {})
    gone = stoker("pause", "--worker", "alpha")
    assert (gone.code, "last heard of 2h ago" in gone.err) == (1, True)
    assert not any(worker.paused for worker in queue.workers())


def test_a_rehearsal_pauses_nothing(queue: Store) -> None:
    queue.heartbeat("worker-1", "alpha", View())
    assert stoker("pause", "--dry-run").out == f"the queue {queue.place} would be paused\n"
    assert stoker("pause", "--worker", "alpha", "--dry-run").out == "worker worker-1 on alpha would be paused\n"
    assert not queue.paused()
    assert not queue.workers()[0].paused
