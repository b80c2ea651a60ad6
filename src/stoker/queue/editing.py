"""What a job asks for after a person changed some of it: a pure decision."""

from collections.abc import Mapping

from stoker.errors import BadInputError
from stoker.queue.commands import check_command
from stoker.queue.driver import Parameters
from stoker.queue.fields import FIELDS, JobSpec, check, editable, spec_of, values_of
from stoker.queue.model import Job
from stoker.queue.rows import columns


def edited(job: Job, changes: Mapping[str, object]) -> JobSpec:
    """The whole of it. Raises for a field that cannot be edited, and for a value outside its limits."""
    if unknown := set(changes) - set(editable()):
        raise BadInputError(f"a job has no {min(unknown)!r} that could be edited")
    try:
        asked = spec_of({**values_of(job), **changes})
    except BadInputError as error:
        raise BadInputError(f"job {job.id} cannot be edited so: {error}") from None
    check(asked)
    return asked


def check_changes(job: Job, changes: Mapping[str, object]) -> None:
    """Raises also for what the store itself does not check."""
    asked = edited(job, changes)
    if "command" in changes:
        check_command(asked.command)
    for name in changes.keys() & {"environment", "policy"}:
        FIELDS[name].check(asked)


def edited_row(job: Job, asked: JobSpec) -> Parameters:
    """Retries are counted anew when their number was changed."""
    left = asked.retries if asked.retries != job.retries else job.retries_left
    return {"id": job.id, **columns(asked), "retries_left": left}
