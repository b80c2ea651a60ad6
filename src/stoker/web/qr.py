"""A QR code for a terminal, so that a phone's camera can read a link."""

import os
import shutil
import sys
from typing import Final, TextIO

# Two modules of margin suffice on a screen, where the code has its own white background.
_MARGIN: Final = 2
# Black and white by number, independent of the theme of the terminal.
_UPPER_LOWER: Final = {
    (True, True): "\x1b[38;5;16;48;5;16m",
    (True, False): "\x1b[38;5;16;48;5;231m",
    (False, True): "\x1b[38;5;231;48;5;16m",
    (False, False): "\x1b[38;5;231;48;5;231m",
}
_HALF: Final = "\N{UPPER HALF BLOCK}"
_PLAIN: Final = "\x1b[0m"


def qr_code(link: str, stream: TextIO | None = None) -> str | None:
    """The code, two modules per character; None if the output is no terminal, or one that cannot show it."""
    stream = stream or sys.stdout
    if not stream.isatty() or os.environ.get("TERM", "dumb") == "dumb" or not _can_show(stream):
        return None
    try:
        import segno
    except ImportError:
        return None  # without the extra `web`, there is only the link
    code = segno.make(link, error="l", micro=False, boost_error=False)
    rows = [[bool(module) for module in row] for row in code.matrix_iter(border=_MARGIN)]
    if len(rows[0]) > shutil.get_terminal_size().columns:
        return None
    if len(rows) % 2:
        rows.append([False] * len(rows[0]))
    return "\n".join(_line(upper, lower) for upper, lower in zip(rows[::2], rows[1::2], strict=True))


def qr_rows(link: str) -> list[str]:
    """The code as rows of 0 and 1; empty if the library for it is not installed."""
    try:
        import segno
    except ImportError:
        return []
    code = segno.make(link, error="l", micro=False, boost_error=False)
    return ["".join("1" if module else "0" for module in row) for row in code.matrix_iter(border=_MARGIN)]


def _line(upper: list[bool], lower: list[bool]) -> str:
    letters, before = [], ""
    for both in zip(upper, lower, strict=True):
        colours = _UPPER_LOWER[both]
        letters.append(_HALF if colours == before else colours + _HALF)
        before = colours
    return "".join(letters) + _PLAIN


def _can_show(stream: TextIO) -> bool:
    try:
        _HALF.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
