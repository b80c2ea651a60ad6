"""The feed from a sheet: rows become jobs, each once, and what becomes of those is written beside them.

People edit the sheet at any moment, and Google knows no transactions: a row may have moved between a look and what is
written because of it. So rows are known by what `row_memory` remembers of them, which is kept in the queue and changes
together with the jobs; and whatever was written is read again, until every cell stands beside its row.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from stoker.errors import BadInputError, StokerError
from stoker.feeds.intake import FeedLog, Intake, RetryForever, SourceCommand
from stoker.feeds.row_memory import (
    Memory,
    Recognised,
    RememberedRow,
    claims_kept,
    digest,
    floor_of,
    is_command,
    look,
    pending_with,
)
from stoker.feeds.rows import (
    Cell,
    Content,
    CounterError,
    Layout,
    RowField,
    SheetRow,
    Values,
    changes,
    content_of,
    counter_after,
)
from stoker.queue import Attempt, Job, QueueAwayError, Store, Worker
from stoker.queue.fields import ID
from stoker.queue.jobs import new_id
from stoker.queue.model import ENDED

# Rows whose jobs are in the queue are shown as taken soon, also when somebody pastes thousands.
MOST_AT_ONCE: Final = 100
# One request may take long when it changes many cells.
MOST_CELLS: Final = 2000
# What was read so long ago is read again before a row is taken: the machine may have slept in between.
SECONDS_TO_TAKE: Final = 40.0
# How often a turn looks again at what it has written. What people keep moving is put right in the next turn.
MOST_ROUNDS: Final = 6
# A row is taken when its id was read beside it. When nothing could be written for so long, rows are taken without.
SECONDS_TO_WRITE: Final = 60.0
# Beside a row that no job can be made of.
LEFT_OUT: Final = "left out: "


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


class _Look(NamedTuple):
    """What was found on the sheet and in the queue, and is to be done about it."""

    prefix: str
    version: int
    """Of the memory."""
    memory: Memory | None
    content: Content
    rows: Recognised
    jobs: Mapping[str, Job]
    refused: Mapping[int, str]
    """Why no jobs can be made of these rows."""
    claimed: Mapping[int, str]
    """Rows beside which an id was read that was written for them: they become jobs now."""
    new: Sequence[SheetRow]
    later: Sequence[SheetRow]
    """New ones as well, for the next look."""


class _Step(NamedTuple):
    """What follows from a look."""

    cells: Sequence[Cell]
    claims: Mapping[int, str]
    """The ids that are to be written beside rows, by their numbers."""
    memory: Memory
    version: int


class SheetFeed:
    """One worksheet, and the queue that its rows go into."""

    def __init__(
        self, sheet: Sheet, layout: Layout, intake: Intake, open_store: Callable[[], Store], log: FeedLog
    ) -> None:
        self._sheet = sheet
        self._layout = layout
        self._intake = intake
        self._open_store = open_store
        self._log = log
        self._store: Store | None = None
        self._gpus = GpuWords()
        self._has_written = False
        """Whether the last look was followed by a request that wrote, and that one worked."""

    def run_once(self) -> None:
        """Takes what is there."""
        self._turn()

    def run(self, every: float) -> None:
        """Takes what is there and what comes, for ever."""
        patience = RetryForever(self._log, QueueAwayError, SheetAwayError)
        patience.until_done(self._round)
        # It has worked before, so later errors may be temporary.
        patience.also(SheetRefusedError, CounterError)
        while True:
            patience.until_done(self._turn)
            time.sleep(every)

    def close(self) -> None:
        self._sheet.close()
        if self._store is not None:
            self._store.close()

    def _turn(self) -> None:
        """Looks at the sheet until there is nothing to take, and all that was written is read beside its row."""
        fruitless = 0
        while fruitless < MOST_ROUNDS:
            took, is_done = self._round()
            if is_done:
                return
            fruitless = 0 if took else fruitless + 1

    def _round(self) -> tuple[int, bool]:
        """One look, and all that follows from it; how many rows were taken, and whether nothing is left to be done."""
        store = self._opened()
        found = self._look(store)
        if found is None:
            return 0, False
        step = self._take(store, found)
        if step is None:
            return 0, False
        self._has_written = False
        try:
            for start in range(0, len(step.cells), MOST_CELLS):
                self._sheet.write(step.cells[start : start + MOST_CELLS])
        except StokerError:
            self._take_unwritten(store, found, step)
            raise
        self._has_written = bool(step.cells)
        return len(found.claimed) + len(found.new), not step.cells and not found.later

    def _look(self, store: Store) -> _Look | None:
        """None when that took so long that it is old."""
        begun = _now()
        prefix = f"sheet:{self._sheet.identity}:{self._layout.commands}:"
        # Before the sheet is read: when another feed changes it meanwhile, what was read is old.
        version, text = store.feeds.memory(prefix)
        memory = msgspec.json.decode(text, type=Memory) if text else None
        content = content_of(self._layout, self._sheet.read(self._layout.ranges()))
        jobs = {job.id: job for job in store.jobs.by_origin(prefix)}
        rows = look(memory, content, self._layout, store.clock(), _known(store, prefix, jobs, content))
        refused = {row.number: problem for row in rows.unknown if (problem := self._refusal(row)) is not None}
        able = [row for row in rows.unknown if row.number not in refused]
        claimed = _claimed(memory, able)
        new = [row for row in able if row.number not in claimed]
        if _now() - begun > SECONDS_TO_TAKE:
            return None
        return _Look(
            prefix, version, memory, content, rows, jobs, refused, claimed, new[:MOST_AT_ONCE], new[MOST_AT_ONCE:]
        )

    def _take(self, store: Store, found: _Look) -> _Step | None:
        """Puts rows into the queue, together with what is remembered; what is to be written then.

        Where there is a column for ids, a row becomes a job when its id is read beside it: wherever the row moves,
        whatever else it says by then, it is known. None when another feed was faster, and all must be read again.
        """
        rows = {row.number: row for row in found.content.rows}
        now = store.clock()
        claims = {row.number: new_id() for row in found.new}
        are_marked = "id" in self._layout.columns
        taken = {**found.claimed} if are_marked else claims
        entries = dict(found.rows.found)
        for number, name in taken.items():
            text = digest(rows[number].command)
            entries[number] = RememberedRow(name, text, text, number, now, seen=are_marked, marked=are_marked)
        cells = self._cells(store, found, entries, {**found.claimed, **claims})
        floor = floor_of(found.memory, found.content)
        wanted = counter_after(found.content, self._layout, found.later, floor)
        if found.content.counter != wanted:
            cells.insert(0, Cell(self._layout.counter, wanted))
        after = Memory(
            counter=found.content.counter,
            wanted=wanted,
            floor=floor,
            ids=self._layout.columns.get("id", ""),
            entries=[*entries.values(), *found.rows.away],
            claims={**claims_kept(found.memory, found.content, now), **dict.fromkeys(claims.values(), now)},
            fresh=[digest(row.command) for row in (*found.new, *found.later)],
            failing=0.0 if self._has_written or found.memory is None else found.memory.failing,
            pending=pending_with(found.memory, self._layout, cells),
        )
        for name in taken.values():
            after.claims.pop(name, None)
        if after.ids and any(one.address.startswith(after.ids) for one in cells):
            # Until all is read again: an id that is written beside a row that moved takes the place of another.
            after.entries = [replace(entry, seen=False) for entry in after.entries]
        done = self._put(store, found, found.version, after, [(rows[number], name) for number, name in taken.items()])
        version = found.version + (after != found.memory or bool(taken))
        return _Step(cells, claims, after, version) if done else None

    def _take_unwritten(self, store: Store, found: _Look, step: _Step) -> None:
        """A sheet that cannot be written to must not keep anything from running: then rows are known by their text."""
        now = store.clock()
        after = replace(step.memory, failing=step.memory.failing or now)
        taken: list[tuple[SheetRow, str]] = []
        if now - after.failing >= SECONDS_TO_WRITE:
            rows = {row.number: row for row in found.content.rows}
            taken = [(rows[number], name) for number, name in step.claims.items() if name in after.claims]
            fresh = [
                RememberedRow(name, digest(row.command), digest(row.command), row.number, now) for row, name in taken
            ]
            names = {name for _, name in taken}
            after.entries = [*after.entries, *fresh]
            after.claims = {name: at for name, at in after.claims.items() if name not in names}
        if after != step.memory:
            self._put(store, found, step.version, after, taken)

    def _put(
        self, store: Store, found: _Look, version: int, after: Memory, taken: Sequence[tuple[SheetRow, str]]
    ) -> bool:
        """False, and nothing is done, when another feed was faster or an id is somebody else's by chance."""
        made = [
            replace(job, id=name, origin=f"{found.prefix}{name}")
            for job, (_, name) in zip(
                self._intake.made([SourceCommand(row.command, found.prefix) for row, _ in taken]), taken, strict=True
            )
        ]
        if not made and version == found.version and after == found.memory:
            return True
        try:
            if not store.feeds.take(found.prefix, version, _text(after), made):
                return False
        except BadInputError:
            if not made:
                raise
            # These rows get others.
            store.feeds.take(found.prefix, version, _text(replace(found.memory or Memory(), claims={})), [])
            return False
        for row, name in taken:
            self._log.job(name, row.command)
        return True

    def _cells(
        self, store: Store, found: _Look, entries: Mapping[int, RememberedRow], fresh: Mapping[int, str]
    ) -> list[Cell]:
        """What must be written so that all is right beside every row."""
        columns = self._layout.columns
        ours = {entry.id for entry in entries.values()} - {""}
        shown = [found.jobs[name] for name in sorted(ours) if name in found.jobs]
        gpus = self._gpus.of(shown, store) if "gpu" in columns else {}
        last = found.memory or Memory()
        truth: dict[int, dict[RowField, str]] = {}
        for row in found.content.rows:
            entry = entries.get(row.number)
            if row.number in fresh:
                truth[row.number] = {"state": "queued", "gpu": "", "id": fresh[row.number], "link": ""}
                continue
            if entry is not None and entry.id:
                # What stands beside a job that `stoker clean` has forgotten stays.
                job = found.jobs.get(entry.id)
                truth[row.number] = {"id": entry.id} if job is None else self._about(row, entry, job, gpus)
                continue
            # What was written beside it belongs to a row that has moved.
            stray: dict[RowField, str] = {
                field: "" for field, column in columns.items() if row.cells[field] in last.pending.get(column, ())
            }
            name = row.cells.get("id", "")
            if name in ours or (name in last.claims and not is_command(row)):
                stray["id"] = ""
            if row.cells.get("state", "").startswith(LEFT_OUT):
                stray["state"] = ""
            if row.number in found.refused:
                stray["state"] = LEFT_OUT + found.refused[row.number]
            truth[row.number] = stray
        return changes(found.content, self._layout, truth)

    def _about(self, row: SheetRow, entry: RememberedRow, job: Job, gpus: Mapping[str, str]) -> dict[RowField, str]:
        """What is to be read beside the row of this job."""
        state: str = job.state
        if entry.again and job.state not in ENDED:
            entry.again = False
        if entry.is_edited and row.command:
            state += ", as it was when taken: write the change into a new row"
            self._log.write_once(
                f"row {row.number} was changed after it had become job {job.id}: the job stays as it is, so "
                "write the new command into a new row"
            )
        elif entry.again:
            state += f": `stoker retry {job.id}` runs it again"
            self._log.write_once(
                f"row {row.number} was taken before, as job {job.id}: `stoker retry {job.id}` runs it again"
            )
        return {"state": state, "gpu": gpus.get(job.id, ""), "id": job.id, "link": job.link}

    def _refusal(self, row: SheetRow) -> str | None:
        problem = self._intake.refusal(row.command)
        if problem is not None:
            self._log.write_once(f"row {row.number} is left out: {problem}")
        return problem

    def _opened(self) -> Store:
        if self._store is None:
            self._store = self._open_store()
        return self._store


