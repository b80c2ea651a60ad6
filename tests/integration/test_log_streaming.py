"""A remote reader gets the complete log while the job runs and afterwards, across worker restarts."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker.logs.reader import LogFileReader
from stoker.queue import Store, open_queue
from stoker.status.log_follower import RemoteLog, queries_on
from tests.support.waiting import wait_for
from tests.support.work_site import WorkSite

# Much more than the queue keeps of it.
NUMBERS = 30_000
COUNTED = "".join(f"{number}\n" for number in range(1, NUMBERS + 1))


class Elsewhere:
    """A reader on another machine that follows the log of one job."""

    def __init__(self, store: Store, attempt: str) -> None:
        self._store = store
        self.copy = RemoteLog(attempt)

    def text(self) -> str:
        """All that is there now, as anybody reads an output."""
        self.copy.update(queries_on(self._store))
        if self.copy.directory is None:
            return ""
        with contextlib.closing(LogFileReader(self.copy.directory)) as reader:
            return b"".join(reader.read()).decode()

    def wait_until_it_reads(self, text: str) -> None:
        wait_for(lambda: self.text() == text, named=f"an output that ends with {text[-40:]!r}")

    def wait_until_complete(self) -> str:
        def whole() -> str | None:
            text = self.text()
            return text if self.copy.is_complete else None

        return wait_for(whole, named="the whole output")


@pytest.fixture
def elsewhere(site: WorkSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Elsewhere]]:
    """Gives a reader of a job, on a machine where no job ran and with the same queue."""
    monkeypatch.setenv("STOKER_HOME", str(tmp_path / "elsewhere"))
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(open_queue(site.store.place))

        def reader_of(job: str) -> Elsewhere:
            reader = Elsewhere(store, site.last_attempt(job).id)
            stack.callback(reader.copy.close)
            return reader

        yield reader_of


def test_complete_log_is_streamed_while_the_job_runs_and_afterwards(
    site: WorkSite, elsewhere: Callable[[str], Elsewhere]
) -> None:
    site.work()
    first, second = site.until("first"), site.until("second")
    job = site.submit(rf"seq {NUMBERS}; {first}; printf 'more\n 10%%'; {second}; printf '\r100%%\nend'")
    site.wait_until(job, "running")
    reader = elsewhere(job)
    reader.wait_until_it_reads(COUNTED)
    edition = reader.copy.edition
    site.create_flag("first")
    reader.wait_until_it_reads(f"{COUNTED}more\n 10%")
    assert not reader.copy.is_complete
    site.create_flag("second")
    assert reader.wait_until_complete() == f"{COUNTED}more\n100%\nend"
    assert reader.copy.edition == edition
    assert elsewhere(job).wait_until_complete() == f"{COUNTED}more\n100%\nend"
    ended = site.submit(f"seq {NUMBERS}; echo another")
    site.wait_until(ended, "succeeded")
    assert elsewhere(ended).wait_until_complete() == f"{COUNTED}another\n"
    assert len(site.store.logs.read(site.last_attempt(ended).id)) < len(COUNTED)


def test_streams_resume_after_a_worker_restart_without_loss(
    site: WorkSite, elsewhere: Callable[[str], Elsewhere]
) -> None:
    worker = site.work()
    job = site.submit(f"seq {NUMBERS}; {site.until('first')}; echo alone; {site.until('second')}; echo end")
    site.wait_until(job, "running")
    reader = elsewhere(job)
    reader.wait_until_it_reads(COUNTED)
    edition = reader.copy.edition
    worker.kill()
    site.create_flag("first")
    wait_for(lambda: site.output(job).read_text().endswith("alone\n"), named="what it printed without a worker")
    assert reader.text() == COUNTED
    site.work()
    reader.wait_until_it_reads(f"{COUNTED}alone\n")
    assert reader.copy.edition != edition
    site.create_flag("second")
    assert reader.wait_until_complete() == f"{COUNTED}alone\nend\n"
