"""Tables: fitted to the width of a terminal, or plain text of any width. rich is imported only for output on a terminal
or with wide letters, because it is half of what a short command loads. Columns are laid out as a whole, because there
may be a hundred thousand rows.
"""

import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Final, Literal, NamedTuple, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_GAP: Final = "  "
_BAR: Final = 10
# Stoker's own non-ASCII characters with a width of one column.
_NARROW: Final = str.maketrans("", "", "█·…×°–÷")
# Every write reaches the terminal at once, so this many lines are written together.
_AT_ONCE: Final = 500


class Styled(str):
    """Text with colours; as a string, without them."""

    pieces: tuple[tuple[str, str], ...]
    """Text and style of each part, for `rich.text.Text.assemble`."""

    def __new__(cls, *pieces: tuple[str, str]) -> Self:
        made = super().__new__(cls, "".join([text for text, _style in pieces]))
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
    """How it shrinks: an id stays whole, a command is cut at its end, a place in its middle, a sentence is wrapped."""
    least: int = 16
    """The minimum width before other columns are omitted."""
    left_out: int = 0
    """Without room, the column with the highest number is omitted first; 0 is never omitted."""


def terminal() -> "Console | None":
    """The terminal that standard output goes to; None for a file or a pipe."""
    # With these variables rich treats a pipe as a terminal.
    if not sys.stdout.isatty() and not any(os.environ.get(name) for name in ("FORCE_COLOR", "TTY_COMPATIBLE")):
        return None
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else None


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    screen = terminal()
    print_lines(screen, table_lines(columns, rows, None if screen is None else screen.width))


def print_lines(screen: "Console | None", lines: Iterable[str]) -> None:
    """Prints lines unchanged; a narrow terminal wraps them."""
    if screen is None:
        _write(sys.stdout, lines)
    else:
        _write(screen.file, map(_EscapeCodes(screen).of, lines))


def _write(file: IO[str], lines: Iterable[str]) -> None:
    rest = iter(lines)
    while some := list(itertools.islice(rest, _AT_ONCE)):
        some.append("")
        file.write("\n".join(some))


class _EscapeCodes:
    """Lines with rich's escape codes for their styles. Rich itself takes fifty times as long per line."""

    def __init__(self, screen: "Console") -> None:
        self._screen = screen
        self._around: dict[str, tuple[str, str]] = {}

    def of(self, line: str) -> str:
        return "".join([self._piece(text, style) if style and text else text for text, style in pieces_of(line)])

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
    if width is None:
        whole = ([column.name, *one] for column, one in zip(columns, cells, strict=True))
        padded = list(map(_padded, columns, whole, natural))
        yield from map(str.rstrip, map(_GAP.join, zip(*padded, strict=True)))
        return
    shown = _kept(columns, natural, width)
    widths = _narrowed(columns, natural, shown, width)
    yield from _lines(columns, [Styled((column.name, "dim")) for column in columns], widths, shown)
    if any(columns[place].gives == "wrap" and natural[place] > widths[place] for place in shown):
        for row in zip(*cells, strict=True):
            yield from _lines(columns, row, widths, shown)
        return
    yield from _whole_lines(
        [
            (columns[place], _cut(columns[place], cells[place], widths[place], natural[place]), widths[place])
            for place in shown
        ]
    )


