"""A worker lends outputs of its own machine while somebody wants them: all of them, soon, and never at a job's cost."""

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
from stoker.logs.model import LogChunk
from stoker.logs.reader import LogFileReader
from stoker.logs.remote import RemoteLog
from stoker.logs.writer import LogWriter
from stoker.queue import Store, init_queue
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


class Stage:
    """A worker that lends, on a clock that the test sets, through a queue that is a real one."""

    def __init__(self, directory: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.store = store
        self.home = WorkerIdentity(directory)
        self.lending = LogStreaming(self.home)
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self._patch = monkeypatch

    def run(self, worker: str | None = None) -> Run:
        """An attempt that has begun, and printed nothing yet."""
        (job,) = submit(self.store, "x")
        attempt = self.store.attempts.claim(job, worker or self.home.worker, [], LONG)
        assert attempt is not None
        return Run(self.home.directory / "attempts" / f"{job}-{attempt.number}", attempt.id)

    def wanted(self, printed: bytes = b"") -> Run:
        """One that somebody wants to read."""
        run = self.run()
        run.prints(printed)
        assert self.store.logs.request_stream(run.attempt, LONG)
        return run

    def forget_wish(self, run: Run, ago: float = 1.0) -> None:
        """As if nobody had wanted it any more for so long."""
        change = f"UPDATE stoker_log_streams SET until = until - {LONG + ago} WHERE attempt_id = '{run.attempt}'"
        self.store._driver.fetch_text(change, {})

    def lend(self, after: float = 0.0) -> None:
        """What is due after so many seconds, and nothing else."""
        self.now += after
        self.lending.step(self.store)

    def lend_all(self, after: float = 0.0) -> None:
        """The same, step by step until nothing is due."""
        self.lend(after)
        while self.lending.due() <= self.now:
            self.lend()

    def read(self, run: Run, edition: str = "", start: int = 0) -> LogChunk:
        """All that was lent of it."""
        told = self.store.logs.read_chunk(run.attempt, edition, start)
        assert told is not None
        return told

    def calls(self, name: str) -> list[object]:
        """One for every call of the store from now on."""
        made: list[object] = []
        original = getattr(self.store.logs, name)

        def counted(*arguments: Any) -> Any:
            made.append(arguments)
            return original(*arguments)

        self._patch.setattr(self.store.logs, name, counted)
        return made


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    with init_queue(str(tmp_path / "queue.db")) as store:
        stage = Stage(tmp_path / "home", store, monkeypatch)
        yield stage
        stage.lending.close()
        stage.home.leave()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - only their number


# Whose


def test_only_requested_logs_are_streamed(stage: Stage) -> None:
    run, unwanted = stage.wanted(b"one\ntwo\n 10%"), stage.run()
    unwanted.prints(b"private\n")
    stage.lend()
    told = stage.read(run)
    assert (told.finished, told.unfinished, told.is_behind, told.is_complete) == (b"one\ntwo\n", b" 10%", False, False)
    assert stage.store.logs.read_chunk(unwanted.attempt) is None


def test_log_of_another_machine_is_not_streamed(stage: Stage) -> None:
    run = stage.run("another-1")
    run.prints(b"of an older job by the same name\n")
    stage.store.logs.request_stream(run.attempt, LONG)
    stage.lend()
    assert stage.store.logs.read_chunk(run.attempt) is None


def test_log_of_an_earlier_worker_of_this_home_is_streamed(stage: Stage) -> None:
    run = stage.run(f"{stage.home.key}-earlier")
    run.prints(b"one\n")
    stage.store.logs.request_stream(run.attempt, LONG)
    stage.lend()
    assert stage.read(run).finished == b"one\n"


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
def test_files_of_another_attempt_are_not_streamed(stage: Stage, spoilt: Callable[[Run], None]) -> None:
    run = stage.wanted(b"secret\n")
    spoilt(run)
    for _ in range(3):
        stage.lend(SECOND)
    assert stage.store.logs.read_chunk(run.attempt) is None


# When


def test_requests_are_checked_at_most_once_a_second(stage: Stage) -> None:
    asked = stage.calls("stream_requests")
    stage.lend()
    for _ in range(9):
        stage.lending.note_change()
        stage.lend(0.1)
    assert len(asked) == 1
    assert stage.lending.due() == pytest.approx(1000.0 + SECOND)
    stage.lend(0.2)
    assert len(asked) == 2


def test_without_requests_or_changes_nothing_is_checked(stage: Stage) -> None:
    asked = stage.calls("stream_requests")
    stage.lend()
    # Only whether others have left something is looked for now and then.
    assert stage.lending.due() - stage.now == 600.0
    stage.lend(3600.0)
    assert len(asked) == 1
    run = stage.wanted(b"one\n")
    stage.lending.note_change()
    assert stage.lending.due() <= stage.now
    stage.lend()
    assert stage.read(run).finished == b"one\n"


def test_log_that_starts_after_its_request_is_streamed_within_a_second(stage: Stage) -> None:
    run = stage.run()
    stage.store.logs.request_stream(run.attempt, LONG)
    stage.lend()
    run.prints(b"one\n")
    stage.lend(SECOND)
    assert stage.read(run).finished == b"one\n"


def test_long_log_is_streamed_in_steps(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STEP", 10)
    lines = b"".join(b"%04d\n" % number for number in range(7))
    run = stage.wanted(lines + b"last")
    for step in (1, 2, 3):
        stage.lend()
        told = stage.read(run)
        assert (told.finished, told.unfinished, told.is_behind) == (lines[: 10 * step], b"", True)
        assert stage.lending.due() <= stage.now
    stage.lend()
    told = stage.read(run)
    assert (told.finished, told.unfinished, told.is_behind) == (lines, b"last", False)
    assert stage.lending.due() == stage.now + MOMENT


def test_new_text_is_sent_twice_a_second_and_nothing_otherwise(stage: Stage) -> None:
    run = stage.wanted(b"one\n")
    stage.lend()
    brought = stage.calls("write_chunk")
    run.prints(b"two\n")
    stage.lend(0.9 * MOMENT)
    assert not brought
    stage.lend(0.1 * MOMENT)
    assert stage.read(run).finished == b"one\ntwo\n"
    for _ in range(10):
        stage.lend(MOMENT)
    assert len(brought) == 1
    run.prints(b" 10%")
    stage.lend(MOMENT)
    assert stage.read(run).unfinished == b" 10%"
    os.truncate(run.output, 8)
    run.prints(b" 20%\nthree\n")
    stage.lend(MOMENT)
    assert (stage.read(run).finished, stage.read(run).unfinished) == (b"one\ntwo\n 20%\nthree\n", b"")
    assert len(brought) == 3


def test_several_logs_are_streamed_side_by_side(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STEP", 4)
    runs = [stage.wanted(b"%d00\n" % number * 5) for number in range(3)]
    for _ in range(6):
        stage.lend()
    assert [len(stage.read(run).finished) for run in runs] == [8, 8, 8]
    stage.lend_all()
    assert [stage.read(run).finished for run in runs] == [b"%d00\n" % number * 5 for number in range(3)]


def test_streams_wait_while_too_many_are_behind(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_BEHIND", 2)
    monkeypatch.setattr(module, "_MAX_OPEN", 3)
    before = descriptors()
    runs = [stage.wanted(b"one\n") for _ in range(5)]
    stage.lend_all()
    assert descriptors() == before + 2
    assert sum(stage.store.logs.read_chunk(run.attempt) is not None for run in runs) == 2
    for _ in range(3):
        stage.lend_all(SECOND)
    assert descriptors() == before + 3
    for run in runs:
        run.ends()
    for _ in range(5):
        stage.lend_all(SECOND)
    assert all(stage.read(run).is_complete for run in runs)
    assert descriptors() == before
    assert stage.lending.due() == stage.now + SECOND  # what is complete is looked at no more


def test_followed_jobs_do_not_delay_other_streams(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_BEHIND", 1)
    for _ in range(3):
        run = stage.wanted(b"one\n")
        for _ in range(2):
            stage.lend_all(SECOND)
        assert stage.read(run).finished == b"one\n"


def test_new_reader_right_after_another_gets_the_log_of_a_silent_job(stage: Stage) -> None:
    run = stage.wanted(b"one\n")
    stage.lend_all()
    stage.forget_wish(run)
    stage.store.logs.request_stream(run.attempt, LONG)
    assert stage.store.logs.read_chunk(run.attempt) is None
    stage.lend_all(SECOND)
    assert stage.read(run).finished == b"one\n"


def test_total_size_of_streams_is_limited(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_STORED", 6)
    runs = [stage.wanted(b"one\n") for _ in range(4)]
    for run in runs:
        run.ends()
    for _ in range(5):
        stage.lend_all(SECOND)
    assert sum(stage.store.logs.read_chunk(run.attempt) is not None for run in runs) == 4
    # All were begun before the first was brought; no other one is.
    another = stage.wanted(b"two\n")
    stage.lend_all(SECOND)
    assert stage.store.logs.read_chunk(another.attempt) is None


@pytest.mark.parametrize("line", [b"x" * 200, b"x" * 200 + b"\n", b"one\n" * 3 + b"x" * 200])
def test_line_without_an_end_is_not_streamed(stage: Stage, monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    monkeypatch.setattr(module, "_MAX_LINE", 100)
    monkeypatch.setattr(module, "_STEP", 10)
    run = stage.wanted(line)
    for _ in range(3):
        stage.lend_all(SECOND)
    assert stage.store.logs.read_chunk(run.attempt) is None
    read = [0]
    monkeypatch.setattr(LogFileReader, "read", lambda *_: read.append(1))
    stage.lend_all(SECOND)
    assert read == [0]  # nor is it tried again


# What


def test_rotated_log_is_streamed_whole_in_one_edition(stage: Stage) -> None:
    run = stage.wanted()
    log = LogWriter(run.output, 2 * 60)
    written = b""
    for number in range(40):
        line = b"line number %d\n" % number
        log.write(line)
        written += line
        stage.lend(MOMENT)
    log.close()
    edition = stage.read(run).edition
    found = b""
    while (told := stage.read(run, edition, len(found))).is_behind:
        found += told.finished
    assert found + told.finished == written
    assert told.edition == edition


def test_too_large_log_is_not_streamed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_LOG", 100)
    monkeypatch.setattr(module, "_STEP", 10)
    run = stage.run()
    (run.directory / "output.1").write_bytes(b"x\n" * 40)
    run.prints(b"x\n" * 11)
    stage.store.logs.request_stream(run.attempt, LONG)
    brought = stage.calls("write_chunk")
    for _ in range(3):
        stage.lend(SECOND)
    assert not brought
    assert stage.store.logs.read_chunk(run.attempt) is None


def test_stream_of_a_log_that_becomes_too_large_is_dropped(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_LOG", 100)
    run = stage.wanted(b"x\n" * 50)
    stage.lend()
    assert len(stage.read(run).finished) == 100
    opened = descriptors()
    run.prints(b"y\n")
    for _ in range(5):
        stage.lend(MOMENT)
        assert stage.store.logs.read_chunk(run.attempt) is None
    assert descriptors() == opened - 1


@pytest.mark.parametrize("error", [StokerError("it cannot be read"), OSError(errno.EIO, "Input/output error")])
def test_unreadable_log_is_dropped_without_affecting_others(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    bad, good = stage.wanted(b"one\n"), stage.wanted(b"one\n")
    stage.lend_all()
    read = LogFileReader.read

    def spoilt(reader: LogFileReader, most: int | None = None) -> Any:
        if reader._newer == bad.output:
            raise error
        return read(reader, most)

    for run in (bad, good):
        run.prints(b"two\n")
    with monkeypatch.context() as trouble:
        trouble.setattr(LogFileReader, "read", spoilt)
        stage.lend_all(MOMENT)
        assert stage.store.logs.read_chunk(bad.attempt) is None
        stage.lend_all(SECOND)
        assert stage.store.logs.read_chunk(bad.attempt) is None
    assert stage.read(good).finished == b"one\ntwo\n"
    stage.forget_wish(bad)
    stage.lend_all(SECOND)
    stage.store.logs.request_stream(bad.attempt, LONG)
    stage.lend_all(SECOND)
    assert stage.read(bad).finished == b"one\ntwo\n"


def test_growing_line_is_cut_until_it_ends(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_UNFINISHED", 64)
    run = stage.wanted(b"one\n" + b"x" * 100)
    stage.lend()
    assert stage.read(run).unfinished == b"x" * 64
    brought = stage.calls("write_chunk")
    run.prints(b"x" * 100)
    stage.lend(MOMENT)
    assert not brought  # that is what it is for
    run.ends()
    stage.lend(MOMENT)
    told = stage.read(run)
    assert (told.unfinished, told.is_complete) == (b"x" * 200, True)


@pytest.mark.parametrize("end", [b"", b"\nlast\n"])
def test_line_longer_than_a_step_is_streamed_to_its_end(stage: Stage, end: bytes) -> None:
    """What the file has behind the step is not yet known when the line is first seen to have grown."""
    run = stage.wanted(b"one\n" + b"x" * 100_000)
    stage.lend()
    run.prints(b"x" * 900_000 + end)
    run.ends()
    for _ in range(3):
        stage.lend(MOMENT)
    told = stage.read(run)
    assert told.is_complete
    assert told.finished + told.unfinished == b"one\n" + b"x" * 1_000_000 + end


def test_stream_of_an_ended_attempt_is_complete_once_all_is_sent(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_STEP", 10)
    run = stage.wanted(b"123456789\n")
    stage.lend()
    run.prints(b"123456789\n" * 2 + b"end")
    run.ends()
    stage.lend(MOMENT)
    stage.lend()
    assert (stage.read(run).size, stage.read(run).is_complete) == (30, False)
    stage.lend()
    told = stage.read(run)
    assert (told.finished, told.unfinished, told.is_complete) == (b"123456789\n" * 3, b"end", True)


def test_log_of_an_old_attempt_is_streamed_at_once(stage: Stage) -> None:
    run = stage.run()
    (run.directory / "output.1").write_bytes(b"older\n")
    run.prints(b"newer\n")
    run.ends()
    stage.store.logs.request_stream(run.attempt, LONG)
    stage.lend()
    told = stage.read(run)
    assert (told.finished, told.is_complete) == (b"older\nnewer\n", True)


def test_stream_is_complete_only_with_the_last_line(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stage.wanted(b"one\n")
    read = LogFileReader.read

    def and_then_it_ends(reader: LogFileReader, most: int | None = None) -> Any:
        piece = read(reader, most)
        run.prints(b"last words\n")
        run.ends()
        return piece

    with monkeypatch.context() as patch:
        patch.setattr(LogFileReader, "read", and_then_it_ends)
        stage.lend()
    assert (stage.read(run).finished, stage.read(run).is_complete) == (b"one\n", False)
    stage.lend(MOMENT)
    assert (stage.read(run).finished, stage.read(run).is_complete) == (b"one\nlast words\n", True)


# Its end


def test_stream_without_readers_is_closed(stage: Stage) -> None:
    before = descriptors()
    run = stage.wanted(b"one\n")
    stage.lend()
    assert descriptors() == before + 1
    stage.forget_wish(run)
    asked, ended = stage.calls("stream_requests"), stage.calls("expire_streams")
    stage.lend(SECOND)
    assert descriptors() == before
    run.prints(b"two\n")
    stage.lend(SECOND)
    assert stage.read(run).finished == b"one\n"
    # Whoever comes back soon need not wait for it again; after that, it is in nobody's way.
    assert 60.0 <= stage.lending.due() - stage.now < 120.0
    assert not ended
    stage.forget_wish(run, ago=61.0)
    stage.lend(stage.lending.due() - stage.now)
    assert stage.store.logs.read_chunk(run.attempt) is None
    assert (stage.lending.due() - stage.now, len(asked)) == (600.0, 1)


def test_stream_without_readers_is_closed_when_sending(stage: Stage) -> None:
    before = descriptors()
    run = stage.wanted(b"one\n")
    stage.lend()
    stage.forget_wish(run)
    run.prints(b"two\n")
    stage.lend(MOMENT)
    assert descriptors() == before
    assert stage.read(run).finished == b"one\n"


def test_returning_reader_gets_what_it_missed(stage: Stage) -> None:
    run = stage.wanted(b"one\n")
    stage.lend()
    first = stage.read(run)
    stage.forget_wish(run)
    stage.lend(SECOND)
    run.prints(b"two\n")
    stage.store.logs.request_stream(run.attempt, LONG)
    stage.lending.note_change()
    stage.lend(SECOND)
    assert stage.read(run, first.edition, first.size).size == 8
    assert stage.read(run).finished == b"one\ntwo\n"


def test_job_cleaned_during_streaming_is_ignored(stage: Stage) -> None:
    run, other = stage.wanted(b"one\n"), stage.wanted(b"one\n")
    stage.lend_all()
    assert stage.store.attempts.finish(run.attempt, "succeeded", 0)
    assert stage.store.jobs.clean(-1.0) == 1
    for one in (run, other):
        one.prints(b"two\n")
    stage.lend_all(MOMENT)
    stage.lend_all(SECOND)
    assert stage.read(other).finished == b"one\ntwo\n"


def test_stream_restarts_after_it_expired_during_an_outage(stage: Stage) -> None:
    run = stage.wanted(b"one\n")
    stage.lend()
    stage.forget_wish(run, ago=120.0)
    stage.store.logs.expire_streams()
    stage.store.logs.request_stream(run.attempt, LONG)
    run.prints(b"two\n")
    for _ in range(3):
        stage.lend(SECOND)
    assert stage.read(run).finished == b"one\ntwo\n"


@pytest.mark.parametrize("was_done", [False, True])
def test_stream_restarts_after_the_queue_was_away(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, was_done: bool
) -> None:
    before = descriptors()
    run = stage.wanted(b"one\n")
    stage.lend()
    edition = stage.read(run).edition
    write_log_chunk = stage.store.logs.write_chunk

    def away(attempt: str, lent: LogChunk) -> bool:
        if was_done:
            write_log_chunk(attempt, lent)
        raise QueueAwayError("the queue went away")

    run.prints(b"two\n")
    with monkeypatch.context() as trouble:
        trouble.setattr(stage.store.logs, "write_chunk", away)
        with pytest.raises(QueueAwayError):
            stage.lend(MOMENT)
    assert descriptors() == before
    stage.lending.note_change()
    stage.lend(SECOND)
    assert stage.read(run).edition == edition  # perhaps it was the loan that was too much for it
    stage.lend(5.0)
    told = stage.read(run, edition, 4)
    assert (told.start, told.finished) == (0, b"one\ntwo\n")
    assert told.edition != edition


def test_requests_are_checked_again_after_the_queue_was_away(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> None:
        raise QueueAwayError("the queue went away")

    with monkeypatch.context() as trouble:
        trouble.setattr(stage.store.logs, "stream_requests", away)
        with pytest.raises(QueueAwayError):
            stage.lend()
    run = stage.wanted(b"one\n")
    stage.lend(5.0)
    assert stage.read(run).finished == b"one\n"


def test_database_that_refuses_streams_affects_no_job(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_attempt: str, _lent: LogChunk) -> bool:
        raise StokerError("the queue may not be changed by this user")

    run = stage.wanted(b"one\n")
    with monkeypatch.context() as trouble:
        trouble.setattr(stage.store.logs, "write_chunk", refused)
        stage.lend()
    asked = stage.calls("stream_requests")
    for _ in range(10):
        stage.lending.note_change()
        stage.lend(SECOND)
    assert not asked  # it would be refused again
    stage.lend(120.0)
    assert stage.read(run).finished == b"one\n"


# All of it together

WORDS = [b"line\n", b"a longer line than that\n", b"\r 10%", b"\r 100%", b"x" * 30, b"\n", b"\0\xff"]
PRINTED = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(b"".join)
# Mostly none of the last ones: what comes after them is another edition, and a shorter one.
EVENTS = st.sampled_from([*["nothing", "lends", "reads"] * 8, "worker restarts", "queue goes away"])
LIMIT = 300
STEPS = st.lists(st.tuples(PRINTED, EVENTS), min_size=15, max_size=40)


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One for all examples."""
    place = tmp_path_factory.mktemp("lasting")
    with pytest.MonkeyPatch.context() as patch, init_queue(str(place / "queue.db")) as store:
        patch.setattr(module, "_STEP", 64)
        stage = Stage(place / "home", store, patch)
        yield stage
        stage.lending.close()
        stage.home.leave()


@given(steps=STEPS)
@settings(max_examples=examples(60))
def test_copy_equals_the_log_whatever_happens(lasting: Stage, steps: list[tuple[bytes, str]]) -> None:
    # A line that is longer than a file is cut there, and no carriage return overwrites its beginning any more.
    assume(max(map(len, re.split(rb"[\r\n]", b"".join(printed for printed, _ in steps)))) < LIMIT // 2)
    run = lasting.wanted()
    mirror = RemoteLog(run.attempt)
    follower = Follower(mirror)
    log, whole = LogWriter(run.output, LIMIT), LogWriter(run.directory / "whole", 10**9)
    try:
        is_whole = play(steps, lasting, run, (log, whole), follower)
        run.ends()
        for _ in range(100):
            lasting.lend(SECOND)
            follower.read(lasting.store)
            if mirror.is_complete:
                break
        assert mirror.is_complete
        expected = (run.directory / "whole").read_bytes()
        with contextlib.closing(LogFileReader(run.directory)) as fresh:
            assert follower.told.endswith(b"".join(fresh.read()))
        assert expected.endswith(follower.told)
        assert not is_whole or follower.told == expected
    finally:
        for opened in (log, whole, follower, mirror):
            opened.close()
        lasting.forget_wish(run)
        lasting.lending.close()


def play(
    steps: list[tuple[bytes, str]],
    stage: Stage,
    run: Run,
    logs: tuple[LogWriter, LogWriter],
    follower: "Follower",
) -> bool:
    """Whether whoever has read along has all of it."""
    is_whole = True
    stage.lending.note_change()
    stage.lend(SECOND)
    for printed, event in steps:
        for log in logs:
            log.write(printed)
        # Two rotations between two looks would lose lines to any reader.
        stage.lend(MOMENT)
        match event:
            case "lends":
                stage.lend(SECOND)
            case "reads":
                follower.read(stage.store)
            case "worker restarts" | "queue goes away":
                # What was rotated away before is not in the next edition.
                is_whole = is_whole and not (run.directory / "output.1").exists()
                stage.lending.close()
                if event == "worker restarts":
                    stage.lending = LogStreaming(stage.home)
                stage.lend(SECOND)
    return is_whole


class Follower:
    """Reads a mirror as anybody reads an output, and begins anew when it does."""

    def __init__(self, mirror: RemoteLog) -> None:
        self._mirror = mirror
        self._edition = ""
        self._reader: LogFileReader | None = None
        self._finished = b""
        self.told = b""

    def read(self, store: Store) -> None:
        self._mirror.update(store)
        if self._mirror.directory is None:
            return
        if self._reader is None or self._mirror.edition != self._edition:
            self.close()
            self._edition, self._finished = self._mirror.edition, b""
            self._reader = LogFileReader(self._mirror.directory)
        finished, unfinished = self._reader.read()
        self._finished += finished
        self.told = self._finished + unfinished

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
