"""Following a log on another machine: streamed whole, or the tail, and no line twice."""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from stoker.cli.options.queue import Listener
from stoker.cli.tables.log import JobFollower, PipeScreen
from stoker.errors import StokerError
from stoker.logs import follow as follow_module
from stoker.logs.follow import STREAM_STARTS_WITHIN, LogFollower
from stoker.logs.model import LogChunk, LogUpdate
from stoker.logs.reader import attempt_directory
from stoker.logs.writer import LogWriter
from stoker.queue import Attempt, Store, init_queue
from tests.support.attempts import WORKER, be_there, start, submit
from tests.support.log_sender import LogSender, copies_in

PATIENCE = STREAM_STARTS_WITHIN


class Reading:
    """One follower of an attempt elsewhere. The first read goes on until everything printed so far has arrived."""

    def __init__(self, scene: "Scene", attempt: Attempt) -> None:
        self._scene = scene
        self._has_begun = False
        self.follower = LogFollower(attempt, scene.home, continuous=True, complete=True)

    def read(self) -> LogUpdate:
        finished, unfinished = self.follower.read(self._scene.store)
        while self.follower.is_behind or not (self._has_begun or self.follower.is_caught_up):
            pause = self.follower.pause()
            if pause:
                self._scene.sleep(pause)
            else:
                self._scene.waited += 0.001
            lines, unfinished = self.follower.read(self._scene.store)
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


