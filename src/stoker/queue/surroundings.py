"""What an explanation needs to know, asked of the queue."""

from stoker.queue.explanation import MOST_AHEAD, Needs, Surroundings, Why, explain
from stoker.queue.model import Job
from stoker.queue.store import Store


def look_around(store: Store) -> Surroundings:
    """What is the case around all jobs now."""
    return Surroundings(
        now=store.clock(),
        paused=store.paused(),
        workers=tuple(store.workers.all()),
        running={attempt.job: attempt for attempt in store.attempts.running()},
    )


def why(store: Store, job: Job) -> Why:
    """Why this one job is as it is."""
    return explain(job, look_around(store), needs_of(store, job), ahead_of(store, job))


def needs_of(store: Store, job: Job) -> Needs:
    """What it waits for, if it is queued."""
    return store.jobs.needs_of([job.id] if job.state == "queued" else [])


def ahead_of(store: Store, job: Job) -> int:
    """How many queued jobs come before it, if it is queued; those that nobody would wait for are counted too."""
    return store.jobs.ahead_of(job, MOST_AHEAD) if job.state == "queued" else 0
