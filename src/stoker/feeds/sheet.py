"""The feed from a sheet: rows from the counter on become jobs, and what becomes of those is written beside them."""

import re
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from stoker.errors import StokerError
from stoker.feeds.gpu_words import GpuWords
from stoker.feeds.intake import Intake, Taken, Wanted
from stoker.feeds.patience import Patience
from stoker.feeds.rows import (
    Cell,
    Content,
    CounterError,
    Layout,
    SheetRow,
    Values,
    changes,
    content_of,
    holders,
    left_behind,
    to_take,
)
from stoker.feeds.voice import Voice
from stoker.queue import Job, QueueAwayError, Store

# Rows whose jobs are in the queue are shown as taken soon, also when somebody pastes thousands.
MOST_AT_ONCE: Final = 100
# One request may take long when it changes many cells.
MOST_CELLS: Final = 2000
# A row that was taken and not yet counted, because its feeder died or another one has just read it, may be edited in
# the meantime. For so long its number alone says that it was taken; after that another text in it is another command.
SECONDS_TO_COUNT: Final = 120.0
# What was read so long ago is read again before a row is taken for new: the machine may have slept in between.
SECONDS_TO_TAKE: Final = 40.0

_TAKEN_FROM: Final = re.compile(r"(\d+)#(\d+)")


class SheetAwayError(StokerError):
    """The sheet cannot be reached now; later it can."""


class SheetRefusedError(StokerError):
    """The sheet cannot be used as it was asked for."""


class Sheet(Protocol):
    """What the feed needs of a worksheet."""

    @property
    def identity(self) -> str: ...

    def read(self, ranges: Sequence[str]) -> Values: ...

    def write(self, cells: Sequence[Cell]) -> None: ...

    def close(self) -> None: ...


class Past:
    """What was made of the rows of a sheet before."""

    def __init__(self, prefix: str, jobs: Sequence[Job], content: Content) -> None:
        self._by_id = {job.id: job for job in jobs}
        self._where = holders(content)
        self._last: dict[int, tuple[int, Job]] = {}
        for job in jobs:
            place = _taken_from(prefix, job)
            if place is not None and place[1] > self.generation_at(place[0]):
                self._last[place[0]] = (place[1], job)

    def generation_at(self, row: int) -> int:
        """How often something was taken from there."""
        return self._last[row][0] if row in self._last else 0

    def job_of(self, row: SheetRow) -> Job | None:
        """The job that was made of this row: the one that is written beside it, or the last that was taken from there.

        Rows move when others above them come or go, and what is written beside them moves with them.
        """
        name = row.cells.get("id", "")
        if self._where.get(name) == row.number and name in self._by_id:
            return self._by_id[name]
        _, job = self._last.get(row.number, (0, None))
        return job if job is not None and self._where.get(job.id, row.number) == row.number else None


