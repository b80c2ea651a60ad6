"""Following a log on another machine: streamed whole, or the tail, and no line twice."""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from stoker.cli.options.queue import Listener
from stoker.cli.verbs.logs import JobFollower, PipeScreen
from stoker.errors import StokerError
from stoker.logs.reader import LogChunk, LogUpdate, attempt_directory
from stoker.logs.writer import LogWriter
from stoker.queue import Attempt, Store, init_queue
from stoker.status import log_follower as follow_module
from stoker.status.log_follower import STREAM_STARTS_WITHIN, LogFollower, queries_on
from tests.support.attempts import WORKER, be_there, start, submit
from tests.support.log_sender import LogSender, copies_in

PATIENCE = STREAM_STARTS_WITHIN


class Reading:
    """One follower of an attempt elsewhere. The first read goes on until everything printed so far has arrived."""

    def __init__(self, harness: "Harness", attempt: Attempt) -> None:
        self._harness = harness
        self._has_begun = False
        self.follower = LogFollower(attempt, harness.home, continuous=True, complete=True)

    def read(self) -> LogUpdate:
        finished, unfinished = self.follower.read(queries_on(self._harness.store))
        while self.follower.is_behind or not (self._has_begun or self.follower.is_caught_up):
            pause = self.follower.pause()
            if pause:
                self._harness.sleep(pause)
            else:
                self._harness.waited += 0.001
            lines, unfinished = self.follower.read(queries_on(self._harness.store))
            finished += lines
        self._has_begun = True
        return LogUpdate(finished, unfinished)

    @property
    def is_whole(self) -> bool:
        return self.follower.source in {"file", "stream"}

    @property
    def is_here(self) -> bool:
        return self.follower.source == "file"

    @property
    def is_late(self) -> bool:
        return self.follower.ended is not None and not self.follower.is_complete

    def close(self) -> None:
        self.follower.close()


class Harness:
    """An attempt elsewhere and its reader here, on a clock that moves only while the reader waits."""

    def __init__(self, store: Store, place: Path, sender: LogSender) -> None:
        self.store = store
        self.sender = sender
        self.attempt = start(store, *submit(store, "train"))
        self.home = place / "home"
        self.here = attempt_directory(self.home, self.attempt)
        self.waited = 0.0
        self.clock = SimpleNamespace(monotonic=self.now, sleep=self.sleep)
        self.meanwhile: Callable[[], None] = self.work

    def begin(self) -> None:
        self.reader = Reading(self, self.attempt)

    def now(self) -> float:
        return 1000.0 + self.waited

    def sleep(self, seconds: float) -> None:
        self.waited += seconds
        self.meanwhile()

    def work(self) -> None:
        self.sender.send(self.store)

    def idle(self) -> None:
        """No worker answers."""

    @property
    def output(self) -> Path:
        return self.sender.place_of(self.attempt) / "output"

    def prints(self, data: bytes) -> None:
        with self.output.open("ab") as file:
            file.write(data)

    def ends(self) -> Attempt:
        self.store.attempts.finish(self.attempt.id, "succeeded", 0)
        self.sender.end(self.attempt)
        found = self.store.attempts.get(self.attempt.id)
        assert found is not None
        return found

    def read(self) -> LogUpdate:
        """Reads after the worker streamed new output."""
        self.work()
        return self.reader.read()


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return copies_in(tmp_path / "copies", monkeypatch)


@pytest.fixture
def harness(tmp_path: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Harness]:
    with init_queue(str(tmp_path / "queue.db")) as store:
        be_there(store)
        harness = Harness(store, tmp_path, LogSender(tmp_path / "far", monkeypatch))
        monkeypatch.setattr(follow_module, "time", harness.clock)
        monkeypatch.setattr(follow_module, "CHECK_END_EVERY", 0.0)
        harness.begin()
        yield harness
        harness.reader.close()
        harness.sender.close()
    assert list(copies.iterdir()) == []


def lines(begin: int, end: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(begin, end))


# Whole stream


