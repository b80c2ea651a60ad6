"""When jobs begin, recur and fail for their deadline: the same on SQLite and PostgreSQL."""

import msgspec
import pytest

from stoker.errors import InvalidFieldsError
from stoker.queue import JobSpec, Store
from stoker.queue.model import Job
from stoker.status.forecast import why
from tests.support.either_queue import queue, url
from tests.support.queue_jobs import LONG
from tests.support.waiting import wait_for

__all__ = ["queue", "url"]

HOUR = 3600.0


def ready(queue: Store) -> list[str]:
    return [job.id for job in queue.attempts.heads("w").jobs]


def run(queue: Store, job: str, outcome: str = "succeeded") -> None:
    attempt = queue.attempts.claim([job], "w", [], LONG)
    assert attempt is not None
    assert queue.attempts.finish(attempt.id, "succeeded" if outcome == "succeeded" else "failed", 0)


def waiting(queue: Store) -> list[Job]:
    queue.attempts.sweep("w")
    return queue.jobs.find(("queued", "held"))


def test_job_begins_at_its_time_and_not_before(queue: Store) -> None:
    now = queue.clock()
    later, soon, past = queue.jobs.submit(
        [JobSpec(command="true", name=str(at), begin=now + at) for at in (HOUR, 0.4, -HOUR)]
    )
    heads = queue.attempts.heads("w")
    assert [job.id for job in heads.jobs] == [past]
    assert heads.wake_in is not None
    assert heads.wake_in <= 0.4
    wait_for(lambda: set(ready(queue)) == {past, soon}, named="the second one")
    found = queue.jobs.get(later)
    assert found.not_before == pytest.approx(now + HOUR, abs=1.5)
    assert why(queue, found).kind == "begin"
    # Another time, and none.
    queue.jobs.edit(later, {"begin": now + 2 * HOUR})
    assert queue.jobs.get(later).not_before == pytest.approx(now + 2 * HOUR, abs=1.5)
    queue.jobs.edit(later, {"priority": 3})
    assert later not in ready(queue)
    queue.jobs.edit(later, {"begin": None})
    assert ready(queue)[0] == later


def test_job_that_waits_at_its_deadline_fails(queue: Store) -> None:
    now = queue.clock()
    started, queued, held, later = queue.jobs.submit(
        [
            JobSpec(command="true", deadline=now + 1),
            JobSpec(command="true", deadline=now + 1),
            JobSpec(command="true", deadline=now + 1, hold=True),
            JobSpec(command="true", deadline=now + HOUR),
        ]
    )
    (after,) = queue.jobs.submit([JobSpec(command="true", after_any=(queued,))])
    attempt = queue.attempts.claim([started], "w", [], LONG)
    assert attempt is not None
    wait_for(lambda: queue.clock() > now + 1.1, named="the deadline")
    # A running one goes on. The answer of the same question has those that became ready by it.
    assert set(ready(queue)) == {after, later}
    for job in (queued, held):
        found = queue.jobs.get(job)
        assert (found.state, found.exit_code, found.ended is not None) == ("failed", None, True)
        assert found.reason.startswith("it did not start by its deadline, 20")
    assert queue.jobs.get(started).state == "running"
    # Given back after its deadline, it fails as well.
    queue.attempts.finish(attempt.id, "preempted")
    queue.attempts.sweep("w")
    assert queue.jobs.get(started).reason.startswith("it was not running again by its deadline")
    # A person may run it all the same.
    assert queue.jobs.retry([queued]) == [queued]
    assert queued in ready(queue)
    queue.jobs.edit(later, {"deadline": queue.clock() + 1})
    wait_for(lambda: later not in ready(queue), named="the edited deadline")


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_recurring_job_runs_again_one_at_a_time_until_it_is_cancelled(queue: Store, outcome: str) -> None:
    every = "0 3 * * * UTC"
    asked = JobSpec(command="true", name="nightly", every=every, tags=("night",), environment={"A": "1"}, gpus=0)
    (first,) = queue.jobs.submit([asked])
    begin = queue.jobs.get(first).begin
    assert begin is not None
    assert 0 < begin - queue.clock() <= 24 * HOUR
    assert begin % (24 * HOUR) == 3 * HOUR
    assert ready(queue) == []
    assert f"recurs: {every}" in why(queue, queue.jobs.get(first)).reason
    assert [job.id for job in waiting(queue)] == [first]
    queue.jobs.retry([first])
    run(queue, first, outcome)
    assert queue.jobs.clean(-1.0) == 0, "before its next run is in the queue it is not removed"
    (second,) = waiting(queue)
    assert (second.name, second.tags, second.environment, second.every) == ("nightly", ("night",), {"A": "1"}, every)
    assert second.begin == begin
    assert (second.attempts, second.state) == (0, "queued")
    assert queue.jobs.get(first).state == outcome
    assert [job.id for job in waiting(queue)] == [second.id]
    # Cancelled and brought back, it recurs; cancelled, it ends.
    queue.jobs.cancel([second.id])
    assert waiting(queue) == []
    queue.jobs.reinstate([second.id])
    queue.jobs.release([second.id])
    queue.jobs.retry([second.id])
    run(queue, second.id)
    (third,) = waiting(queue)
    queue.jobs.cancel([third.id])
    assert waiting(queue) == []
    # Another recurrence begins at its first time; one that has ended is not run by an edit.
    (other,) = queue.jobs.submit([asked])
    queue.jobs.edit(other, {"every": "30 4 * * * UTC"})
    assert (queue.jobs.get(other).begin or 0.0) % (24 * HOUR) == 4.5 * HOUR
    queue.jobs.edit(first, {"every": "30 4 * * * UTC"})
    assert [job.id for job in waiting(queue)] == [other]


def test_running_recurring_job_that_is_cancelled_does_not_recur(queue: Store) -> None:
    (job,) = queue.jobs.submit([JobSpec(command="true", every="* * * * * UTC", begin=queue.clock() - 200)])
    attempt = queue.attempts.claim([job], "w", [], LONG)
    assert attempt is not None
    queue.jobs.cancel([job])
    queue.attempts.finish(attempt.id, "succeeded", 0)
    assert waiting(queue) == []


def test_contradicting_times_are_refused(queue: Store) -> None:
    now = queue.clock()
    for asked in (
        JobSpec(command="true", begin=now + 10, deadline=now + 5),
        JobSpec(command="true", every="0 3 * * *", deadline=now + 5),
        JobSpec(command="true", retry_on=("oom",)),
    ):
        with pytest.raises(InvalidFieldsError):
            queue.jobs.submit([asked])


def test_deadlines_that_have_passed_are_refused(queue: Store) -> None:
    late = JobSpec(command="true", deadline=queue.clock() - 1)
    (waits,) = queue.jobs.submit([JobSpec(command="true")])
    with pytest.raises(InvalidFieldsError, match=r"^deadline: 20.* has passed: choose a later time$"):
        queue.jobs.submit([JobSpec(command="true"), late])
    with pytest.raises(InvalidFieldsError, match="has passed"):  # as the page submits it, with a key
        queue.jobs.submit([msgspec.structs.replace(late, origin="web:1")])
    with pytest.raises(InvalidFieldsError, match="has passed"):
        queue.jobs.edit(waits, {"deadline": late.deadline})
    assert [job.id for job in queue.jobs.find()] == [waits]
