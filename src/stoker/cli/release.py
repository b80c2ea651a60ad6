"""`stoker release`: jobs that are held wait for a GPU again."""

import click

from stoker.cli.steering import Request, request_options, steer
from stoker.queue.steering import RELEASE


@click.command("release")
@request_options(*RELEASE.among)
def command(request: Request) -> int:
    """Let jobs that are held start when it is their turn.

    JOB is an id, the beginning of one, or the name of a job or a sweep.
    """
    return steer(RELEASE, request)
