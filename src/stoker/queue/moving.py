"""The order of the jobs that wait, after some of them were moved: a pure decision."""

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple


class Waiting(NamedTuple):
    """A job that waits, as far as its place matters."""

    id: str
    priority: int
    position: float


def stepped(waiting: Sequence[Waiting], moving: Collection[str], way: Literal["up", "down"]) -> dict[str, float]:
    """The new positions of all whose place changes when these go one step that way.

    `waiting` is in its order. Each passes one neighbour of its own priority; none passes another that moves too.
    """
    order = list(waiting) if way == "up" else list(reversed(waiting))
    passed = list(order)
    for at in range(1, len(passed)):
        before, job = passed[at - 1], passed[at]
        if job.id in moving and before.id not in moving and before.priority == job.priority:
            passed[at - 1], passed[at] = job, before
    return {job.id: place.position for place, job in zip(order, passed, strict=True) if job.position != place.position}