def test_whole_stream_is_read_and_then_new_output(harness: Harness) -> None:
    harness.prints(lines(0, 100_000) + b" 10%")
    assert len(lines(0, 100_000)) > 4 * 256 * 1024  # several steps of the worker
    assert harness.reader.read() == LogUpdate(lines(0, 100_000), b" 10%")
    assert harness.reader.is_whole
    assert not harness.reader.is_here
    assert harness.read() == LogUpdate(b"", b" 10%")
    harness.prints(b"\n" + lines(0, 3) + b"end")
    assert harness.read() == LogUpdate(b" 10%\n" + lines(0, 3), b"end")


def test_invalid_utf8_is_streamed_unchanged(harness: Harness) -> None:
    harness.prints(b"\xff\0\xfe\n")
    assert harness.reader.read() == LogUpdate(b"\xff\0\xfe\n", b"")


def test_log_of_an_ended_attempt_is_incomplete_until_its_last_line_arrives(harness: Harness) -> None:
    harness.prints(b"1\n")
    harness.reader.read()
    harness.prints(b"2")
    harness.ends()
    assert harness.reader.read() == LogUpdate(b"", b"")
    assert harness.reader.is_late
    assert harness.read() == LogUpdate(b"", b"2")
    assert not harness.reader.is_late


def test_read_of_an_ended_attempt_waits_for_its_last_line(harness: Harness) -> None:
    harness.prints(b"1\n")
    harness.reader.read()
    harness.prints(b"2")
    second = Reading(harness, harness.ends())
    assert second.read() == LogUpdate(b"1\n", b"2")
    assert not second.is_late
    second.close()


def test_rest_of_an_earlier_stream_is_not_taken_for_the_whole_log(harness: Harness) -> None:
    """Its reader has gone, and the job has printed more since."""
    harness.prints(b"1\n")
    harness.reader.read()
    harness.store._driver.fetch_text("UPDATE stoker_log_streams SET until = until - 31", {})
    harness.work()
    harness.prints(b"2\n")
    second = Reading(harness, harness.attempt)
    assert second.read() == LogUpdate(b"1\n2\n", b"")
    second.close()


def test_slow_stream_is_waited_for_while_it_makes_progress(harness: Harness) -> None:
    turns = itertools.count()
    harness.meanwhile = lambda: harness.work() if next(turns) % 50 == 0 else None  # every five seconds
    harness.prints(lines(0, 100_000))
    assert harness.reader.read().finished == lines(0, 100_000)
    assert harness.waited > 20.0


def test_machine_that_was_asleep_waits_for_the_stream_after_it_wakes(harness: Harness) -> None:
    def sleep_and_wake() -> None:
        harness.waited += 3600.0
        harness.meanwhile = harness.work

    harness.meanwhile = sleep_and_wake
    harness.prints(b"1\n")
    assert harness.reader.read() == LogUpdate(b"1\n", b"")
    assert harness.reader.is_whole


def test_closing_removes_the_copy(harness: Harness, copies: Path) -> None:
    harness.prints(b"1\n")
    harness.reader.read()
    assert len(list(copies.iterdir())) == 1
    harness.reader.close()
    assert list(copies.iterdir()) == []


# Another edition


def test_restarted_worker_repeats_no_line(harness: Harness) -> None:
    harness.prints(lines(0, 50_000) + b" 10%")
    received = harness.reader.read().finished
    for number in range(50_000, 50_003):
        harness.sender.close()
        harness.sender.restart()
        harness.prints(b"\n" if number == 50_000 else b"")
        harness.prints(lines(number, number + 1))
        steps = [harness.read() for _ in range(6)]
        assert b"".join(step.finished for step in steps[:2]) == b""  # the new edition is still arriving
        received += b"".join(step.finished for step in steps)
    assert received == lines(0, 50_000) + b" 10%\n" + lines(50_000, 50_003)
    assert harness.reader.is_whole


