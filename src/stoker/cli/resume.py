"""`stoker resume`: the queue, or one worker, starts jobs again after a pause."""

import click

from stoker.cli.pausing import Pausing, pausing_options, turn
from stoker.queue.pausing import RESUME


@click.command("resume")
@pausing_options
def command(asked: Pausing) -> int:
    """Go on after `stoker pause`: the queue, or with --worker one worker. A worker's own pause outlasts the queue's."""
    return turn(RESUME, asked)
