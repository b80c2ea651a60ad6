"""`stoker logs`: the whole log from any machine or its tail, and followed as it comes."""

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker.cli.verbs import logs
from stoker.logs.writer import LogWriter
from stoker.queue import Attempt, Store
from tests.support.attempts import WORKER, be_there, place_of, run, start, submit
from tests.support.command import stoker, stoker_command
from tests.support.log_sender import LogSender, copies_in
from tests.support.waiting import wait_for


class Following:
    """`stoker logs -f` at work, its output in files."""

    def __init__(self, place: Path, *arguments: str) -> None:
        self._out, self._err = place / "followed.out", place / "followed.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            command = [stoker_command(), "logs", *arguments]
            self.process = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def shows(self, lines: int) -> None:
        """Waits until it has shown this many lines."""
        wait_for(lambda: self.out.count("\n") >= lines, named=f"line {lines}")

    def code(self) -> int:
        return self.process.wait(timeout=60)


@pytest.fixture
def following(tmp_path: Path) -> Iterator[Callable[..., Following]]:
    started: list[Following] = []

    def begin(*arguments: str) -> Following:
        started.append(Following(tmp_path, *arguments))
        return started[-1]

    yield begin
    for follower in started:
        follower.process.kill()
        follower.process.wait()


def test_local_log_is_shown_with_its_older_part(queue: Store) -> None:
    (job,) = submit(queue, "a", name="train")
    attempt = run(queue, job, "succeeded", 0)
    queue.logs.write(attempt.id, "only the tail\n")
    (place_of(attempt) / "output.1").write_text("one\n")
    (place_of(attempt) / "output").write_text("two\n100%")
    done = stoker("logs", "train")
    assert (done.code, done.out, done.err) == (0, "one\ntwo\n100%\n", "")
    assert stoker("logs", job, "-n", "2").out == "two\n100%\n"
    assert stoker("logs", job, "--json").json() == {"job": job, "attempt": 1, "whole": True, "text": "one\ntwo\n100%"}


