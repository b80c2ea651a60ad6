"""`stoker release`: jobs that are held wait for a GPU again."""

from typing import TYPE_CHECKING, Final

import click

from stoker.cli.steering import Request, Verb, it_ended, request_options, steer

if TYPE_CHECKING:
    from stoker.queue import Job


def _obstacle(job: "Job", _now: float) -> str | None:
    match job.state:
        case "queued":
            return "it is not held"
        case "running":
            return "it is not held, it is running"
    return it_ended(job)


RELEASE: Final = Verb(
    name="release",
    done="released",
    among=("held",),
    obstacle=_obstacle,
    expected=lambda _job: "released",
    apply=lambda store, ids: dict.fromkeys(store.release(ids), "released"),
)


@click.command("release")
@request_options(*RELEASE.among)
def command(request: Request) -> int:
    """Let jobs that are held start when it is their turn.

    JOB is an id, the beginning of one, or a name.
    """
    return steer(RELEASE, request)
