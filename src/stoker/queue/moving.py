"""The order of the jobs that wait, after some of them were moved: pure decisions."""

import math
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from stoker.queue.model import Side


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


def beside(waiting: Sequence[Waiting], moving: Sequence[str], neighbour: Waiting, side: Side) -> dict[str, float]:
    """The new positions of all whose place changes when these are put right beside that one, among its equals.

    `waiting` is in its order. Who is moved goes between two others; only when there is no room left between these two
    do others get new positions as well, and keep their order.
    """
    others = [job for job in waiting if job.priority == neighbour.priority and job.id not in moving]
    at = others.index(neighbour) + (side == "after")
    # What is submitted next is put at a whole number that is behind all, so behind this one.
    high = others[at].position if at < len(others) else math.floor(neighbour.position) + 1.0
    low = others[at - 1].position if at > 0 else neighbour.position - 1.0 - len(moving)
    step = (high - low) / (len(moving) + 1)
    places = {name: low + step * number for number, name in enumerate(moving, 1)}
    if all(one < other for one, other in pairwise([low, *places.values(), high])):
        return places
    order = [*(job.id for job in others[:at]), *moving, *(job.id for job in others[at:])]
    last = max(job.position for job in others)
    return {name: last - back for back, name in enumerate(reversed(order))}
