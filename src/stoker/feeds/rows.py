"""The rows of a sheet: their layout, and their identity after edits. Pure.

The id that the feed wrote beside a row identifies it. Google has no transactions: rows may move between a read and a
write, and an id may overwrite that of another row. After ids were written, rows that lack theirs are therefore
recognized by their text.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Final, Literal, NamedTuple, get_args

import msgspec

from stoker.errors import BadInputError

RowField = Literal["state", "gpu", "id", "link"]
Values = Sequence[Sequence[Sequence[str]]]
"""Rows of cells for each range; empty ends are missing."""

# A claim whose id does not appear after this many seconds was never written, or its row was deleted.
SECONDS_TO_CLAIM: Final = 3600.0

_COLUMN: Final = re.compile(r"[A-Z]{1,3}")
_CELL: Final = re.compile(r"([A-Z]{1,3})([1-9][0-9]{0,6})")


class CounterError(BadInputError):
    """The counter cell does not hold a counter."""


class Layout(msgspec.Struct, frozen=True):
    """The layout of the sheet."""

    counter: str
    commands: str
    first_row: int
    columns: dict[RowField, str]
    """The column of each written field; always contains `id`."""

    def ranges(self) -> list[str]:
        columns = [self.commands, *self.columns.values()]
        return [self.counter, *(f"{column}{self.first_row}:{column}" for column in columns)]

    def row_of(self, counter: int) -> int:
        """The row that a counter refers to; 1 is the first."""
        return counter + self.first_row - 1


class SheetRow(NamedTuple):
    number: int
    command: str
    cells: Mapping[RowField, str]
    """The cells beside it now."""

    @property
    def id(self) -> str:
        return self.cells["id"].strip()

    @property
    def digest(self) -> str:
        return sha256(self.command.encode()).hexdigest()[:16]

    @property
    def is_command(self) -> bool:
        return bool(self.command) and not self.command.startswith("#")


class Content(NamedTuple):
    counter: int
    rows: Sequence[SheetRow]
    is_counted: bool
    """Whether the counter's cell has a value."""


class Cell(NamedTuple):
    address: str
    value: str | int


def parse_columns(text: str) -> dict[RowField, str]:
    """The columns in `state=D,id=F`."""
    columns: dict[RowField, str] = {}
    for part in text.split(","):
        name, _, column = (piece.strip() for piece in part.partition("="))
        known = {field: field for field in get_args(RowField)}
        if name not in known or not _COLUMN.fullmatch(column.upper()):
            raise BadInputError(f"{text!r} does not say what goes where: write it like state=D,gpu=E,id=F,link=G")
        columns[known[name]] = column.upper()
    if "id" not in columns:
        raise BadInputError(f"{text!r} has no column for ids, by which rows are recognized: add one, like id=F")
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
    """The contents of the layout's ranges."""
    (first, *columns) = values
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
    counter = _at(first, 0).strip()
    return Content(_counter(layout, counter), rows, bool(counter))


def _counter(layout: Layout, written: str) -> int:
    if not written:
        return 1
    if not (written.isascii() and written.isdigit() and len(written) < 8 and int(written) > 0):
        raise CounterError(
            f"cell {layout.counter} says {written[:40]!r}: it must be the number of the next row to take, counted from "
            f"1 in row {layout.first_row}"
        )
    return int(written)


def _at(cells: Sequence[Sequence[str]], index: int) -> str:
    if index < len(cells) and cells[index]:
        return str(cells[index][0])
    return ""


def changes(content: Content, layout: Layout, truth: Mapping[int, Mapping[RowField, str]]) -> list[Cell]:
    """The cells that differ from the correct value for their row."""
    return [
        Cell(f"{layout.columns[field]}{row.number}", value)
        for row in content.rows
        for field, value in truth.get(row.number, {}).items()
        if field in layout.columns and row.cells[field] != value
    ]


class TakenRow(msgspec.Struct, array_like=True):
    """A row that became a job."""

    id: str
    """Its job."""
    digest: str
    """Digest of its text when last seen."""
    taken: str
    """Digest of its text at submission."""
    again: bool = False
    """Whether somebody set the counter back past it after its job had ended."""

    @property
    def is_edited(self) -> bool:
        return self.digest != self.taken


class Claim(msgspec.Struct, array_like=True):
    """A row that becomes a job when its id is read back beside it, or beside another new row."""

    digest: str
    at: float


class Memory(msgspec.Struct):
    """A feed's state of a sheet, stored in the queue."""

    counter: int = 1
    """The cell's value at the last read."""
    wanted: int = 1
    """The value that the feed wants."""
    floor: int = 1
    """The value to which a person, or an earlier program, has raised it."""
    verified: str = ""
    """The column in which all ids were read beside their rows; empty if ids were written since."""
    taken: list[TakenRow] = []
    claims: dict[str, Claim] = {}
    """By their ids."""
    skipped: dict[str, int] = {}
    """Number of rows with this text digest before the counter when they were first seen."""
    written: dict[str, list[str]] = {}
    """Values written to each column since the last correct read: they may be beside rows that have moved."""


class Recognized(NamedTuple):
    taken: dict[int, TakenRow]
    """By current row number."""
    missing: list[TakenRow]
    """Rows not found now, which may reappear."""
    skipped: dict[int, SheetRow]
    new: list[SheetRow]
    """Rows with unprocessed commands."""


