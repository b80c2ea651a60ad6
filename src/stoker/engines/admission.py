"""Whether any engine that serves a queue can run a job: asked when jobs are submitted and edited."""

from collections.abc import Iterable, Sequence

from stoker.engines import engine_module
from stoker.errors import BadInputError
from stoker.queue.fields import JobSpec
from stoker.queue.model import View
from stoker.queue.store import Store
from stoker.settings import load_settings


def check_jobs(store: Store, jobs: Iterable[JobSpec]) -> None:
    """Raises BadInputError for the first job that no engine of this queue can ever run."""
    engines = _engines_of(store)
    for job in jobs:
        if (refusal := _refusal(job, engines)) is not None:
            raise refusal


def check_edits(store: Store, edits: Sequence[tuple[JobSpec, JobSpec]]) -> None:
    """The same for jobs before and after an edit. One that could not run before may be edited."""
    engines = _engines_of(store) if edits else []
    for before, after in edits:
        if (refusal := _refusal(after, engines)) is not None and _refusal(before, engines) is None:
            raise refusal


_Engines = Sequence[tuple[str, View | None]]
"""Names of engines, each with what a live worker reports."""


def _engines_of(store: Store) -> _Engines:
    """The engines of the live workers; without one, of the settings and of workers that were there before."""
    workers, now = store.workers.all(), store.clock()
    if there := [(worker.view.engine, worker.view) for worker in workers if worker.is_there(now)]:
        return sorted(there, key=lambda one: one[0])
    return [(name, None) for name in sorted({load_settings().engine, *(worker.view.engine for worker in workers)})]


def _refusal(job: JobSpec, engines: _Engines) -> BadInputError | None:
    """Why none of the engines can run it; None when one can, or may: an engine that is not installed here."""
    refusals: dict[str, BadInputError] = {}
    for name, view in engines:
        try:
            module = engine_module(name)
        except BadInputError:
            return None
        try:
            module.check(job, view)
        except BadInputError as error:
            refusals.setdefault(f"{error} ({name})", error)
        else:
            return None
    if len(refusals) <= 1:
        return next(iter(refusals.values()), None)
    return BadInputError("; ".join(refusals))
