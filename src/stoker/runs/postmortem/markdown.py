"""Text of unknown origin put into GitHub's Markdown so that it shows as it is and changes nothing around it."""

import re
from typing import Final

from stoker.runs.transcript import harmless, one_line

# An underscore inside a word is no markup, and file names are easier to read without backslashes.
_MARKUP: Final = re.compile(r"[\\`*\[\]<>~|]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)")
# What makes a heading or a list of a line when it comes first.
_FIRST: Final = re.compile(r"^(?:(\d{1,9})(?=[.)](?: |$))|(?=[#+=-]))")
_TICKS: Final = re.compile("`+")
_SHORTEST_FENCE: Final = 3


def prose(text: str) -> str:
    """A piece of a sentence, on one line."""
    return _FIRST.sub(r"\g<1>\\", _MARKUP.sub(r"\\\g<0>", one_line(text)))


def code(text: str) -> str:
    """A piece of a sentence that is a name or a command, on one line."""
    shown = one_line(text)
    if not shown:
        return "(empty)"
    ticks = "`" * (_longest_run(shown) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{ticks}{pad}{shown}{pad}{ticks}"


def block(text: str) -> str:
    """Lines that stand as they are, between fences that no line of them can end."""
    shown = harmless(text).strip("\n")
    fence = "`" * max(_longest_run(shown) + 1, _SHORTEST_FENCE)
    return f"{fence}text\n{shown}\n{fence}"


def listed(words: list[str], most: int = 8) -> str:
    """`a`, `a and b`, `a, b and c`, `a, b and 5 more`."""
    if len(words) > most:
        words = [*words[: most - 1], f"{len(words) - most + 1} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def clipped(text: str, columns: int) -> str:
    return text if len(text) <= columns else f"{text[: columns - 1]}…"


def _longest_run(text: str) -> int:
    return max(map(len, _TICKS.findall(text)), default=0)
