"""The lines of a text file as commands, each with an identity that survives edits of the file around it."""

import os
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

# A database indexes no more than some 2,700 bytes of an origin, and a path alone may have 4,096.
LONGEST_NAME: Final = 600


class Line(NamedTuple):
    number: int
    text: str
    occurrence: int
    """The how-manieth line with this text it is."""


class Unreadable(NamedTuple):
    number: int


class Lines(NamedTuple):
    commands: list[Line]
    unreadable: list[Unreadable]
    """Lines that are not text."""


def lines_in(data: bytes) -> Lines:
    """The commands; blank lines and comments are skipped."""
    found = Lines([], [])
    seen: Counter[str] = Counter()
    # Some editors put a mark before the first letter that is no part of the command.
    for number, written in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            text = written.decode().strip()
        except UnicodeDecodeError:
            found.unreadable.append(Unreadable(number))
            continue
        if text and not text.startswith("#"):
            seen[text] += 1
            found.commands.append(Line(number, text, seen[text]))
    return found


def finished_part(data: bytes) -> bytes:
    """All but a last line that somebody may still be writing."""
    if not data[data.rfind(b"\n") + 1 :].strip():
        return data
    return data[: data.rfind(b"\n") + 1]


def feed_prefix(path: Path, name: str | None) -> str:
    """What the origins of all lines of a file begin with: its name if it was given one, else its real path."""
    written = quote(os.fsencode(name if name is not None else os.path.realpath(path)), safe="/ .,-_~+=@")
    return f"file:{written if len(written) <= LONGEST_NAME else sha256(written.encode()).hexdigest()}:"


def origin_of(prefix: str, line: Line) -> str:
    """Neither the number of the line nor what is around it: those change when the file is edited."""
    return f"{prefix}{sha256(line.text.encode()).hexdigest()[:32]}:{line.occurrence}"
