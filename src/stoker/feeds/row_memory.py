"""What a feed remembers of the rows of a sheet, and how it knows them again after people have edited it. Pure."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Final, NamedTuple

import msgspec

from stoker.feeds.rows import Cell, Content, Layout, SheetRow

# A row whose id was never seen beside it and that is missing now may be back at the next look: the sheet may have been
# read in the middle of somebody's work, or somebody else may have answered for Google.
SECONDS_TO_COME_BACK: Final = 120.0
# Without an id beside it, a row that was just taken and has another text now was edited; later that is another command.
SECONDS_TO_EDIT: Final = 120.0

# A claim that stands nowhere after so long was never written, or its row was deleted.
SECONDS_TO_CLAIM: Final = 3600.0


class RememberedRow(msgspec.Struct, array_like=True):
    """A row that was dealt with."""

    id: str
    """Its job; empty for a row that the counter was past from the beginning."""
    digest: str
    """Of its text when it was last seen."""
    taken: str
    """Of its text when it was taken."""
    row: int
    """Where it was last seen."""
    at: float
    """When it was taken."""
    seen: bool = False
    """Whether its id stands beside it for certain: it was read there, and no ids were written since."""
    marked: bool = False
    """Whether its id was ever read beside it: then its place says nothing, unless a claim stands there instead."""
    away: float = 0.0
    """Since when it is missing; 0 when it is not."""
    again: bool = False
    """Whether somebody set the counter back over it after its job had ended."""

    @property
    def is_edited(self) -> bool:
        return self.digest != self.taken


class Memory(msgspec.Struct):
    counter: int = 1
    """What the cell said at the last look."""
    wanted: int = 1
    """What the feed wants it to say."""
    floor: int = 1
    """What a person, or the program before this one, has raised it to."""
    ids: str = ""
    """The column in which ids were seen."""
    entries: list[RememberedRow] = []
    claims: dict[str, float] = {}
    """Ids that were, or are to be, written beside rows which become jobs when they are read there; and since when."""
    fresh: list[str] = []
    """Digests of rows that were new at the last look: none of them is an older row that was edited."""
    failing: float = 0.0
    """Since when nothing can be written; 0 when that works."""
    pending: dict[str, list[str]] = {}
    """What was written into each column since all was last found right: it may stand beside rows that moved."""


def claims_kept(memory: Memory | None, content: Content, now: float) -> dict[str, float]:
    """Those that stand beside a row, or that may still be written."""
    if memory is None:
        return {}
    written = {row.cells.get("id", "") for row in content.rows}
    return {name: at for name, at in memory.claims.items() if name in written or now - at < SECONDS_TO_CLAIM}


def pending_with(memory: Memory | None, layout: Layout, cells: Sequence[Cell]) -> dict[str, list[str]]:
    if not cells:
        return {}
    values = {column: set(written) for column, written in (memory.pending if memory is not None else {}).items()}
    for cell in cells:
        if cell.value and cell.address != layout.counter:
            values.setdefault(cell.address.rstrip("0123456789"), set()).add(str(cell.value))
    return {column: sorted(written) for column, written in values.items()}


class Recognised(NamedTuple):
    found: dict[int, RememberedRow]
    """By the numbers that their rows have now."""
    away: list[RememberedRow]
    unknown: list[SheetRow]
    """Rows with commands that were not dealt with yet."""


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:16]


def look(memory: Memory | None, content: Content, layout: Layout, now: float, known: Collection[str]) -> Recognised:
    """What each row is. `known` are ids in the sheet that are, or were, jobs of it; no memory means the first look."""
    last = memory or Memory()
    column = layout.columns.get("id", "")
    if column != last.ids:
        last = msgspec.structs.replace(
            last, entries=[msgspec.structs.replace(entry, seen=False) for entry in last.entries]
        )
    found, away, unknown = recognise(last.entries, content.rows, now, known, last, has_ids=bool(column))
    rows = {row.number: row for row in content.rows}
    skipped = range(layout.first_row, layout.row_of(content.counter)) if memory is None else range(0)
    before = max(last.counter, last.wanted)
    if was_moved(memory, content):
        skipped = range(layout.row_of(before), layout.row_of(content.counter))
        for number, entry in [*found.items()]:
            if content.counter >= before or number < layout.row_of(content.counter):
                continue
            if is_command(rows[number]) and (not entry.id or entry.is_edited):
                del found[number]
                unknown.append(rows[number])
            else:
                entry.again = True
    for row in unknown:
        if row.number in skipped:
            text = digest(row.command)
            found[row.number] = RememberedRow(id="", digest=text, taken=text, row=row.number, at=now)
    return Recognised(found, away, sorted((row for row in unknown if row.number not in found), key=_number))


def was_moved(memory: Memory | None, content: Content) -> bool:
    """Whether somebody else has written the counter. An empty cell says nothing: rows may have been inserted above."""
    return memory is not None and content.is_counted and content.counter not in (memory.counter, memory.wanted)


def floor_of(memory: Memory | None, content: Content) -> int:
    if memory is None or was_moved(memory, content):
        is_raised = memory is None or content.counter > max(memory.counter, memory.wanted)
        return content.counter if is_raised else 1
    return memory.floor


def is_command(row: SheetRow) -> bool:
    return bool(row.command) and not row.command.startswith("#")


def recognise(
    entries: Iterable[RememberedRow],
    rows: Sequence[SheetRow],
    now: float,
    known: Collection[str],
    last: Memory,
    *,
    has_ids: bool,
) -> Recognised:
    """Each entry with its row. The id beside a row says most, then its text, and its place the least."""
    search = _Search(entries, rows)
    search.match(lambda entry, row: row.digest == entry.digest, by="id")
    search.match(lambda entry, _: entry.seen, by="id")
    adopted = search.adopted(known, now)
    search.match(lambda entry, row: not entry.seen and row.is_command, by="text")
    # Where one's own ids stand beside other rows, rows moved while they were written, and others were written over.
    search.match(lambda _, row: row.is_command and search.is_ours(row.id, known, last.claims), by="text")
    search.match(lambda entry, row: not entry.seen and row.digest not in last.fresh, by="id")
    search.match_places(
        lambda entry, row: (
            bool(entry.id)
            and not entry.away
            and (not entry.marked or row.id in last.claims)
            and row.digest not in last.fresh
            and (has_ids or now - entry.at < SECONDS_TO_EDIT)
        )
    )
    found = adopted
    for number, entry in search.found.items():
        row = search.rows[number]
        seen = has_ids and bool(entry.id) and row.id == entry.id
        found[number] = msgspec.structs.replace(
            entry, digest=row.digest, row=number, seen=seen, marked=entry.marked or seen, away=0.0
        )
    away = [
        msgspec.structs.replace(entry, away=entry.away or now)
        for entry in search.left
        if not entry.seen and (not entry.away or now - entry.away < SECONDS_TO_COME_BACK)
    ]
    unknown = [search.rows[number].row for number in search.free if search.rows[number].is_command]
    return Recognised(found, away, unknown)


class _Row(NamedTuple):
    row: SheetRow
    id: str
    digest: str
    is_command: bool


class _Search:
    """Entries and rows that have not found each other yet."""

    def __init__(self, entries: Iterable[RememberedRow], rows: Sequence[SheetRow]) -> None:
        self.entries = sorted(entries, key=lambda entry: entry.row)
        self.rows = {
            row.number: _Row(row, row.cells.get("id", "").strip(), digest(row.command), is_command(row)) for row in rows
        }
        self.free = dict.fromkeys(sorted(self.rows))
        self.found: dict[int, RememberedRow] = {}
        self._left = dict(enumerate(self.entries))
        self._ids = {entry.id for entry in self.entries} - {""}

    @property
    def left(self) -> list[RememberedRow]:
        return list(self._left.values())

    def is_ours(self, name: str, *others: Collection[str]) -> bool:
        return name in self._ids or any(name in some for some in others)

    def match(self, fits: Callable[[RememberedRow, _Row], bool], *, by: str) -> None:
        """First those that are where they were, then the others in their order; rows without an id come first."""
        places: Mapping[str, list[int]] = defaultdict(list)
        for number in sorted(self.free, key=lambda number: (bool(self.rows[number].id), number)):
            row = self.rows[number]
            places[row.id if by == "id" else row.digest].append(number)
        for in_place in (True, False):
            for index, entry in [*self._left.items()]:
                for number in (
                    places.get(entry.id if by == "id" else entry.digest, ()) if entry.id or by != "id" else ()
                ):
                    if number in self.free and (number == entry.row or not in_place) and fits(entry, self.rows[number]):
                        self._take(index, number)
                        break

    def adopted(self, known: Collection[str], now: float) -> dict[int, RememberedRow]:
        """Rows that come back with the id of a job that was forgotten here, as when somebody undoes a deletion."""
        entries: dict[int, RememberedRow] = {}
        names = set(known) - self._ids
        for number in [*self.free]:
            row = self.rows[number]
            if row.id in names:
                names.discard(row.id)
                del self.free[number]
                entries[number] = RememberedRow(row.id, row.digest, row.digest, number, now, seen=True, marked=True)
        return entries

    def match_places(self, fits: Callable[[RememberedRow, _Row], bool]) -> None:
        """Rows that still are as far below the row before them as they were, with another text: they were edited."""
        now_at = {id(entry): number for number, entry in self.found.items()}
        # What came or went above them has moved the rows before them as far, or those after them.
        for order in (1, -1):
            shift = 0
            for index, entry in [*enumerate(self.entries)][::order]:
                if id(entry) in now_at:
                    shift = now_at[id(entry)] - entry.row
                elif index in self._left:
                    number = entry.row + shift
                    if number in self.free and self.rows[number].is_command and fits(entry, self.rows[number]):
                        self._take(index, number)

    def _take(self, index: int, number: int) -> None:
        self.found[number] = self._left.pop(index)
        del self.free[number]


def _number(row: SheetRow) -> int:
    return row.number
