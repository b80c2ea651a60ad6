"""Where tables go: a terminal with its width and colours, or plain text that nothing is cut from."""

from typing import Final

from rich.console import Console

# What is no terminal has no width: wide enough that nothing is cut.
_PLAIN_WIDTH: Final = 200


def console() -> Console:
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)
