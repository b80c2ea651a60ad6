"""Jobs in the test's own queue, brought into any state without a worker."""

from collections.abc import Iterator

import pytest

from stoker.queue import JobSpec, Outcome, Store, init_queue
from tests.support.waiting import wait_for

LONG = 600.0


@pytest.fixture
def queue() -> Iterator[Store]:
    """The queue that `stoker` finds by itself."""
    with init_queue() as store:
        yield store


def submit(store: Store, *names: str, **asked: object) -> list[str]:
    """One job for each name, in this order."""
    jobs = [JobSpec(command=f"echo {name}", name=name, **asked) for name in names]  # type: ignore[arg-type]  # by name
    return store.jobs.submit(jobs)


def start(store: Store, job: str, worker: str = "w") -> str:
    """The id of the attempt that now runs."""
    attempt = store.attempts.claim([job], worker, [], LONG)
    assert attempt is not None
    return attempt.id


def end(store: Store, job: str, outcome: Outcome = "failed") -> None:
    assert store.attempts.finish(start(store, job), outcome, 0 if outcome == "succeeded" else 1)


def states(store: Store, *jobs: str) -> list[str]:
    return [store.jobs.get(job).state for job in jobs]


def moment(store: Store) -> float:
    """A time after all that was done and before all that will be: SQLite's clock counts milliseconds."""
    now = store.clock()
    wait_for(lambda: store.clock() > now, named="the next millisecond")
    after = store.clock()
    wait_for(lambda: store.clock() > after, named="the next millisecond")
    return after
