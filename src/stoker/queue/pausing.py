"""Whether work is started: pausing and resuming of the queue, or of one worker, and the words for it."""

from collections.abc import Callable
from typing import Final

import msgspec

from stoker.queue.store import Store


class Direction(msgspec.Struct, frozen=True):
    """Which of the two it is, and how it is done."""

    verb: str
    opposite: str
    done: str
    paused: bool
    """What is the case afterwards."""
    queue: Callable[[Store], None]
    worker: Callable[[Store, str], bool]


PAUSE: Final = Direction(
    verb="pause",
    opposite="resume",
    done="paused",
    paused=True,
    queue=lambda store: store.pause(),
    worker=lambda store, worker: store.workers.pause(worker),
)

RESUME: Final = Direction(
    verb="resume",
    opposite="pause",
    done="resumed",
    paused=False,
    queue=lambda store: store.resume(),
    worker=lambda store, worker: store.workers.resume(worker),
)


def already(direction: Direction) -> str:
    """Why nothing is to be done."""
    return "it is paused already" if direction.paused else "it was not paused"
