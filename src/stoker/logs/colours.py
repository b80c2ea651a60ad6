"""Terminal colours and styles of logs on the page. Text has a contrast of at least 4.5. `scripts/log-palette` generates
`static/log.css` from this module. Logs are dark in both colour schemes of the page.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

Colour = tuple[int, int, int]

# Required by WCAG.
CONTRAST: Final = 4.5
LOG_BACKGROUND: Final[Colour] = (0x16, 0x18, 0x1D)
LOG_FOREGROUND: Final[Colour] = (0xE4, 0xE6, 0xEB)
BLACK: Final[Colour] = (0, 0, 0)
WHITE: Final[Colour] = (255, 255, 255)
_THEME: Final = (
    "4b5263", "e8686f", "8cc265", "d5a458", "61a5f0", "c77ddb", "4fb8c4", "c8ccd4",
    "8a919e", "ff8b92", "a9dc85", "efc27b", "8cc0ff", "dda0ee", "7fd6e0", "ffffff",
)  # fmt: skip
_FIRST_GREY: Final = 232
_LEVELS: Final = (0, 95, 135, 175, 215, 255)
# Programs print white and black on the six plain colours: as backgrounds they suit both.
_BOTH_READABLE: Final = range(1, 7)
# Black on a coloured background stays black.
_BLACKS: Final = frozenset({"0", "16", "232"})


def rgb(number: int) -> Colour:
    """One of the 256 terminal colours: 16 of the theme, a cube of 6×6×6, and 24 greys."""
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
def foreground(number: int) -> Colour:
    """The colour of text on the log's background, lightened until readable: some programs print navy for white
    terminals.
    """
    colour, white = rgb(number), 0.0
    while contrast(_mixed(rgb(number), WHITE, white), LOG_BACKGROUND) < CONTRAST:
        white += 0.02
    return _mixed(colour, WHITE, white)


@lru_cache(maxsize=256)
def background(number: int) -> Colour:
    """The colour behind text."""
    colour, black = rgb(number), 0.0
    while number in _BOTH_READABLE and contrast(_mixed(colour, BLACK, black), WHITE) < CONTRAST:
        black += 0.002
    return _mixed(colour, BLACK, black)


@lru_cache(maxsize=4096)
def readable(letters: str, behind: str) -> str:
    """The foreground for text on this background: the requested one, or else black or white. A foreground is a number,
    `k` for the log's foreground, `p` for its background, `b` for black or `w` for white; a background is a number or
    `k`.
    """
    on = LOG_FOREGROUND if behind == "k" else background(int(behind))
    # One of the two is readable on every background.
    otherwise = "wb" if _luminance(_foreground(letters)) > _luminance(on) else "bw"
    wanted = ["b", letters] if letters in _BLACKS else [letters]
    names: tuple[str, ...] = (*wanted, *otherwise)
    return next(name for name in names if contrast(_foreground(name), on) >= CONTRAST)


def _foreground(name: str) -> Colour:
    named = {"k": LOG_FOREGROUND, "p": LOG_BACKGROUND, "b": BLACK, "w": WHITE}
    return named[name] if name in named else foreground(int(name))


def _mixed(colour: Colour, other: Colour, share: float) -> Colour:
    red, green, blue = (round(part + (more - part) * share) for part, more in zip(colour, other, strict=True))
    return red, green, blue


class Style(NamedTuple):
    """None means the colour of the page."""

    foreground: int | None = None
    background: int | None = None
    bold: bool = False
    dim: bool = False
    italic: bool = False
    underlined: bool = False
    inverse: bool = False
    struck: bool = False


PLAIN: Final = Style()

_SWITCHES: Final[dict[int, dict[str, bool]]] = {
    1: {"bold": True},
    2: {"dim": True},
    3: {"italic": True},
    4: {"underlined": True},
    7: {"inverse": True},
    9: {"struck": True},
    21: {"underlined": True},
    22: {"bold": False, "dim": False},
    23: {"italic": False},
    24: {"underlined": False},
    27: {"inverse": False},
    29: {"struck": False},
}
_CLASSES: Final = {"bold": "a-b", "dim": "a-d", "italic": "a-i", "underlined": "a-u", "struck": "a-s"}


def restyled(style: Style, parameters: str) -> Style:
    """The style after `ESC [ parameters m`. Unknown codes are ignored."""
    codes = iter(parameters.split(";"))
    for code in codes:
        first, *inner = code.split(":")
        number = _number(first)
        if number in {38, 48}:
            colour = _colour_within(inner) if inner else _colour_from(codes)
            if colour is not None:
                style = style._replace(foreground=colour) if number == 38 else style._replace(background=colour)
        elif number == 4 and inner[:1] == ["0"]:
            style = style._replace(underlined=False)
        elif number is not None:
            style = _switched(style, number)
    return style


def _switched(style: Style, code: int) -> Style:
    if code == 0:
        return PLAIN
    if code in _SWITCHES:
        return style._replace(**_SWITCHES[code])
    tens, units = divmod(code, 10)
    if units <= 7 and tens in {3, 9}:
        return style._replace(foreground=units + (8 if tens == 9 else 0))
    if units <= 7 and tens in {4, 10}:
        return style._replace(background=units + (8 if tens == 10 else 0))
    if code == 39:
        return style._replace(foreground=None)
    return style._replace(background=None) if code == 49 else style


def _colour_from(codes: Iterator[str]) -> int | None:
    """Consumes `5;n` or `2;r;g;b`, the common form."""
    kind = next(codes, "")
    if kind == "5":
        return _from_table([next(codes, "")])
    return nearest(*_three(list(islice(codes, 3)))) if kind == "2" else None


def _colour_within(inner: list[str]) -> int | None:
    """`5:n`, `2:r:g:b` or `2:space:r:g:b`, the standard's form."""
    if inner[0] == "5":
        return _from_table(inner[1:])
    return nearest(*_three(inner[2:] if len(inner) > 4 else inner[1:])) if inner[0] == "2" else None


