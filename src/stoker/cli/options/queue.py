"""The queue that a verb works on: `--queue`, or else what the environment and the configuration file say."""

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
        help="A SQLite file or postgresql://… (default: STOKER_QUEUE, then a file of your own).",
    )(command)


def queue_url_of(option: str | None) -> str | None:
    """The address that was given anywhere; None means the file in the state directory."""
    return option or load_settings().queue or None


def opened(option: str | None) -> "Store":
    """The queue that is there."""
    from stoker.queue import open_queue

    url = queue_url_of(option)
    return _tightened(open_queue(url), url)


def opened_or_created(option: str | None) -> "Store":
    """For verbs that put something in: a file is created when it is not there, a database must have been prepared."""
    from stoker.queue import open_or_create

    url = queue_url_of(option)
    return _tightened(open_or_create(url), url)


def _tightened(store: "Store", url: str | None) -> "Store":
    """Only now, that it is known to be a queue: what else a person named is left as it is."""
    from stoker.queue import queue_address

    path = queue_address(url).path
    if path is not None and (sentence := tighten_queue(path)) is not None:
        warn(sentence)
    return store


# The bell may be late in rare cases; nobody minds so short a delay then.
SLOW_POLL: Final = 2.0
# A database that restarts needs a few seconds; asking more often does not bring it back.
_BETWEEN_TRIES: Final = 1.0

T = TypeVar("T")


class Listener:
    """One person's wait for news of a queue."""

    def __init__(self, store: "Store") -> None:
        self._changes = store.listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._changes.close()

    def wait(self, seconds: float) -> bool:
        """Waits for news for so long at the most; whether there may be some."""
        number = self._changes.fileno()
        if number < 0:
            time.sleep(max(0.0, seconds))
        else:
            waiting = select.poll()
            waiting.register(number, select.POLLIN)
            waiting.poll(max(0.0, seconds) * 1000)
        return self._changes.poll()


def patiently(question: Callable[[], T], deadline: float | None = None) -> T:
    """The answer, when the database gives one: what runs goes on without it, so whoever waits does too."""
    told = False
    while True:
        try:
            return question()
        except QueueAwayError as error:
            if deadline is not None and time.monotonic() >= deadline:
                raise
            if not told:
                note(f"{error}; waiting for it")
                told = True
            time.sleep(_BETWEEN_TRIES)