class Scene:
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
def scene(tmp_path: Path, copies: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with init_queue(str(tmp_path / "queue.db")) as store:
        be_there(store)
        scene = Scene(store, tmp_path, LogSender(tmp_path / "far", monkeypatch))
        monkeypatch.setattr(follow_module, "time", scene.clock)
        monkeypatch.setattr(follow_module, "CHECK_END_EVERY", 0.0)
        scene.begin()
        yield scene
        scene.reader.close()
        scene.sender.close()
    assert list(copies.iterdir()) == []


def lines(begin: int, end: int) -> bytes:
    return b"".join(b"line %d\n" % number for number in range(begin, end))


# Whole stream


def test_whole_stream_is_read_and_then_new_output(scene: Scene) -> None:
    scene.prints(lines(0, 100_000) + b" 10%")
    assert len(lines(0, 100_000)) > 4 * 256 * 1024  # several steps of the worker
    assert scene.reader.read() == LogUpdate(lines(0, 100_000), b" 10%")
    assert scene.reader.is_whole
    assert not scene.reader.is_here
    assert scene.read() == LogUpdate(b"", b" 10%")
    scene.prints(b"\n" + lines(0, 3) + b"end")
    assert scene.read() == LogUpdate(b" 10%\n" + lines(0, 3), b"end")


def test_invalid_utf8_is_streamed_unchanged(scene: Scene) -> None:
    scene.prints(b"\xff\0\xfe\n")
    assert scene.reader.read() == LogUpdate(b"\xff\0\xfe\n", b"")


def test_log_of_an_ended_attempt_is_incomplete_until_its_last_line_arrives(scene: Scene) -> None:
    scene.prints(b"1\n")
    scene.reader.read()
    scene.prints(b"2")
    scene.ends()
    assert scene.reader.read() == LogUpdate(b"", b"")
    assert scene.reader.is_late
    assert scene.read() == LogUpdate(b"", b"2")
    assert not scene.reader.is_late


def test_read_of_an_ended_attempt_waits_for_its_last_line(scene: Scene) -> None:
    scene.prints(b"1\n")
    scene.reader.read()
    scene.prints(b"2")
    second = Reading(scene, scene.ends())
    assert second.read() == LogUpdate(b"1\n", b"2")
    assert not second.is_late
    second.close()


def test_rest_of_an_earlier_stream_is_not_taken_for_the_whole_log(scene: Scene) -> None:
    """Its reader has gone, and the job has printed more since."""
    scene.prints(b"1\n")
    scene.reader.read()
    scene.store._driver.fetch_text("UPDATE stoker_log_streams SET until = until - 31", {})
    scene.work()
    scene.prints(b"2\n")
    second = Reading(scene, scene.attempt)
    assert second.read() == LogUpdate(b"1\n2\n", b"")
    second.close()


def test_slow_stream_is_waited_for_while_it_makes_progress(scene: Scene) -> None:
    turns = itertools.count()
    scene.meanwhile = lambda: scene.work() if next(turns) % 50 == 0 else None  # every five seconds
    scene.prints(lines(0, 100_000))
    assert scene.reader.read().finished == lines(0, 100_000)
    assert scene.waited > 20.0


def test_machine_that_was_asleep_waits_for_the_stream_after_it_wakes(scene: Scene) -> None:
    def sleep_and_wake() -> None:
        scene.waited += 3600.0
        scene.meanwhile = scene.work

    scene.meanwhile = sleep_and_wake
    scene.prints(b"1\n")
    assert scene.reader.read() == LogUpdate(b"1\n", b"")
    assert scene.reader.is_whole


def test_closing_removes_the_copy(scene: Scene, copies: Path) -> None:
    scene.prints(b"1\n")
    scene.reader.read()
    assert len(list(copies.iterdir())) == 1
    scene.reader.close()
    assert list(copies.iterdir()) == []


# Another edition


def test_restarted_worker_repeats_no_line(scene: Scene) -> None:
    scene.prints(lines(0, 50_000) + b" 10%")
    received = scene.reader.read().finished
    for number in range(50_000, 50_003):
        scene.sender.close()
        scene.sender.restart()
        scene.prints(b"\n" if number == 50_000 else b"")
        scene.prints(lines(number, number + 1))
        steps = [scene.read() for _ in range(6)]
        assert b"".join(step.finished for step in steps[:2]) == b""  # the new edition is still arriving
        received += b"".join(step.finished for step in steps)
    assert received == lines(0, 50_000) + b" 10%\n" + lines(50_000, 50_003)
    assert scene.reader.is_whole


def test_unfinished_line_stays_while_another_edition_arrives(scene: Scene) -> None:
    scene.prints(lines(0, 50_000) + b" 10%")
    scene.reader.read()
    scene.sender.close()
    scene.sender.restart()
    assert {scene.read() for _ in range(4)} == {LogUpdate(b"", b" 10%")}


@pytest.mark.parametrize("repeats", [1, 3])
def test_rotated_log_is_continued_in_another_edition(scene: Scene, repeats: int) -> None:
    """The writer keeps a limited size, and the new worker starts with what remains."""
    log = LogWriter(scene.output, limit=20_000)
    log.write(lines(0, 1000))
    received = scene.reader.read().finished
    for turn in range(repeats):
        log.write(lines(1000 + 500 * turn, 1500 + 500 * turn))
        scene.sender.close()
        scene.sender.restart()
        received += scene.read().finished
    log.close()
    assert received == lines(0, 1000 + 500 * repeats)


def test_lines_lost_between_two_editions_are_marked(scene: Scene) -> None:
    scene.prints(lines(0, 10))
    scene.reader.read()
    scene.sender.close()
    scene.sender.restart()
    scene.output.write_bytes(lines(50, 60))
    marker, rest = scene.read().finished.split(b"\n", 1)
    assert b"lines are missing here" in marker
    assert rest == lines(50, 60)


# The end


def test_tail_is_read_if_no_stream_starts_in_time(scene: Scene) -> None:
    scene.meanwhile = scene.idle
    scene.store.logs.write(scene.attempt.id, "the\nend")
    assert scene.reader.read() == LogUpdate(b"the\n", b"end")
    assert not scene.reader.is_whole
    assert not scene.reader.is_late
    assert scene.waited == pytest.approx(PATIENCE, abs=0.2)
    scene.store.logs.write(scene.attempt.id, "the\nend\nof it")
    assert scene.reader.read() == LogUpdate(b"end\n", b"of it")
    assert scene.waited < PATIENCE + 0.2


def test_lost_machine_is_not_waited_for(scene: Scene) -> None:
    scene.store.workers.farewell(WORKER)
    scene.store.logs.write(scene.attempt.id, "the end\n")
    assert scene.reader.read() == LogUpdate(b"the end\n", b"")
    assert not scene.reader.is_whole
    assert scene.waited < 0.1


@pytest.mark.parametrize("age", [0, 31])
def test_complete_stream_of_a_lost_machine_is_the_whole_log(scene: Scene, age: int) -> None:
    scene.prints(lines(0, 250_000))
    assert len(lines(0, 250_000)) > 8 * 256 * 1024  # more than one read returns
    scene.reader.read()
    ended = scene.ends()
    scene.read()
    scene.store.workers.farewell(WORKER)
    scene.store._driver.fetch_text(f"UPDATE stoker_log_streams SET until = until - {age}", {})
    scene.waited = 0.0
    second = Reading(scene, ended)
    assert second.read() == LogUpdate(lines(0, 250_000), b"")
    assert second.is_whole
    assert scene.waited < 0.1
    second.close()


def test_tail_is_read_if_the_stream_stalls(scene: Scene) -> None:
    scene.prints(lines(0, 100_000))
    scene.store.logs.write(scene.attempt.id, "the end\n")
    steps = iter(range(3))
    scene.meanwhile = lambda: scene.work() if next(steps, None) is not None else None
    assert scene.reader.read() == LogUpdate(b"the end\n", b"")
    assert not scene.reader.is_whole
    assert PATIENCE < scene.waited < 30.0


def test_tail_is_read_if_an_earlier_stream_is_not_continued(scene: Scene) -> None:
    scene.prints(b"old\n")
    scene.reader.read()
    scene.store._driver.fetch_text("UPDATE stoker_log_streams SET until = until - 31", {})
    scene.store.logs.write(scene.attempt.id, "old\nnew\n")
    scene.meanwhile = scene.idle
    second = Reading(scene, scene.attempt)
    assert second.read() == LogUpdate(b"old\nnew\n", b"")
    assert not second.is_whole
    second.close()


def test_tail_is_read_if_there_is_no_room_for_a_copy(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.prints(b"all\nof it\n")
    scene.store.logs.write(scene.attempt.id, "of it\n")

    def full(**_asked: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    assert scene.reader.read() == LogUpdate(b"of it\n", b"")
    assert not scene.reader.is_whole


@pytest.mark.parametrize("behind", [0, 50])
def test_dropped_stream_is_continued_by_the_tail_without_repeating_lines(scene: Scene, behind: int) -> None:
    """The tail in the queue is a few seconds old."""
    scene.prints(b"\xff\n" + lines(0, 20_000) + b" 10%")
    assert scene.reader.read().finished == b"\xff\n" + lines(0, 20_000)
    scene.store.logs.drop_stream(scene.attempt.id)
    assert scene.reader.read() == LogUpdate(b"", b" 10%")
    scene.waited += PATIENCE
    written = (b"\xff\n" + lines(0, 20_000)).decode(errors="replace")
    scene.store.logs.write(scene.attempt.id, written[: len(written) - 11 * behind])
    assert scene.reader.read() == LogUpdate(b"", b" 10%")
    assert not scene.reader.is_whole
    scene.store.logs.write(scene.attempt.id, written + "new\n 20%")
    assert scene.reader.read() == LogUpdate(b"new\n", b" 20%")


def test_dropped_stream_that_restarts_soon_stays_whole(scene: Scene) -> None:
    """The stream of a very long log restarts now and then."""
    scene.prints(lines(0, 10))
    scene.reader.read()
    scene.waited += 2 * PATIENCE
    scene.reader.read()
    scene.store.logs.drop_stream(scene.attempt.id)
    scene.reader.read()
    scene.waited += PATIENCE / 2
    scene.sender.close()
    scene.sender.restart()
    scene.prints(lines(10, 12))
    assert scene.read() == LogUpdate(lines(10, 12), b"")
    scene.waited += PATIENCE
    assert scene.read() == LogUpdate(b"", b"")
    assert scene.reader.is_whole


# A job that has just started


def test_job_silent_for_long_is_read_whole_once_it_prints(scene: Scene) -> None:
    assert scene.reader.read() == LogUpdate(b"", b"")
    assert scene.waited >= PATIENCE
    scene.prints(b"1\n")
    scene.store.logs.write(scene.attempt.id, "1\n")
    assert scene.read() == LogUpdate(b"1\n", b"")
    assert scene.reader.is_whole


def test_whole_log_replaces_the_tail_and_repeats_no_line(scene: Scene) -> None:
    scene.meanwhile = scene.idle
    scene.store.logs.write(scene.attempt.id, "2\n")
    scene.reader.read()
    scene.prints(b"1\n2\n")
    assert scene.read() == LogUpdate(b"", b"")
    assert scene.reader.is_whole
    scene.prints(b"3\n")
    assert scene.read() == LogUpdate(b"3\n", b"")


def test_job_that_starts_on_this_machine_is_read_from_its_file(scene: Scene) -> None:
    def begin() -> None:
        scene.here.mkdir(parents=True, exist_ok=True)
        (scene.here / "output").write_bytes(b"1\n")

    scene.meanwhile = begin
    assert scene.reader.read() == LogUpdate(b"1\n", b"")
    assert scene.waited < PATIENCE
    assert (scene.reader.is_here, scene.reader.is_whole, scene.reader.is_late) == (True, True, False)


# Following it


class Script:
    """Events during the waits of the follower, in order; then time passes."""

    def __init__(self, scene: Scene, *events: Callable[[], object]) -> None:
        self._scene = scene
        self._events = iter(events)

    def wait(self, seconds: float) -> bool:
        event = next(self._events, None)
        if event is None:
            self._scene.sleep(seconds)
        else:
            event()
        assert self._scene.waited < 60.0
        return True


def follow(scene: Scene, monkeypatch: pytest.MonkeyPatch, *events: Callable[[], object]) -> None:
    JobFollower(scene.store, cast(Listener, Script(scene, *events)), PipeScreen(), None).follow_attempt(scene.attempt)


def test_following_goes_on_until_the_last_line_arrives(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scene.prints(b"1\n")
    late = scene.idle, scene.idle, lambda: scene.prints(b"2\n3"), lambda: scene.sender.end(scene.attempt)
    follow(scene, monkeypatch, lambda: scene.store.attempts.finish(scene.attempt.id, "succeeded", 0), *late)
    assert capfd.readouterr() == ("1\n2\n3\n", "")


def test_missing_last_line_is_not_waited_for_long(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scene.prints(b"1\n")
    follow(scene, monkeypatch, lambda: scene.store.attempts.finish(scene.attempt.id, "lost", None))
    assert capfd.readouterr() == ("1\n", "")
    assert scene.waited < 15.0


def test_last_lines_of_a_job_whose_worker_left_come_from_the_queue(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def end() -> None:
        scene.meanwhile = scene.idle
        scene.store.logs.write(scene.attempt.id, "1\nits last words")
        scene.store.attempts.finish(scene.attempt.id, "failed", 1)

    scene.prints(b"1\n")
    follow(scene, monkeypatch, end)
    assert capfd.readouterr().out == "1\nits last words\n"


def test_job_that_ended_before_its_log_arrived_is_followed_to_its_last_line(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def end() -> None:
        scene.prints(b"1\n2")
        scene.store.attempts.finish(scene.attempt.id, "failed", 1)

    scene.meanwhile = scene.idle  # It has no log yet, so it cannot be streamed.

    def begin_to_work() -> None:
        scene.waited += PATIENCE
        scene.meanwhile = scene.work

    follow(scene, monkeypatch, scene.idle, end, scene.idle, begin_to_work, lambda: scene.sender.end(scene.attempt))
    assert capfd.readouterr() == ("1\n2\n", "")


def test_older_tail_does_not_remove_the_last_line(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    scene.store.logs.write(scene.attempt.id, "1\n")
    scene.prints(b"1\n2\nresult 42")
    follow(scene, monkeypatch, lambda: scene.store.attempts.finish(scene.attempt.id, "succeeded", 0))
    assert capfd.readouterr().out == "1\n2\nresult 42\n"


def test_log_that_grows_faster_than_its_stream_is_not_waited_for(scene: Scene) -> None:
    editions = itertools.count(1)

    def restart() -> None:
        chunk = LogChunk(edition=f"{next(editions)}", start=0, finished=b"one\n", is_behind=True)
        scene.store.logs.write_chunk(scene.attempt.id, chunk)

    scene.meanwhile = restart
    scene.store.logs.write(scene.attempt.id, "the end\n")
    assert scene.reader.read() == LogUpdate(b"the end\n", b"")
    assert scene.waited < 3.0


def test_tail_is_read_if_the_database_refuses_streams(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise StokerError("the queue may not be changed by this user")

    monkeypatch.setattr(scene.store.logs, "request_stream", refuse)
    scene.store.logs.write(scene.attempt.id, "1\n")
    assert scene.reader.read() == LogUpdate(b"1\n", b"")
    assert not scene.reader.is_whole


def test_following_continues_with_the_tail_after_the_stream_is_dropped(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def take_back() -> None:
        scene.store.logs.drop_stream(scene.attempt.id)
        scene.store.logs.write(scene.attempt.id, "1\n2\n")
        scene.meanwhile = scene.idle

    def wait_long() -> None:
        scene.waited += PATIENCE

    def end() -> None:
        scene.store.logs.write(scene.attempt.id, "1\n2\n3")
        scene.store.attempts.finish(scene.attempt.id, "succeeded", 0)

    scene.prints(b"1\n")
    follow(scene, monkeypatch, take_back, wait_long, scene.idle, end)
    said = capfd.readouterr()
    assert said.out == "1\n2\n3\n"
    assert said.err == "stoker: this is the end of the log, as the queue keeps it; the whole log is on gpu-box\n"
