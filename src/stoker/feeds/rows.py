"""The rows of a sheet: where things are on it, where the counter goes, which cells are to be written. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from stoker.errors import BadInputError

RowField = Literal["state", "gpu", "id", "link"]
Values = Sequence[Sequence[Sequence[str]]]
"""Rows of cells for each range; empty ends are missing."""

_COLUMN: Final = re.compile(r"[A-Z]{1,3}")
_CELL: Final = re.compile(r"([A-Z]{1,3})([1-9][0-9]{0,6})")
_OFF: Final = "off"


class CounterError(BadInputError):
    """The counter cell holds something else than a counter."""


class Layout(msgspec.Struct, frozen=True):
    """Where things are on the sheet."""

    counter: str
    commands: str
    first_row: int
    columns: dict[RowField, str]
    """Where each thing is written back; none when nothing is."""

    def ranges(self) -> list[str]:
        columns = [self.commands, *self.columns.values()]
        return [self.counter, *(f"{column}{self.first_row}:{column}" for column in columns)]

    def row_of(self, counter: int) -> int:
        """The row that a counter points at: 1 is the first."""
        return counter + self.first_row - 1

    def counter_at(self, row: int) -> int:
        return row - self.first_row + 1


class SheetRow(NamedTuple):
    number: int
    command: str
    cells: Mapping[RowField, str]
    """What is written back beside it now."""


class Content(NamedTuple):
    counter: int
    rows: Sequence[SheetRow]
    is_counted: bool
    """Whether the cell of the counter says anything."""


class Cell(NamedTuple):
    address: str
    value: str | int


def parse_columns(text: str) -> dict[RowField, str]:
    """The columns in `state=D,id=F`; none for `off`."""
    if text.strip().lower() == _OFF:
        return {}
    columns: dict[RowField, str] = {}
    for part in text.split(","):
        name, _, column = (piece.strip() for piece in part.partition("="))
        known = {field: field for field in get_args(RowField)}
        if name not in known or not _COLUMN.fullmatch(column.upper()):
            raise BadInputError(
                f"{text!r} does not say what goes where: write it like state=D,gpu=E,id=F,link=G, or off"
            )
        columns[known[name]] = column.upper()
    return columns


def parse_layout(counter: str, commands: str, first_row: int, columns: Mapping[RowField, str]) -> Layout:
    """Checks that no column or cell is used twice."""
    cell = _CELL.fullmatch(counter.strip().upper())
    if cell is None:
        raise BadInputError(f"{counter!r} is not a cell for the counter: write it like B1")
    if not _COLUMN.fullmatch(commands.strip().upper()):
        raise BadInputError(f"{commands!r} is not a column for the commands: write it like C")
    layout = Layout(cell[0], commands.strip().upper(), first_row, dict(columns))
    used = [layout.commands, *layout.columns.values()]
    if int(cell[2]) >= first_row:
        used.append(cell[1])
    if twice := [column for column in used if used.count(column) > 1]:
        raise BadInputError(f"column {twice[0]} is used for two things: give each its own column")
    return layout


def content_of(layout: Layout, values: Values) -> Content:
    """What was read of the ranges of the layout."""
    (first, *columns) = values
    counter = _counter(layout, _at(first, 0))
    commands, *others = columns
    written = dict(zip(layout.columns, others, strict=True))
    rows = [
        SheetRow(
            layout.first_row + index,
            _at(commands, index).strip(),
            {name: _at(cells, index) for name, cells in written.items()},
        )
        for index in range(max(map(len, columns)))
    ]
    return Content(counter, rows, bool(_at(first, 0).strip()))


def counter_after(content: Content, layout: Layout, unhandled: Sequence[SheetRow], floor: int) -> int:
    """The number of the next row to take: the first that was left for later, or the one after the last command."""
    if unhandled:
        return layout.counter_at(min(row.number for row in unhandled))
    return max(floor, layout.counter_at(max((row.number for row in content.rows if row.command), default=0) + 1), 1)


def changes(content: Content, layout: Layout, truth: Mapping[int, Mapping[RowField, str]]) -> list[Cell]:
    """The cells that say something else than the truth of their row."""
    return [
        Cell(f"{layout.columns[field]}{row.number}", value)
        for row in content.rows
        for field, value in truth.get(row.number, {}).items()
        if field in layout.columns and row.cells[field] != value
    ]


def _counter(layout: Layout, text: str) -> int:
    written = text.strip()
    if not written:
        return 1
    if not (written.isascii() and written.isdigit() and len(written) < 8 and int(written) > 0):
        raise CounterError(
            f"cell {layout.counter} says {written[:40]!r}: the number of the next row to take is meant, counted from 1 "
            f"in row {layout.first_row}"
        )
    return int(written)


def _at(cells: Sequence[Sequence[str]], index: int) -> str:
    if index < len(cells) and cells[index]:
        return str(cells[index][0])
    return ""