def test_unfinished_line_stays_while_another_edition_arrives(harness: Harness) -> None:
    harness.prints(lines(0, 50_000) + b" 10%")
    harness.reader.read()
    harness.sender.close()
    harness.sender.restart()
    assert {harness.read() for _ in range(4)} == {LogUpdate(b"", b" 10%")}


@pytest.mark.parametrize("repeats", [1, 3])
def test_rotated_log_is_continued_in_another_edition(harness: Harness, repeats: int) -> None:
    """The writer keeps a limited size, and the new worker starts with what remains."""
    log = LogWriter(harness.output, limit=20_000)
    log.write(lines(0, 1000))
    received = harness.reader.read().finished
    for turn in range(repeats):
        log.write(lines(1000 + 500 * turn, 1500 + 500 * turn))
        harness.sender.close()
        harness.sender.restart()
        received += harness.read().finished
    log.close()
    assert received == lines(0, 1000 + 500 * repeats)


def test_lines_lost_between_two_editions_are_marked(harness: Harness) -> None:
    harness.prints(lines(0, 10))
    harness.reader.read()
    harness.sender.close()
    harness.sender.restart()
    harness.output.write_bytes(lines(50, 60))
    marker, rest = harness.read().finished.split(b"\n", 1)
    assert b"lines are missing here" in marker
    assert rest == lines(50, 60)


# The end


def test_tail_is_read_if_no_stream_starts_in_time(harness: Harness) -> None:
    harness.meanwhile = harness.idle
    harness.store.logs.write(harness.attempt.id, "the\nend")
    assert harness.reader.read() == LogUpdate(b"the\n", b"end")
    assert not harness.reader.is_whole
    assert not harness.reader.is_late
    assert harness.waited == pytest.approx(PATIENCE, abs=0.2)
    harness.store.logs.write(harness.attempt.id, "the\nend\nof it")
    assert harness.reader.read() == LogUpdate(b"end\n", b"of it")
    assert harness.waited < PATIENCE + 0.2


def test_lost_machine_is_not_waited_for(harness: Harness) -> None:
    harness.store.workers.farewell(WORKER)
    harness.store.logs.write(harness.attempt.id, "the end\n")
    assert harness.reader.read() == LogUpdate(b"the end\n", b"")
    assert not harness.reader.is_whole
    assert harness.waited < 0.1


@pytest.mark.parametrize("age", [0, 31])
def test_complete_stream_of_a_lost_machine_is_the_whole_log(harness: Harness, age: int) -> None:
    harness.prints(lines(0, 250_000))
    assert len(lines(0, 250_000)) > 8 * 256 * 1024  # more than one read returns
    harness.reader.read()
    ended = harness.ends()
    harness.read()
    harness.store.workers.farewell(WORKER)
    harness.store._driver.fetch_text(f"UPDATE stoker_log_streams SET until = until - {age}", {})
    harness.waited = 0.0
    second = Reading(harness, ended)
    assert second.read() == LogUpdate(lines(0, 250_000), b"")
    assert second.is_whole
    assert harness.waited < 0.1
    second.close()


def test_tail_is_read_if_the_stream_stalls(harness: Harness) -> None:
    harness.prints(lines(0, 100_000))
    harness.store.logs.write(harness.attempt.id, "the end\n")
    steps = iter(range(3))
    harness.meanwhile = lambda: harness.work() if next(steps, None) is not None else None
    assert harness.reader.read() == LogUpdate(b"the end\n", b"")
    assert not harness.reader.is_whole
    assert PATIENCE < harness.waited < 30.0


def test_tail_is_read_if_an_earlier_stream_is_not_continued(harness: Harness) -> None:
    harness.prints(b"old\n")
    harness.reader.read()
    harness.store._driver.fetch_text("UPDATE stoker_log_streams SET until = until - 31", {})
    harness.store.logs.write(harness.attempt.id, "old\nnew\n")
    harness.meanwhile = harness.idle
    second = Reading(harness, harness.attempt)
    assert second.read() == LogUpdate(b"old\nnew\n", b"")
    assert not second.is_whole
    second.close()