def _from_table(numbers: list[str]) -> int | None:
    number = _number(numbers[0]) if numbers else None
    return number if number is not None and number < 256 else None


def _three(numbers: list[str]) -> tuple[int, int, int]:
    red, green, blue = ([min(_number(text) or 0, 255) for text in numbers] + [0, 0, 0])[:3]
    return red, green, blue


@lru_cache(maxsize=4096)
def nearest(red: int, green: int, blue: int) -> int:
    """The nearest colour of the cube or the greys; the first 16 depend on the theme."""
    number = 16 + 36 * _level(red) + 6 * _level(green) + _level(blue)
    grey = _FIRST_GREY + max(0, min(23, round(((red + green + blue) / 3 - 8) / 10)))
    return min(number, grey, key=lambda one: _distance(rgb(one), (red, green, blue)))


def _level(part: int) -> int:
    return min(range(6), key=lambda level: abs(_LEVELS[level] - part))


def _distance(one: tuple[int, int, int], other: tuple[int, int, int]) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def _number(text: str) -> int | None:
    if not text:
        return 0
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 6 else None


@lru_cache(maxsize=4096)
def classes_of(style: Style) -> tuple[str, ...]:
    """Classes in `static/log.css`; none for plain text."""
    letters, behind = _name(style.foreground, "k"), _name(style.background, "p")
    if style.inverse:
        letters, behind = behind, letters
    if behind != "p":
        letters = readable(letters, behind)
    colours = [f"a-fg-{letters}"] * (letters != "k") + [f"a-bg-{behind}"] * (behind != "p")
    return (*colours, *(name for field, name in _CLASSES.items() if getattr(style, field)))


def _name(colour: int | None, otherwise: str) -> str:
    """`k` is the foreground of the page and `p` its background."""
    return otherwise if colour is None else str(colour)
