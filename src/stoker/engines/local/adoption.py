"""Attempts that an earlier worker of this home left on this machine: jobs that still run, and results not taken."""

import os
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Final, NamedTuple

from stoker.engines.attempt import ATTEMPT_TAG
from stoker.engines.engine import CannotTellError
from stoker.engines.identity import WorkerIdentity
from stoker.engines.local.record import SHIM_NAME, LocalAttemptRecord, LocalAttemptSpec, has_shim
from stoker.engines.local.running_attempt import LocalAttempt, kill_leftovers
from stoker.procfs import Identity, boot_id, is_gone
from stoker.queue import Attempt, queue_address
from stoker.runs.processes.reaper_process import REAPER_NAME
from stoker.runs.processes.tree import environments, find_tagged, has_ancestor_named, kill_all

_DIRECTORY_TAG: Final = b"STOKER_RUN_DIR="


class FoundHere(NamedTuple):
    """What `Engine.find` returns, with local attempts."""

    attempts: list[LocalAttempt]
    complete: bool


def find(identity: WorkerIdentity, queue: str | None, known: Collection[str] = ()) -> FoundHere:
    """The attempts of an earlier worker besides those that are known; some have ended.

    Needs no queue: jobs without a supervisor are killed first, since another machine may start them when the lease
    ends.
    """
    address = str(queue_address(queue))
    found: list[LocalAttempt] = []
    complete = True
    try:
        _kill_orphans(identity)
        names = sorted(os.listdir(identity.directory / "attempts"))  # noqa: PTH208 - thousands of names, one call
    except FileNotFoundError:
        return FoundHere([], True)
    except OSError:
        return FoundHere([], False)
    for name in names:
        record = LocalAttemptRecord(identity.directory / "attempts" / name)
        try:
            attempt_spec = record.checked_attempt_spec()
        except OSError:
            complete = False
            continue
        # Attempts of another queue are left to that queue's worker.
        if attempt_spec is not None and attempt_spec.attempt not in known and _is_ours(attempt_spec, identity, address):
            found.append(_found(record, attempt_spec))
    return FoundHere(found, complete)


def _is_ours(attempt_spec: LocalAttemptSpec, identity: WorkerIdentity, address: str) -> bool:
    return attempt_spec.host == identity.host and str(queue_address(attempt_spec.queue)) == address


def _found(record: LocalAttemptRecord, attempt_spec: LocalAttemptSpec) -> LocalAttempt:
    attempt = LocalAttempt(record, attempt_spec, None)
    if attempt_spec.boot != boot_id():
        attempt.conclude_after_reboot()
    else:
        attempt.connect()
    return attempt


def is_started(identity: WorkerIdentity, attempt: Attempt) -> bool:
    """Whether an attempt is supervised that `find` did not find, perhaps because its files were deleted.

    Processes of it without a supervisor are killed. Raises CannotTellError.
    """
    directory = identity.directory_of(attempt.job, attempt.number)
    if LocalAttemptRecord(directory).has_attempt():
        return True
    try:
        if has_shim(directory) or any(map(_is_supervised, find_tagged(ATTEMPT_TAG, attempt.id))):
            return True
        return not kill_all(lambda: find_tagged(ATTEMPT_TAG, attempt.id))
    except OSError as error:
        raise CannotTellError(str(error)) from None


def _kill_orphans(identity: WorkerIdentity) -> None:
    """Kills processes of attempts whose files and supervisors are both gone. Raises OSError."""
    kill_all(
        lambda: [
            who for who, directory in _processes_of(identity) if not _is_recorded(directory) and not _is_supervised(who)
        ]
    )


def _processes_of(identity: WorkerIdentity) -> list[tuple[Identity, str]]:
    """All processes of this home's attempts, each with the directory of its attempt."""
    tag = _DIRECTORY_TAG + os.fsencode(identity.directory / "attempts") + b"/"
    return [
        (who, os.fsdecode(variable.removeprefix(_DIRECTORY_TAG)))
        for who, environment in environments()
        for variable in environment
        if variable.startswith(tag)
    ]


def _is_recorded(directory: str) -> bool:
    """Whether the attempt is known: then its record says who supervises it, or that it has ended."""
    return any(os.path.exists(f"{directory}/{name}") for name in ("attempt.json", "delivered.json"))  # noqa: PTH110 - text


def _is_supervised(who: Identity) -> bool:
    return has_ancestor_named(who, REAPER_NAME, SHIM_NAME)


def unsupervised(home: Path, names: Collection[str]) -> set[str]:
    """Those of the attempts that nobody supervises any more; what was left of them is killed. Raises OSError."""
    found = set()
    for name in names:
        record = LocalAttemptRecord(home / "attempts" / name)
        attempt_spec = record.checked_attempt_spec()
        if attempt_spec is None or attempt_spec.host != socket.gethostname() or attempt_spec.boot != boot_id():
            found.add(name)  # delivered, or of another machine that shares the home
            continue
        shim, reaper = attempt_spec.processes.shim_identity, attempt_spec.processes.reaper_identity
        is_alone = is_gone(shim) and is_gone(reaper)
        if is_alone and (record.checked_status().state == "ended" or kill_leftovers(record, attempt_spec)):
            found.add(name)
    return found
