"""`stoker resume`: the queue, or one worker, starts jobs again after a pause."""

from typing import Final

import click

from stoker.cli.pausing import Direction, Pausing, pausing_options, turn

RESUME: Final = Direction(
    verb="resume",
    done="resumed",
    paused=False,
    queue=lambda store: store.resume(),
    worker=lambda store, worker: store.resume_worker(worker),
)


@click.command("resume")
@pausing_options
def command(asked: Pausing) -> int:
    """Go on after `stoker pause`: the queue, or with --worker one worker. A worker's own pause outlasts the queue's."""
    return turn(RESUME, asked)
