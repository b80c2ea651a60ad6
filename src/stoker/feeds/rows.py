"""The rows of a sheet: which of them are to be taken, where the counter goes, what is written back. Pure."""

import re
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from stoker.errors import BadInputError
from stoker.queue.model import ID, Job

Field = Literal["state", "gpu", "id", "link"]
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
    columns: dict[Field, str]
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
    cells: Mapping[Field, str]
    """What is written back beside it now."""


class Content(NamedTuple):
    counter: int
    rows: Sequence[SheetRow]


class Cell(NamedTuple):
    address: str
    value: str | int


def parse_columns(text: str) -> dict[Field, str]:
    """The columns in `state=D,id=F`; none for `off`."""
    if text.strip().lower() == _OFF:
        return {}
    columns: dict[Field, str] = {}
    for part in text.split(","):
        name, _, column = (piece.strip() for piece in part.partition("="))
        known = {field: field for field in get_args(Field)}
        if name not in known or not _COLUMN.fullmatch(column.upper()):
            raise BadInputError(
                f"{text!r} does not say what goes where: write it like state=D,gpu=E,id=F,link=G, or off"
            )
        columns[known[name]] = column.upper()
    return columns


def parse_layout(counter: str, commands: str, first_row: int, columns: Mapping[Field, str]) -> Layout:
    """A layout in which everything has a place of its own."""
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
        raise BadInputError(f"column {twice[0]} is used for two things: give each a column of its own")
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
    return Content(counter, rows)


def to_take(content: Content, layout: Layout, limit: int) -> tuple[list[SheetRow], int]:
    """The next rows with commands, so many at the most, and the counter when they are taken.

    Rows that are empty are skipped as soon as there is something below them, and waited for before.
    """
    rows: list[SheetRow] = []
    counter = content.counter
    for row in content.rows:
        if row.number < layout.row_of(content.counter) or not row.command:
            continue
        if len(rows) == limit:
            break
        counter = layout.counter_at(row.number + 1)
        if not row.command.startswith("#"):
            rows.append(row)
    return rows, counter


def left_behind(content: Content, layout: Layout) -> list[SheetRow]:
    """Commands before the counter that nobody took, as far as can be told: they come after rows that were taken.

    That happens when rows above them are deleted, and they move up past the counter.
    """
    last_taken = max(holders(content).values(), default=None)
    if last_taken is None:
        return []
    return [
        row
        for row in content.rows
        if last_taken < row.number < layout.row_of(content.counter) and row.command and not row.command.startswith("#")
    ]


def holders(content: Content) -> dict[str, int]:
    """The row of each job that is written somewhere. Further rows with the same id are copies, made by a person."""
    found: dict[str, int] = {}
    for row in content.rows:
        name = row.cells.get("id", "")
        if ID.fullmatch(name):
            found.setdefault(name, row.number)
    return found


def changes(content: Content, layout: Layout, jobs: Sequence[tuple[int, Job]], gpus: Mapping[str, str]) -> list[Cell]:
    """The cells that say something else of these jobs than is true; each job with the row it was taken from.

    `gpus` are words for the GPUs of each job that has been on some.
    """
    cells = []
    for row, job in _matched(content, jobs):
        truth: dict[Field, str] = {"state": job.state, "gpu": gpus.get(job.id, ""), "id": job.id, "link": job.link}
        for field, column in layout.columns.items():
            if row.cells[field] != truth[field]:
                cells.append(Cell(f"{column}{row.number}", truth[field]))
    return cells


def _matched(content: Content, jobs: Sequence[tuple[int, Job]]) -> list[tuple[SheetRow, Job]]:
    """Each row with its job. A row moves when others above it come or go, and its id moves with it."""
    rows = {row.number: row for row in content.rows}
    where = holders(content)
    found = {where[job.id]: job for _, job in jobs if job.id in where}
    for number, job in jobs:
        row = rows.get(number)
        if row is None or row.command != job.command or job.id in where:
            continue
        # The id of another job gives way when it is of an earlier command in this row.
        if number not in found or found[number].command != row.command:
            found[number] = job
    return [(rows[number], job) for number, job in found.items()]


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