def fits(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> bool:
    """Whether all columns fit, with the flexible ones at their minimum."""
    return _needed(columns, _measured(columns, rows)[1], range(len(columns))) <= width


def _measured(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> tuple[list[Sequence[str]], list[int]]:
    """The cells of each column, and its natural width."""
    cells: list[Sequence[str]] = [*zip(*rows, strict=True)] if rows else [() for _ in columns]
    natural = [_width(column.name) for column in columns]
    for place, one in enumerate(cells):
        if not "".join(one).isprintable():
            cells[place] = [cell if cell.isprintable() else _on_one_line(cell) for cell in one]
        natural[place] = max(natural[place], max(_widths(cells[place]), default=0))
    return cells, natural


def _width(text: str) -> int:
    if text.isascii() or text.translate(_NARROW).isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _widths(cells: Sequence[str]) -> Iterator[int]:
    return map(len if "".join(cells).isascii() else _width, cells)


def _padded(column: Column, cells: Sequence[str], width: int) -> Sequence[str]:
    """The cells of a column, all equally wide and without colours."""
    is_right = column.justify == "right"
    if "".join(cells).isascii():
        return [*map(str.rjust if is_right else str.ljust, cells, itertools.repeat(width))]
    blanks = (" " * (width - _width(cell)) for cell in cells)
    return [blank + cell if is_right else cell + blank for blank, cell in zip(blanks, cells, strict=True)]


def _cut(column: Column, cells: Sequence[str], width: int, natural: int) -> Sequence[str]:
    """The cells of a column, limited to this width if it may be cut."""
    if natural <= width:
        return cells
    return [cell if _width(cell) <= width else _fitted(column, cell, width)[0] for cell in cells]


def _whole_lines(columns: Sequence[tuple[Column, Sequence[str], int]]) -> Iterator[Styled]:
    """Each row is one line: uncoloured columns are joined first, coloured cells are inserted between them."""
    parts: list[Iterable[str]] = []
    plain: list[Iterable[str]] = []
    for column, cells, width in columns:
        gap = itertools.repeat(_GAP if plain or parts else "")
        if not any(isinstance(cell, Styled) for cell in cells):
            plain += [gap, _padded(column, cells, width)]
            continue
        blanks = [" " * (width - size) for size in _widths(cells)]
        is_right = column.justify == "right"
        parts += [_joined([*plain, gap, blanks] if is_right else [*plain, gap]), cells]
        plain = [] if is_right else [blanks]
    parts.append(_joined(plain))
    count = len(columns[0][1]) if columns else 0
    for row in itertools.islice(zip(*parts, strict=False), count):
        pieces: list[tuple[str, str]] = []
        for cell in row:
            if isinstance(cell, Styled):
                pieces += cell.pieces
            else:
                pieces.append((cell, ""))
        yield _stripped(pieces)


def _joined(columns: Sequence[Iterable[str]]) -> Iterator[str]:
    return map("".join, zip(*columns, strict=False)) if columns else itertools.repeat("")


def _on_one_line(cell: str) -> str:
    """Without line breaks and control characters."""
    return Styled(
        *(
            ("".join(letter if letter.isprintable() else " " for letter in text), style)
            for text, style in pieces_of(cell)
        )
    )


def _needed(columns: Sequence[Column], natural: Sequence[int], shown: Sequence[int]) -> int:
    return sum(_least(columns, natural, place) for place in shown) + len(_GAP) * (len(shown) - 1)


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
    excess = sum(widths[place] for place in shown) + len(_GAP) * (len(shown) - 1) - width
    while excess > 0:
        above = [place for place in shown if widths[place] > _least(columns, natural, place)]
        # Columns are cut no further: the terminal wraps the line.
        if not above:
            break
        *others, widest = sorted(above, key=lambda place: widths[place])
        least = max([_least(columns, natural, widest), *(widths[place] for place in others[-1:])])
        less = min(excess, max(1, widths[widest] - least))
        widths[widest] -= less
        excess -= less
    return widths


def _lines(columns: Sequence[Column], row: Sequence[str], widths: Sequence[int], shown: Sequence[int]) -> list[str]:
    """A row, with several lines if a cell is wrapped."""
    parts = [_fitted(columns[place], row[place], widths[place]) for place in shown]
    lines: list[str] = []
    for number in range(max(map(len, parts), default=0)):
        pieces: list[tuple[str, str]] = []
        for place, part in zip(shown, parts, strict=True):
            cell = part[number] if number < len(part) else ""
            blanks = " " * (widths[place] - _width(cell))
            before, after = (blanks, "") if columns[place].justify == "right" else ("", blanks)
            pieces += [(before, ""), *pieces_of(cell), (after + _GAP, "")]
        lines.append(_stripped(pieces))
    return lines


def _stripped(pieces: list[tuple[str, str]]) -> Styled:
    """Without trailing blanks."""
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
    cut = cut_in_the_middle(cell, width) if column.gives == "middle" else _first_cells(cell, width - 1) + "…"
    return [Styled((cut, style)) if style else cut]


def _first_cells(text: str, width: int) -> str:
    """As many letters as fit, padded with blanks for half a wide letter."""
    if text.isascii():
        return text[:width].ljust(width)
    from rich.cells import set_cell_size

    return set_cell_size(text, width)


def _wrapped(cell: str, width: int) -> list[str]:
    from rich.console import Console

    style = pieces_of(cell)[0][1]
    return [Styled((line.plain.rstrip(), style)) for line in rich_text(cell).wrap(Console(width=width), width)]


def bar(fraction: float, caption: str) -> Styled:
    """`████······  40%`."""
    # Make any activity visible.
    full = max(min(round(fraction * _BAR), _BAR), 1 if fraction > 0 else 0)
    return Styled(("█" * full, "cyan"), ("·" * (_BAR - full), "dim"), (f" {caption}", ""))


def cut_in_the_middle(text: str, width: int) -> str:
    """`gpu-box-1…ple.org:0,1`: both ends matter."""
    if _width(text) <= width:
        return text
    tail = text[len(text) - width // 2 :]
    return f"{_first_cells(text, width - 1 - _width(tail))}…{tail}"
