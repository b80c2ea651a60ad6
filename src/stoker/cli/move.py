"""`stoker move`: which of the jobs that wait comes earlier."""

from typing import TYPE_CHECKING, Final, cast

import click

from stoker.cli.steering import Request, Verb, it_ended, request_options, steer

if TYPE_CHECKING:
    from stoker.queue import Job, Place, State

PLACES: Final = ("up", "down", "first", "last")
AMONG: Final[tuple["State", ...]] = ("queued", "held")


def _obstacle(job: "Job", _now: float) -> str | None:
    return "it is running" if job.state == "running" else it_ended(job)


def _verb(place: "Place") -> Verb:
    words = f"moved {place}"
    return Verb(
        name="move",
        done="moved",
        among=AMONG,
        obstacle=_obstacle,
        expected=lambda _job: words,
        apply=lambda store, ids: dict.fromkeys(store.move(ids, place), words),
    )


@click.command("move")
@click.argument("place", metavar="up|down|first|last", type=click.Choice(PLACES))
@request_options(*AMONG)
def command(place: str, request: Request) -> int:
    """Move jobs that wait within the queue: `stoker move first JOB...`.

    JOB is an id, the beginning of one, or a name. Several keep their order among themselves. A job is moved among those
    of its own priority: `stoker edit --priority` brings it before others.
    """
    return steer(_verb(cast("Place", place)), request)
