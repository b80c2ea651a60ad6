"""What the feed from a sheet makes of edits, with the real gspread against a local server that speaks Google's API."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import gspread
import pytest

from stoker.errors import BadInputError
from stoker.feeds.google import GoogleSheet, key_in
from stoker.feeds.intake import FeedLog, Intake
from stoker.feeds.rows import Cell, Layout, parse_columns
from stoker.feeds.sheet import SheetAwayError, SheetFeed, SheetRefusedError
from stoker.queue import JobSpec, Store
from tests.support.feeding import Queue
from tests.support.sheets_server import EMAIL, KEY, QUOTA, Refusal, SheetsServer, Worksheet

LAYOUT = Layout("B1", "C", 3, parse_columns("state=D,gpu=E,id=F,link=G"))


class Sheet:
    """A sheet laid out as its people have it, and feeds that look at it once."""

    def __init__(self, server: SheetsServer, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.server = server
        self.cells = server.sheet
        self.queue = Queue(str(directory / "queue.db"))
        self.credentials = server.credentials(directory / "credentials.json")
        self.append = ""
        self._capsys = capsys

    def fill(self, *commands: str, first: int = 3) -> None:
        for row, command in enumerate(commands, first):
            self.cells[f"C{row}"] = command

    def feed(self, layout: Layout = LAYOUT, title: str | None = None) -> SheetFeed:
        google = GoogleSheet(self.credentials, KEY, title, self.server.url)
        return SheetFeed(google, layout, Intake(JobSpec(command="-"), self.append), self.queue.opened, FeedLog())

    def look(self, layout: Layout = LAYOUT, title: str | None = None) -> str:
        """Runs a new feeder over the current rows and returns its messages."""
        feed = self.feed(layout, title)
        try:
            feed.run_once()
        finally:
            feed.close()
        return self._capsys.readouterr().err

    def age(self, seconds: float) -> None:
        """As if all jobs had been submitted so much earlier."""
        with self.queue.opened() as store:
            store._driver.fetch_text(f"UPDATE stoker_jobs SET submitted = submitted - {seconds}", {})

    def ids(self, first: int, last: int) -> list[str]:
        return self.cells.column("F", first, last)

    def states(self, first: int, last: int) -> dict[str, str]:
        return {self.cells[f"C{row}"]: self.cells[f"D{row}"] for row in range(first, last + 1)}


@pytest.fixture
def sheet(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Sheet]:
    with SheetsServer().listening() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield Sheet(server, tmp_path, capsys)


def test_earlier_reader_of_the_sheet_can_continue(sheet: Sheet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counter and commands by the calls that its readers make: `acell` and `update_cells`."""
    sheet.fill("first", "second", "third")
    sheet.look()
    monkeypatch.setattr("gspread.http_client.SPREADSHEET_URL", f"{sheet.server.url}/v4/spreadsheets/%s")
    values = f"{sheet.server.url}/v4/spreadsheets/%s/values/%s"
    monkeypatch.setattr("gspread.http_client.SPREADSHEET_VALUES_URL", values)
    worksheet = gspread.service_account(sheet.credentials).open_by_key(KEY).sheet1
    counter = worksheet.acell("B1")
    assert int(str(counter.value)) == 4
    sheet.fill("fourth", "fifth", first=6)
    assert worksheet.acell(f"C{int(str(counter.value)) + 2}").value == "fourth"
    counter.value = "5"
    worksheet.update_cells([counter])
    worksheet.client.session.close()
    sheet.look()
    assert sheet.queue.commands() == ["first", "second", "third", "fifth"]


def test_edits_count_until_a_row_is_taken(sheet: Sheet) -> None:
    sheet.fill("one", "a draft")
    sheet.server.refusals = [QUOTA]
    with pytest.raises(SheetAwayError):
        sheet.look()
    sheet.fill("one", "as intended")
    sheet.look()
    sheet.fill("one", "changed too late")
    sheet.look()
    sheet.age(1000)
    sheet.look()
    assert sheet.queue.commands() == ["one", "as intended"]


def test_row_is_not_taken_before_its_id_can_be_written(sheet: Sheet) -> None:
    sheet.fill("before")
    sheet.server.read_only = True
    with pytest.raises(SheetRefusedError):
        sheet.look()
    sheet.server.read_only = False
    sheet.fill("after")
    sheet.look()
    assert sheet.queue.commands() == ["after"]