def test_tail_is_read_if_there_is_no_room_for_a_copy(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness.prints(b"all\nof it\n")
    harness.store.logs.write(harness.attempt.id, "of it\n")

    def full(**_asked: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    assert harness.reader.read() == LogUpdate(b"of it\n", b"")
    assert not harness.reader.is_whole


@pytest.mark.parametrize("behind", [0, 50])
def test_dropped_stream_is_continued_by_the_tail_without_repeating_lines(harness: Harness, behind: int) -> None:
    """The tail in the queue is a few seconds old."""
    harness.prints(b"\xff\n" + lines(0, 20_000) + b" 10%")
    assert harness.reader.read().finished == b"\xff\n" + lines(0, 20_000)
    harness.store.logs.drop_stream(harness.attempt.id)
    assert harness.reader.read() == LogUpdate(b"", b" 10%")
    harness.waited += PATIENCE
    written = (b"\xff\n" + lines(0, 20_000)).decode(errors="replace")
    harness.store.logs.write(harness.attempt.id, written[: len(written) - 11 * behind])
    assert harness.reader.read() == LogUpdate(b"", b" 10%")
    assert not harness.reader.is_whole
    harness.store.logs.write(harness.attempt.id, written + "new\n 20%")
    assert harness.reader.read() == LogUpdate(b"new\n", b" 20%")


def test_dropped_stream_that_restarts_soon_stays_whole(harness: Harness) -> None:
    """The stream of a very long log restarts now and then."""
    harness.prints(lines(0, 10))
    harness.reader.read()
    harness.waited += 2 * PATIENCE
    harness.reader.read()
    harness.store.logs.drop_stream(harness.attempt.id)
    harness.reader.read()
    harness.waited += PATIENCE / 2
    harness.sender.close()
    harness.sender.restart()
    harness.prints(lines(10, 12))
    assert harness.read() == LogUpdate(lines(10, 12), b"")
    harness.waited += PATIENCE
    assert harness.read() == LogUpdate(b"", b"")
    assert harness.reader.is_whole


# A job that has just started


def test_job_silent_for_long_is_read_whole_once_it_prints(harness: Harness) -> None:
    assert harness.reader.read() == LogUpdate(b"", b"")
    assert harness.waited >= PATIENCE
    harness.prints(b"1\n")
    harness.store.logs.write(harness.attempt.id, "1\n")
    assert harness.read() == LogUpdate(b"1\n", b"")
    assert harness.reader.is_whole


def test_whole_log_replaces_the_tail_and_repeats_no_line(harness: Harness) -> None:
    harness.meanwhile = harness.idle
    harness.store.logs.write(harness.attempt.id, "2\n")
    harness.reader.read()
    harness.prints(b"1\n2\n")
    assert harness.read() == LogUpdate(b"", b"")
    assert harness.reader.is_whole
    harness.prints(b"3\n")
    assert harness.read() == LogUpdate(b"3\n", b"")


def test_job_that_starts_on_this_machine_is_read_from_its_file(harness: Harness) -> None:
    def begin() -> None:
        harness.here.mkdir(parents=True, exist_ok=True)
        (harness.here / "output").write_bytes(b"1\n")

    harness.meanwhile = begin
    assert harness.reader.read() == LogUpdate(b"1\n", b"")
    assert harness.waited < PATIENCE
    assert (harness.reader.is_here, harness.reader.is_whole, harness.reader.is_late) == (True, True, False)


# Following it


class Script:
    """Events during the waits of the follower, in order; then time passes."""

    def __init__(self, harness: Harness, *events: Callable[[], object]) -> None:
        self._harness = harness
        self._events = iter(events)

    def wait(self, seconds: float) -> bool:
        event = next(self._events, None)
        if event is None:
            self._harness.sleep(seconds)
        else:
            event()
        assert self._harness.waited < 60.0
        return True


def follow(harness: Harness, monkeypatch: pytest.MonkeyPatch, *events: Callable[[], object]) -> None:
    JobFollower(harness.store, cast(Listener, Script(harness, *events)), PipeScreen(), None).follow_attempt(
        harness.attempt
    )


def test_following_continues_until_the_last_line_arrives(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    harness.prints(b"1\n")
    late = harness.idle, harness.idle, lambda: harness.prints(b"2\n3"), lambda: harness.sender.end(harness.attempt)
    follow(harness, monkeypatch, lambda: harness.store.attempts.finish(harness.attempt.id, "succeeded", 0), *late)
    assert capfd.readouterr() == ("1\n2\n3\n", "")


def test_missing_last_line_is_not_waited_for_long(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    harness.prints(b"1\n")
    follow(harness, monkeypatch, lambda: harness.store.attempts.finish(harness.attempt.id, "lost", None))
    assert capfd.readouterr() == ("1\n", "")
    assert harness.waited < 15.0


def test_last_lines_of_a_job_whose_worker_left_come_from_the_queue(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def end() -> None:
        harness.meanwhile = harness.idle
        harness.store.logs.write(harness.attempt.id, "1\nits last words")
        harness.store.attempts.finish(harness.attempt.id, "failed", 1)

    harness.prints(b"1\n")
    follow(harness, monkeypatch, end)
    assert capfd.readouterr().out == "1\nits last words\n"


def test_job_that_ended_before_its_log_arrived_is_followed_to_its_last_line(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def end() -> None:
        harness.prints(b"1\n2")
        harness.store.attempts.finish(harness.attempt.id, "failed", 1)

    harness.meanwhile = harness.idle  # It has no log yet, so it cannot be streamed.

    def begin_to_work() -> None:
        harness.waited += PATIENCE
        harness.meanwhile = harness.work

    follow(
        harness,
        monkeypatch,
        harness.idle,
        end,
        harness.idle,
        begin_to_work,
        lambda: harness.sender.end(harness.attempt),
    )
    assert capfd.readouterr() == ("1\n2\n", "")


def test_older_tail_does_not_remove_the_last_line(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    harness.store.logs.write(harness.attempt.id, "1\n")
    harness.prints(b"1\n2\nresult 42")
    follow(harness, monkeypatch, lambda: harness.store.attempts.finish(harness.attempt.id, "succeeded", 0))
    assert capfd.readouterr().out == "1\n2\nresult 42\n"


def test_log_that_grows_faster_than_its_stream_is_not_waited_for(harness: Harness) -> None:
    editions = itertools.count(1)

    def restart() -> None:
        chunk = LogChunk(edition=f"{next(editions)}", start=0, finished=b"one\n", is_behind=True)
        harness.store.logs.write_chunk(harness.attempt.id, chunk)

    harness.meanwhile = restart
    harness.store.logs.write(harness.attempt.id, "the end\n")
    assert harness.reader.read() == LogUpdate(b"the end\n", b"")
    assert harness.waited < 3.0


def test_tail_is_read_if_the_database_refuses_streams(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StokerError("the queue may not be changed by this user")

    monkeypatch.setattr(harness.store.logs, "request_stream", refuse)
    harness.store.logs.write(harness.attempt.id, "1\n")
    assert harness.reader.read() == LogUpdate(b"1\n", b"")
    assert not harness.reader.is_whole


def test_following_continues_with_the_tail_after_the_stream_is_dropped(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def take_back() -> None:
        harness.store.logs.drop_stream(harness.attempt.id)
        harness.store.logs.write(harness.attempt.id, "1\n2\n")
        harness.meanwhile = harness.idle

    def wait_long() -> None:
        harness.waited += PATIENCE

    def end() -> None:
        harness.store.logs.write(harness.attempt.id, "1\n2\n3")
        harness.store.attempts.finish(harness.attempt.id, "succeeded", 0)

    harness.prints(b"1\n")
    follow(harness, monkeypatch, take_back, wait_long, harness.idle, end)
    said = capfd.readouterr()
    assert said.out == "1\n2\n3\n"
    assert said.err == "stoker: this is the end of the log, from the queue; the whole log is on gpu-box\n"
