"""`stoker clean`: what ended long ago is deleted."""

import pytest

from stoker.queue import Store, View
from tests.support.command import stoker
from tests.support.queue_jobs import end, start, submit

DAY = 86400.0


def aged(queue: Store, job: str, days: float) -> None:
    queue._driver.fetch_text(
        "UPDATE stoker_jobs SET ended = ended - :age WHERE id = :id", {"age": days * DAY, "id": job}
    )


def names(queue: Store) -> set[str]:
    return {job.name for job in queue.jobs.find()}


def test_only_jobs_that_ended_more_than_a_month_ago_are_deleted(queue: Store) -> None:
    old, young, runs, _waits, held = submit(queue, "old", "young", "runs", "waits", "held")
    end(queue, old, "succeeded")
    end(queue, young)
    aged(queue, old, 31)
    aged(queue, young, 29)
    start(queue, runs)
    queue.jobs.hold([held])
    done = stoker("clean")
    assert (done.code, done.out) == (0, "1 job that ended more than 30d ago deleted; 1 kept\n")
    assert names(queue) == {"young", "runs", "waits", "held"}
    again = stoker("clean")
    assert (again.code, again.out) == (
        0,
        "nothing to delete; 1 that ended are more recent, or other jobs depend on them\n",
    )


def test_age_and_state_are_selectable(queue: Store) -> None:
    well, wrong, unwanted = submit(queue, "well", "wrong", "unwanted")
    end(queue, well, "succeeded")
    end(queue, wrong)
    queue.jobs.cancel([unwanted])
    for job in (well, wrong, unwanted):
        aged(queue, job, 2)
    assert stoker("clean", "--older-than", "3d", "--json").json()["deleted"] == 0
    done = stoker("clean", "--older-than", "1d", "--state", "failed", "--state", "cancelled")
    assert done.out == "2 failed or cancelled jobs that ended more than 1d ago deleted; 0 kept\n"
    assert names(queue) == {"well"}


def test_dependency_of_an_unfinished_job_is_kept(queue: Store) -> None:
    (needed,) = submit(queue, "needed")
    submit(queue, "waits", after=(needed,))
    end(queue, needed, "succeeded")
    aged(queue, needed, 99)
    assert stoker("clean", "--dry-run", "--json").json()["deleted"] == 0
    assert stoker("clean", "--json").json() == {
        "verb": "clean",
        "queue": queue.place,
        "dry_run": False,
        "older_than": 30 * DAY,
        "states": ["succeeded", "failed", "cancelled"],
        "deleted": 0,
        "kept": 1,
        "snapshot_bytes": 0,
    }
    assert names(queue) == {"needed", "waits"}


def test_dry_run_counts_and_deletes_nothing(queue: Store) -> None:
    (old,) = submit(queue, "old")
    end(queue, old)
    aged(queue, old, 40)
    assert stoker("clean", "--dry-run").out == "1 job that ended more than 30d ago would be deleted; 0 kept\n"
    assert names(queue) == {"old"}


@pytest.mark.parametrize("state", ["queued", "held", "running"])
def test_unfinished_states_cannot_be_selected(queue: Store, state: str) -> None:
    submit(queue, "a")
    done = stoker("clean", "--older-than", "0s", "--state", state)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert names(queue) == {"a"}


def test_live_worker_stays_paused_when_old_jobs_are_deleted(queue: Store) -> None:
    queue.workers.heartbeat("worker-1", "alpha", View())
    queue.workers.pause("worker-1")
    assert stoker("clean", "--older-than", "0s").code == 0
    assert [worker.paused for worker in queue.workers.all()] == [True]
