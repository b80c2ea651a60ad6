"""What is wrong in a configuration: all of it at once, each with its file, its line and what to do."""

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stoker.errors import BadInputError
from stoker.fill.config import FillConfig


class Mistake(NamedTuple):
    """One thing to mend."""

    where: str
    """`file:line`, or only the file where no line is to blame."""
    sentence: str

    def __str__(self) -> str:
        return f"{self.where}: {self.sentence}"


class Mistakes(BadInputError):  # noqa: N818 - it carries many of them, and is named for that
    """Every mistake of a configuration, one per line."""

    def __init__(self, mistakes: Sequence[Mistake], understood: FillConfig | None = None) -> None:
        super().__init__("\n".join(map(str, mistakes)))
        self.mistakes = tuple(mistakes)
        self.understood = understood
        """The configuration without what is wrong: the rest of it can be checked in the same go."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was most likely meant."""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[near[0]] if near else None


def in_order(mistakes: Iterable[Mistake]) -> list[Mistake]:
    """From the top of the file to its end, each once."""

    def place(mistake: Mistake) -> tuple[str, int]:
        file, _, line = mistake.where.rpartition(":")
        return (file, int(line)) if line.isdecimal() else (mistake.where, 0)

    return sorted(dict.fromkeys(mistakes), key=place)
