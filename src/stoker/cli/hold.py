"""`stoker hold`: jobs that wait do not start until they are released."""

from typing import TYPE_CHECKING, Final

import click

from stoker.cli.steering import Request, Verb, it_ended, request_options, steer

if TYPE_CHECKING:
    from stoker.queue import Job


def _obstacle(job: "Job", _now: float) -> str | None:
    match job.state:
        case "held":
            return "it is held already"
        case "running":
            return "it is running (`stoker cancel` stops it)"
    return it_ended(job)


HOLD: Final = Verb(
    name="hold",
    done="held",
    among=("queued",),
    obstacle=_obstacle,
    expected=lambda _job: "held",
    apply=lambda store, ids: dict.fromkeys(store.hold(ids), "held"),
)


@click.command("hold")
@request_options(*HOLD.among)
def command(request: Request) -> int:
    """Keep jobs that wait from starting, until `stoker release`.

    JOB is an id, the beginning of one, or a name.
    """
    return steer(HOLD, request)
