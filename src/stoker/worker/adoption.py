"""What an earlier worker of this home left behind: jobs that go on, outcomes nobody took, claims without a start."""

from collections.abc import Collection

from stoker.procfs import boot_id
from stoker.queue import Store
from stoker.worker.assignment import Assignment, AttemptRecord, undelivered
from stoker.worker.engagement import Engagement
from stoker.worker.home import Home
from stoker.worker.messages import Channel, Stop


def adopt(store: Store, home: Home, lease: float) -> list[Engagement]:
    """The attempts that are this worker's from now on; of some, the end is known already."""
    found = [
        _engagement(record, assignment)
        for record, assignment in undelivered(home.directory)
        if assignment.host == home.host and assignment.queue == _place(store, assignment)
    ]
    held = store.adopt([one.attempt for one in found if one.over is None], home.worker, lease)
    for engagement in found:
        if engagement.over is None and engagement.attempt not in held:
            engagement.stop(Stop("lease", "The queue had given the job up, and another may run it."))
    give_back(store, home, {one.attempt for one in found})
    return found


def give_back(store: Store, home: Home, known: Collection[str]) -> None:
    """The claims of this home that nobody here knows of: nothing of them was ever started.

    Their worker was killed before it could write them down, or the database before it could answer.
    """
    for attempt in store.running():
        if home.is_own(attempt.worker) and attempt.id not in known and not home.holds(attempt):
            why = "its worker or the database was killed before the job was started"
            store.finish(attempt.id, "requeued", None, why)


def _place(store: Store, assignment: Assignment) -> str:
    """Another queue's attempts are left to that queue's worker."""
    from stoker.queue import queue_address

    return assignment.queue if str(queue_address(assignment.queue)) == store.place else ""


def _engagement(record: AttemptRecord, assignment: Assignment) -> Engagement:
    engagement = Engagement(record, assignment, None)
    if assignment.boot != boot_id():
        engagement.conclude_after_reboot()
        return engagement
    try:
        engagement.channel = Channel(record.connect())
    except OSError:
        if not engagement.watch_guardian():
            engagement.conclude()
    return engagement
