"""`--queue`, opening the queue, and waiting for its changes."""

import select
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import click

from stoker.cli.output import note
from stoker.errors import QueueAwayError
from stoker.paths import tighten_queue
from stoker.settings import load_settings
from stoker.streams import warn

if TYPE_CHECKING:
    from stoker.queue import Store

F = TypeVar("F", bound=Callable[..., Any])


def queue_option(command: F) -> F:
    return click.option(
        "--queue",
        "queue_url",
        metavar="URL",
        help="A SQLite file or postgresql://… [STOKER_QUEUE, or a file of yours].",
    )(command)


def queue_url_of(option: str | None) -> str | None:
    """The address from the option, the environment or the file; None: the file in the state directory."""
    return option or load_settings().queue or None


def opened(option: str | None) -> "Store":
    """An existing queue."""
    from stoker.queue import open_queue

    url = queue_url_of(option)
    return _tightened(open_queue(url), url)


def opened_or_created(option: str | None) -> "Store":
    """For verbs that submit jobs: creates a missing file; a database needs `stoker queue init`."""
    from stoker.queue import open_or_create

    url = queue_url_of(option)
    return _tightened(open_or_create(url), url)


def _tightened(store: "Store", url: str | None) -> "Store":
    """Restricts the permissions of a file that is known to be a queue."""
    from stoker.queue import queue_address

    path = queue_address(url).path
    if path is not None and (problem := tighten_queue(path)) is not None:
        warn(problem)
    return store


# Polling interval without a change notification.
SLOW_POLL: Final = 2.0
# A database needs a few seconds to restart.
_BETWEEN_TRIES: Final = 1.0

T = TypeVar("T")


class Listener:
    """Waits for changes of a queue."""

    def __init__(self, store: "Store") -> None:
        self._changes = store.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._changes.close()

    def wait(self, seconds: float) -> bool:
        """Waits for a change for at most `seconds`; returns whether there may be one."""
        number = self._changes.fileno()
        if number < 0:
            time.sleep(max(0.0, seconds))
        else:
            waiting = select.poll()
            waiting.register(number, select.POLLIN)
            waiting.poll(max(0.0, seconds) * 1000)
        return self._changes.poll() is not None


def patiently(question: Callable[[], T], deadline: float | None = None) -> T:
    """The answer, when the database gives one: jobs survive an outage, so this waits too."""
    noted = False
    while True:
        try:
            return question()
        except QueueAwayError as error:
            if deadline is not None and time.monotonic() >= deadline:
                raise
            if not noted:
                note(f"{error}; waiting for it")
                noted = True
            time.sleep(_BETWEEN_TRIES)
