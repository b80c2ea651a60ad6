"""`stoker retry`: what ended runs again."""

from stoker.queue import Store
from tests.support.command import stoker
from tests.support.queue_jobs import end, start, states, submit


def test_a_job_that_ended_is_queued_again_however_it_ended(queue: Store) -> None:
    failed, well, unwanted = submit(queue, "failed", "well", "unwanted")
    end(queue, failed)
    end(queue, well, "succeeded")
    queue.cancel([unwanted])
    done = stoker("retry", failed, well, unwanted)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == f"{failed} (failed): queued again"
    assert states(queue, failed, well, unwanted) == ["queued"] * 3


def test_a_tag_means_what_went_wrong_and_not_what_went_well(queue: Store) -> None:
    failed, well, waits = submit(queue, "failed", "well", "waits", tags=("sweep",))
    end(queue, failed)
    end(queue, well, "succeeded")
    assert stoker("retry", "--tag", "sweep").out == f"{failed} (failed): queued again\n"
    assert states(queue, failed, well, waits) == ["queued", "succeeded", "queued"]
    assert stoker("retry", "--tag", "sweep", "--state", "succeeded").out == f"{well} (well): queued again\n"


def test_what_runs_waits_or_is_held_is_left_alone_and_told(queue: Store) -> None:
    runs, waits, held = submit(queue, "runs", "waits", "held")
    start(queue, runs)
    queue.hold([held])
    done = stoker("retry", runs, waits, held)
    assert (done.code, done.out) == (1, "")
    assert [line.split(": ", 2)[2] for line in done.err.splitlines()] == [
        "it is running",
        "it waits in the queue already",
        "it is held (`stoker release` lets it start)",
    ]


def test_a_job_that_waits_for_its_next_try_starts_at_once(queue: Store) -> None:
    (job,) = submit(queue, "a", retries=3, backoff=3000.0)
    end(queue, job)
    assert not queue.ready()
    assert stoker("retry", job).code == 0
    assert [ready.id for ready in queue.ready()] == [job]


def test_a_rehearsal_queues_nothing(queue: Store) -> None:
    (job,) = submit(queue, "a")
    end(queue, job)
    assert stoker("retry", "--all", "--dry-run").out == f"{job} (a): would be queued again\n"
    assert states(queue, job) == ["failed"]
