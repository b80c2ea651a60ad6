"""Everything about one job: what it is, why it is so, each attempt at it, and how far it is."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from stoker.logs.reader import attempt_directory, has_log
from stoker.queue.explanation import Surroundings, Why, explain, gpu_names
from stoker.queue.fields import State
from stoker.queue.model import Attempt, AttemptDetails, Job
from stoker.queue.surroundings import ahead_of, look_around, needs_of
from stoker.status.model import Progress
from stoker.status.progress import NO_OUTPUT, LastOutputs

if TYPE_CHECKING:
    from stoker.queue import Store

_NOTHING_FOUND: Final = AttemptDetails()


class AttemptDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt, with what is known of it beyond the queue's own row."""

    attempt: Attempt
    host: str
    """Where it ran; its worker's id when nobody knows the host any more."""
    gpus: tuple[str, ...]
    """What people call its GPUs."""
    details: AttemptDetails
    """Why it ended, its report and how its batch size was found; each empty when nobody told."""
    whole_here: bool
    """Whether its whole output is on this machine; elsewhere the queue keeps the end of it."""

    @property
    def stopped(self) -> str:
        """The kind of the verdict that it was stopped by, such as `idle`; empty if no rule stopped it."""
        return self.details.cause if self.details.rule else ""


class JobDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One job at one moment, by the database's clock."""

    now: float
    job: Job
    why: Why
    needs: dict[str, State]
    """The jobs that it still waits for."""
    attempts: tuple[AttemptDetail, ...]
    """In their order."""
    progress: Progress | None
    """Of the attempt that runs."""
    last_line: str
    """The last line that it printed, while it runs."""
    snoozed_until: float | None

    @property
    def last(self) -> AttemptDetail | None:
        """The attempt that runs, or else the last one."""
        return self.attempts[-1] if self.attempts else None


def read_detail(store: "Store", job_id: str, home: Path) -> JobDetail:
    """Raises BadInputError when there is no such job. `home` is where this machine's attempts are."""
    job = store.job(job_id)
    around = look_around(store)
    attempts = store.attempts(job.id)
    needs = needs_of(store, job)
    running = [attempt for attempt in attempts if attempt.outcome is None]
    words = LastOutputs(home).words(store, running)
    current = running[-1].id if running else ""
    said = words.get(current, NO_OUTPUT)
    return JobDetail(
        now=around.now,
        job=job,
        why=explain(job, around, needs, ahead_of(store, job)),
        needs=needs.of(job.id),
        attempts=_attempts(store, attempts, around, home),
        progress=said.progress,
        last_line=said.line,
        snoozed_until=store.snoozes().get(current) if running else None,
    )


def _attempts(
    store: "Store", attempts: Sequence[Attempt], around: Surroundings, home: Path
) -> tuple[AttemptDetail, ...]:
    workers = {worker.id: worker for worker in around.workers}
    told = []
    for attempt in attempts:
        worker = workers.get(attempt.worker)
        directory = attempt_directory(home, attempt)
        told.append(
            AttemptDetail(
                attempt=attempt,
                host=worker.host if worker is not None else f"worker {attempt.worker}",
                gpus=tuple(gpu_names(attempt.gpus, worker)),
                details=_with_record(store.details(attempt.id) or _NOTHING_FOUND, directory),
                whole_here=has_log(directory),
            )
        )
    return tuple(told)


def _with_record(told: AttemptDetails, directory: Path) -> AttemptDetails:
    """What the queue has not been told yet is taken from the record, should the attempt have run here."""
    if (told.cause and told.report and told.fit) or not directory.is_dir():
        return told
    # Here, because it brings the worker's whole room along.
    from stoker.engines.attempt import AttemptRecord
    from stoker.engines.delivery import details_of

    here = details_of(AttemptRecord(directory)) or _NOTHING_FOUND
    return AttemptDetails(
        cause=told.cause or here.cause,
        rule=told.rule or here.rule,
        report=told.report or here.report,
        fit=told.fit or here.fit,
    )
