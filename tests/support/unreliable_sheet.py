"""A sheet that changes between any two requests, on a server that sometimes does not answer."""

import random
from collections.abc import Sequence

from stoker.feeds.rows import Cell, Values
from stoker.feeds.sheet import SheetAwayError
from tests.support.sheets_server import Worksheet

FIRST_ROW = 3


class UnreliableSheet:
    """The counter in B1, commands in column C from row 3 on. People do something before many a request."""

    def __init__(self, seed: int) -> None:
        self.cells = Worksheet(0, "Sheet1")
        self.random = random.Random(seed)
        self.changes_happen = True
        self.edits_happen = seed % 2 == 0
        """Otherwise the counter is lowered: both together would ask for another run of edited rows."""
        self.failing_writes = 0
        """Number of write requests that still fail."""
        self.written: list[str] = []
        """Every command that people wrote into a row, in the order of writing."""
        self.deleted: set[str] = set()
        self.edits: list[tuple[str, str]] = []

    @property
    def identity(self) -> str:
        return "key:0"

    def read(self, ranges: Sequence[str]) -> Values:
        self._people()
        if self.changes_happen and self.random.random() < 0.05:
            raise SheetAwayError("Google answered 503")
        return [self.cells.values(one) for one in ranges]

    def write(self, cells: Sequence[Cell]) -> None:
        self._people()
        if self.changes_happen and not self.failing_writes and self.random.random() < 0.1:
            self.failing_writes = self.random.randrange(1, 5)
        if self.failing_writes:
            self.failing_writes -= 1
            if self.random.random() < 0.5:
                raise SheetAwayError("Google answered 503")
        for cell in cells:
            self.cells[cell.address] = cell.value
        if self.failing_writes:
            raise SheetAwayError("the answer was lost")

    def close(self) -> None: ...

    def rows(self) -> dict[int, str]:
        """The rows with commands."""
        found = self.cells.values(f"C{FIRST_ROW}:C")
        return {number: cells[0] for number, cells in enumerate(found, FIRST_ROW) if cells}

    def append(self, command: str) -> None:
        self.write_row(max(self.rows(), default=FIRST_ROW - 1) + 1, command)

    def insert(self, number: int, command: str) -> None:
        self.cells.insert_row(number)
        self.write_row(number, command)

    def write_row(self, number: int, command: str) -> None:
        self.cells[f"C{number}"] = command
        self.written.append(command)

    def delete(self, number: int) -> None:
        self.deleted.add(self.cells[f"C{number}"])
        self.cells.delete_row(number)

    def edit(self, number: int) -> None:
        before = self.cells[f"C{number}"]
        self.cells[f"C{number}"] = f"{before} --edited"
        self.edits.append((before, f"{before} --edited"))

    def _people(self) -> None:
        if self.changes_happen and self.random.random() < 0.5:
            rows = sorted(self.rows())
            match self.random.choice(["append", "append", "insert", "insert", "delete", "edit", "counter", "blank"]):
                case "append":
                    self.append(self._command())
                case "insert" if rows:
                    self.insert(self.random.choice(rows), self._command())
                case "delete" if len(rows) > 3:
                    self.delete(self.random.choice(rows))
                case "edit" if rows and self.edits_happen:
                    number = self.random.choice(rows)
                    if "edited" not in self.cells[f"C{number}"]:
                        self.edit(number)
                case "counter" if not self.edits_happen and self.cells["B1"]:
                    self.cells["B1"] = str(self.random.randint(1, int(self.cells["B1"])))
                case "blank" if rows:
                    self.cells.insert_row(self.random.choice(rows))

    def _command(self) -> str:
        return f"python train.py --seed={len(self.written)}"
