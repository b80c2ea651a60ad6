"""Checks at submission and edit that some engine of the queue can run the job."""

from collections.abc import Iterable, Sequence

from stoker.engines import engine_module
from stoker.errors import BadInputError, InvalidFieldsError
from stoker.queue.fields import JobSpec
from stoker.queue.model import View, Worker, is_host
from stoker.queue.store import Store
from stoker.settings import load_settings
from stoker.units import name_some


def check_jobs(store: Store, jobs: Iterable[JobSpec]) -> None:
    """Raises BadInputError for the first job that no engine of this queue can ever run."""
    workers, now = store.workers.all(), store.clock()
    engines = _engines_of(workers, now)
    for job in jobs:
        if (refusal := _unknown_place(job, workers) or _refusal(job, engines)) is not None:
            raise refusal


def check_edits(store: Store, edits: Sequence[tuple[JobSpec, JobSpec]]) -> None:
    """Like `check_jobs`, for pairs of a job before and after an edit. A job that could not run before may be edited."""
    workers, now = (store.workers.all(), store.clock()) if edits else ([], 0.0)
    engines = _engines_of(workers, now)

    def refusal_of(job: JobSpec) -> BadInputError | None:
        return _unknown_place(job, workers) or _refusal(job, engines)

    for before, after in edits:
        if (refusal := refusal_of(after)) is not None and refusal_of(before) is None:
            raise refusal


_Engines = Sequence[tuple[str, View | None]]
"""Engine names, each with the report of a live worker."""


def _unknown_place(job: JobSpec, workers: Sequence[Worker]) -> BadInputError | None:
    """Refuses a machine or label that no worker of the queue has ever had: most likely it is misspelt.

    An absent machine may come back. A queue without any worker so far accepts every name.
    """
    if not workers or not (job.machine or job.labels or job.exclude_machines):
        return None
    hosts = {worker.host for worker in workers if not worker.view.cluster}
    hosts |= {node.name for worker in workers for node in worker.view.nodes}
    # A large cluster does not report all its nodes.
    if not any(worker.view.cluster and not worker.view.nodes for worker in workers):
        for field, names in (
            ("machine", [job.machine] if job.machine else []),
            ("exclude_machines", job.exclude_machines),
        ):
            for name in names:
                if not any(is_host(host, name) for host in hosts):
                    return InvalidFieldsError({field: f"this queue has no machine {name}: {_some(hosts)}"})
    return _unknown_label(job, workers)


def _unknown_label(job: JobSpec, workers: Sequence[Worker]) -> BadInputError | None:
    labels = {label for worker in workers for label in worker.view.labels}
    labels |= {feature for worker in workers for node in worker.view.nodes for feature in node.features}
    for label in job.labels:
        if label not in labels:
            cure = "`stoker work --label` gives one" if not labels else _some(labels)
            return InvalidFieldsError({"labels": f"no machine of this queue has the label {label}: {cure}"})
    return None


def _some(names: Iterable[str]) -> str:
    return f"there are {name_some(sorted(names))}"


def _engines_of(workers: Sequence[Worker], now: float) -> _Engines:
    """The engines of the live workers; without any, the engine of the settings and those of former workers."""
    if there := [(worker.view.engine, worker.view) for worker in workers if worker.is_there(now)]:
        return sorted(there, key=lambda one: one[0])
    return [(name, None) for name in sorted({load_settings().engine, *(worker.view.engine for worker in workers)})]


def _refusal(job: JobSpec, engines: _Engines) -> BadInputError | None:
    """Why no engine can run the job; None if one can, or if an engine is unknown here and might."""
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
