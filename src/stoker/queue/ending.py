"""What becomes of a job when an attempt at it ends: a pure decision."""

from typing import Final

import msgspec

from stoker.queue.fields import State
from stoker.queue.model import Job, Outcome

# Longer than most outages of a file server or a licence server; waiting longer than that helps nobody.
LONGEST_BACKOFF: Final = 3600.0
# A job that takes its machine down each time must not take every machine down in turn, night after night.
MOST_LOSSES: Final = 10
# A job that a machine could not start may start elsewhere at once; one that none can start must not stay first.
LONGEST_REQUEUE_DELAY: Final = 30.0


class Consequence(msgspec.Struct, frozen=True):
    """The job's next state; `delay` is how many seconds it then waits at least."""

    state: State
    reason: str
    retries_left: int
    delay: float = 0.0


def consequence(job: Job, outcome: Outcome, reason: str, times: int) -> Consequence:
    """`times` says how many attempts ended so, this one included; it matters for those that nobody wanted to end."""
    left = job.retries_left
    if outcome == "succeeded":
        return Consequence("succeeded", reason, left)
    if job.cancel_requested is not None or outcome == "cancelled":
        return Consequence("cancelled", reason or "cancelled", left)
    if outcome == "preempted":
        return Consequence("queued", reason or "made room for another job", left)
    if outcome == "requeued":
        return Consequence("queued", reason, left, _requeue_delay(times))
    if outcome == "lost":
        return _after_loss(job, reason or "its worker was not heard of in time", times)
    return _after_failure(job, reason)


def backoff(first: float, earlier: int) -> float:
    """Seconds to wait before the next try, `earlier` retries having been made."""
    return float(min(LONGEST_BACKOFF, first * 2.0 ** min(earlier, 60)))


def _requeue_delay(times: int) -> float:
    """The machine's trouble, not the job's, costs neither a retry nor a loss, only patience from the second time on."""
    return min(LONGEST_REQUEUE_DELAY, 2.0 ** min(times - 2, 60)) if times > 1 else 0.0


def _after_failure(job: Job, reason: str) -> Consequence:
    left = job.retries_left
    if left <= 0:
        return Consequence("failed", reason, 0)
    return Consequence("queued", reason, left - 1, backoff(job.backoff, job.retries - left))


def _after_loss(job: Job, reason: str, losses: int) -> Consequence:
    if job.on_loss == "hold":
        return Consequence("held", reason, job.retries_left)
    if losses >= MOST_LOSSES:
        return Consequence("held", f"{reason}, for the {losses}th time", job.retries_left)
    return Consequence("queued", reason, job.retries_left)
