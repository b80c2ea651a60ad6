"""What is wrong with a queue: damage of its file, and rows that contradict each other."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from stoker.queue.driver import Driver
from stoker.queue.rows import job_of

# A person looks at the first few; a thousand of the same kind have one cause.
MOST_NAMED: Final = 5

CONTRADICTIONS: Final = (
    (
        "running without attempt",
        "marked as running, but no attempt at them runs",
    ),
    ("attempts without job", "the jobs of attempts that run, but are not marked as running"),
    ("in no known state", "in a state that this Stoker does not know"),
)


def problems(driver: Driver) -> list[str]:
    """Sentences for people; none when all is well. A file that is damaged is not looked at further."""
    if damage := driver.damage():
        return [f"the file is damaged: {line}" for line in damage[:MOST_NAMED]]
    return [*_contradictions(driver), *_unreadable(driver), *_circles(driver)]


def _contradictions(driver: Driver) -> Iterable[str]:
    for statement, what in CONTRADICTIONS:
        ids = [row[0] for row in driver.fetch(statement, {})]
        if ids:
            yield f"{_listed(ids)} are {what}"


def _unreadable(driver: Driver) -> Iterable[str]:
    for row in driver.fetch("unfinished jobs", {}):
        try:
            job_of(row)
        except msgspec.MsgspecError as error:
            yield f"the job {row[0]} cannot be read ({error}): `stoker cancel {row[0]}` takes it out of the way"


def _circles(driver: Driver) -> Iterable[str]:
    from graphlib import CycleError, TopologicalSorter

    graph: dict[str, list[str]] = {}
    for job, needs in driver.fetch("open dependencies", {}):
        graph.setdefault(job, []).append(needs)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield f"jobs wait for each other in a circle: {' before '.join(error.args[1])}"


def _listed(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - MOST_NAMED} more" if len(ids) > MOST_NAMED else ""
    return f"the jobs {', '.join(ids[:MOST_NAMED])}{more}"