def _now() -> float:
    """Goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _text(memory: Memory) -> str:
    return msgspec.json.encode(memory).decode()


def _claimed(memory: Memory | None, rows: Sequence[SheetRow]) -> dict[int, str]:
    """The rows that are claimed, each by its id; further rows with the same id are copies."""
    claimed: dict[str, int] = {}
    for row in rows:
        name = row.cells.get("id", "").strip()
        if memory is not None and name in memory.claims:
            claimed.setdefault(name, row.number)
    return {number: name for name, number in claimed.items()}


def _known(store: Store, prefix: str, jobs: Mapping[str, Job], content: Content) -> set[str]:
    """The ids on the sheet that are jobs of it, or were before they were cleaned away."""
    written = {row.cells.get("id", "").strip() for row in content.rows}
    ids = {name for name in written if ID.fullmatch(name)}
    unknown = sorted(ids - jobs.keys())
    origins = store.feeds.known_origins([f"{prefix}{name}" for name in unknown])
    return {name for name in ids if name in jobs or f"{prefix}{name}" in origins}


class GpuWords:
    """Remembers what it found out: an attempt keeps its GPUs."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}

    def of(self, jobs: Sequence[Job], store: Store) -> Mapping[str, str]:
        """Words for each of the jobs that has been somewhere."""
        started = [
            (job, job.attempt) for job in jobs if job.attempt is not None and job.state not in ("queued", "held")
        ]
        if unknown := [name for _, name in started if name not in self._words]:
            workers = store.workers.all()
            for name in unknown:
                attempt = store.attempts.get(name)
                self._words[name] = words(attempt, workers) if attempt is not None else ""
        return {job.id: self._words[name] for job, name in started}


def words(attempt: Attempt, workers: Sequence[Worker]) -> str:
    """`GPU 0 and 1 on lab1`; only the machine for a job without GPUs, a part of the uuid where no worker knows it."""
    indices = {gpu.uuid: str(gpu.index) for worker in workers for gpu in worker.view.gpus}
    hosts = [worker.host for worker in workers if worker.id == attempt.worker]
    place = f" on {hosts[0]}" if hosts else ""
    if not attempt.gpus:
        return hosts[0] if hosts else "no GPU"
    return "GPU " + " and ".join(indices.get(uuid, uuid.removeprefix("GPU-")[:8]) for uuid in attempt.gpus) + place