def test_output_after_the_outcome_is_shown(queue: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    be_there(queue)
    (job,) = submit(queue, "a")
    attempt = start(queue, job)
    (place_of(attempt) / "output").write_text("one\n")
    assert queue.attempts.finish(attempt.id, "succeeded", 0, "")

    def bring(_seconds: float) -> None:
        (place_of(attempt) / "output").write_text("one\ntwo\n")
        queue.logs.write(attempt.id, "one\ntwo\n", is_last=True)

    monkeypatch.setattr("stoker.queue.logs.time.sleep", bring)
    ((update, is_tail),) = logs._updates(queue, queue.attempts.of(job)[0], 0, None)
    assert (update.finished, is_tail) == (b"one\ntwo\n", False)


def test_tail_of_a_lost_machine_is_shown_and_marked(queue: Store) -> None:
    (job,) = submit(queue, "a")
    be_there(queue)
    queue.workers.farewell(WORKER)
    queue.logs.write(run(queue, job, "succeeded", 0).id, "the\nend\n")
    done = stoker("logs", job)
    assert (done.code, done.out) == (0, "the\nend\n")
    assert done.err == "stoker: this is the end of the log, from the queue; the whole log is on gpu-box\n"
    assert stoker("logs", job, "--json").json()["whole"] is False


def test_lines_are_found_by_text_error_and_number(queue: Store) -> None:
    (job,) = submit(queue, "a")
    place = place_of(attempt := run(queue, job, "failed", 1))
    (place / "output.1").write_text("one\nloss=NaN\n")
    (place / "output").write_text("Traceback (most recent call last):\n\x1b[31mValueError\x1b[0m: nan\nbye")
    done = stoker("logs", job, "--grep", "nan")
    assert (done.code, done.out, done.err) == (0, "2: loss=NaN\n4: ValueError: nan\n", "")
    assert stoker("logs", job, "--errors").out == "3: Traceback (most recent call last):\n4: ValueError: nan\n"
    assert stoker("logs", job, "--errors", "-n", "1").out == "4: ValueError: nan\n"
    found = stoker("logs", job, "--grep", "BYE", "--json").json()
    assert found == {"job": job, "attempt": 1, "whole": True, "matches": [{"line": 5, "text": "bye"}]}
    done = stoker("logs", job, "--grep", "not there")
    assert (done.code, done.out, done.err) == (1, "", "stoker: no such line\n")
    assert stoker("logs", job, "--from", "2", "-n", "2").out == "loss=NaN\nTraceback (most recent call last):\n"
    assert stoker("logs", job, "--from", "5").out == "bye\n"
    assert stoker("logs", job, "--from", "6").out == ""
    # Of a machine that is gone, the end in the queue is searched, and that is said.
    for file in place.iterdir():
        file.unlink()
    queue.logs.write(attempt.id, "the\nend\n")
    done = stoker("logs", job, "--grep", "end")
    assert (done.code, done.out) == (0, "2: end\n")
    assert "this is the end of the log" in done.err


def test_invalid_utf8_passes_through(queue: Store) -> None:
    (job,) = submit(queue, "a")
    (place_of(run(queue, job, "succeeded", 0)) / "output").write_bytes(b"\xff\xfe \x1b[31mred\n")
    done = subprocess.run([stoker_command(), "logs", job], capture_output=True, check=True)
    assert done.stdout == b"\xff\xfe \x1b[31mred\n"


def test_last_attempt_is_the_default(queue: Store) -> None:
    (job,) = submit(queue, "a", retries=1, backoff=0.0)
    for words in ("first", "second"):
        queue.logs.write(run(queue, job, "failed", 1).id, f"{words}\n")
    assert stoker("logs", job).out == "second\n"
    assert stoker("logs", job, "--attempt", "1").out == "first\n"
    assert stoker("logs", job, "--attempt", "1", "-f").out == "first\n"
    done = stoker("logs", job, "--attempt", "3")
    assert (done.code, done.err) == (2, f"stoker: job {job} has no attempt 3: its last one is 2\n")


def test_reason_is_shown_for_a_job_that_has_not_started(queue: Store) -> None:
    (job,) = submit(queue, "a")
    done = stoker("logs", job)
    assert (done.code, done.out) == (0, "")
    assert done.err.startswith(f"stoker: job {job} has printed nothing: no worker is there")


BAD_SEARCHES = [
    ["nobody", "--grep", ""],
    ["nobody", "--from", "0"],
    ["nobody", "--grep", "a", "--errors"],
    ["nobody", "-f", "--errors"],
]


@pytest.mark.parametrize(
    "arguments", [["nobody"], [], ["nobody", "-n", "-1"], ["nobody", "--attempt", "0"], *BAD_SEARCHES]
)
def test_invalid_arguments_are_reported_in_one_line(queue: Store, arguments: list[str]) -> None:
    done = stoker("logs", *arguments)
    assert (done.code, len(done.err.splitlines())) == (2, 1)


# From another machine


@pytest.fixture
def sender(queue: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LogSender:
    """Another machine whose worker was seen just now."""
    be_there(queue)
    return LogSender(tmp_path / "far", monkeypatch)


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return copies_in(tmp_path / "copies", monkeypatch)


def many_lines(begin: int, end: int) -> str:
    return "".join(f"line {number} {'x' * 60}\n" for number in range(begin, end))


def test_whole_log_of_a_remote_job_is_shown(queue: Store, sender: LogSender, copies: Path) -> None:
    (job,) = submit(queue, "a")
    attempt = run(queue, job, "succeeded", 0)
    queue.logs.write(attempt.id, "only the tail\n")
    (sender.place_of(attempt) / "output").write_text(many_lines(0, 10_000) + "100%")
    sender.end(attempt)
    with sender.works():
        done = stoker("logs", job)
        assert (done.code, done.out, done.err) == (0, many_lines(0, 10_000) + "100%\n", "")
        assert stoker("logs", job, "-f").out == done.out
        result = stoker("logs", job, "--json").json()
    assert result == {"job": job, "attempt": 1, "whole": True, "text": done.out.removesuffix("\n")}
    assert list(copies.iterdir()) == []


def test_last_lines_in_the_queue_need_no_stream(queue: Store, sender: LogSender) -> None:
    (job,) = submit(queue, "a")
    attempt = run(queue, job, "succeeded", 0)
    queue.logs.write(attempt.id, "ut off\none\ntwo\n100%")
    queue._driver.fetch_text("UPDATE stoker_attempts SET ended = ended - 60", {})
    (sender.place_of(attempt) / "output").write_text("cut off\none\ntwo\n100%")
    sender.end(attempt)
    done = stoker("logs", job, "-n", "3")
    assert (done.out, done.err) == ("one\ntwo\n100%\n", "")
    assert queue.logs.stream_requests() == []
    with sender.works():
        assert stoker("logs", job, "-n", "4").out == "cut off\none\ntwo\n100%\n"


def test_remote_job_is_followed_to_its_last_line(
    queue: Store, sender: LogSender, copies: Path, following: Callable[..., Following]
) -> None:
    (job,) = submit(queue, "a")
    attempt = start(queue, job)
    log = LogWriter(sender.place_of(attempt) / "output", limit=2**20)
    log.write(many_lines(0, 4000).encode() + b" 10%")
    with sender.works():
        follower = following(job, "-f")
        wait_for(lambda: follower.out == many_lines(0, 4000), named="what was printed before")
        log.write(b"\r100%\n" + many_lines(0, 2000).encode())
        follower.shows(6001)
    sender.restart()
    sender.end(attempt)
    log.write(b"last\nwords")
    with sender.works():
        follower.shows(6002)
        queue.attempts.finish(attempt.id, "succeeded", 0)
        assert follower.code() == 0
    assert follower.out == many_lines(0, 4000) + "100%\n" + many_lines(0, 2000) + "last\nwords\n"
    assert follower.err == ""
    assert list(copies.iterdir()) == []
    log.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_copy_of_a_remote_log_is_removed_at_any_exit(
    queue: Store, sender: LogSender, copies: Path, following: Callable[..., Following], number: signal.Signals
) -> None:
    (job,) = submit(queue, "a")
    attempt = start(queue, job)
    (sender.place_of(attempt) / "output").write_text("one\n")
    with sender.works():
        follower = following(job, "-f")
        follower.shows(1)
        assert len(list(copies.iterdir())) == 1
        follower.process.send_signal(number)
        assert follower.code() == 130
    assert follower.err.strip() == ""
    assert list(copies.iterdir()) == []


def test_copy_is_removed_when_the_pipe_is_closed(queue: Store, sender: LogSender, copies: Path) -> None:
    (job,) = submit(queue, "a")
    attempt = start(queue, job)
    output = sender.place_of(attempt) / "output"
    output.write_text("one\n")
    with sender.works(), subprocess.Popen([stoker_command(), "logs", "-f", job], stdout=subprocess.PIPE) as follower:
        assert follower.stdout is not None
        assert follower.stdout.readline() == b"one\n"
        assert len(list(copies.iterdir())) == 1
        follower.stdout.close()
        output.write_text("one\ntwo\n")
        follower.wait(60)
    assert list(copies.iterdir()) == []


# Following


def test_follow_waits_for_the_start_and_ends_with_the_job(queue: Store, following: Callable[..., Following]) -> None:
    (job,) = submit(queue, "a")
    follower = following(job, "-f")
    wait_for(lambda: "no worker is there" in follower.err, named="the word on why it waits")
    attempt = start(queue, job)
    log = output_of(attempt)
    log.write(b"one\n 10%")
    wait_for(lambda: follower.out == "one\n", named="the first line")
    log.write(b"\r100%\ntwo\nlast")
    wait_for(lambda: follower.out == "one\n100%\ntwo\n", named="the finished lines")
    queue.attempts.finish(attempt.id, "succeeded", 0)
    assert follower.code() == 0
    assert follower.out == "one\n100%\ntwo\nlast\n"
    log.close()


def test_follow_continues_across_a_retry_and_reports_the_wait(
    queue: Store, following: Callable[..., Following]
) -> None:
    (job,) = submit(queue, "a", retries=1, backoff=600.0)
    be_there(queue)
    first = start(queue, job)
    (place_of(first) / "output").write_text("first\n")
    follower = following(job, "-f")
    wait_for(lambda: follower.out == "first\n")
    queue.attempts.finish(first.id, "failed", 1, "out of memory")
    wait_for(lambda: "waits until its retry in" in follower.err, named="the word on the retry")
    assert "out of memory" in follower.err
    queue.jobs.retry([job])
    second = start(queue, job)
    (place_of(second) / "output").write_text("second\n")
    wait_for(lambda: follower.out == "first\nsecond\n")
    queue.attempts.finish(second.id, "succeeded", 0)
    assert follower.code() == 0


def test_rotation_during_follow_neither_loses_nor_repeats_lines(
    queue: Store, following: Callable[..., Following]
) -> None:
    (job,) = submit(queue, "a")
    attempt = start(queue, job)
    log = LogWriter(place_of(attempt) / "output", limit=40_000)
    follower = following(job, "-f")
    expected = ""
    for number in range(24):
        lines = "".join(f"step {number}.{part} {'x' * 60}\n" for part in range(100))
        expected += lines + f"bar {number}\n"
        log.write(lines.encode() + f"bar 0\rbar {number}".encode())
        # Two files' worth may be unread at the most: a slower reader than that cannot have it all.
        follower.shows(number * 101)
        log.write(b"\n")
    queue.attempts.finish(attempt.id, "succeeded", 0)
    assert follower.code() == 0
    assert follower.out == expected
    log.close()


def test_follow_of_a_lost_machine_shows_the_tail(queue: Store, following: Callable[..., Following]) -> None:
    (job,) = submit(queue, "a")
    attempt = start(queue, job)
    follower = following(job, "-f")
    text = ""
    for number in range(4):
        text += "".join(f"{number}.{line} {'y' * 50}\n" for line in range(400))
        queue.logs.write(attempt.id, text + " 10%")
        follower.shows(text.count("\n"))
    assert len(text) > 64 * 1024  # more than the queue keeps
    queue.attempts.finish(attempt.id, "succeeded", 0)
    assert follower.code() == 0
    assert follower.out == text + " 10%\n"
    assert follower.err.count("this is the end of the log") == 1


def test_follow_starts_with_the_requested_number_of_lines(queue: Store, following: Callable[..., Following]) -> None:
    (job,) = submit(queue, "a")
    attempt = start(queue, job)
    output = place_of(attempt) / "output"
    output.write_text("one\ntwo\nthree\n")
    follower = following(job, "-f", "-n", "1")
    wait_for(lambda: follower.out == "three\n")
    with output.open("a") as file:
        file.write("four\nfive\n")
    queue.attempts.finish(attempt.id, "succeeded", 0)
    assert follower.code() == 0
    assert follower.out == "three\nfour\nfive\n"


def test_follow_with_json_prints_one_object_per_line(queue: Store) -> None:
    (job,) = submit(queue, "a")
    (place_of(run(queue, job, "succeeded", 0)) / "output").write_text("one\ntwo")
    done = stoker("logs", job, "-f", "--json")
    assert done.out.splitlines() == [
        f'{{"job":"{job}","attempt":1,"line":"one"}}',
        f'{{"job":"{job}","attempt":1,"line":"two"}}',
    ]


def test_follow_ends_when_the_job_is_cancelled_before_its_start(
    queue: Store, following: Callable[..., Following]
) -> None:
    (job,) = submit(queue, "a")
    follower = following(job, "-f")
    wait_for(lambda: follower.err, named="the word on why it waits")
    queue.jobs.cancel([job])
    assert follower.code() == 0
    assert follower.out == ""
    assert f"job {job} has printed nothing: cancelled" in follower.err


def test_ctrl_c_ends_follow_cleanly(queue: Store, following: Callable[..., Following]) -> None:
    (job,) = submit(queue, "a")
    (place_of(start(queue, job)) / "output").write_text("one\n")
    follower = following(job, "-f")
    wait_for(lambda: follower.out == "one\n")
    follower.process.send_signal(signal.SIGINT)
    assert follower.code() == 130
    assert follower.err.strip() == ""


def test_progress_bar_is_updated_on_a_terminal(queue: Store) -> None:
    (job,) = submit(queue, "a")
    attempt = start(queue, job)
    log = output_of(attempt)
    log.write(b"one\n 10%")
    terminal = Terminal(job)
    terminal.until(b"one\r\n 10%")
    log.write(b"\r 20%" + b"#" * 200)
    terminal.until(b"\r\x1b[K 20%" + b"#" * 75)
    assert b"#" * 80 not in terminal.seen  # a line that wraps could not be rewritten
    log.write(b"\r100%\n")
    queue.attempts.finish(attempt.id, "succeeded", 0)
    terminal.until(b"\r\x1b[K100%\r\n")
    assert terminal.process.wait(timeout=60) == 0
    os.close(terminal.ours)
    log.close()


class Terminal:
    """`stoker logs -f` on a terminal of eighty columns."""

    def __init__(self, job: str) -> None:
        self.ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [stoker_command(), "logs", job, "-f"],
            stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "COLUMNS": "80", "TERM": "xterm"},
        )  # fmt: skip
        os.close(theirs)
        self.seen = b""

    def until(self, text: bytes) -> None:
        ends = time.monotonic() + 60
        while text not in self.seen:
            ready, _, _ = select.select([self.ours], [], [], max(0.0, ends - time.monotonic()))
            assert ready, self.seen
            self.seen += os.read(self.ours, 4096)


def output_of(attempt: Attempt) -> LogWriter:
    """Writes like the worker: the file is never emptied and rewritten."""
    return LogWriter(place_of(attempt) / "output", limit=2**20)
