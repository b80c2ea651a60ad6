"""`stoker feed sheet` as typed, with the real gspread against a local server that speaks Google's API."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.queue import View, WorkerGpu
from tests.support.command import Finished, stoker
from tests.support.feeding import Feeder, Feeders, Queue
from tests.support.sheets_server import (
    EMAIL,
    FORBIDDEN,
    KEY,
    QUOTA,
    UNAVAILABLE,
    Refusal,
    SheetsServer,
)
from tests.support.waiting import wait_for


class Sheet:
    """A sheet laid out as its people have it: the counter in B1, commands in column C from row 3 on."""

    def __init__(self, server: SheetsServer, directory: Path) -> None:
        self.server = server
        self.cells = server.sheet
        self.queue = Queue(str(directory / "queue.db"))
        self.credentials = server.credentials(directory / "credentials.json")
        self.feeders = Feeders(directory)

    def fill(self, *commands: str, first: int = 3) -> None:
        with self.server.lock:
            for row, command in enumerate(commands, first):
                self.cells[f"C{row}"] = command

    def start(self, *options: str) -> Feeder:
        return self.feeders.start(*self._words("--every", "1s", *options), environment=self.server.environment)

    def once(self, *options: str) -> Finished:
        return stoker("feed", *self._words("--once", *options), environment=self.server.environment)

    def row(self, number: int) -> list[str]:
        """What is written back beside it."""
        with self.server.lock:
            return [self.cells[f"{column}{number}"] for column in "DEFG"]

    def requests(self, part: str) -> int:
        """How many there were with this in their address."""
        with self.server.lock:
            return sum(part in asked for asked in self.server.asked)

    def wait_for_feeders(self, number: int) -> None:
        """Waits until that number of feeders has reached Google: each requests one token."""
        wait_for(lambda: self.requests("/token") >= number, named=f"feeder {number}")

    def _words(self, *options: str) -> list[str]:
        return ["sheet", KEY, "--credentials", str(self.credentials), "--queue", self.queue.url, *options]


@pytest.fixture
def sheet(tmp_path: Path) -> Iterator[Sheet]:
    with SheetsServer().listening() as server:
        there = Sheet(server, tmp_path)
        yield there
        there.feeders.close()


def test_rows_become_jobs_in_order_and_the_counter_increases(sheet: Sheet) -> None:
    sheet.cells["B1"] = "2"
    sheet.cells["C2"] = "Queue"
    sheet.fill("old", "python train.py --lr=1e-3", "python train.py --lr=1e-4")
    done = sheet.once("--gpus", "2", "--tag", "phone", "--memory", "8GiB", "--directory", "/srv")
    assert (done.code, done.err) == (0, "")
    jobs = sheet.queue.jobs()
    assert [job.command for job in jobs] == ["python train.py --lr=1e-3", "python train.py --lr=1e-4"]
    assert done.out == "".join(f"{job.id}  {job.command}\n" for job in jobs)
    assert {(job.gpus, job.tags, job.memory, job.directory) for job in jobs} == {(2, ("phone",), 8 * 2**30, "/srv")}
    assert sheet.cells["B1"] == "4"
    assert [sheet.row(row) for row in (3, 4, 5)] == [
        ["", "", "", ""],
        ["queued", "", jobs[0].id, ""],
        ["queued", "", jobs[1].id, ""],
    ]
    assert sheet.once().out == ""
    assert len(sheet.queue.jobs()) == 2


def test_two_feeders_and_a_kill_create_500_jobs_from_500_rows(sheet: Sheet) -> None:
    commands = [f"python train.py --seed={number}" for number in range(500)]
    sheet.server.delay = 0.02
    first, second = sheet.start(), sheet.start()
    sheet.wait_for_feeders(2)
    sheet.fill(*commands[:250])
    wait_for(lambda: len(sheet.queue.jobs()) >= 100, named="the first jobs")
    first.end(signal.SIGKILL)
    sheet.fill(*commands[250:], first=253)
    third = sheet.start()
    wait_for(lambda: sheet.cells["B1"] == "501", named="the last row")
    wait_for(lambda: all(sheet.cells.column("F", 3, 502)), named="all ids")
    wait_for(lambda: len(sheet.queue.jobs()) >= 500, named="all jobs")
    assert sheet.queue.commands() == commands
    sheet.wait_for_feeders(3)
    assert second.end() == 130
    assert third.end() == 130
    assert (second.err.strip(), third.err.strip()) == ("", "")


def test_feeder_killed_while_writing_takes_no_row_twice(sheet: Sheet) -> None:
    sheet.fill("one", "two")
    sheet.server.may_write.clear()
    feeder = sheet.start()
    wait_for(lambda: sheet.requests("values:batchUpdate"), named="a request that writes")
    feeder.end(signal.SIGKILL)
    assert sheet.cells["B1"] == ""
    sheet.server.may_write.set()
    wait_for(lambda: sheet.cells["B1"] == "3", named="what was written after its death")
    sheet.fill("three", first=5)
    assert sheet.once().code == 0
    assert sheet.queue.commands() == ["one", "two", "three"]
    assert [sheet.row(row)[2] for row in (3, 4, 5)] == [job.id for job in sheet.queue.jobs()]


def test_empty_rows_are_skipped_except_at_the_end(sheet: Sheet) -> None:
    feeder = sheet.start()
    wait_for(lambda: sheet.requests("batchGet"), named="a look")
    sheet.fill("one", "", "# a note", "two")
    wait_for(lambda: sheet.cells["B1"] == "5", named="the rows")
    sheet.fill("three", first=7)
    wait_for(lambda: len(feeder.taken) == 3, named="the row that was waited for")
    assert feeder.taken == ["one", "two", "three"] == sheet.queue.commands()


def test_state_gpu_id_and_link_are_written_back_across_restarts(sheet: Sheet) -> None:
    sheet.fill("good", "bad", "waiting")
    assert sheet.once().code == 0
    with sheet.queue.opened() as store:
        gpus = tuple(WorkerGpu(uuid=f"GPU-{index}", index=index, name="H100") for index in range(2))
        store.workers.heartbeat("w", "lab1", View(gpus=gpus))
    good = sheet.queue.run("good", "succeeded", link="https://wandb.ai/me/p/runs/1", gpus=("GPU-0", "GPU-1"))
    bad = sheet.queue.run("bad", "failed", gpus=("GPU-deadbeef-1234",))
    sheet.server.written.clear()
    feeder = sheet.start()
    wait_for(lambda: sheet.row(4)[0] == "failed", named="the state")
    assert sheet.row(3) == ["succeeded", "GPU 0 and 1 on lab1", good, "https://wandb.ai/me/p/runs/1"]
    assert sheet.row(4) == ["failed", "GPU deadbeef on lab1", bad, ""]
    assert sheet.server.written == [["D3", "E3", "G3", "D4", "E4"]], "one request, and only what changed"
    looks = sheet.requests("batchGet")
    wait_for(lambda: sheet.requests("batchGet") > looks + 1, named="two more looks, so that all of one is over")
    assert len(sheet.server.written) == 1
    sheet.queue.run("waiting", "succeeded")
    wait_for(lambda: sheet.row(5)[0] == "succeeded", named="the state of the last")
    assert feeder.end() == 130


def test_quota_errors_and_outages_are_retried(sheet: Sheet) -> None:
    sheet.fill("one")
    feeder = sheet.start()
    wait_for(lambda: sheet.row(3)[0] == "queued", named="the first row")
    sheet.server.refusals = [QUOTA, QUOTA]
    wait_for(lambda: "going on" in feeder.err, named="the end of the first outage")
    sheet.server.drops = 2
    wait_for(lambda: feeder.err.count("going on") == 2, named="the end of the second")
    sheet.server.refusals = [UNAVAILABLE]
    sheet.fill("two", first=4)
    wait_for(lambda: feeder.err.count("going on") == 3, named="the end of the third")
    wait_for(lambda: sheet.row(4)[0] == "queued", named="the second row")
    result = feeder.err.splitlines()
    assert len(result) == 6, "each is reported once"
    assert "quota" in result[0]
    assert "Google cannot be reached" in result[2]
    assert "Google answered 503" in result[4]
    assert sheet.queue.commands() == ["one", "two"]


def test_running_feeder_survives_invalid_sheet_contents(sheet: Sheet) -> None:
    sheet.fill("one")
    feeder = sheet.start()
    wait_for(lambda: sheet.row(3)[0] == "queued", named="the first row")
    sheet.cells["B1"] = "soon"
    sheet.fill("two", first=4)
    wait_for(lambda: "cell B1 says 'soon'" in feeder.err, named="the complaint")
    sheet.cells["B1"] = "2"
    wait_for(lambda: sheet.queue.commands() == ["one", "two"], named="the second job")
    sheet.cells.title = "Renamed"
    sheet.fill("three", first=5)
    wait_for(lambda: sheet.queue.commands() == ["one", "two", "three"], named="the job of the renamed worksheet")


@pytest.mark.parametrize(
    ("refusal", "code", "sentence"),
    [
        (FORBIDDEN, 1, f"{EMAIL} may not edit the sheet {KEY}: share the sheet with that address, as an editor"),
        (QUOTA, 1, "Google's quota for reading and writing sheets is used up"),
    ],
)
def test_refusal_by_google_is_reported(sheet: Sheet, refusal: Refusal, code: int, sentence: str) -> None:
    sheet.server.refusals = [refusal]
    done = sheet.once()
    assert (done.code, done.err) == (code, f"stoker: {sentence}\n")


def test_invalid_keys_and_credentials_are_reported(sheet: Sheet, tmp_path: Path) -> None:
    def fed(key: str, credentials: Path) -> Finished:
        return stoker(
            *("feed", "sheet", key, "--credentials", str(credentials), "--queue", sheet.queue.url),
            environment=sheet.server.environment,
        )

    wrong = fed("1AbC-another-key", sheet.credentials)
    assert (wrong.code, wrong.err.startswith("stoker: there is no sheet with the key 1AbC-another-key")) == (2, True)
    missing = fed(KEY, tmp_path / "missing.json")
    assert (missing.code, missing.err.count("\n"), "No such file" in missing.err) == (2, 1, True)


@pytest.mark.parametrize(
    "options",
    [
        ("--every", "100ms"),
        ("--counter", "7"),
        ("--worksheet", "missing"),
    ],
)
def test_invalid_options_are_refused(sheet: Sheet, options: tuple[str, ...]) -> None:
    done = sheet.once(*options)
    assert (done.code, done.err.count("\n")) == (1 if options[0] == "--worksheet" else 2, 1), done.err
    assert sheet.queue.jobs() == []


def test_missing_gspread_is_reported_with_the_extra_to_install(sheet: Sheet, tmp_path: Path) -> None:
    (tmp_path / "gspread.py").write_text("raise ImportError('no gspread', name='gspread')\n")
    done = stoker(
        *("feed", "sheet", KEY, "--credentials", str(sheet.credentials)),
        environment={"PYTHONPATH": os.pathsep.join([str(tmp_path)])},
    )
    assert (done.code, "pip install 'stoker[sheets]'" in done.err) == (1, True)
