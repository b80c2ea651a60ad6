"""A job that was held and cancelled by mistake is held again, on both databases."""

from stoker.queue import Store
from tests.support.either_queue import queue, url
from tests.support.queue_jobs import end, submit

__all__ = ["queue", "url"]


def test_what_was_cancelled_is_held_as_if_nothing_had_been(queue: Store) -> None:
    held, failed = submit(queue, "held", "failed")
    queue.hold([held])
    before = queue.job(held)
    end(queue, failed)
    queue.cancel([held])
    assert queue.reinstate([held, failed]) == [held]
    assert queue.job(held) == before
    assert queue.ready() == []
    assert queue.job(failed).state == "failed"
