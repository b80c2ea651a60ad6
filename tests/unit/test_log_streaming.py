"""A worker streams logs of its machine on request: whole, soon, and without affecting jobs."""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stoker.engines.identity import WorkerIdentity
from stoker.errors import QueueAwayError, StokerError
from stoker.logs.metrics import curves_of
from stoker.logs.reader import LogChunk, LogFileReader
from stoker.logs.search import LogIndex
from stoker.logs.writer import LogWriter
from stoker.queue import Store, init_queue
from stoker.status.log_follower import RemoteLog, queries_on
from stoker.worker import log_streaming as module
from stoker.worker.log_streaming import LogStreaming
from tests.support.deep import examples
from tests.support.queue_jobs import LONG, submit

MOMENT = 0.5
SECOND = 1.0


class Run:
    """One attempt: where it printed, and what its output is called in the queue."""

    def __init__(self, directory: Path, attempt: str) -> None:
        self.attempt = attempt
        self.directory = directory
        self.directory.mkdir()
        (self.directory / "attempt.json").write_text(f'{{"attempt": "{attempt}"}}')
        self.output = directory / "output"

    def prints(self, data: bytes) -> None:
        with self.output.open("ab") as file:
            file.write(data)

    def ends(self) -> None:
        (self.directory / "attempt.json").rename(self.directory / "delivered.json")


