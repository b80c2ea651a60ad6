"""What a job asks for after a person changed some of it: a pure decision."""

from collections.abc import Mapping
from typing import Final

import msgspec

from stoker.errors import BadInputError
from stoker.queue.commands import check_command
from stoker.queue.driver import Parameters
from stoker.queue.model import Job, JobSpec, check
from stoker.queue.provenance import check_environment
from stoker.queue.rows import columns
from stoker.rules.registry import policies_of

# Who edits a job does not become who wanted it.
UNCHANGING: Final = frozenset({"submitter"})


def edited(job: Job, changes: Mapping[str, object]) -> JobSpec:
    """The whole of it. What cannot be meant is refused."""
    if unknown := set(changes) - (set(JobSpec.__struct_fields__) - UNCHANGING):
        raise BadInputError(f"a job has no {min(unknown)!r} that could be edited")
    now = {field: getattr(job, field) for field in JobSpec.__struct_fields__}
    try:
        asked = msgspec.convert({**now, **changes}, JobSpec)
    except msgspec.ValidationError as error:
        raise BadInputError(f"job {job.id} cannot be edited so: {error}") from None
    check(asked)
    return asked


def check_changes(job: Job, changes: Mapping[str, object]) -> None:
    """Refuses what cannot be meant, also in what the store itself does not look at."""
    asked = edited(job, changes)
    if "command" in changes:
        check_command(asked.command)
    check_environment(asked.environment)
    if changes.get("policy"):
        policies_of(asked.policy)


def edited_row(job: Job, asked: JobSpec) -> Parameters:
    """Retries are counted anew when their number was changed."""
    left = asked.retries if asked.retries != job.retries else job.retries_left
    return {"id": job.id, **columns(asked), "retries_left": left}
