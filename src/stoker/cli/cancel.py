"""`stoker cancel`: jobs that wait are cancelled, and those that run are asked to stop."""

import click

from stoker.cli.steering import Request, request_options, steer
from stoker.queue.steering import CANCEL


@click.command("cancel")
@request_options(*CANCEL.among)
def command(request: Request) -> int:
    """Cancel jobs. One that runs is asked to stop: `stoker wait` waits until it has.

    JOB is an id, the beginning of one, or the name of a job or a sweep.
    """
    return steer(CANCEL, request)
