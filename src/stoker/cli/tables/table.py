"""Tables: fitted to the width of a terminal, or plain text of any width."""

from collections.abc import Iterable, Sequence
from typing import Final, Literal, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

# A file or pipe has no width: nothing is cut there.
_PLAIN_WIDTH: Final = 200
_GAP: Final = 2
_BAR: Final = 10

CellText = Text | str


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


def console() -> Console:
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH)


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[CellText]]) -> None:
    screen = console()
    print_lines(screen, table_lines(columns, rows, width_of(screen)))


def print_lines(screen: Console, lines: Iterable[Text]) -> None:
    """Prints lines as they are; a terminal that is too narrow wraps them."""
    if not screen.is_terminal:
        screen.file.writelines(f"{line.plain}\n" for line in lines)
        return
    for line in lines:
        screen.print(line, no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)


def width_of(screen: Console) -> int | None:
    """The width of a table; None without a limit."""
    return screen.width if screen.is_terminal else None


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[CellText]], width: int | None) -> list[Text]:
    """The table with its heading; without a width each row is one whole line."""
    cells, natural = _measured(columns, rows)
    shown = list(range(len(columns)))
    if width is not None:
        shown = _kept(columns, natural, width)
        natural = _narrowed(columns, natural, shown, width)
    heading = [Text(column.name, style="dim") for column in columns]
    return [line for row in (heading, *cells) for line in _lines(columns, row, natural, shown)]


def fits(columns: Sequence[Column], rows: Sequence[Sequence[CellText]], width: int | None) -> bool:
    """Whether all columns fit, the flexible ones at their narrowest."""
    return width is None or _needed(columns, _measured(columns, rows)[1], range(len(columns))) <= width


def _measured(columns: Sequence[Column], rows: Sequence[Sequence[CellText]]) -> tuple[list[list[Text]], list[int]]:
    """The cells, and the width of each column without a limit."""
    cells = [[_on_one_line(cell) for cell in row] for row in rows]
    natural = [
        max([cell_len(column.name), *(row[place].cell_len for row in cells)]) for place, column in enumerate(columns)
    ]
    return cells, natural


def _on_one_line(cell: CellText) -> Text:
    """Without line breaks and control characters."""
    text = cell if isinstance(cell, Text) else Text(cell)
    if text.plain.isprintable():
        return text
    return Text("".join(letter if letter.isprintable() else " " for letter in text.plain), style=text.style)


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


def _lines(columns: Sequence[Column], row: Sequence[Text], widths: Sequence[int], shown: Sequence[int]) -> list[Text]:
    parts = [_fitted(columns[place], row[place], widths[place]) for place in shown]
    lines = []
    for number in range(max(map(len, parts), default=0)):
        line = Text()
        for place, part in zip(shown, parts, strict=True):
            piece = part[number].copy() if number < len(part) else Text()
            piece.align(columns[place].justify, widths[place])
            line.append_text(piece).append(" " * _GAP)
        line.rstrip()
        lines.append(line)
    return lines


def _fitted(column: Column, cell: Text, width: int) -> list[Text]:
    if cell.cell_len <= width:
        return [cell]
    if column.gives == "wrap":
        return list(cell.wrap(Console(width=width), width))
    if column.gives == "middle":
        return [Text(cut_in_the_middle(cell.plain, width), style=cell.style)]
    piece = cell.copy()
    piece.truncate(width, overflow="ellipsis")
    return [piece]


def bar(fraction: float, caption: str) -> Text:
    """`████······  40%`."""
    # Any activity is visible.
    full = max(min(round(fraction * _BAR), _BAR), 1 if fraction > 0 else 0)
    return Text.assemble(("█" * full, "cyan"), ("·" * (_BAR - full), "dim"), f" {caption}")


def cut_in_the_middle(text: str, width: int) -> str:
    """`gpu-box-1…ple.org:0,1`: both ends matter."""
    if cell_len(text) <= width:
        return text
    tail = text[len(text) - width // 2 :]
    return f"{set_cell_size(text, width - 1 - cell_len(tail))}…{tail}"