@pytest.mark.parametrize("moment", ["before it looks into the queue", "after it"])
def test_two_feeders_that_read_different_texts_of_a_row_create_one_job(
    sheet: Sheet, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one takes a row that was edited, after this one has read it and before it submits it."""
    sheet.fill("as this one saw it")
    other, this = sheet.feed(), sheet.feed()

    def overtaken(work: Callable[..., object]) -> Callable[..., object]:
        def after_the_other(*arguments: object) -> object:
            sheet.fill("as the other one saw it")
            other.run_once()
            return work(*arguments)

        return after_the_other

    if moment == "after it":
        monkeypatch.setattr(this._intake, "made", overtaken(this._intake.made))
    else:
        monkeypatch.setattr(this, "_open_store", overtaken(this._open_store))
    this.run_once()
    assert sheet.queue.commands() == ["as the other one saw it"]
    assert sheet.cells["B1"] == "2"
    assert sheet.ids(3, 3) == [sheet.queue.jobs()[0].id]
    other.close()
    this.close()


def test_row_whose_id_is_overwritten_by_a_slow_feeder_runs_once(sheet: Sheet, monkeypatch: pytest.MonkeyPatch) -> None:
    sheet.fill("one")
    slow, other = sheet.feed(), sheet.feed()
    write = GoogleSheet.write

    def after_the_other(google: GoogleSheet, cells: Sequence[Cell]) -> None:
        monkeypatch.setattr(GoogleSheet, "write", write)
        other.run_once()
        write(google, cells)

    monkeypatch.setattr(GoogleSheet, "write", after_the_other)
    slow.run_once()
    other.run_once()
    assert sheet.queue.commands() == ["one"]
    assert sheet.ids(3, 3) == [sheet.queue.jobs()[0].id]
    slow.close()
    other.close()


def test_feeder_with_stale_data_does_not_lower_the_counter(sheet: Sheet, monkeypatch: pytest.MonkeyPatch) -> None:
    sheet.fill("one")
    first, slow = sheet.feed(), sheet.feed()
    open_store = slow._open_store

    def after_the_first() -> Store:
        """It opens the queue after its first reading."""
        sheet.fill("one", "two", "three")
        first.run_once()
        return open_store()

    monkeypatch.setattr(slow, "_open_store", after_the_first)
    slow.run_once()
    assert sheet.cells["B1"] == "4"
    assert sheet.queue.commands() == ["one", "two", "three"]
    first.close()
    slow.close()


def test_columns_written_back_are_configurable(sheet: Sheet) -> None:
    jobs = Worksheet(77, "My 'jobs'")
    sheet.server.worksheets.append(jobs)
    jobs["A2"] = "1"
    jobs["H5"] = "one"
    with pytest.raises(SheetRefusedError, match="Range exceeds grid limits"):
        sheet.look(Layout("A2", "H", 5, parse_columns("id=aa")), "My 'jobs'")
    sheet.look(Layout("A2", "H", 5, parse_columns("id=J")), "My 'jobs'")
    (job,) = sheet.queue.jobs()
    assert (jobs["A2"], jobs["J5"], jobs["D5"]) == ("2", job.id, "")
    jobs["H6"] = "two"
    sheet.look(Layout("A2", "H", 5, parse_columns("id=K")), "My 'jobs'")
    assert (jobs["A2"], jobs["K5"], jobs["J6"]) == ("3", job.id, "")
    assert sheet.queue.commands() == ["one", "two"]


def test_row_that_loses_its_id_does_not_run_again(sheet: Sheet, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that is to be cleared beside one row may be beside another when the request arrives."""
    sheet.fill("one")
    sheet.look()
    sheet.fill("one", "two")
    write = GoogleSheet.write

    def beside_the_wrong_row(google: GoogleSheet, cells: Sequence[Cell]) -> None:
        write(google, cells)
        monkeypatch.setattr(GoogleSheet, "write", write)
        sheet.cells["F3"] = ""

    monkeypatch.setattr(GoogleSheet, "write", beside_the_wrong_row)
    sheet.look()
    assert sheet.queue.commands() == ["one", "two"]
    assert sheet.ids(3, 4) == [job.id for job in sheet.queue.jobs()]
    sheet.cells["F3"] = ""
    sheet.look()
    assert sheet.queue.commands() == ["one", "two", "one"], "clearing it asks for another run"


def test_states_follow_their_rows_when_rows_above_are_deleted(sheet: Sheet) -> None:
    sheet.fill("one", "two", "three")
    sheet.look()
    sheet.cells.delete_row(3)
    sheet.queue.run("three", "succeeded")
    sheet.look()
    assert sheet.states(3, 5) == {"two": "queued", "three": "succeeded", "": ""}


def test_new_rows_above_the_counter_run(sheet: Sheet) -> None:
    """Those that are inserted among taken ones, and those written after finished ones were deleted."""
    sheet.fill("one", "two", "three")
    sheet.look()
    sheet.cells.insert_row(4)
    sheet.fill("inserted", first=4)
    sheet.look()
    assert sheet.queue.commands() == ["one", "two", "three", "inserted"]
    for _ in range(4):
        sheet.cells.delete_row(3)
    sheet.fill("one", "new")
    sheet.look()
    assert sheet.queue.commands() == ["one", "two", "three", "inserted", "one", "new"]
    assert sheet.ids(3, 4) == [job.id for job in sheet.queue.jobs()[-2:]]
    assert sheet.cells["B1"] == "3", "the next row to take"


def test_rows_before_the_initial_counter_run_when_it_is_lowered(sheet: Sheet) -> None:
    sheet.cells["B1"] = "3"
    sheet.fill("old", "older", "new")
    sheet.look()
    assert sheet.queue.commands() == ["new"]
    sheet.cells["B1"] = "2"
    sheet.look()
    assert sheet.queue.commands() == ["new", "older"]
    assert (sheet.cells["F3"], sheet.cells["B1"]) == ("", "4")


def test_row_inserted_between_read_and_write_shifts_nothing(sheet: Sheet, monkeypatch: pytest.MonkeyPatch) -> None:
    sheet.fill("one", "two")
    write = GoogleSheet.write
    inserted = iter(["inserted"])

    def after_an_insertion(google: GoogleSheet, cells: Sequence[Cell]) -> None:
        for text in inserted:
            sheet.cells.insert_row(3)
            sheet.fill(text)
        write(google, cells)

    monkeypatch.setattr(GoogleSheet, "write", after_an_insertion)
    sheet.look()
    sheet.queue.run("two", "succeeded")
    sheet.look()
    jobs = {job.command: job.id for job in sheet.queue.jobs()}
    assert len(sheet.queue.jobs()) == 3
    assert sheet.ids(3, 5) == [jobs["inserted"], jobs["one"], jobs["two"]]
    assert sheet.states(3, 5) == {"inserted": "queued", "one": "queued", "two": "succeeded"}


def test_taken_row_moved_below_the_counter_does_not_run_again(sheet: Sheet) -> None:
    sheet.fill("one", "two")
    sheet.look()
    sheet.age(1000)
    sheet.cells.insert_row(3)
    sheet.fill("three", first=6)
    sheet.look()
    assert sheet.queue.commands() == ["one", "two", "three"]
    assert sheet.ids(4, 6) == [job.id for job in sheet.queue.jobs()]


def test_copied_row_runs_as_a_separate_row(sheet: Sheet) -> None:
    sheet.fill("one")
    sheet.look()
    for column in "CDEFG":
        sheet.cells[f"{column}4"] = sheet.cells[f"{column}3"]
    sheet.look()
    assert sheet.queue.commands() == ["one", "one"]
    assert sheet.ids(3, 4) == [job.id for job in sheet.queue.jobs()]


@pytest.mark.parametrize("cleaned", [False, True])
def test_sheet_started_over_runs_again(sheet: Sheet, cleaned: bool) -> None:
    sheet.fill("one", "two")
    sheet.look()
    sheet.queue.run("two", "succeeded")
    if cleaned:
        with sheet.queue.opened() as store:
            assert store.jobs.clean(-1.0) == 1
    one = sheet.queue.run("one", "failed")
    sheet.cells["B1"] = "1"
    sheet.fill("one", "another")
    assert f"row 3 was taken before, as job {one}" in sheet.look()
    assert sheet.cells["D3"] == f"failed: `stoker retry {one}` runs it again"
    jobs = sheet.queue.jobs()
    assert [job.command for job in jobs] == ["one", *([] if cleaned else ["two"]), "another"]
    assert sheet.ids(3, 4) == [jobs[0].id, jobs[-1].id]
    sheet.look()
    assert len(sheet.queue.jobs()) == len(jobs)


def test_invalid_command_is_reported_and_skipped(sheet: Sheet) -> None:
    sheet.fill("python train.py --batch {batch_size}", "fine")
    assert "row 3 is left out: batch_size: the command contains {batch_size}" in sheet.look()
    assert sheet.queue.commands() == ["fine"]
    assert sheet.cells["B1"] == "3"
    assert sheet.cells["D3"].startswith("left out: batch_size: the command contains {batch_size}")
    sheet.fill("python train.py --batch 8")
    sheet.look()
    assert sheet.queue.commands() == ["fine", "python train.py --batch 8"]
    assert sheet.cells["D3"] == "queued"


@pytest.mark.parametrize("only_after", [0, 1])
def test_captive_portal_page_is_retried(sheet: Sheet, only_after: int) -> None:
    """In place of the token, and in place of the sheet."""
    sheet.server.captive_after = only_after
    with pytest.raises(SheetAwayError, match="a hotel's network"):
        sheet.look()


@pytest.mark.parametrize("written", ["not json", "[]", '{"type": "authorized_user"}', "a broken key"])
def test_invalid_service_account_key_is_reported(sheet: Sheet, written: str) -> None:
    text = sheet.credentials.read_text().replace("BEGIN", "B") if written == "a broken key" else written
    sheet.credentials.write_text(text)
    with pytest.raises(BadInputError, match="is not the key of a service account") as caught:
        sheet.look()
    assert "\n" not in str(caught.value)


def test_revoked_key_is_reported(sheet: Sheet) -> None:
    sheet.server.token_refusal = Refusal(400, "invalid_grant", "Invalid JWT Signature.")
    with pytest.raises(SheetRefusedError, match=f"Google does not accept the credentials of {EMAIL}") as caught:
        sheet.look()
    assert "\n" not in str(caught.value)


def test_sheet_key_is_extracted_from_the_browser_url() -> None:
    assert key_in(f"https://docs.google.com/spreadsheets/d/{KEY}/edit#gid=0") == key_in(KEY) == KEY
    with pytest.raises(BadInputError, match="is not the key of a sheet"):
        key_in("no key!")
