"""The look of letters in a terminal: what the codes of a colour sequence change, and the CSS classes for it.

Colours are numbers of the table of 256 that terminals share: 16 that a theme chooses, a cube of 6×6×6, and 24 greys.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

from stoker.logs.ansi_palette import readable, rgb

_LEVELS: Final = (0, 95, 135, 175, 215, 255)
_FIRST_GREY: Final = 232


class Style(NamedTuple):
    """None is the colour of the page."""

    ink: int | None = None
    paper: int | None = None
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
    """The style after `ESC [ parameters m`. What is not known changes nothing."""
    codes = iter(parameters.split(";"))
    for code in codes:
        first, *inner = code.split(":")
        number = _number(first)
        if number in {38, 48}:
            colour = _colour_within(inner) if inner else _colour_from(codes)
            if colour is not None:
                style = style._replace(ink=colour) if number == 38 else style._replace(paper=colour)
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
        return style._replace(ink=units + (8 if tens == 9 else 0))
    if units <= 7 and tens in {4, 10}:
        return style._replace(paper=units + (8 if tens == 10 else 0))
    if code == 39:
        return style._replace(ink=None)
    return style._replace(paper=None) if code == 49 else style


def _colour_from(codes: Iterator[str]) -> int | None:
    """`5;n` or `2;r;g;b`, as most programs write it; they are used up."""
    kind = next(codes, "")
    if kind == "5":
        return _from_table([next(codes, "")])
    return nearest(*_three(list(islice(codes, 3)))) if kind == "2" else None


def _colour_within(inner: list[str]) -> int | None:
    """`5:n`, `2:r:g:b` or `2:space:r:g:b`, as the standard has it."""
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
    """The colour of the cube or of the greys that is least far from this one; the first 16 are a theme's."""
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
    """Names that `static/log.css` knows; none for plain text."""
    letters, behind = _name(style.ink, "k"), _name(style.paper, "p")
    if style.inverse:
        letters, behind = behind, letters
    if behind != "p":
        letters = readable(letters, behind)
    colours = [f"a-fg-{letters}"] * (letters != "k") + [f"a-bg-{behind}"] * (behind != "p")
    return (*colours, *(name for field, name in _CLASSES.items() if getattr(style, field)))


def _name(colour: int | None, otherwise: str) -> str:
    """`k` is the ink of the page and `p` its paper."""
    return otherwise if colour is None else str(colour)
