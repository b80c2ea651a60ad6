"""Tables: fitted to the width of a terminal, or plain text of any width.

Nothing here imports rich's console before something is printed on a terminal: it is half of what a short command loads.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Self

from rich.cells import cell_len, set_cell_size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_GAP: Final = 2
_BAR: Final = 10


class Styled(str):
    """Text with colours. As a string it is without them."""

    pieces: tuple[tuple[str, str], ...]
    """Text and style of each part, for `rich.text.Text.assemble`."""

    def __new__(cls, *pieces: tuple[str, str]) -> Self:
        made = super().__new__(cls, "".join(text for text, _style in pieces))
        made.pieces = pieces
        return made


def pieces_of(text: str) -> tuple[tuple[str, str], ...]:
    return text.pieces if isinstance(text, Styled) else ((text, ""),)


def rich_text(text: str) -> "Text":
    """For rich's console."""
    from rich.text import Text

    return Text.assemble(*pieces_of(text))


class Column(NamedTuple):
    """One column of a table, and how it adapts to a narrow terminal."""

    name: str
    justify: Literal["left", "right"] = "left"
    gives: Literal["never", "cut", "middle", "wrap"] = "never"
    """Whether it may be narrower than its content: an id stays whole, a command is cut at its end, a place in its
    middle, a sentence is wrapped."""
    least: int = 16
    """The narrowest it may become before other columns are left out."""
    left_out: int = 0
    """Without room, the column with the highest number is left out first; 0 never is."""


def terminal() -> "Console | None":
    """The terminal that standard output goes to; None for a file or a pipe."""
    # By these variables rich takes a pipe for a terminal.
    if not sys.stdout.isatty() and not any(os.environ.get(name) for name in ("FORCE_COLOR", "TTY_COMPATIBLE")):
        return None
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else None


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    screen = terminal()
    print_lines(screen, table_lines(columns, rows, None if screen is None else screen.width))


def print_lines(screen: "Console | None", lines: Iterable[str]) -> None:
    """Prints lines as they are; a terminal that is too narrow wraps them."""
    if screen is None:
        sys.stdout.writelines(f"{line}\n" for line in lines)
        return
    codes = _EscapeCodes(screen)
    screen.file.writelines(f"{codes.of(line)}\n" for line in lines)


class _EscapeCodes:
    """Lines with the escape codes that rich has for their styles. Rich itself takes fifty times as long for a line."""

    def __init__(self, screen: "Console") -> None:
        self._screen = screen
        self._around: dict[str, tuple[str, str]] = {}

    def of(self, line: str) -> str:
        return "".join(self._piece(text, style) if style and text else text for text, style in pieces_of(line))

    def _piece(self, text: str, style: str) -> str:
        if style not in self._around:
            with self._screen.capture() as printed:
                self._screen.print(rich_text(Styled(("x", style))), end="")
            before, _, after = printed.get().partition("x")
            self._around[style] = before, after
        before, after = self._around[style]
        return f"{before}{text}{after}"


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    """The table with its heading; without a width each row is one whole line, without colours."""
    cells, natural = _measured(columns, rows)
    heading: list[str] = [Styled((column.name, "dim")) for column in columns]
    if width is None:
        for row in (heading, *cells):
            yield (" " * _GAP).join(map(_padded, row, natural, columns)).rstrip()
        return
    shown = _kept(columns, natural, width)
    widths = _narrowed(columns, natural, shown, width)
    for row in (heading, *cells):
        yield from _lines(columns, row, widths, shown)