def recognize(memory: Memory | None, content: Content, layout: Layout, known: Collection[str]) -> Recognized:
    """Identifies each row. `known`: ids in the sheet that are, or were, its jobs; no memory means the first read."""
    last = memory or Memory()
    is_verified = last.verified == layout.columns["id"]
    left = {entry.id: entry for entry in last.taken}
    free = {row.number: row for row in content.rows}
    taken: dict[int, TakenRow] = {}

    def match(row: SheetRow, entry: TakenRow) -> None:
        taken[row.number] = msgspec.structs.replace(entry, digest=row.digest)
        del free[row.number]
        left.pop(entry.id, None)

    for row in content.rows:
        if row.id in left and left[row.id].digest == row.digest:
            match(row, left[row.id])
    # One of our ids beside another text was written for a row that has moved or that another feed has submitted.
    ours = {*known, *last.claims, *left, *(entry.id for entry in taken.values())}
    # Rows without an id come first: others may have been edited into this text.
    for row in sorted(free.values(), key=lambda row: bool(row.id)):
        if row.is_command and (row.id in ours or not is_verified):
            same = next((entry for entry in left.values() if entry.digest == row.digest), None)
            if same is not None:
                match(row, same)
    # None of the claimed rows is an edited older one.
    claimed = set() if is_verified else {claim.digest for claim in last.claims.values()}
    for row in [*free.values()]:
        if row.id in left and row.digest not in claimed:
            match(row, left[row.id])
    # Undoing a deletion brings a row back with its id.
    forgotten = set(known) - {entry.id for entry in last.taken}
    for row in [*free.values()]:
        if row.id in forgotten:
            forgotten.discard(row.id)
            match(row, TakenRow(row.id, row.digest, row.digest))
    waiting = [row for row in free.values() if row.is_command]
    missing = [] if is_verified else [*left.values()]
    return _counted(memory, content, layout, Recognized(taken, missing, _skipped(last, waiting), waiting))


def _skipped(last: Memory, rows: Iterable[SheetRow]) -> dict[int, SheetRow]:
    left = Counter(last.skipped)
    skipped = {}
    for row in rows:
        if left[row.digest]:
            left[row.digest] -= 1
            skipped[row.number] = row
    return skipped


def _counted(memory: Memory | None, content: Content, layout: Layout, rows: Recognized) -> Recognized:
    """Applies the counter: setting it forward skips new rows, setting it back restores rows."""
    at = layout.row_of(content.counter)
    before = layout.first_row if memory is None else layout.row_of(max(memory.counter, memory.wanted))
    taken, skipped, new = rows.taken, rows.skipped, {row.number: row for row in rows.new}
    if memory is None or was_moved(memory, content):
        skipped |= {number: row for number, row in new.items() if before <= number < at}
        if at < before:
            skipped = {number: row for number, row in skipped.items() if number < at}
            for row in content.rows:
                entry = taken.get(row.number)
                if entry is None or row.number < at:
                    continue
                if entry.is_edited and row.is_command:
                    new[row.number] = row
                    del taken[row.number]
                else:
                    entry.again = True
    unhandled = [new[number] for number in sorted(new.keys() - skipped.keys())]
    return Recognized(taken, rows.missing, skipped, unhandled)


def was_moved(memory: Memory, content: Content) -> bool:
    """Whether somebody else wrote the counter. An empty cell proves nothing: rows may have been inserted above."""
    return content.is_counted and content.counter not in (memory.counter, memory.wanted)


def floor_of(memory: Memory | None, content: Content) -> int:
    """The lower bound of the counter: the value that somebody else has set."""
    if memory is None:
        return content.counter
    if was_moved(memory, content):
        return content.counter if content.counter > max(memory.counter, memory.wanted) else 1
    return memory.floor


def counter_after(content: Content, layout: Layout, floor: int) -> int:
    """The number of the row after the last command."""
    last = max((row.number for row in content.rows if row.command), default=0)
    return max(floor, last - layout.first_row + 2, 1)


def claimed(memory: Memory | None, rows: Sequence[SheetRow]) -> dict[int, str]:
    """The claimed rows by id; further rows with the same id are copies."""
    claims: dict[str, int] = {}
    for row in rows:
        if memory is not None and row.id in memory.claims:
            claims.setdefault(row.id, row.number)
    return {number: name for name, number in claims.items()}


def claims_kept(memory: Memory | None, content: Content, now: float) -> dict[str, Claim]:
    """Claims whose ids are beside a row, or may still be written."""
    written = {row.id for row in content.rows}
    claims = memory.claims if memory is not None else {}
    return {name: claim for name, claim in claims.items() if name in written or now - claim.at < SECONDS_TO_CLAIM}


def written_with(memory: Memory | None, layout: Layout, cells: Sequence[Cell]) -> dict[str, list[str]]:
    """What `Memory.written` becomes when these cells are written."""
    if not cells:
        return {}
    values = {column: set(written) for column, written in (memory.written if memory is not None else {}).items()}
    for cell in cells:
        if cell.value and cell.address != layout.counter:
            values.setdefault(cell.address.rstrip("0123456789"), set()).add(str(cell.value))
    return {column: sorted(written) for column, written in values.items()}
