"""`stoker pause`: nothing more is started, anywhere or by one worker; what runs goes on."""

from typing import Final

import click

from stoker.cli.pausing import Direction, Pausing, pausing_options, turn

PAUSE: Final = Direction(
    verb="pause",
    done="paused",
    paused=True,
    queue=lambda store: store.pause(),
    worker=lambda store, worker: store.pause_worker(worker),
)


@click.command("pause")
@pausing_options
def command(asked: Pausing) -> int:
    """Start nothing more, until `stoker resume`. What runs goes on.

    Without --worker nothing of the queue is started anywhere. A worker that is started anew is not paused.
    """
    return turn(PAUSE, asked)