class SheetFeed:
    """One worksheet, and the queue that its rows go into."""

    def __init__(
        self, sheet: Sheet, layout: Layout, intake: Intake, open_store: Callable[[], Store], voice: Voice
    ) -> None:
        self._sheet = sheet
        self._layout = layout
        self._intake = intake
        self._open_store = open_store
        self._voice = voice
        self._store: Store | None = None
        self._gpus = GpuWords()

    def run_once(self) -> None:
        """Takes what is there."""
        while self._turn():
            pass

    def run(self, every: float) -> None:
        """Takes what is there and what comes, for ever."""
        patience = Patience(self._voice, QueueAwayError, SheetAwayError)
        more = patience.until_done(self._turn)
        # It has worked once: what is wrong from now on may be put right by whoever did it.
        patience.also(SheetRefusedError, CounterError)
        while True:
            if not more:
                time.sleep(every)
            more = patience.until_done(self._turn)

    def close(self) -> None:
        self._sheet.close()
        if self._store is not None:
            self._store.close()

    def _turn(self) -> bool:
        """One look at the sheet, and all that follows from it; whether there is more to take."""
        begun = _now()
        prefix = f"sheet:{self._sheet.identity}:"
        content = content_of(self._layout, self._sheet.read(self._layout.ranges()))
        if _now() - begun > SECONDS_TO_TAKE:
            return True
        store = self._opened()
        rows, counter = to_take(content, self._layout, MOST_AT_ONCE)
        self._take(store, prefix, content, rows)
        self._write(store, prefix, content, counter)
        self._warn(content)
        return len(rows) == MOST_AT_ONCE

    def _take(self, store: Store, prefix: str, content: Content, rows: Sequence[SheetRow]) -> None:
        able = [row for row in rows if not self._is_refused(row)]
        if not able:
            return
        past = Past(prefix, store.by_origin(prefix), content)
        now = store.clock()
        new = [row for row in able if self._is_new(row, past.job_of(row), now)]
        generations = {row.number: past.generation_at(row.number) + 1 for row in new}
        while new:
            # Another feeder that means the same generation of a row gets the same job.
            wanted = [Wanted(row.command, f"{prefix}{row.number}#{generations[row.number]}") for row in new]
            taken = list(zip(new, self._intake.take(store, wanted), strict=True))
            for _, one in taken:
                if one.is_new:
                    self._voice.job(one.id, one.wanted.command)
            new = [row for row, one in taken if not one.is_new and _is_forgotten(one, store)]
            for row in new:
                generations[row.number] += 1

    def _is_new(self, row: SheetRow, job: Job | None, now: float) -> bool:
        """Whether it is to become a job, although the counter may have been set back over it."""
        if job is None:
            return True
        is_recent = now - job.submitted < SECONDS_TO_COUNT
        if job.command == row.command:
            if not is_recent:
                self._voice.say_once(
                    f"row {row.number} was taken before, as job {job.id}: `stoker retry {job.id}` runs it again"
                )
            return False
        if is_recent:
            self._voice.say_once(
                f"row {row.number} was changed after it had become job {job.id}: the job stays as it is, so "
                "write the new command into a new row"
            )
        return not is_recent

    def _is_refused(self, row: SheetRow) -> bool:
        problem = self._intake.refusal(row.command)
        if problem is not None:
            self._voice.say_once(f"row {row.number} is left out: {problem}")
        return problem is not None

    def _write(self, store: Store, prefix: str, content: Content, counter: int) -> None:
        cells: list[Cell] = []
        if counter > content.counter:
            cells.append(Cell(self._layout.counter, counter))
        if self._layout.columns:
            found = [(_taken_from(prefix, job), job) for job in store.by_origin(prefix)]
            jobs = [(place[0], job) for place, job in found if place is not None]
            gpus = self._gpus.of([job for _, job in jobs], store) if "gpu" in self._layout.columns else {}
            cells += changes(content, self._layout, jobs, gpus)
        for start in range(0, len(cells), MOST_CELLS):
            self._sheet.write(cells[start : start + MOST_CELLS])

    def _warn(self, content: Content) -> None:
        behind = left_behind(content, self._layout)
        if behind:
            self._voice.say_once(
                f"row {behind[0].number} has a command that was not taken, and the counter is past it: write "
                f"{self._layout.counter_at(behind[0].number)} into {self._layout.counter} to have it taken"
            )

    def _opened(self) -> Store:
        if self._store is None:
            self._store = self._open_store()
        return self._store


def _now() -> float:
    """Goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _taken_from(prefix: str, job: Job) -> tuple[int, int] | None:
    """The row, and which generation of it."""
    found = _TAKEN_FROM.fullmatch((job.origin or "").removeprefix(prefix))
    return (int(found[1]), int(found[2])) if found else None


def _is_forgotten(taken: Taken, store: Store) -> bool:
    """Whether it was a job once and has been cleaned away since: what is in its row now is another command."""
    return not any(job.id == taken.id for job in store.by_origin(taken.wanted.origin))
