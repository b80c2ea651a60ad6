"""The queue that a verb works on: `--queue`, or else what the environment and the configuration file say."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

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
    from stoker.queue import SqliteAddress, init_queue, open_queue, queue_address

    url = queue_url_of(option)
    if isinstance(queue_address(url), SqliteAddress):
        return _tightened(init_queue(url), url)
    return open_queue(url)


def _tightened(store: "Store", url: str | None) -> "Store":
    """Only now, that it is known to be a queue: what else a person named is left as it is."""
    from stoker.queue import SqliteAddress, queue_address

    address = queue_address(url)
    if isinstance(address, SqliteAddress) and (sentence := tighten_queue(address.path)) is not None:
        warn(sentence)
    return store
