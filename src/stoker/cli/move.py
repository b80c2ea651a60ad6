"""`stoker move`: which of the jobs that wait comes earlier."""

from typing import Final, cast

import click
from msgspec.structs import replace

from stoker.cli.queue_options import opened
from stoker.cli.steering import Request, request_options, steer
from stoker.errors import BadInputError
from stoker.queue.model import Job, Place, Side, State
from stoker.queue.steering import moving, moving_beside

PLACES: Final = ("up", "down", "first", "last")
SIDES: Final = ("before", "after")
AMONG: Final[tuple[State, ...]] = ("queued", "held")


@click.command("move")
@click.argument("place", metavar="up|down|first|last|before OTHER|after OTHER", type=click.Choice([*PLACES, *SIDES]))
@request_options(*AMONG)
def command(place: str, request: Request) -> int:
    """Move jobs that wait within the queue: `stoker move first JOB...`, or `stoker move before OTHER JOB...`.

    JOB and OTHER are ids, beginnings of ids, or names; JOB also that of a sweep. Several jobs keep their order among
    themselves. A job is moved among those of its own priority; beside another job that waits, it takes the priority of
    that one.
    """
    if place in SIDES:
        return _beside(cast("Side", place), request)
    return steer(moving(cast("Place", place)), request)


def _beside(side: Side, request: Request) -> int:
    """The first of the words is the other job; the rest says, as ever, which ones are meant."""
    if not request.selection.words:
        raise BadInputError(f"{side} which job? Write it first, as in `stoker move {side} OTHER JOB...`")
    other, *words = request.selection.words
    with opened(request.queue_url) as store:
        neighbour = store.job(other)
    verb = moving_beside(neighbour.id, side)
    if obstacle := verb.obstacle(neighbour, 0.0):
        raise BadInputError(f"nothing can be moved {side} job {neighbour.id}: {obstacle}")

    def why_not(job: Job, now: float) -> str | None:
        return f"it is the job that the others go {side}" if job.id == neighbour.id else verb.obstacle(job, now)

    chosen = replace(request.selection, words=tuple(words))
    return steer(replace(verb, obstacle=why_not), replace(request, selection=chosen))
