"""Rows of a sheet run once and keep their job ids under concurrent edits and server errors."""

import contextlib
from collections import Counter
from pathlib import Path

import pytest

from stoker.feeds.intake import FeedLog, Intake
from stoker.feeds.rows import Layout, parse_columns
from stoker.feeds.sheet import SheetAwayError, SheetFeed
from stoker.queue import JobSpec
from tests.support.feeding import Queue
from tests.support.unreliable_sheet import UnreliableSheet

LAYOUT = Layout("B1", "C", 3, parse_columns("state=D,gpu=E,id=F,link=G"))
APPENDED = "--version={id}"


class Storm:
    """A sheet in motion, and feeds that come and go."""

    def __init__(self, directory: Path, seed: int, layout: Layout = LAYOUT) -> None:
        self.sheet = UnreliableSheet(seed)
        self.queue = Queue(str(directory / f"queue-{seed}.db"))
        self._layout = layout
        self._feed = self._new()

    def _new(self) -> SheetFeed:
        return SheetFeed(self.sheet, self._layout, Intake(JobSpec(command="-"), APPENDED), self.queue.opened, FeedLog())

    def look(self) -> None:
        if self.sheet.random.random() < 0.2:
            self._feed.close()
            self._feed = self._new()
        with contextlib.suppress(SheetAwayError):
            self._feed.run_once()

    def calm(self) -> None:
        """People go home, and Google works."""
        self.sheet.changes_happen, self.sheet.failing_writes = False, 0
        self.look()
        self.look()

    def close(self) -> None:
        self._feed.close()

    def work(self) -> None:
        """Some job ends."""
        with self.queue.opened() as store:
            ready = [job.id for job in store.attempts.heads().jobs if not job.gpus]
            attempt = store.attempts.claim(ready, "w", (), 600.0) if self.sheet.random.random() < 0.5 else None
            if attempt is not None:
                store.attempts.finish(attempt.id, "succeeded", 0)

    def runs(self) -> Counter[str]:
        return Counter(command.removesuffix(f" {APPENDED}") for command in self.queue.commands())


@pytest.mark.parametrize("part", range(2))
def test_every_row_runs_once_and_has_its_job_id_written_back(tmp_path: Path, part: int) -> None:
    for seed in range(part * 6, part * 6 + 6):
        storm = Storm(tmp_path, seed)
        for _ in range(12):
            storm.look()
            storm.work()
        storm.calm()
        runs, sheet = storm.runs(), storm.sheet
        assert max(runs.values(), default=0) <= 1, (seed, [text for text, count in runs.items() if count > 1])
        assert not [(before, after) for before, after in sheet.edits if runs[before] and runs[after]], seed
        kept = sheet.rows()
        versions = {after: before for before, after in sheet.edits}
        missing = [text for text in kept.values() if not runs[text] and not runs[versions.get(text, text)]]
        assert not missing, (seed, missing)
        jobs = {job.id: job for job in storm.queue.jobs()}
        ids = {number: sheet.cells[f"F{number}"] for number in kept}
        for number, text in kept.items():
            job = jobs[ids[number]]
            command = str(job.command).removesuffix(f" {APPENDED}")
            assert command in (text, versions.get(text)), (seed, number)
            assert sheet.cells[f"D{number}"].startswith(job.state), (seed, number)
        last = max(kept, default=2)
        strays = [
            n for n in range(3, last + 40) if n not in kept and any(sheet.cells.column(c, n, n)[0] for c in "DEFG")
        ]
        assert not strays, (seed, strays)
        assert (sheet.cells["B1"] or "1") == str(last - 1), seed
        storm.close()
