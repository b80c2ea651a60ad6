"""Logs of jobs on other machines: streamed whole while their workers run, otherwise the tail."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import StokerError
from stoker.logs.reader import LogChunk
from stoker.queue import Store, init_queue
from stoker.status import log_follower as follow
from stoker.status.log_follower import RemoteLog, RunQuery
from stoker.web.sse import log_channels
from tests.support.attempts import WORKER, be_there
from tests.support.log_sender import LogSender, copies_in
from tests.support.log_server import Place


class Far(Place):
    """Its worker was seen just now, and streams while it `works`."""

    def __init__(self, store: Store, home: Path, far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(store, home, far)
        self._sender = LogSender(far, monkeypatch)
        found = store.attempts.get(self.attempt)
        assert found is not None
        self._found = found
        self._sender.place_of(found)
        self.prints(b"")

    @contextlib.asynccontextmanager
    async def works(self) -> AsyncIterator[None]:
        async def send() -> None:
            while True:
                self._sender.send(self.store)
                await asyncio.sleep(0.01)

        self._sender.restart()
        work = asyncio.create_task(send())
        try:
            yield
        finally:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
            self._sender.close()

    def end(self) -> None:
        assert self.store.attempts.finish(self.attempt, "succeeded", 0)
        self._sender.end(self._found)


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return copies_in(tmp_path / "copies", monkeypatch)


@pytest.fixture
def far(tmp_path: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    monkeypatch.setattr(follow, "POLL_QUEUE", 0.05)
    monkeypatch.setattr(follow, "TAIL_ENDS_WITHIN", 0.2)
    with init_queue() as store:
        be_there(store)
        found = Far(store, Path(os.environ["STOKER_HOME"]), tmp_path / "far", monkeypatch)
        yield found
        found.app_state.pool.close()


def played(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 100))


def printed(begin: int, end: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(begin, end))


def shown(begin: int, end: int) -> list[str]:
    return [f"line {number}" for number in range(begin, end)]


def test_whole_log_of_a_remote_job_is_followed_to_its_end(
    far: Far, copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        far.prints(printed(0, 30_000) + b" 10%")
        async with far.works(), far.page("log/live?all=1") as page, far.page() as last:
            await page.until(lambda: page.text == [*shown(0, 30_000), " 10%"])
            assert json.loads(page.heard("begin")[-1]) == {"from": 0, "whole": True}
            await last.until(lambda: last.text == [*shown(29_000, 30_000), " 10%"] or len(last.text) == 1000)
            far.rewrites(far.output.read_bytes().removesuffix(b" 10%") + b" 20%")
            await page.until(lambda: page.text[-1] == " 20%")
            far.rewrites(far.output.read_bytes().removesuffix(b" 20%") + b"100%\n" + printed(30_000, 30_010))
            far.end()
            await page.ended()
            assert page.text == [*shown(0, 30_000), "100%", *shown(30_000, 30_010)]
            assert json.loads(page.heard("end")[-1])["outcome"] == "succeeded"
            await last.ended()
            assert last.text[-1] == "line 30009"
            # A person goes on to search in the copy; it is removed a while after the last one has left.
            (copy,) = copies.iterdir()
            found = json.loads(await far.get("log/matches?text=LINE%2029"))
            assert (len(found["matches"]), found["more"], found["whole"]) == (100, True, True)
            assert found["matches"][-1] == {"line": 30_000, "text": "line 29999"}
            part = json.loads(await far.get(f"/jobs/{far.job}/attempts/1/log/lines?from=9&count=2"))
            assert (part["lines"], part["total"]) == (shown(9, 11), 30_011)
            assert page.mark.startswith(f"{part['epoch']}.")
            assert list(copies.iterdir()) == [copy]
            monkeypatch.setattr(log_channels, "_LINGER_WITH_COPY", 0.0)
            await last.until(lambda: not any(copies.iterdir()), "the end of what was copies")

    played(story)


@pytest.mark.parametrize("what", ["log", "/api/v1/jobs/{job}/attempts/1/log"])
def test_whole_log_of_a_remote_job_can_be_downloaded(far: Far, copies: Path, what: str) -> None:
    async def story() -> None:
        text = printed(0, 60_000) + "é\n".encode() + b"the last line"
        far.prints(text)
        async with far.works(), far.page(what.replace("{job}", far.job)) as page:
            await page.ended()
            assert (page.status, page.headers["stoker-log"]) == (200, "whole")
            assert page.body == text
            await page.until(lambda: not any(copies.iterdir()), "the end of what was copies")

    played(story)


def test_absence_of_the_worker_loses_no_line(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "STREAM_STARTS_WITHIN", 0.0)

    async def story() -> None:
        far.prints(printed(0, 5000))
        far.store.logs.write(far.attempt, "line 4999\n")
        async with far.page("log/live?all=1") as page:
            await page.until(lambda: page.text == ["line 4999"])
            assert not json.loads(page.heard("begin")[-1])["whole"]
            found = json.loads(await far.get("log/matches?text=line"))
            assert (found["matches"], found["whole"]) == ([{"line": 1, "text": "line 4999"}], False)
            assert json.loads(await far.get("curves")) == {"curves": [], "whole": False}
            for end in (5010, 5020):  # lent from the beginning each time, by another worker
                far.prints(printed(end - 10, end))
                async with far.works():
                    await page.until(lambda upto=end: page.text == shown(0, upto))  # type: ignore[misc]  # bound now
            assert len(page.heard("begin")) == 3

    played(story)


def test_last_lines_of_a_job_whose_worker_died_come_from_the_queue(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "STREAM_ENDS_WITHIN", 0.2)

    async def story() -> None:
        far.prints(printed(0, 100))
        async with far.page() as page:
            async with far.works():
                await page.until(lambda: page.text == shown(0, 100))
            far.store.logs.write(far.attempt, "line 99\nits last words\n")
            far.store.attempts.finish(far.attempt, "failed", 1)
            await page.ended()
            assert page.text == ["line 99", "its last words"]
            assert not json.loads(page.heard("begin")[-1])["whole"]

    played(story)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), StokerError("it may not be changed")])
@pytest.mark.parametrize("what", ["log", "log/live"])
def test_tail_is_shown_if_the_log_cannot_be_streamed(
    far: Far, monkeypatch: pytest.MonkeyPatch, what: str, error: Exception
) -> None:
    def spoilt(_copy: RemoteLog, _run: RunQuery) -> None:
        raise error

    async def story() -> None:
        far.store.logs.write(far.attempt, "what the queue has\n")
        far.store.attempts.finish(far.attempt, "failed", 1)
        async with far.page(what) as page:
            await page.ended()
        assert page.status == 200
        assert b"what the queue has" in page.body

    monkeypatch.setattr(RemoteLog, "update", spoilt)
    played(story)


def test_whole_log_of_an_ended_job_has_its_last_line(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "STREAM_STARTS_WITHIN", 0.2)

    async def story() -> None:
        far.store.logs.request_stream(far.attempt, 60.0)
        assert far.store.logs.write_chunk(far.attempt, LogChunk(edition="1", start=0, finished=b"one\n"))
        far.store.logs.write(far.attempt, "one\nthe last\n")
        far.store.attempts.finish(far.attempt, "succeeded", 0)
        async with far.page("log") as page:
            await page.ended()
        assert (page.headers["stoker-log"], page.body) == ("end", b"one\nthe last\n")
        lent = LogChunk(edition="1", start=4, finished=b"the last\n", is_complete=True)
        assert far.store.logs.write_chunk(far.attempt, lent)
        async with far.page("log") as page:
            await page.ended()
        assert (page.headers["stoker-log"], page.body) == ("whole", b"one\nthe last\n")

    played(story)


def test_too_many_downloads_get_the_tail(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        far.store.logs.write(far.attempt, "what the queue has\n")
        channels = far.app_state.log_channels
        while channels._copies.acquire(blocking=False):
            pass
        async with far.page("log") as page:
            await page.ended()
        assert (page.headers["stoker-log"], page.body) == ("end", b"what the queue has\n")

    played(story)


def test_few_lines_come_from_the_tail_without_a_stream(far: Far) -> None:
    async def story() -> None:
        far.prints(printed(0, 100))
        far.store.logs.write(far.attempt, printed(90, 100).decode())
        async with far.page(f"/api/v1/jobs/{far.job}/attempts/1/log?lines=3") as page:
            await page.ended()
        assert page.body == printed(97, 100)
        assert far.store.logs.stream_requests() == []
        async with far.works(), far.page(f"/api/v1/jobs/{far.job}/attempts/1/log?lines=50") as page:
            await page.ended()
        assert page.body == printed(50, 100)
        far.prints(b"the last\n")
        far.end()
        # What the queue has may be older than the outcome.
        async with far.works(), far.page(f"/api/v1/jobs/{far.job}/attempts/1/log?lines=1") as page:
            await page.ended()
        assert page.body == b"the last\n"

    played(story)


def test_page_with_the_tail_gets_the_last_lines_of_an_ended_job(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "STREAM_STARTS_WITHIN", 0.0)
    monkeypatch.setattr(follow, "TAIL_ENDS_WITHIN", 600.0)
    monkeypatch.setattr(follow, "CHECK_END_EVERY", 0.05)

    async def story() -> None:
        far.store.logs.write(far.attempt, "one\n")
        async with far.page() as page:
            await page.until(lambda: page.text == ["one"])
            far.store.attempts.finish(far.attempt, "failed", 1)
            await asyncio.sleep(0.3)  # the end is learned of, and the queue gets the last of the output after it
            far.store.logs.write(far.attempt, "one\nits last words\n")
            await page.until(lambda: page.text == ["one", "its last words"])
            monkeypatch.setattr(follow, "TAIL_ENDS_WITHIN", 0.0)
            await page.ended()
        assert page.text == ["one", "its last words"]

    played(story)


def test_stalled_stream_is_replaced_by_the_tail_until_it_catches_up(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "STREAM_STARTS_WITHIN", 0.2)
    monkeypatch.setattr(follow, "STREAM_STALLS_AFTER", 0.2)

    async def story() -> None:
        far.store.logs.write(far.attempt, "what the queue has\n")
        far.store.logs.request_stream(far.attempt, 60.0)
        assert far.store.logs.write_chunk(
            far.attempt, LogChunk(edition="1", start=0, finished=b"one\n", is_behind=True)
        )
        async with far.page() as page:
            await page.until(lambda: page.text == ["what the queue has"])
            lent = LogChunk(edition="1", start=4, finished=b"two\n")
            assert far.store.logs.write_chunk(far.attempt, lent)
            await page.until(lambda: page.text == ["one", "two"])
            assert json.loads(page.heard("begin")[-1])["whole"]

    played(story)


@pytest.mark.parametrize("what", ["log", "log/live"])
def test_unknown_machine_is_not_waited_for(far: Far, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    async def story() -> None:
        far.store.logs.write(far.attempt, "what the queue has\n")
        far.store.attempts.finish(far.attempt, "failed", 1)
        async with far.page(what) as page:
            await page.ended()
        assert b"what the queue has" in page.body

    far.store.workers.farewell(WORKER)
    monkeypatch.setattr(follow, "STREAM_STARTS_WITHIN", 600.0)
    played(story)


def test_edition_that_is_a_path_is_refused(far: Far, copies: Path) -> None:
    """A client that can write to the queue must not be able to write to the disk of the page."""

    async def story() -> None:
        far.store.logs.request_stream(far.attempt, 60.0)
        far.store.logs.write_chunk(far.attempt, LogChunk(edition="../evil", start=0, finished=b"evil\n"))
        far.store.logs.write(far.attempt, "what the queue has\n")
        far.store.attempts.finish(far.attempt, "failed", 1)
        async with far.page() as page:
            await page.ended()
        assert page.text == ["what the queue has"]
        assert list(copies.iterdir()) == []
        assert not (copies / "../evil").exists()

    far.store.workers.farewell(WORKER)
    played(story)
