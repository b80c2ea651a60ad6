"""Attempts that a cluster manager lets begin later than they were claimed: the same on SQLite and PostgreSQL."""

from stoker.queue import Store
from stoker.queue.model import Attempt, DeferredStart, Job
from tests.support.either_queue import queue, url
from tests.support.queue_jobs import LONG, moment, submit

__all__ = ["queue", "url"]


def claimed(queue: Store, *, pending: bool = True) -> tuple[str, Attempt]:
    (job,) = submit(queue, "train")
    attempt = queue.attempts.claim([job], "w", [], LONG, pending=pending)
    assert attempt is not None
    return job, attempt


def state(queue: Store, job: str) -> tuple[Job, Attempt]:
    (attempt,) = queue.attempts.of(job)
    return queue.jobs.get(job), attempt


def test_attempt_of_this_machine_is_never_pending(queue: Store) -> None:
    job, claim = claimed(queue, pending=False)
    found, attempt = state(queue, job)
    assert (attempt.pending, attempt.where, claim.pending) == (False, "", False)
    assert found.started == attempt.started
    assert not found.is_pending


def test_pending_job_has_no_start(queue: Store) -> None:
    job, claim = claimed(queue)
    found, attempt = state(queue, job)
    assert claim.pending
    assert (found.state, found.started, found.is_pending) == ("running", None, True)
    assert (attempt.pending, attempt.where) == (True, "")
    assert [one.pending for one in queue.attempts.running()] == [True]


def test_start_on_a_cluster_is_the_start_of_job_and_attempt(queue: Store) -> None:
    job, claim = claimed(queue)
    began = moment(queue)
    moment(queue)
    queue.attempts.annotate({claim.id: DeferredStart(False, "Slurm job 4711 on node1", began)})
    found, attempt = state(queue, job)
    assert (found.started, attempt.started) == (began, began)
    assert began > claim.started
    assert (attempt.pending, attempt.where) == (False, "Slurm job 4711 on node1")
    assert not found.is_pending
    assert queue.attempts.finish(claim.id, "succeeded", 0)
    assert queue.jobs.get(job).started == began


def test_clock_of_the_cluster_moves_no_start_before_the_claim_or_into_the_future(queue: Store) -> None:
    for wrong in (-3600.0, 3600.0):
        job, claim = claimed(queue)
        queue.attempts.annotate({claim.id: DeferredStart(False, "", claim.started + wrong)})
        found, attempt = state(queue, job)
        assert found.started == attempt.started
        assert claim.started <= attempt.started <= queue.clock()


def test_requeue_by_the_cluster_makes_the_job_pending_again(queue: Store) -> None:
    job, claim = claimed(queue)
    first = moment(queue)
    queue.attempts.annotate({claim.id: DeferredStart(False, "Slurm job 4711 on node1", first)})
    queue.attempts.annotate({claim.id: DeferredStart(True, "Slurm job 4711")})
    found, attempt = state(queue, job)
    assert found.is_pending
    assert (attempt.pending, attempt.where) == (True, "Slurm job 4711")
    second = moment(queue)
    queue.attempts.annotate({claim.id: DeferredStart(False, "Slurm job 4711 on node2", second)})
    assert queue.jobs.get(job).started == second


def test_many_attempts_are_written_at_once(queue: Store) -> None:
    claims = [claimed(queue) for _ in range(3)]
    queue.attempts.annotate(
        {claim.id: DeferredStart(True, f"Slurm job {number}") for number, (_, claim) in enumerate(claims)}
    )
    assert [state(queue, job)[1].where for job, _ in claims] == ["Slurm job 0", "Slurm job 1", "Slurm job 2"]


def test_ended_attempt_and_the_next_one_keep_what_they_have(queue: Store) -> None:
    job, claim = claimed(queue)
    assert queue.attempts.finish(claim.id, "requeued", None, "the cluster is away")
    late = DeferredStart(False, "Slurm job 4711 on node1", queue.clock())
    queue.attempts.annotate({claim.id: late})
    found, attempt = state(queue, job)
    assert (found.state, found.started) == ("queued", None)
    assert (attempt.pending, attempt.where) == (True, "")
    following = queue.attempts.claim([job], "w", [], LONG)
    assert following is not None
    queue.attempts.annotate({claim.id: late})
    assert queue.jobs.get(job).started == following.started


def test_job_cancelled_while_pending_never_started(queue: Store) -> None:
    job, claim = claimed(queue)
    assert queue.attempts.finish(claim.id, "cancelled", None)
    found = queue.jobs.get(job)
    assert (found.state, found.started) == ("cancelled", None)
