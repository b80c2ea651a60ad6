"""What an earlier worker of this home left behind: jobs that go on, outcomes nobody took, claims without a start."""

import os
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

from stoker.engines.identity import WorkerIdentity
from stoker.engines.local.attempt_spec import ATTEMPT_TAG, SHIM_NAME, AttemptRecord, AttemptSpec, has_shim
from stoker.engines.local.messages import StopAttempt
from stoker.engines.local.running_attempt import RunningAttempt, stop_leftovers
from stoker.procfs import Identity, boot_id, is_gone
from stoker.queue import Attempt, Store, queue_address
from stoker.runs.processes.reaper_process import REAPER_NAME
from stoker.runs.processes.tree import environments, find_tagged, has_ancestor_named, kill_all

_PLACE_MARK: Final = b"STOKER_RUN_DIR="


class Found(NamedTuple):
    """What an earlier worker left here."""

    running_attempts: list[RunningAttempt]
    complete: bool
    """False when something could not be looked at, for want of descriptors: it is to be looked again."""


def find(home: WorkerIdentity, queue: str | None, known: Collection[str] = ()) -> Found:
    """The attempts that an earlier worker started, besides those that are known, and of some the end.

    Needs no queue: whatever nobody looks after any more is stopped before anything else, for another machine may start
    the job as soon as the lease is over.
    """
    place = str(queue_address(queue))
    found: list[RunningAttempt] = []
    complete = True
    try:
        _kill_orphans(home)
        names = sorted(os.listdir(home.directory / "attempts"))  # noqa: PTH208 - thousands of names, one call
    except FileNotFoundError:
        return Found([], True)
    except OSError:
        return Found([], False)
    for name in names:
        record = AttemptRecord(home.directory / "attempts" / name)
        try:
            attempt_spec = record.last_assignment()
        except OSError:
            complete = False
            continue
        # Another queue's attempts are left to that queue's worker.
        if attempt_spec is not None and attempt_spec.attempt not in known and _is_ours(attempt_spec, home, place):
            found.append(_engagement(record, attempt_spec))
    return Found(found, complete)


def adopt(store: Store, home: WorkerIdentity, lease: float, found: Collection[RunningAttempt]) -> None:
    """They are this worker's from now on, unless the queue has given them up."""
    held = store.adopt([one.attempt for one in found if one.over is None], home.worker, lease)
    for running_attempt in found:
        if running_attempt.over is None and running_attempt.attempt not in held:
            running_attempt.stop(StopAttempt("lease", "The queue had given the job up, and another may run it."))


def requeue_unstarted(store: Store, home: WorkerIdentity, known: Collection[str]) -> bool:
    """The claims of this home that nobody here knows of: nothing of them was ever started.

    Their worker was killed before it could write them down, or the database before it could answer. One whose files
    somebody has deleted is not among them: its processes tell. False when that could not be told.
    """
    complete = True
    for attempt in store.running():
        if home.is_own(attempt.worker) and attempt.id not in known and not home.holds(attempt):
            try:
                lives = _lives(home, attempt)
            except OSError:
                complete = False
                continue
            if not lives:
                why = "its worker or the database was killed before the job was started"
                store.finish(attempt.id, "requeued", None, why)
    return complete


def _lives(home: WorkerIdentity, attempt: Attempt) -> bool:
    """Whether somebody looks after it. What runs without anybody is stopped. Raises OSError."""
    if has_shim(home.place_of(attempt)):
        return True
    here = find_tagged(ATTEMPT_TAG, attempt.id)
    if any(has_ancestor_named(who, REAPER_NAME, SHIM_NAME) for who in here):
        return True
    return not kill_all(lambda: find_tagged(ATTEMPT_TAG, attempt.id))


def _kill_orphans(home: WorkerIdentity) -> None:
    """Kills what is left of attempts whose files are gone as well as whoever looked after them. Raises OSError."""
    kill_all(lambda: [who for who, place in _placed(home) if not _is_recorded(place) and _is_orphan(who)])


def _placed(home: WorkerIdentity) -> list[tuple[Identity, str]]:
    """Everything that attempts of this home started, each with the directory of its attempt."""
    mark = _PLACE_MARK + os.fsencode(home.directory / "attempts") + b"/"
    return [
        (who, os.fsdecode(variable.removeprefix(_PLACE_MARK)))
        for who, environment in environments()
        for variable in environment
        if variable.startswith(mark)
    ]


def _is_recorded(place: str) -> bool:
    """Whether the attempt there is known: then its record says who looks after it, or that it has ended."""
    return any(os.path.exists(f"{place}/{name}") for name in ("attempt.json", "delivered.json"))  # noqa: PTH110 - text


def _is_orphan(who: Identity) -> bool:
    return not has_ancestor_named(who, REAPER_NAME, SHIM_NAME)


def unsupervised(home: Path, names: Collection[str]) -> set[str]:
    """Those of the attempts that nobody looks after any more; what was left of them is stopped. Raises OSError."""
    found = set()
    for name in names:
        record = AttemptRecord(home / "attempts" / name)
        attempt_spec = record.last_assignment()
        if attempt_spec is None or attempt_spec.host != socket.gethostname() or attempt_spec.boot != boot_id():
            found.add(name)  # delivered, or of another machine that shares the home
            continue
        attendant, reaper = attempt_spec.keepers.attendant_identity, attempt_spec.keepers.reaper_identity
        is_alone = is_gone(attendant) and is_gone(reaper)
        if is_alone and (record.last_status().state == "ended" or stop_leftovers(record, attempt_spec)):
            found.add(name)
    return found


def _is_ours(attempt_spec: AttemptSpec, home: WorkerIdentity, place: str) -> bool:
    return attempt_spec.host == home.host and str(queue_address(attempt_spec.queue)) == place


def _engagement(record: AttemptRecord, attempt_spec: AttemptSpec) -> RunningAttempt:
    running_attempt = RunningAttempt(record, attempt_spec, None)
    if attempt_spec.boot != boot_id():
        running_attempt.conclude_after_reboot()
    else:
        running_attempt.reach()
    return running_attempt