class Harness:
    """A worker that streams logs through a real queue, on a clock that the test sets."""

    def __init__(self, directory: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.store = store
        self.home = WorkerIdentity(directory)
        self.streaming = LogStreaming(self.home)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self._patch = monkeypatch

    def run(self, worker: str | None = None) -> Run:
        """A started attempt without output."""
        (job,) = submit(self.store, "x")
        attempt = self.store.attempts.claim([job], worker or self.home.worker, [], LONG)
        assert attempt is not None
        return Run(self.home.directory / "attempts" / f"{job}-{attempt.number}", attempt.id)

    def requested(self, printed: bytes = b"") -> Run:
        """An attempt whose log is requested."""
        run = self.run()
        run.prints(printed)
        assert self.store.logs.request_stream(run.attempt, LONG)
        return run

    def expire_request(self, run: Run, ago: float = 1.0) -> None:
        """As if its request had ended this long ago."""
        change = f"UPDATE stoker_log_streams SET until = until - {LONG + ago} WHERE attempt_id = '{run.attempt}'"
        self.store._driver.fetch_text(change, {})

    def step(self, after: float = 0.0) -> None:
        """One step, this many seconds later."""
        self.now += after
        self.streaming.step(self.store)

    def step_all(self, after: float = 0.0) -> None:
        """Steps until nothing is due."""
        self.step(after)
        while self.streaming.due() <= self.now:
            self.step()

    def read(self, run: Run, edition: str = "", start: int = 0) -> LogChunk:
        """All that was streamed."""
        chunk = self.store.logs.read_chunk(run.attempt, edition, start)
        assert chunk is not None
        return chunk

    def calls(self, name: str) -> list[object]:
        """Has one entry for every call of the store from now on."""
        made: list[object] = []
        original = getattr(self.store.logs, name)

        def counted(*arguments: Any) -> Any:
            made.append(arguments)
            return original(*arguments)

        self._patch.setattr(self.store.logs, name, counted)
        return made


@pytest.fixture
def harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    with init_queue(str(tmp_path / "queue.db")) as store:
        harness = Harness(tmp_path / "home", store, monkeypatch)
        yield harness
        harness.streaming.close()
        harness.home.leave()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only their number


# Selection


def test_only_requested_logs_are_streamed(harness: Harness) -> None:
    run, unwanted = harness.requested(b"one\ntwo\n 10%"), harness.run()
    unwanted.prints(b"private\n")
    harness.step()
    chunk = harness.read(run)
    assert (chunk.finished, chunk.unfinished, chunk.is_behind, chunk.is_complete) == (
        b"one\ntwo\n",
        b" 10%",
        False,
        False,
    )
    assert harness.store.logs.read_chunk(unwanted.attempt) is None


def test_log_of_another_machine_is_not_streamed(harness: Harness) -> None:
    run = harness.run("another-1")
    run.prints(b"of an older job by the same name\n")
    harness.store.logs.request_stream(run.attempt, LONG)
    harness.step()
    assert harness.store.logs.read_chunk(run.attempt) is None


def test_log_of_an_earlier_worker_of_this_home_is_streamed(harness: Harness) -> None:
    run = harness.run(f"{harness.home.key}-earlier")
    run.prints(b"one\n")
    harness.store.logs.request_stream(run.attempt, LONG)
    harness.step()
    assert harness.read(run).finished == b"one\n"


def of_another_queue(run: Run) -> None:
    (run.directory / "attempt.json").write_text('{"attempt": "another"}')


def linked(run: Run) -> None:
    run.output.rename(run.directory / "secret")
    run.output.symlink_to(run.directory / "secret")


def linked_as_a_whole(run: Run) -> None:
    elsewhere = run.directory.parents[1] / "elsewhere"
    run.directory.rename(elsewhere)
    run.directory.symlink_to(elsewhere)


def cleaned_away(run: Run) -> None:
    run.output.unlink()


@pytest.mark.parametrize("spoilt", [of_another_queue, linked, linked_as_a_whole, cleaned_away])
def test_files_of_another_attempt_are_not_streamed(harness: Harness, spoilt: Callable[[Run], None]) -> None:
    run = harness.requested(b"secret\n")
    spoilt(run)
    for _ in range(3):
        harness.step(SECOND)
    assert harness.store.logs.read_chunk(run.attempt) is None


# Rate


def test_requests_are_checked_at_most_once_a_second(harness: Harness) -> None:
    asked = harness.calls("stream_requests")
    harness.step()
    for _ in range(9):
        harness.streaming.note_change()
        harness.step(0.1)
    assert len(asked) == 1
    assert harness.streaming.due() == pytest.approx(1000.0 + SECOND)
    harness.step(0.2)
    assert len(asked) == 2


def test_without_requests_or_changes_nothing_is_checked(harness: Harness) -> None:
    asked = harness.calls("stream_requests")
    harness.step()
    # Only files of earlier workers are checked, at a low rate.
    assert harness.streaming.due() - harness.now == 600.0
    harness.step(3600.0)
    assert len(asked) == 1
    run = harness.requested(b"one\n")
    harness.streaming.note_change()
    assert harness.streaming.due() <= harness.now
    harness.step()
    assert harness.read(run).finished == b"one\n"


def test_log_that_starts_after_its_request_is_streamed_within_a_second(harness: Harness) -> None:
    run = harness.run()
    harness.store.logs.request_stream(run.attempt, LONG)
    harness.step()
    run.prints(b"one\n")
    harness.step(SECOND)
    assert harness.read(run).finished == b"one\n"


def test_long_log_is_streamed_in_steps(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STEP", 10)
    lines = b"".join(b"%04d\n" % number for number in range(7))
    run = harness.requested(lines + b"last")
    for step in (1, 2, 3):
        harness.step()
        chunk = harness.read(run)
        assert (chunk.finished, chunk.unfinished, chunk.is_behind) == (lines[: 10 * step], b"", True)
        assert harness.streaming.due() <= harness.now
    harness.step()
    chunk = harness.read(run)
    assert (chunk.finished, chunk.unfinished, chunk.is_behind) == (lines, b"last", False)
    assert harness.streaming.due() == harness.now + MOMENT


def test_states_of_a_bar_are_in_the_copy_and_only_the_last_one_is_shown(harness: Harness) -> None:
    states = b"1/9 loss=3\r5/9 loss=2\r9/9 loss=1"
    run = harness.requested(states + b"\n" + states)
    harness.step_all()
    copy = RemoteLog(run.attempt)
    copy.update(queries_on(harness.store))
    assert copy.directory is not None
    with LogIndex(copy.directory).open() as view:
        (curve,) = curves_of(view)
        assert curve.values == [3, 2, 1, 3, 2, 1]
        assert view.lines(0, 9) == [b"9/9 loss=1", b"9/9 loss=1"]
    reader = LogFileReader(copy.directory)
    assert reader.read() == (b"9/9 loss=1\n", b"9/9 loss=1")
    reader.close()
    copy.close()


def test_new_text_is_sent_twice_a_second_and_nothing_otherwise(harness: Harness) -> None:
    run = harness.requested(b"one\n")
    harness.step()
    brought = harness.calls("write_chunk")
    run.prints(b"two\n")
    harness.step(0.9 * MOMENT)
    assert not brought
    harness.step(0.1 * MOMENT)
    assert harness.read(run).finished == b"one\ntwo\n"
    for _ in range(10):
        harness.step(MOMENT)
    assert len(brought) == 1
    run.prints(b" 10%")
    harness.step(MOMENT)
    assert harness.read(run).unfinished == b" 10%"
    os.truncate(run.output, 8)
    run.prints(b" 20%\nthree\n")
    harness.step(MOMENT)
    assert (harness.read(run).finished, harness.read(run).unfinished) == (b"one\ntwo\n 20%\nthree\n", b"")
    assert len(brought) == 3


def test_several_logs_are_streamed_side_by_side(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STEP", 4)
    runs = [harness.requested(b"%d00\n" % number * 5) for number in range(3)]
    for _ in range(6):
        harness.step()
    assert [len(harness.read(run).finished) for run in runs] == [8, 8, 8]
    harness.step_all()
    assert [harness.read(run).finished for run in runs] == [b"%d00\n" % number * 5 for number in range(3)]


def test_streams_wait_while_too_many_are_open(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_OPEN", 3)
    before = descriptors()
    runs = [harness.requested(b"one\n") for _ in range(5)]
    harness.step_all()
    assert sum(harness.store.logs.read_chunk(run.attempt) is not None for run in runs) == 3
    for _ in range(3):
        harness.step_all(SECOND)
    assert descriptors() == before + 3
    for run in runs:
        run.ends()
    for _ in range(5):
        harness.step_all(SECOND)
    assert all(harness.read(run).is_complete for run in runs)
    assert descriptors() == before
    assert harness.streaming.due() == harness.now + SECOND  # a complete stream is not checked again


def test_new_reader_right_after_another_gets_the_log_of_a_silent_job(harness: Harness) -> None:
    run = harness.requested(b"one\n")
    harness.step_all()
    harness.expire_request(run)
    harness.store.logs.request_stream(run.attempt, LONG)
    assert harness.store.logs.read_chunk(run.attempt) is None
    harness.step_all(SECOND)
    assert harness.read(run).finished == b"one\n"


def test_total_size_of_streams_is_limited(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_STORED", 6)
    runs = [harness.requested(b"one\n") for _ in range(4)]
    for run in runs:
        run.ends()
    for _ in range(5):
        harness.step_all(SECOND)
    assert sum(harness.store.logs.read_chunk(run.attempt) is not None for run in runs) == 4
    # All started before the first was complete; no other stream starts.
    another = harness.requested(b"two\n")
    harness.step_all(SECOND)
    assert harness.store.logs.read_chunk(another.attempt) is None


@pytest.mark.parametrize("line", [b"x" * 200, b"x" * 200 + b"\n", b"one\n" * 3 + b"x" * 200])
def test_line_without_an_end_is_not_streamed(harness: Harness, monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    monkeypatch.setattr(module, "_MAX_LINE", 100)
    monkeypatch.setattr(module, "_STEP", 10)
    run = harness.requested(line)
    for _ in range(3):
        harness.step_all(SECOND)
    assert harness.store.logs.read_chunk(run.attempt) is None
    read = [0]
    monkeypatch.setattr(LogFileReader, "read", lambda *_: read.append(1))
    harness.step_all(SECOND)
    assert read == [0]  # nor is it tried again


# Content


def test_rotated_log_is_streamed_whole_in_one_edition(harness: Harness) -> None:
    run = harness.requested()
    log = LogWriter(run.output, 2 * 60)
    written = b""
    for number in range(40):
        line = b"line number %d\n" % number
        log.write(line)
        written += line
        harness.step(MOMENT)
    log.close()
    edition = harness.read(run).edition
    found = b""
    while (chunk := harness.read(run, edition, len(found))).is_behind:
        found += chunk.finished
    assert found + chunk.finished == written
    assert chunk.edition == edition


def test_too_large_log_is_not_streamed(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_LOG", 100)
    monkeypatch.setattr(module, "_STEP", 10)
    run = harness.run()
    (run.directory / "output.1").write_bytes(b"x\n" * 40)
    run.prints(b"x\n" * 11)
    harness.store.logs.request_stream(run.attempt, LONG)
    brought = harness.calls("write_chunk")
    for _ in range(3):
        harness.step(SECOND)
    assert not brought
    assert harness.store.logs.read_chunk(run.attempt) is None


def test_stream_of_a_log_that_becomes_too_large_is_dropped(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_LOG", 100)
    run = harness.requested(b"x\n" * 50)
    harness.step()
    assert len(harness.read(run).finished) == 100
    opened = descriptors()
    run.prints(b"y\n")
    for _ in range(5):
        harness.step(MOMENT)
        assert harness.store.logs.read_chunk(run.attempt) is None
    assert descriptors() == opened - 1


@pytest.mark.parametrize("error", [StokerError("it cannot be read"), OSError(errno.EIO, "Input/output error")])
def test_unreadable_log_is_dropped_without_affecting_others(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    bad, good = harness.requested(b"one\n"), harness.requested(b"one\n")
    harness.step_all()
    read = LogFileReader.read

    def spoilt(reader: LogFileReader, most: int | None = None) -> Any:
        if reader._newer == bad.output:
            raise error
        return read(reader, most)

    for run in (bad, good):
        run.prints(b"two\n")
    with monkeypatch.context() as trouble:
        trouble.setattr(LogFileReader, "read", spoilt)
        harness.step_all(MOMENT)
        assert harness.store.logs.read_chunk(bad.attempt) is None
        harness.step_all(SECOND)
        assert harness.store.logs.read_chunk(bad.attempt) is None
    assert harness.read(good).finished == b"one\ntwo\n"
    harness.expire_request(bad)
    harness.step_all(SECOND)
    harness.store.logs.request_stream(bad.attempt, LONG)
    harness.step_all(SECOND)
    assert harness.read(bad).finished == b"one\ntwo\n"


def test_growing_line_is_cut_until_it_ends(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_UNFINISHED", 64)
    run = harness.requested(b"one\n" + b"x" * 100)
    harness.step()
    assert harness.read(run).unfinished == b"x" * 64
    brought = harness.calls("write_chunk")
    run.prints(b"x" * 100)
    harness.step(MOMENT)
    assert not brought  # that is what it is for
    run.ends()
    harness.step(MOMENT)
    chunk = harness.read(run)
    assert (chunk.unfinished, chunk.is_complete) == (b"x" * 200, True)


@pytest.mark.parametrize("end", [b"", b"\nlast\n"])
def test_line_longer_than_a_step_is_streamed_to_its_end(harness: Harness, end: bytes) -> None:
    """The rest of the file is not known yet when the line first grows beyond a step."""
    run = harness.requested(b"one\n" + b"x" * 100_000)
    harness.step()
    run.prints(b"x" * 900_000 + end)
    run.ends()
    for _ in range(3):
        harness.step(MOMENT)
    chunk = harness.read(run)
    assert chunk.is_complete
    assert chunk.finished + chunk.unfinished == b"one\n" + b"x" * 1_000_000 + end


def test_stream_of_an_ended_attempt_is_complete_once_all_is_sent(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STEP", 10)
    run = harness.requested(b"123456789\n")
    harness.step()
    run.prints(b"123456789\n" * 2 + b"end")
    run.ends()
    harness.step(MOMENT)
    harness.step()
    assert (harness.read(run).size, harness.read(run).is_complete) == (30, False)
    harness.step()
    chunk = harness.read(run)
    assert (chunk.finished, chunk.unfinished, chunk.is_complete) == (b"123456789\n" * 3, b"end", True)


def test_log_of_an_old_attempt_is_streamed_at_once(harness: Harness) -> None:
    run = harness.run()
    (run.directory / "output.1").write_bytes(b"older\n")
    run.prints(b"newer\n")
    run.ends()
    harness.store.logs.request_stream(run.attempt, LONG)
    harness.step()
    chunk = harness.read(run)
    assert (chunk.finished, chunk.is_complete) == (b"older\nnewer\n", True)


def test_stream_is_complete_only_with_the_last_line(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    run = harness.requested(b"one\n")
    read = LogFileReader.read

    def and_then_it_ends(reader: LogFileReader, most: int | None = None) -> Any:
        piece = read(reader, most)
        run.prints(b"last words\n")
        run.ends()
        return piece

    with monkeypatch.context() as patch:
        patch.setattr(LogFileReader, "read", and_then_it_ends)
        harness.step()
    assert (harness.read(run).finished, harness.read(run).is_complete) == (b"one\n", False)
    harness.step(MOMENT)
    assert (harness.read(run).finished, harness.read(run).is_complete) == (b"one\nlast words\n", True)


# End


def test_stream_without_readers_is_closed(harness: Harness) -> None:
    before = descriptors()
    run = harness.requested(b"one\n")
    harness.step()
    assert descriptors() == before + 1
    harness.expire_request(run)
    asked, ended = harness.calls("stream_requests"), harness.calls("expire_streams")
    harness.step(SECOND)
    assert descriptors() == before
    run.prints(b"two\n")
    harness.step(SECOND)
    assert harness.read(run).finished == b"one\n"
    # A reader that returns soon finds the stream; after that it expires.
    assert 60.0 <= harness.streaming.due() - harness.now < 120.0
    assert not ended
    harness.expire_request(run, ago=61.0)
    harness.step(harness.streaming.due() - harness.now)
    assert harness.store.logs.read_chunk(run.attempt) is None
    assert (harness.streaming.due() - harness.now, len(asked)) == (600.0, 1)


def test_stream_without_readers_is_closed_when_sending(harness: Harness) -> None:
    before = descriptors()
    run = harness.requested(b"one\n")
    harness.step()
    harness.expire_request(run)
    run.prints(b"two\n")
    harness.step(MOMENT)
    assert descriptors() == before
    assert harness.read(run).finished == b"one\n"


def test_returning_reader_gets_what_it_missed(harness: Harness) -> None:
    run = harness.requested(b"one\n")
    harness.step()
    first = harness.read(run)
    harness.expire_request(run)
    harness.step(SECOND)
    run.prints(b"two\n")
    harness.store.logs.request_stream(run.attempt, LONG)
    harness.streaming.note_change()
    harness.step(SECOND)
    assert harness.read(run, first.edition, first.size).size == 8
    assert harness.read(run).finished == b"one\ntwo\n"


def test_job_cleaned_during_streaming_is_ignored(harness: Harness) -> None:
    run, other = harness.requested(b"one\n"), harness.requested(b"one\n")
    harness.step_all()
    assert harness.store.attempts.finish(run.attempt, "succeeded", 0)
    assert harness.store.jobs.clean(-1.0) == 1
    for one in (run, other):
        one.prints(b"two\n")
    harness.step_all(MOMENT)
    harness.step_all(SECOND)
    assert harness.read(other).finished == b"one\ntwo\n"


def test_stream_restarts_after_it_expired_during_an_outage(harness: Harness) -> None:
    run = harness.requested(b"one\n")
    harness.step()
    harness.expire_request(run, ago=120.0)
    harness.store.logs.expire_streams()
    harness.store.logs.request_stream(run.attempt, LONG)
    run.prints(b"two\n")
    for _ in range(3):
        harness.step(SECOND)
    assert harness.read(run).finished == b"one\ntwo\n"


@pytest.mark.parametrize("was_done", [False, True])
def test_stream_restarts_after_the_queue_was_away(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, was_done: bool
) -> None:
    before = descriptors()
    run = harness.requested(b"one\n")
    harness.step()
    edition = harness.read(run).edition
    write_log_chunk = harness.store.logs.write_chunk

    def away(attempt: str, chunk: LogChunk) -> bool:
        if was_done:
            write_log_chunk(attempt, chunk)
        raise QueueAwayError("the queue went away")

    run.prints(b"two\n")
    with monkeypatch.context() as trouble:
        trouble.setattr(harness.store.logs, "write_chunk", away)
        with pytest.raises(QueueAwayError):
            harness.step(MOMENT)
    assert descriptors() == before
    harness.streaming.note_change()
    harness.step(SECOND)
    assert harness.read(run).edition == edition  # the stream itself may have caused the outage
    harness.step(5.0)
    chunk = harness.read(run, edition, 4)
    assert (chunk.start, chunk.finished) == (0, b"one\ntwo\n")
    assert chunk.edition != edition


def test_requests_are_checked_again_after_the_queue_was_away(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> None:
        raise QueueAwayError("the queue went away")

    with monkeypatch.context() as trouble:
        trouble.setattr(harness.store.logs, "stream_requests", away)
        with pytest.raises(QueueAwayError):
            harness.step()
    run = harness.requested(b"one\n")
    harness.step(5.0)
    assert harness.read(run).finished == b"one\n"


def test_database_that_refuses_streams_affects_no_job(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_attempt: str, _chunk: LogChunk) -> bool:
        raise StokerError("the queue may not be changed by this user")

    run = harness.requested(b"one\n")
    with monkeypatch.context() as trouble:
        trouble.setattr(harness.store.logs, "write_chunk", refused)
        harness.step()
    asked = harness.calls("stream_requests")
    for _ in range(10):
        harness.streaming.note_change()
        harness.step(SECOND)
    assert not asked  # it would be refused again
    harness.step(120.0)
    assert harness.read(run).finished == b"one\n"


# Random sequences of events

WORDS = [b"line\n", b"a longer line than that\n", b"\r 10%", b"\r 100%", b"x" * 30, b"\n", b"\0\xff"]
PRINTED = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(b"".join)
# The last ones are rare: each starts another, shorter edition.
EVENTS = st.sampled_from([*["nothing", "streams", "reads"] * 8, "worker restarts", "queue goes away"])
LIMIT = 300
STEPS = st.lists(st.tuples(PRINTED, EVENTS), min_size=15, max_size=40)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """Shared by all examples."""
    place = tmp_path_factory.mktemp("lasting")
    with pytest.MonkeyPatch.context() as patch, init_queue(str(place / "queue.db")) as store:
        patch.setattr(module, "_STEP", 64)
        harness = Harness(place / "home", store, patch)
        yield harness
        harness.streaming.close()
        harness.home.leave()


@given(steps=STEPS)
@settings(max_examples=examples(60))
def test_copy_equals_the_log_after_any_sequence_of_events(lasting: Harness, steps: list[tuple[bytes, str]]) -> None:
    # A line longer than a file is cut, and a carriage return no longer overwrites its start.
    assume(max(map(len, re.split(rb"[\r\n]", b"".join(printed for printed, _ in steps)))) < LIMIT // 2)
    run = lasting.requested()
    copy = RemoteLog(run.attempt)
    follower = Follower(copy)
    log, whole = LogWriter(run.output, LIMIT), LogWriter(run.directory / "whole", 10**9)
    try:
        is_whole = play(steps, lasting, run, (log, whole), follower)
        run.ends()
        for _ in range(100):
            lasting.step(SECOND)
            follower.read(lasting.store)
            if copy.is_complete:
                break
        assert copy.is_complete
        expected = (run.directory / "whole").read_bytes()
        with contextlib.closing(LogFileReader(run.directory)) as fresh:
            assert follower.received.endswith(b"".join(fresh.read()))
        assert expected.endswith(follower.received)
        assert not is_whole or follower.received == expected
    finally:
        for opened in (log, whole, follower, copy):
            opened.close()
        lasting.expire_request(run)
        lasting.streaming.close()


def play(
    steps: list[tuple[bytes, str]],
    harness: Harness,
    run: Run,
    logs: tuple[LogWriter, LogWriter],
    follower: "Follower",
) -> bool:
    """Whether the copy is complete."""
    is_whole = True
    harness.streaming.note_change()
    harness.step(SECOND)
    for printed, event in steps:
        for log in logs:
            log.write(printed)
        # Two rotations between two looks would lose lines to any reader.
        harness.step(MOMENT)
        match event:
            case "streams":
                harness.step(SECOND)
            case "reads":
                follower.read(harness.store)
            case "worker restarts" | "queue goes away":
                # The next edition lacks the lines rotated away before it.
                is_whole = is_whole and not (run.directory / "output.1").exists()
                harness.streaming.close()
                if event == "worker restarts":
                    harness.streaming = LogStreaming(harness.home)
                harness.step(SECOND)
    return is_whole


class Follower:
    """Reads a copy like a log, and restarts with each new edition."""

    def __init__(self, copy: RemoteLog) -> None:
        self._copy = copy
        self._edition = ""
        self._reader: LogFileReader | None = None
        self._finished = b""
        self.received = b""

    def read(self, store: Store) -> None:
        self._copy.update(queries_on(store))
        if self._copy.directory is None:
            return
        if self._reader is None or self._copy.edition != self._edition:
            self.close()
            self._edition, self._finished = self._copy.edition, b""
            self._reader = LogFileReader(self._copy.directory)
        finished, unfinished = self._reader.read()
        self._finished += finished
        self.received = self._finished + unfinished

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
