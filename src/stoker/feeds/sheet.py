"""The feed from a sheet: each row becomes a job once, and the job's state is written beside it.

People may edit the sheet at any time. A row becomes a job when its id has been read back beside it. The feed's state is
stored in the queue and changes in the transactions of the jobs. Written cells are read again until every one is beside
its row.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from stoker.errors import BadInputError, StokerError
from stoker.feeds.intake import FeedLog, Intake, RetryForever, SourceCommand
from stoker.feeds.rows import (
    Cell,
    Claim,
    Content,
    CounterError,
    Layout,
    Memory,
    RowField,
    SheetRow,
    TakenRow,
    Values,
    changes,
    claimed,
    claims_kept,
    content_of,
    counter_after,
    floor_of,
    recognize,
    written_with,
)
from stoker.queue import Attempt, Job, QueueAwayError, Store, Worker
from stoker.queue.field_kinds import ID
from stoker.queue.jobs import new_id
from stoker.queue.model import ENDED

# A request that changes many cells may take long.
MOST_CELLS: Final = 2000
# How often a turn verifies what it has written. If people keep moving rows, the next turn corrects them.
MOST_ROUNDS: Final = 6
# Beside a row with an invalid command.
LEFT_OUT: Final = "left out: "


class SheetAwayError(StokerError):
    """The sheet is temporarily unreachable."""


class SheetRefusedError(StokerError):
    """The sheet cannot be used with these options."""


class Sheet(Protocol):
    """The operations of a worksheet."""

    @property
    def identity(self) -> str: ...

    def read(self, ranges: Sequence[str]) -> Values: ...

    def write(self, cells: Sequence[Cell]) -> None: ...

    def close(self) -> None: ...


class SheetFeed:
    """One worksheet and its queue."""

    def __init__(
        self, sheet: Sheet, layout: Layout, intake: Intake, open_store: Callable[[], Store], log: FeedLog
    ) -> None:
        self._sheet = sheet
        self._layout = layout
        self._intake = intake
        self._open_store = open_store
        self._log = log
        self._store: Store | None = None
        self._gpus: dict[str, str] = {}
        """The GPUs of attempts in words: an attempt keeps its GPUs."""

    def run_once(self) -> None:
        """Reads the sheet until there are no new rows and all written cells are beside their rows."""
        fruitless = 0
        while fruitless < MOST_ROUNDS:
            is_new, is_done = self._round()
            if is_done:
                return
            fruitless = 0 if is_new else fruitless + 1

    def run(self, every: float) -> None:
        """Submits existing and new rows for ever."""
        patience = RetryForever(self._log, QueueAwayError, SheetAwayError)
        patience.until_done(self._round)
        # It worked before, so later errors may be temporary.
        patience.also(SheetRefusedError, CounterError)
        while True:
            patience.until_done(self.run_once)
            time.sleep(every)

    def close(self) -> None:
        self._sheet.close()
        if self._store is not None:
            self._store.close()

    def _round(self) -> tuple[bool, bool]:
        """One read and its consequences; returns whether there were new rows, and whether nothing is left to do."""
        if self._store is None:
            self._store = self._open_store()
        store, layout = self._store, self._layout
        self._intake.admit(store)
        feed = f"sheet:{self._sheet.identity}:{layout.commands}:"
        # Before reading the sheet: if another feed changes it meanwhile, the read is outdated.
        version, text = store.feeds.memory(feed)
        memory = msgspec.json.decode(text, type=Memory) if text else None
        content = content_of(layout, self._sheet.read(layout.ranges()))
        jobs = {job.id: job for job in store.jobs.by_origin(feed)}
        now = store.clock()
        rows = recognize(memory, content, layout, _known(store, feed, jobs, content))
        refused = {row.number: problem for row in rows.new if (problem := self._refusal(row)) is not None}
        new = {row.number: row for row in rows.new if row.number not in refused}
        ready = claimed(memory, [*new.values()])
        claims = {number: new_id() for number in new if number not in ready}
        taken = rows.taken | {
            number: TakenRow(name, new[number].digest, new[number].digest) for number, name in ready.items()
        }
        truth = self._truth(store, jobs, memory or Memory(), content, taken, ready | claims, refused)
        cells = changes(content, layout, truth)
        floor = floor_of(memory, content)
        wanted = counter_after(content, layout, floor)
        if content.counter != wanted:
            cells.insert(0, Cell(layout.counter, wanted))
        column = layout.columns["id"]
        after = Memory(
            counter=content.counter,
            wanted=wanted,
            floor=floor,
            verified="" if any(cell.address.rstrip("0123456789") == column for cell in cells) else column,
            taken=[*taken.values(), *rows.missing],
            claims=claims_kept(memory, content, now)
            | {name: Claim(new[number].digest, now) for number, name in claims.items()},
            skipped=dict(Counter(row.digest for row in rows.skipped.values())),
            written=written_with(memory, layout, cells),
        )
        for name in ready.values():
            after.claims.pop(name, None)
        commands = [SourceCommand(new[number].command, f"{feed}{name}", name) for number, name in ready.items()]
        if (commands or after != memory) and not self._put(store, feed, version, after, commands):
            return False, False
        for start in range(0, len(cells), MOST_CELLS):
            self._sheet.write(cells[start : start + MOST_CELLS])
        return bool(new), not cells

    def _put(self, store: Store, feed: str, version: int, memory: Memory, commands: Sequence[SourceCommand]) -> bool:
        """Returns False and does nothing if another feed was faster or an id collides with another job's."""
        try:
            if not store.feeds.take(feed, version, _text(memory), self._intake.made(commands)):
                return False
        except BadInputError:
            if not commands:
                raise
            # These rows get other ids.
            ids = {command.id for command in commands}
            memory = replace(memory, taken=[row for row in memory.taken if row.id not in ids], verified="")
            store.feeds.take(feed, version, _text(memory), [])
            return False
        for command in commands:
            self._log.job(command.id, command.command)
        return True

    def _truth(
        self,
        store: Store,
        jobs: Mapping[str, Job],
        last: Memory,
        content: Content,
        taken: Mapping[int, TakenRow],
        fresh: Mapping[int, str],
        refused: Mapping[int, str],
    ) -> dict[int, dict[RowField, str]]:
        """The correct cells beside every row."""
        columns = self._layout.columns
        ours = {entry.id for entry in taken.values()}
        gpus = self._gpus_of([jobs[name] for name in ours if name in jobs], store) if "gpu" in columns else {}
        truth: dict[int, dict[RowField, str]] = {}
        for row in content.rows:
            entry = taken.get(row.number)
            if row.number in fresh:
                truth[row.number] = {"state": "queued", "gpu": "", "id": fresh[row.number], "link": ""}
            elif entry is not None:
                # Cells beside a job deleted by `stoker clean` stay.
                job = jobs.get(entry.id)
                truth[row.number] = {"id": entry.id} if job is None else self._about(row, entry, job, gpus)
            else:
                # The cells beside it belong to a row that has moved.
                stray: dict[RowField, str] = {
                    field: "" for field, column in columns.items() if row.cells[field] in last.written.get(column, ())
                }
                if row.id in ours or row.id in last.claims:
                    stray["id"] = ""
                if row.cells.get("state", "").startswith(LEFT_OUT):
                    stray["state"] = ""
                if row.number in refused:
                    stray["state"] = LEFT_OUT + refused[row.number]
                truth[row.number] = stray
        return truth

    def _about(self, row: SheetRow, entry: TakenRow, job: Job, gpus: Mapping[str, str]) -> dict[RowField, str]:
        """The correct cells beside the row of this job."""
        state = job.shown_state
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

    def _gpus_of(self, jobs: Sequence[Job], store: Store) -> dict[str, str]:
        """The GPUs of the last attempt of each started job, in words."""
        started = {
            job.id: job.attempt
            for job in jobs
            if job.attempt is not None and job.state not in ("queued", "held") and not job.is_pending
        }
        if unknown := set(started.values()) - self._gpus.keys():
            workers = store.workers.all()
            for name in unknown:
                attempt = store.attempts.get(name)
                self._gpus[name] = words(attempt, workers) if attempt is not None else ""
        return {job: self._gpus[attempt] for job, attempt in started.items()}


def _text(memory: Memory) -> str:
    return msgspec.json.encode(memory).decode()


def _known(store: Store, feed: str, jobs: Mapping[str, Job], content: Content) -> set[str]:
    """The ids on the sheet that are its jobs, or were before `stoker clean`."""
    ids = {row.id for row in content.rows if ID.fullmatch(row.id)}
    origins = store.feeds.known_origins([f"{feed}{name}" for name in sorted(ids - jobs.keys())])
    return {name for name in ids if name in jobs or f"{feed}{name}" in origins}


def words(attempt: Attempt, workers: Sequence[Worker]) -> str:
    """`GPU 0 and 1 on lab1`; only the machine for a job without GPUs; part of the uuid if no worker knows it."""
    if attempt.where:
        return attempt.where
    indices = {gpu.uuid: str(gpu.index) for worker in workers for gpu in worker.view.gpus}
    hosts = [worker.host for worker in workers if worker.id == attempt.worker]
    place = f" on {hosts[0]}" if hosts else ""
    if not attempt.gpus:
        return hosts[0] if hosts else "no GPU"
    return "GPU " + " and ".join(indices.get(uuid, uuid.removeprefix("GPU-")[:8]) for uuid in attempt.gpus) + place
