"""`stoker retry`: jobs that have ended wait for a GPU again, under the same id."""

import click

from stoker.cli.steering import Request, request_options, steer
from stoker.queue.steering import RETRY


@click.command("retry")
@request_options(*RETRY.among)
def command(request: Request) -> int:
    """Let jobs that ended run again, with all their retries; one that waits for its next try starts at once.

    JOB is an id, the beginning of one, or the name of a job or a sweep. A sweep, --tag and --all mean those that failed
    or were cancelled; to repeat what succeeded name the job, or write --state succeeded.
    """
    return steer(RETRY, request)
