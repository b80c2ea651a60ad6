"""`stoker hold`: jobs that wait do not start until they are released."""

import click

from stoker.cli.steering import Request, request_options, steer
from stoker.queue.steering import HOLD


@click.command("hold")
@request_options(*HOLD.among)
def command(request: Request) -> int:
    """Keep jobs that wait from starting, until `stoker release`.

    JOB is an id, the beginning of one, or the name of a job or a sweep.
    """
    return steer(HOLD, request)
