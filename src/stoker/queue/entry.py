"""How jobs get into the queue: what is refused, which ids they get, and the rows that they become."""

import os
from collections.abc import Iterable, Sequence

from stoker.errors import BadInputError
from stoker.queue.driver import Driver
from stoker.queue.fields import JobSpec, check
from stoker.queue.rows import columns, dependencies, json_text


def check_submission(jobs: Sequence[JobSpec]) -> None:
    """Refuses what cannot be meant, by itself or together."""
    for job in jobs:
        check(job)
    _refuse_cycles(jobs)


def insert(driver: Driver, jobs: Sequence[JobSpec]) -> list[str]:
    """Their ids, in their order; of an origin that was a job already, the id of that."""
    known = _known_origins(driver, jobs)
    fresh = [job for job in jobs if job.origin is None or job.origin not in known]
    ids = iter(_free_ids(driver, fresh))
    positions = iter(driver.positions(len(fresh)) if fresh else [])
    rows, needs, tags, answer = list[dict[str, str | int | float | None]](), list[dict[str, str]](), [], []
    for job in jobs:
        if job.origin is not None and job.origin in known:
            answer.append(known[job.origin])
            continue
        name = next(ids)
        if job.origin is not None:
            known[job.origin] = name
        answer.append(name)
        state = "held" if job.hold else "queued"
        rows.append({"id": name, "origin": job.origin, "state": state, "position": next(positions)} | columns(job))
        needs += dependencies(name, job)
        tags += [{"tag": tag, "job": name} for tag in dict.fromkeys(job.tags)]
    must_exist(driver, {row["needs"] for row in needs} - set(answer))
    driver.many("insert job", rows)
    driver.many("insert dependency", needs)
    driver.many("insert tag", tags)
    return answer


def _known_origins(driver: Driver, jobs: Sequence[JobSpec]) -> dict[str, str]:
    origins = [job.origin for job in jobs if job.origin is not None]
    if not origins:
        return {}
    return dict(driver.fetch("taken origins", {"origins": json_text(origins)}))


def _free_ids(driver: Driver, jobs: Sequence[JobSpec]) -> list[str]:
    chosen = [job.id for job in jobs if job.id]
    if len(set(chosen)) < len(chosen):
        raise BadInputError("two jobs of one submission were given the same id: each needs its own")
    if taken := _taken(driver, chosen):
        raise BadInputError(f"there is a job {min(taken)} already: an id can be given once")
    drawn: list[str] = []
    seen = set(chosen)
    while missing := len(jobs) - len(chosen) - len(drawn):
        candidates = {new_id() for _ in range(missing)} - seen
        seen |= candidates
        drawn += candidates - _taken(driver, candidates)
    free = iter(drawn)
    return [job.id or next(free) for job in jobs]


def _taken(driver: Driver, ids: Iterable[str]) -> set[str]:
    wanted = list(ids)
    return {name for (name,) in driver.fetch("taken ids", {"ids": json_text(wanted)})} if wanted else set()


def must_exist(driver: Driver, needed: set[str]) -> None:
    if missing := needed - _taken(driver, needed):
        raise BadInputError(f"a job cannot come after {min(missing)}: there is no such job in {driver.place}")


def new_id() -> str:
    """Eight hexadecimal digits."""
    return os.urandom(4).hex()


def _refuse_cycles(jobs: Sequence[JobSpec]) -> None:
    """Jobs of one submission may name each other; older ones cannot name these."""
    graph = {job.id: [*job.after, *job.after_any] for job in jobs if job.id}
    if not any(graph.values()):
        return
    from graphlib import CycleError, TopologicalSorter

    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise BadInputError(f"jobs wait for each other in a circle: {' after '.join(error.args[1])}") from None
