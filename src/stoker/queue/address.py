"""Where the queue is: the URL that `STOKER_QUEUE` gives, taken apart."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from stoker.errors import BadInputError
from stoker.masking import without_passwords
from stoker.paths import state_home

_SCHEME = re.compile(r"([a-z][a-z0-9+]*):(//)?", re.IGNORECASE)


class SqliteAddress(msgspec.Struct, frozen=True):
    """A file on this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)


class PostgresAddress(msgspec.Struct, frozen=True):
    """A database that many machines reach."""

    url: str

    def __str__(self) -> str:
        """For people: without its password."""
        return without_passwords(self.url)

    def __repr__(self) -> str:
        return f"PostgresAddress({str(self)!r})"


Address = SqliteAddress | PostgresAddress


def queue_address(url: str | None = None, environment: Mapping[str, str] = os.environ) -> Address:
    """The queue that is meant: `url`, or else `STOKER_QUEUE`, or else a file in the state directory."""
    text = url or environment.get("STOKER_QUEUE")
    if not text:
        return SqliteAddress(state_home(environment) / "queue.db")
    scheme = _SCHEME.match(text)
    if scheme is None:
        return SqliteAddress(Path(text).expanduser())
    match scheme[1].lower():
        case "postgresql" | "postgres" if scheme[2]:
            return PostgresAddress(text)
        case "sqlite" if text[scheme.end() :].startswith("/") and scheme[2]:
            return SqliteAddress(Path("/" + text[scheme.end() :].lstrip("/")))
    raise BadInputError(
        f"{PostgresAddress(text)} is not the address of a queue: "
        "a path, sqlite:///the/path or postgresql://user@host/database is"
    )
