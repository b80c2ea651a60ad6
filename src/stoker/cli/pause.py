"""`stoker pause`: nothing more is started, anywhere or by one worker; what runs goes on."""

import click

from stoker.cli.pausing import Pausing, pausing_options, turn
from stoker.queue.pausing import PAUSE


@click.command("pause")
@pausing_options
def command(asked: Pausing) -> int:
    """Start nothing more, until `stoker resume`. What runs goes on.

    Without --worker nothing of the queue is started anywhere. A worker that is started anew is not paused.
    """
    return turn(PAUSE, asked)