def fits(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> bool:
    """Whether all columns fit, the flexible ones at their narrowest."""
    return _needed(columns, _measured(columns, rows)[1], range(len(columns))) <= width


def _measured(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[int]]:
    """The cells, and the width of each column without a limit."""
    cells = [[cell if cell.isprintable() else _on_one_line(cell) for cell in row] for row in rows]
    natural = [_width(column.name) for column in columns]
    for place, of_column in enumerate(zip(*cells, strict=True)):
        natural[place] = max(natural[place], *map(_width, of_column))
    return cells, natural


def _width(text: str) -> int:
    return len(text) if text.isascii() else cell_len(text)


def _padded(text: str, width: int, column: Column) -> str:
    blanks = " " * (width - _width(text))
    return blanks + text if column.justify == "right" else text + blanks


def _on_one_line(cell: str) -> str:
    """Without line breaks and control characters."""
    return Styled(
        *(
            ("".join(letter if letter.isprintable() else " " for letter in text), style)
            for text, style in pieces_of(cell)
        )
    )


def _needed(columns: Sequence[Column], natural: Sequence[int], shown: Sequence[int]) -> int:
    return sum(_least(columns, natural, place) for place in shown) + _GAP * (len(shown) - 1)


def _least(columns: Sequence[Column], natural: Sequence[int], place: int) -> int:
    return natural[place] if columns[place].gives == "never" else min(natural[place], columns[place].least)


def _kept(columns: Sequence[Column], natural: Sequence[int], width: int) -> list[int]:
    """The columns that fit, in their order."""
    shown = list(range(len(columns)))
    while _needed(columns, natural, shown) > width and any(columns[place].left_out for place in shown):
        shown.remove(max(shown, key=lambda place: columns[place].left_out))
    return shown


def _narrowed(columns: Sequence[Column], natural: Sequence[int], shown: Sequence[int], width: int) -> list[int]:
    """Narrows the widest flexible columns until all fit."""
    widths = list(natural)
    excess = sum(widths[place] for place in shown) + _GAP * (len(shown) - 1) - width
    while excess > 0:
        above = [place for place in shown if widths[place] > _least(columns, natural, place)]
        # Nothing is cut further than that: the terminal wraps the line.
        if not above:
            break
        *others, widest = sorted(above, key=lambda place: widths[place])
        least = max([_least(columns, natural, widest), *(widths[place] for place in others[-1:])])
        less = min(excess, max(1, widths[widest] - least))
        widths[widest] -= less
        excess -= less
    return widths


def _lines(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int], shown: Sequence[int]) -> list[str]:
    if all(len(row[place]) <= widths[place] and row[place].isascii() for place in shown):
        return [_line(columns, row, widths, shown)]
    parts = [_fitted(columns[place], row[place], widths[place]) for place in shown]
    lines: list[str] = []
    for number in range(max(map(len, parts), default=0)):
        pieces: list[tuple[str, str]] = []
        for place, part in zip(shown, parts, strict=True):
            cell = part[number] if number < len(part) else ""
            blanks = " " * (widths[place] - _width(cell))
            before, after = (blanks, "") if columns[place].justify == "right" else ("", blanks)
            pieces += [(before, ""), *pieces_of(cell), (after + " " * _GAP, "")]
        lines.append(_stripped(pieces))
    return lines


def _line(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int], shown: Sequence[int]) -> str:
    """The same for cells that fit as they are, in a fifth of the time: there may be a hundred thousand rows."""
    pieces: list[tuple[str, str]] = []
    plain = ""
    for place in shown:
        cell = row[place]
        blanks = " " * (widths[place] - len(cell))
        before, after = (blanks, "") if columns[place].justify == "right" else ("", blanks)
        if isinstance(cell, Styled):
            pieces += [(plain + before, ""), *cell.pieces]
            plain = after + " " * _GAP
        else:
            plain += before + cell + after + " " * _GAP
    return _stripped([*pieces, (plain, "")])


def _stripped(pieces: list[tuple[str, str]]) -> Styled:
    """Without blanks at the end."""
    while pieces and not pieces[-1][0].strip():
        pieces.pop()
    if pieces:
        text, style = pieces[-1]
        pieces[-1] = text.rstrip(), style
    return Styled(*pieces)


def _fitted(column: Column, cell: str, width: int) -> list[str]:
    if _width(cell) <= width:
        return [cell]
    if column.gives == "wrap":
        return _wrapped(cell, width)
    style = pieces_of(cell)[0][1]
    if column.gives == "middle":
        return [Styled((cut_in_the_middle(cell, width), style))]
    return [Styled((set_cell_size(cell, width - 1) + "…", style))]


def _wrapped(cell: str, width: int) -> list[str]:
    from rich.console import Console

    style = pieces_of(cell)[0][1]
    return [Styled((line.plain.rstrip(), style)) for line in rich_text(cell).wrap(Console(width=width), width)]


def bar(fraction: float, caption: str) -> Styled:
    """`████······  40%`."""
    # Any activity is visible.
    full = max(min(round(fraction * _BAR), _BAR), 1 if fraction > 0 else 0)
    return Styled(("█" * full, "cyan"), ("·" * (_BAR - full), "dim"), (f" {caption}", ""))


def cut_in_the_middle(text: str, width: int) -> str:
    """`gpu-box-1…ple.org:0,1`: both ends matter."""
    if cell_len(text) <= width:
        return text
    tail = text[len(text) - width // 2 :]
    return f"{set_cell_size(text, width - 1 - cell_len(tail))}…{tail}"
