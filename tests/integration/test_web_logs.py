"""Logs on the page: followed live without losing or doubling a line, downloaded, and never more than text."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import pytest

from stoker.errors import QueueAwayError
from stoker.logs.reader import STEP, LogFileReader, LoggedAttempt, LogUpdate, log_directory
from stoker.queue import AttemptDetails, JobSpec, init_queue
from stoker.status import log_follower as follow
from stoker.web.app import create_app
from stoker.web.pool import ConnectionPool
from tests.support.attempts import start
from tests.support.log_server import Place

EVIL = "<script>alert(1)</script>"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    home = Path(os.environ["STOKER_HOME"])
    with init_queue() as store:
        found = Place(store, home)
        yield found
        found.app_state.pool.close()


def played(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 100))


def numbered(begin: int, end: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(begin, end))


def lines(begin: int, end: int) -> list[str]:
    return [f"line {number}" for number in range(begin, end)]


def test_log_is_followed_to_its_end(place: Place) -> None:
    async def story() -> None:
        lines = b"one\n\x1b[31mtwo\x1b[0m\n"
        place.prints(lines + b" 10%")
        async with place.page() as page:
            await page.until(lambda: page.text == ["one", '<span class="a-fg-1">two</span>', " 10%"])
            assert page.headers["content-type"].startswith("text/event-stream")
            assert json.loads(page.heard("begin")[0]) == {"from": 0, "whole": True}
            delays: list[float] = []
            for bar in (" 20%", " 30%", " 40%"):
                place.rewrites(lines + bar.encode())
                began = time.monotonic()
                await page.until(lambda bar=bar: page.text[-1] == bar)  # type: ignore[misc]  # bound at once
                delays.append(time.monotonic() - began)
                if delays[-1] < 2.0:
                    break
            # A machine that is busy may miss it once or twice.
            assert delays[-1] < 2.0, delays
            place.rewrites(lines + b"100%\nlast words")
            place.store.attempts.finish(place.attempt, "failed", 1, "it exited with code 1")
            await page.ended()
            assert page.text[-2:] == ["100%", "last words"]
            ending = json.loads(page.heard("end")[0])
            assert ending == {"outcome": "failed", "reason": "it exited with code 1", "again": False}

    played(story)


def test_page_starts_with_the_last_thousand_lines_or_all_on_request(place: Place) -> None:
    async def story() -> None:
        place.prints(numbered(0, 26_000) + b"now")
        assert place.output.stat().st_size > STEP
        async with place.page() as page, place.page("log/live?all=1") as whole:
            await page.until(lambda: page.text[-1:] == ["now"])
            assert page.text == [*lines(25_001, 26_000), "now"]
            assert min(page.lines) == 25_001
            await whole.until(lambda: whole.text[-1:] == ["now"])
            assert whole.text == [*lines(0, 26_000), "now"]
            # Both have one reader, which remembers no more than it must.
            assert len(place.channels) == 1
            channel = next(iter(place.channels))
            assert len(channel.lines_from(0)) <= 2100

    played(story)


def test_parts_of_a_log_are_read_and_searched(place: Place) -> None:
    async def story() -> None:
        place.prints(b"\x1b[31m<b>red</b>\n" + numbered(1, 26_000) + b"RuntimeError: NaN\n" + b"now")

        async def lines_of(query: str) -> dict[str, Any]:
            found: dict[str, Any] = json.loads(await place.get(f"/jobs/{place.job}/attempts/1/log/lines?{query}"))
            return found

        async def matches(query: str) -> tuple[list[int], bool]:
            found = json.loads(await place.get(f"log/matches?{query}"))
            assert (found["whole"], found["lines"]) == (True, 26_002)
            return [match["line"] for match in found["matches"]], found["more"]

        async with place.page() as page:
            await page.until(lambda: page.text[-1:] == ["now"])
            part = await lines_of("from=0&count=2")
            assert part["lines"] == [
                '<span class="a-fg-1">&lt;b&gt;red&lt;/b&gt;</span>',
                '<span class="a-fg-1">line 1</span>',
            ]
            assert (part["first"], part["total"], part["whole"]) == (0, 26_002, True)
            # Numbers mean the same as those of the stream.
            assert page.mark.startswith(f"{part['epoch']}.")
            assert (await lines_of("from=13000&count=3"))["lines"] == lines(13_000, 13_003)
            assert (await lines_of("from=26000&count=10"))["lines"] == ["RuntimeError: NaN", "now"]
            assert (await lines_of("from=99999"))["lines"] == []
        assert await matches("text=LINE%2025999") == ([26_000], False)
        assert await matches("text=line&limit=2") == ([25_999, 26_000], True)
        assert await matches("text=line&limit=2&before=25999") == ([25_997, 25_998], True)
        assert await matches("text=line&limit=2&after=10") == ([11, 12], True)
        assert await matches("") == ([26_001], False)
        assert await place.get("log?from=25999&lines=3") == b"line 25998\nline 25999\nRuntimeError: NaN\n"
        # All of it by one reader.
        assert len(place.channels) == 1
        place.prints(b"\nstep=1 loss=nan acc=1\nstep=2 loss=0.5 acc=2\n")
        found = json.loads(await place.get("curves"))
        assert [curve["name"] for curve in found["curves"]] == ["acc", "loss"]
        assert found["whole"] is True
        (loss,) = json.loads(await place.get("curves?name=loss"))["curves"]
        assert loss == {"name": "loss", "axis": "step", "at": [1.0, 2.0], "values": [None, 0.5], "last": 0.5}
        # Without a name, what the job is asked to show.
        assert place.store.attempts.finish(place.attempt, "failed", 1)
        place.store.jobs.edit(place.job, {"metrics": ("loss",)})
        assert json.loads(await place.get("curves"))["curves"] == [loss]

    played(story)


@pytest.mark.parametrize("restarted", [False, True], ids=["same server", "server restarted"])
def test_reconnecting_page_continues_at_its_line(place: Place, restarted: bool) -> None:
    async def story() -> None:
        place.prints(numbered(0, 300) + b"bar 1%")
        async with place.page() as page:
            await page.until(lambda: page.text[-1:] == ["bar 1%"])
        # More than is kept in memory, while the phone sleeps.
        place.rewrites(numbered(0, 9_000) + b"bar 2%")
        app = create_app(place.app_state) if restarted else place.app
        async with place.page(app=app, last_event_id=page.mark) as again:
            again.lines = dict(page.lines)
            await again.until(lambda: again.text[-1:] == ["bar 2%"])
            assert again.text == [*lines(0, 9_000), "bar 2%"]
            assert not again.heard("begin")
        async with place.page(f"log/live?after={again.mark}", app) as third:
            third.lines = dict(again.lines)
            place.prints(b" and\nmore\n")
            await third.until(lambda: third.text[-1:] == ["more"])
            assert third.text == [*lines(0, 9_000), "bar 2% and", "more"]

    played(story)


def test_unknown_position_starts_over(place: Place) -> None:
    async def story() -> None:
        place.prints(numbered(0, 3))
        for mark in ["nonsense", "0.5", "x.99999999999999999999", ".", "feed.-1", "feed.²", "feed.0"]:
            async with place.page(f"log/live?after={quote(mark)}") as page:
                await page.until(lambda page=page: page.text == lines(0, 3))  # type: ignore[misc]  # bound at once
                assert page.heard("begin"), mark

    played(story)


def test_rotation_loses_and_repeats_no_line(place: Place) -> None:
    async def story() -> None:
        place.prints(numbered(0, 100))
        async with place.page() as page:
            await page.until(lambda: page.text == lines(0, 100))
            place.output.rename(place.directory / "output.1")
            place.prints(numbered(100, 150))
            await page.until(lambda: page.text == lines(0, 150))
        async with place.page("log") as file:
            await file.ended()
            assert file.body == numbered(0, 150)

    played(story)


def test_tail_of_a_remote_job_is_followed_and_named_as_such(place: Place) -> None:
    async def story() -> None:
        place.store.logs.write(place.attempt, "one\ntwo\n 10%")
        async with place.page() as page:
            await page.until(lambda: page.text == ["one", "two", " 10%"])
            assert json.loads(page.heard("begin")[0])["whole"] is False
            place.store.logs.write(place.attempt, "two\nthree\n")
            place.store.attempts.finish(place.attempt, "succeeded", 0)
            await page.ended()
            assert page.text == ["one", "two", "three"]
        async with place.page("log") as file:
            await file.ended()
            assert (file.body, file.headers["stoker-log"]) == (b"two\nthree\n", "end")

    played(story)


def test_job_without_output_is_followed_from_its_first_line(place: Place) -> None:
    async def story() -> None:
        async with place.page() as page:
            await page.until(lambda: page.heard("begin"))
            place.prints(b"at last\n")
            await page.until(lambda: page.text == ["at last"])
            assert json.loads(page.heard("begin")[-1])["whole"] is True

    played(story)


def test_two_hundred_pages_share_one_reader(place: Place) -> None:
    async def story() -> None:
        place.prints(numbered(0, 50))
        pages = [place.page() for _ in range(200)]
        for page in pages:
            await page.__aenter__()
        for page in pages:
            await page.until(lambda page=page: page.text == lines(0, 50))  # type: ignore[misc]  # bound at once
        assert len(place.channels) == 1
        channel = next(iter(place.channels))
        assert channel.followers == 200
        place.prints(b"and more\n")
        for page in pages:
            await page.until(lambda page=page: page.text == [*lines(0, 50), "and more"])  # type: ignore[misc]  # the same
        for page in pages:
            await page.__aexit__(None, None, None)
        await pages[0].until(lambda: channel.followers == 0, "that nobody follows")

    played(story)


def test_slow_page_gets_all_lines_and_the_last_state_of_a_bar(place: Place) -> None:
    async def story() -> None:
        place.prints(b"begin\n")
        async with place.page() as slow, place.page() as quick:
            await slow.until(lambda: slow.text == ["begin"])
            slow.awake.clear()
            for percent in range(4):
                place.rewrites(b"begin\n" + numbered(0, 1500 * percent) + b"%d%%" % percent)
                await quick.until(lambda percent=percent: quick.text[-1] == f"{percent}%")  # type: ignore[misc]  # bound
            slow.awake.set()
            await slow.until(lambda: slow.text[-1] == "3%")
            assert slow.text == ["begin", *lines(0, 4500), "3%"]
            assert b"1%" not in slow.body
            assert len(next(iter(place.channels)).lines_from(0)) <= 2100  # the rest came from the file

    played(story)


def test_page_with_a_revoked_token_gets_nothing_more(place: Place) -> None:
    async def story() -> None:
        place.prints(b"seen\n")
        async with place.page() as page:
            await page.until(lambda: page.text == ["seen"])
            place.app_state.keys.revoke(place.app_state.keys.first().id)
            await page.ended()
            place.prints(b"secret\n")
            assert page.text == ["seen"]

    played(story)


def test_pages_are_disconnected_when_the_server_stops(place: Place) -> None:
    async def story() -> None:
        place.prints(b"seen\n")
        async with place.page() as page:
            await page.until(lambda: page.text == ["seen"])
            await place.channels.close()
            await page.ended()
            assert not page.heard("end")  # which would tell it not to come back
            assert len(place.channels) == 0

    played(story)


def test_local_log_is_followed_while_the_queue_is_unreachable(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def away(_question: object) -> None:
        raise QueueAwayError("the database does not answer")

    async def story() -> None:
        place.prints(b"before\n")
        async with place.page() as page:
            await page.until(lambda: page.text == ["before"])
            monkeypatch.setattr(ConnectionPool, "run", lambda _pool, question: away(question))
            place.prints(b"meanwhile\n")
            await page.until(lambda: page.text == ["before", "meanwhile"])

    played(story)


def test_script_in_a_log_or_report_stays_text(place: Place) -> None:
    async def story() -> None:
        place.prints(f"{EVIL}\n{EVIL}".encode())
        place.store.attempts.write_details(place.attempt, AttemptDetails(report=f"# {EVIL}\n"))
        async with place.page() as page, place.page("log") as file, place.page("report") as report:
            await page.until(lambda: len(page.text) == 2)
            assert page.text == ["&lt;script&gt;alert(1)&lt;/script&gt;"] * 2
            for kept, kind in [(file, "text/plain"), (report, "text/markdown")]:
                await kept.ended()
                assert kept.status == 200
                assert kept.headers["content-type"] == f"{kind}; charset=utf-8"
                assert kept.headers["x-content-type-options"] == "nosniff"
                assert kept.headers["content-disposition"].startswith(f'attachment; filename="stoker-{place.job}-1.')
            assert file.headers["stoker-log"] == "whole"
            assert file.body == f"{EVIL}\n{EVIL}".encode()

    played(story)


def test_download_is_streamed_in_steps(place: Place) -> None:
    async def story() -> None:
        text = (b"x" * 999 + b"\n") * 3000
        place.prints(text)
        async with place.page("log") as file:
            await file.ended()
            assert file.body == text
            assert file.largest <= STEP

    played(story)


def test_log_of_another_node_is_shown_and_downloaded(place: Place) -> None:
    (several,) = place.store.jobs.submit([JobSpec(command="train", nodes=2)])
    attempt = start(place.store, several)
    directory = place.home / "attempts" / f"{several}-{attempt.number}"
    (directory / "node1").mkdir(parents=True)
    (directory / "output").write_text("first\n")
    (directory / "node1" / "output").write_text("second\n")
    live, api = f"/jobs/{several}/attempts/1/log/live", f"/api/v1/jobs/{several}/attempts/1/log"

    async def story() -> None:
        async with place.page(live) as first, place.page(f"{live}?node=1") as second:
            await first.until(lambda: first.text == ["first"])
            await second.until(lambda: second.text == ["second"])
        async with place.page(f"{api}?node=1") as file, place.page(f"{api}?node=2") as missing:
            await file.ended()
            assert file.body == b"second\n"
            assert file.headers["content-disposition"].endswith(f'stoker-{several}-1.node1.log"')
            await missing.ended()
            assert missing.status == 404
            assert b"they are 0 to 1" in missing.body
        async with place.page("log?node=1") as alone:
            await alone.ended()
            assert (alone.status, b"it runs on one machine" in alone.body) == (404, True)

    played(story)


NOWHERE = [
    "/jobs/../attempts/1/log",
    "/jobs/..%2f..%2fkeys.json/attempts/1/log",
    "/jobs/../../keys.json/attempts/1/log",
    "/jobs/{job}/attempts/../log",
    "/jobs/{job}/attempts/1%2f..%2f..%2fkeys/log",
    "/jobs/{job}/attempts/1/../../../keys/log",
    "/jobs/{job}/attempts/01/log",
    "/jobs/{job}/attempts/1 /log",
    "/jobs/{job}/attempts/2/log",
    "/jobs/{job}/attempts/-1/log/live",
    "/jobs/{job}/attempts/١/log",
    "/jobs/{job}\n/attempts/1/log",
    "/jobs/{short}/attempts/1/log",
    "/jobs/00000000/attempts/1/log",
    "/jobs/00000000/attempts",
    "/jobs/{job}/attempts/1/report",
]


def test_path_without_an_attempt_is_not_found(place: Place) -> None:
    async def story() -> None:
        place.prints(b"output\n")
        (place.home / "attempts" / "00000000-1").mkdir()
        (place.home / "attempts" / "00000000-1" / "output").write_text("not in this queue")
        for address in NOWHERE:
            named = address.format(job=place.job, short=place.job[:5])
            # As a server hands it over: decoded.
            async with place.page(unquote(named)) as page:
                await page.ended()
                assert page.status == 404, address
                assert b"output" not in page.body

    played(story)


def _linked_directory(place: Place, elsewhere: Path) -> None:
    elsewhere.mkdir()
    (elsewhere / "output").write_text("secret\n")
    place.directory.parent.mkdir(parents=True)
    place.directory.symlink_to(elsewhere)


def _linked_file(place: Place, elsewhere: Path) -> None:
    elsewhere.write_text("secret\n")
    place.directory.mkdir(parents=True)
    place.output.symlink_to(elsewhere)


def _of_another_attempt(place: Place, elsewhere: Path) -> None:
    place.prints(b"secret\n")
    (place.directory / "delivered.json").write_bytes(msgspec.json.encode({"attempt": "f" * 32}))


@pytest.mark.parametrize("trick", [_linked_directory, _linked_file, _of_another_attempt])
def test_file_of_another_attempt_is_not_shown(
    place: Place, tmp_path: Path, trick: Callable[[Place, Path], None]
) -> None:
    async def story() -> None:
        trick(place, tmp_path / "elsewhere")
        place.store.logs.write(place.attempt, "what the queue has\n")
        async with place.page() as page, place.page("log") as file:
            await page.until(lambda: page.text == ["what the queue has"])
            await file.ended()
            assert file.body == b"what the queue has\n"

    played(story)


def test_slow_disk_delays_no_other_request(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = threading.Event(), threading.Event()

    def slow(home: Path, attempt: LoggedAttempt, node: int = 0) -> Path | None:
        asked.set()
        assert answered.wait(50), "nobody else had a turn"
        return log_directory(home, attempt, node)

    async def story() -> None:
        place.prints(b"output\n")
        async with place.page("log") as file:
            await file.until(asked.is_set)
            answered.set()
            await file.ended()
            assert (file.status, file.body) == (200, b"output\n")

    monkeypatch.setattr(follow, "log_directory", slow)
    played(story)


@pytest.mark.parametrize(("what", "reader"), [("log", 1), ("log/live?all=1", 2), ("log/live", 1)])
def test_page_that_leaves_during_a_read_leaves_no_file_open(
    place: Place, monkeypatch: pytest.MonkeyPatch, what: str, reader: int
) -> None:
    """Of a stream for all, the second reader is that page's own."""
    began, may_read, has_read = threading.Event(), threading.Event(), threading.Event()
    readers: list[LogFileReader] = []
    read = LogFileReader.read

    def slow(self: LogFileReader, limit: int | None = None) -> LogUpdate:
        if not any(self is other for other in readers):
            readers.append(self)
        if len(readers) < reader or self is not readers[reader - 1]:
            return read(self, limit)
        began.set()
        assert may_read.wait(50)
        try:
            return read(self, limit)
        finally:
            has_read.set()

    async def story() -> None:
        place.prints(numbered(0, 5_000))
        async with place.page(what) as page:
            await page.until(began.is_set)
        if reader == 1:
            await place.channels.close()
        may_read.set()
        await page.until(has_read.is_set)
        await page.until(lambda: readers[reader - 1]._file < 0, "that the file is closed")

    monkeypatch.setattr(LogFileReader, "read", slow)
    played(story)
