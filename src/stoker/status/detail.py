"""Everything about one job: its state and reason, its attempts and its progress."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from stoker.logs.reader import attempt_directory, has_log, node_names
from stoker.queue.explanation import QueueContext, Why, gpu_names, needs_of, read_context
from stoker.queue.fields import State
from stoker.queue.model import Attempt, AttemptDetails, Job
from stoker.rules.rule import RuleWarning
from stoker.status.forecast import reasons_of
from stoker.status.model import Progress
from stoker.status.progress import NO_OUTPUT, last_metrics, last_outputs

if TYPE_CHECKING:
    from stoker.queue import Store

_NOTHING_FOUND: Final = AttemptDetails()


class AttemptDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt with its data."""

    attempt: Attempt
    host: str
    """Where it ran; the worker's id if the host is unknown."""
    gpus: tuple[str, ...]
    """The names of its GPUs."""
    details: AttemptDetails
    """Cause, report and fit; each empty if unknown."""
    whole_here: bool
    """Whether its whole log is on this machine."""
    nodes: tuple[str, ...] = ()
    """The nodes of a job over several, if known here."""

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
    """The jobs it waits for."""
    attempts: tuple[AttemptDetail, ...]
    progress: Progress | None
    """Of the running attempt."""
    last_lines: tuple[str, ...]
    """The last lines of the log of its last attempt."""
    figures: dict[str, float | None]
    """The newest values of its metrics near the end of its log; None if not a number."""
    snoozed_until: float | None
    warning: RuleWarning | None
    """The current warning of a rule."""

    @property
    def last(self) -> AttemptDetail | None:
        """The running attempt, or the last one."""
        return self.attempts[-1] if self.attempts else None


def read_detail(store: "Store", job_id: str, home: Path) -> JobDetail:
    """Raises BadInputError if there is no such job. `home`: the state directory of this machine."""
    job = store.jobs.get(job_id)
    context = read_context(store)
    attempts = store.attempts.of(job.id)
    needs = needs_of(store, job)
    running = [attempt for attempt in attempts if attempt.outcome is None]
    current = running[-1].id if running else ""
    shown = attempts[-1:]
    output = last_outputs(store, home, shown).get(shown[0].id, NO_OUTPUT) if shown else NO_OUTPUT
    (reason,) = reasons_of(store, [job], context)
    return JobDetail(
        now=context.now,
        job=job,
        why=reason,
        needs=needs.of(job.id),
        attempts=_attempts(store, attempts, context, home),
        progress=output.progress if running else None,
        last_lines=output.lines,
        figures=last_metrics(store, [job]).get(job.id, {}),
        snoozed_until=store.attempts.snoozes().get(current) if running else None,
        warning=context.warning_of(job.id),
    )


def _attempts(
    store: "Store", attempts: Sequence[Attempt], context: QueueContext, home: Path
) -> tuple[AttemptDetail, ...]:
    workers = {worker.id: worker for worker in context.workers}
    found = []
    for attempt in attempts:
        worker = workers.get(attempt.worker)
        directory = attempt_directory(home, attempt)
        found.append(
            AttemptDetail(
                attempt=attempt,
                host=worker.host if worker is not None else f"worker {attempt.worker}",
                gpus=tuple(gpu_names(attempt.gpus, worker)),
                details=_with_record(store.attempts.details(attempt.id) or _NOTHING_FOUND, directory),
                whole_here=has_log(directory),
                nodes=node_names(directory),
            )
        )
    return tuple(found)


def _with_record(stored: AttemptDetails, directory: Path) -> AttemptDetails:
    """Adds data that is so far only in the record on this machine."""
    if (stored.cause and stored.report and stored.fit) or not directory.is_dir():
        return stored
    # Imported late, because it loads many modules.
    from stoker.engines.attempt import AttemptRecord
    from stoker.engines.delivery import details_of

    here = details_of(AttemptRecord(directory)) or _NOTHING_FOUND
    return AttemptDetails(
        cause=stored.cause or here.cause,
        rule=stored.rule or here.rule,
        report=stored.report or here.report,
        fit=stored.fit or here.fit,
    )
