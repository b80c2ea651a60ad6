"""The colours of a terminal as the page shows them, readable whatever a program chose: text has a contrast of 4.5.

`static/log.css` is made of this by `scripts/log-palette`. A log is dark in both schemes of the page.
"""

from functools import lru_cache
from typing import Final

Colour = tuple[int, int, int]

# What WCAG asks of text.
CONTRAST: Final = 4.5
LOG_PAPER: Final[Colour] = (0x16, 0x18, 0x1D)
LOG_INK: Final[Colour] = (0xE4, 0xE6, 0xEB)
BLACK: Final[Colour] = (0, 0, 0)
WHITE: Final[Colour] = (255, 255, 255)
_THEME: Final = (
    "4b5263", "e8686f", "8cc265", "d5a458", "61a5f0", "c77ddb", "4fb8c4", "c8ccd4",
    "8a919e", "ff8b92", "a9dc85", "efc27b", "8cc0ff", "dda0ee", "7fd6e0", "ffffff",
)  # fmt: skip
_FIRST_GREY: Final = 232
_LEVELS: Final = (0, 95, 135, 175, 215, 255)
# Programs write both white and black on the six plain colours: as papers these are so dark that either can be read.
_BOTH_READABLE: Final = range(1, 7)
# Black on a paper of the program's own stays black.
_BLACKS: Final = frozenset({"0", "16", "232"})


def rgb(number: int) -> Colour:
    """One of the table of 256 that terminals share: 16 that a theme chooses, a cube of 6×6×6, and 24 greys."""
    if number < 16:
        red, green, blue = bytes.fromhex(_THEME[number])
        return red, green, blue
    if number >= _FIRST_GREY:
        level = 8 + 10 * (number - _FIRST_GREY)
        return level, level, level
    red, rest = divmod(number - 16, 36)
    green, blue = divmod(rest, 6)
    return _LEVELS[red], _LEVELS[green], _LEVELS[blue]


def contrast(one: Colour, other: Colour) -> float:
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


@lru_cache(maxsize=1024)
def _luminance(colour: Colour) -> float:
    parts = [part / 255 for part in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@lru_cache(maxsize=256)
def ink(number: int) -> Colour:
    """The colour of letters on the log's own paper: with as much white in it as it takes.

    A program that prints navy on its author's white terminal is readable here too.
    """
    colour, white = rgb(number), 0.0
    while contrast(_mixed(rgb(number), WHITE, white), LOG_PAPER) < CONTRAST:
        white += 0.02
    return _mixed(colour, WHITE, white)


@lru_cache(maxsize=256)
def paper(number: int) -> Colour:
    """The colour behind letters."""
    colour, black = rgb(number), 0.0
    while number in _BOTH_READABLE and contrast(_mixed(colour, BLACK, black), WHITE) < CONTRAST:
        black += 0.002
    return _mixed(colour, BLACK, black)


@lru_cache(maxsize=4096)
def readable(letters: str, behind: str) -> str:
    """The name of the ink to take for letters on this paper: the wanted one, or else black or white.

    An ink is a number, `k` for the log's own, `p` for its paper, `b` for black, `w` for white; a paper a number or `k`.
    """
    on = LOG_INK if behind == "k" else paper(int(behind))
    # On every paper one of the two can be read.
    otherwise = "wb" if _luminance(_ink(letters)) > _luminance(on) else "bw"
    wanted = ["b", letters] if letters in _BLACKS else [letters]
    names: tuple[str, ...] = (*wanted, *otherwise)
    return next(name for name in names if contrast(_ink(name), on) >= CONTRAST)


def _ink(name: str) -> Colour:
    named = {"k": LOG_INK, "p": LOG_PAPER, "b": BLACK, "w": WHITE}
    return named[name] if name in named else ink(int(name))


def _mixed(colour: Colour, other: Colour, share: float) -> Colour:
    red, green, blue = (round(part + (more - part) * share) for part, more in zip(colour, other, strict=True))
    return red, green, blue
