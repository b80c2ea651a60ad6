"""A job that was held and cancelled by mistake is held again, on both databases."""

from stoker.queue import Store
from tests.support.either_queue import queue, url
from tests.support.queue_jobs import end, submit

__all__ = ["queue", "url"]


def test_cancelled_held_job_is_held_again_unchanged(queue: Store) -> None:
    held, failed = submit(queue, "held", "failed")
    queue.jobs.hold([held])
    before = queue.jobs.get(held)
    end(queue, failed)
    queue.jobs.cancel([held])
    assert queue.jobs.reinstate([held, failed]) == [held]
    assert queue.jobs.get(held) == before
    assert not queue.attempts.heads().jobs
    assert queue.jobs.get(failed).state == "failed"
