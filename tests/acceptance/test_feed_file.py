"""`stoker feed file` as typed."""

import getpass
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.feeds.text_file import SECONDS_BETWEEN_LOOKS
from tests.support.command import Finished, stoker
from tests.support.feeding import Feeder, Feeders, Queue
from tests.support.waiting import wait_for


class Lines:
    """A file of commands, its queue, and feeders between them."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "gpu_queue.txt"
        self.finished = directory / "finished.txt"
        self.queue = Queue(str(directory / "queue.db"))
        self.feeders = Feeders(directory)

    def add(self, *commands: str) -> None:
        with self.path.open("a") as file:
            file.write("".join(f"{command}\n" for command in commands))

    def start(self, *options: str) -> Feeder:
        return self.feeders.start("file", str(self.path), "--queue", self.queue.url, *options)

    def once(self, *options: str) -> Finished:
        return stoker("feed", "file", str(self.path), "--queue", self.queue.url, "--once", *options)

    def wait_for(self, *commands: str) -> None:
        wait_for(lambda: self.queue.commands() == list(commands), named=f"jobs {commands}")

    def start_without_file(self) -> Feeder:
        """A feeder that waits for a missing file."""
        feeder = self.start()
        wait_for(lambda: "is not there yet" in feeder.err, named="a feeder that waits")
        return feeder


@pytest.fixture
def lines(tmp_path: Path) -> Iterator[Lines]:
    there = Lines(tmp_path)
    yield there
    there.feeders.close()


def test_lines_become_jobs_with_the_given_options(lines: Lines) -> None:
    lines.add("python train.py --lr=1e-3 --version={id}", "", "  # a note", "\tpython train.py --bs {batch_size}  ")
    options = ("--gpus", "2", "--memory", "8GiB", "--tag", "night", "--priority", "3", "--retries", "2", "--share")
    done = lines.once(*options, "--time-limit", "1h", "--preemptible", "--directory", "/srv", "--batch-size", "64")
    assert (done.code, done.err) == (0, "")
    jobs = lines.queue.jobs()
    assert [job.command for job in jobs] == [
        "python train.py --lr=1e-3 --version={id}",
        "python train.py --bs {batch_size}",
    ]
    assert done.out == "".join(f"{job.id}  {job.command}\n" for job in jobs)
    for job in jobs:
        assert (job.gpus, job.memory, job.tags, job.priority, job.retries) == (2, 8 * 2**30, ("night",), 3, 2)
        assert (job.share, job.time_limit, job.preemptible) == (True, 3600.0, True)
        assert job.submitter == getpass.getuser()
        assert (job.directory, job.batch_size) == ("/srv", 64)


def test_appended_line_is_taken_also_from_a_new_file(lines: Lines) -> None:
    feeder = lines.start_without_file()
    lines.add("one")
    lines.wait_for("one")
    lines.add("two")
    lines.wait_for("one", "two")
    replacement = lines.path.with_name("gpu_queue.txt~")
    replacement.write_text("two\none\nthree\n")
    replacement.rename(lines.path)
    lines.wait_for("one", "two", "three")
    lines.add("four")
    lines.wait_for("one", "two", "three", "four")
    assert feeder.end() == 130
    assert feeder.taken == ["one", "two", "three", "four"]


def test_line_wakes_the_feeder(lines: Lines) -> None:
    """A busy machine may delay it once; a feeder that is not woken is never in time."""

    def is_woken(number: int) -> bool:
        lines.path = lines.path.with_name(f"gpu_queue-{number}.txt")
        feeder = lines.start_without_file()
        # The first line makes the file, the second one changes it. Each comes straight after a look.
        return all(_seconds_until_taken(lines, feeder) < 0.8 * SECONDS_BETWEEN_LOOKS for _ in range(2))

    assert any(is_woken(number) for number in range(3))


def _seconds_until_taken(lines: Lines, feeder: Feeder) -> float:
    before = len(feeder.taken)
    begun = time.monotonic()
    lines.add(f"line {before}")
    wait_for(lambda: len(feeder.taken) > before, named=f"line {before}")
    return time.monotonic() - begun


def test_no_edit_of_the_file_makes_a_line_run_again(lines: Lines) -> None:
    lines.add("one", "two")
    lines.once()
    for text in ("", "two\none\n", "# above\none\n\ntwo\n", "two\n", "one\ntwo\n"):
        lines.path.write_text(text)
        assert lines.once().out == ""
    assert lines.queue.commands() == ["one", "two"]


def test_same_line_twice_is_two_jobs(lines: Lines) -> None:
    lines.add("again", "other")
    lines.once()
    lines.add("again")
    lines.once()
    lines.once()
    assert lines.queue.commands() == ["again", "other", "again"]


def test_deleted_jobs_are_not_submitted_again(lines: Lines) -> None:
    lines.add("one", "two")
    lines.once()
    lines.queue.run("one", "succeeded")
    with lines.queue.opened() as store:
        assert store.jobs.clean(-1.0) == 1
    assert lines.once().out == ""
    assert lines.queue.commands() == ["two"]


def test_killed_and_restarted_feeders_take_each_line_once(lines: Lines) -> None:
    commands = [f"python train.py --seed={number}" for number in range(300)]
    first, second = lines.start_without_file(), lines.start_without_file()
    for start in range(0, 300, 20):
        lines.add(*commands[start : start + 20])
        if start == 100:
            wait_for(lambda: len(lines.queue.jobs()) > 40, named="the first jobs")
            first.end(signal.SIGKILL)
            lines.start()
    wait_for(lambda: len(lines.queue.jobs()) >= 300, named="the last jobs")
    assert second.end() == 130
    assert lines.once().out == ""
    assert lines.queue.counted() == Counter(commands)


def test_last_line_without_a_newline_is_taken_after_a_delay(lines: Lines) -> None:
    """Other feeders do not wait for one that is delayed while writing; the test tolerates that."""

    def is_waited_for(number: int) -> bool:
        lines.path = lines.path.with_name(f"gpu_queue-{number}.txt")
        lines.path.write_text(f"one {number}\ntwo {number} --lr=0.")
        feeder = lines.start()
        wait_for(lambda: feeder.taken, named="the first line")
        with lines.path.open("a") as file:
            file.write("001")
        wait_for(lambda: f"two {number} --lr=0.001" in feeder.taken, named="the last line")
        return feeder.taken == [f"one {number}", f"two {number} --lr=0.001"]

    assert any(is_waited_for(number) for number in range(3))


def test_finished_commands_are_appended_once(lines: Lines) -> None:
    lines.add("good", "bad", "later", "good")
    lines.finished.write_text("from before, without a newline")
    feeder = lines.start("--finished", str(lines.finished))
    wait_for(lambda: len(lines.queue.jobs()) == 4, named="the jobs")
    with lines.queue.opened() as store:
        (first, *_) = [job for job in store.jobs.find(order="queue") if job.command == "good"]
        attempt = store.attempts.claim([first.id], "w", [], 600.0)
        assert attempt is not None
        store.attempts.finish(attempt.id, "succeeded", 0)
    lines.queue.run("bad", "failed")
    wait_for(lambda: lines.finished.read_text() == "from before, without a newline\ngood\n", named="the first")
    ids = lines.finished.with_name(f".{lines.finished.name}.stoker")
    wait_for(lambda: ids.exists() and ids.read_text(), named="its id, after which a crash repeats nothing")
    feeder.end(signal.SIGKILL)
    lines.queue.run("later", "succeeded")
    for _ in range(2):
        assert lines.once("--finished", str(lines.finished)).code == 0
    assert lines.finished.read_text() == "from before, without a newline\ngood\nlater\n"
    lines.queue.run("good", "succeeded")
    lines.finished.write_text("")
    assert lines.once("--finished", str(lines.finished)).code == 0
    assert lines.finished.read_text() == "good\n"


def test_invalid_lines_are_reported_and_left_out(lines: Lines) -> None:
    lines.path.write_bytes(b"\xef\xbb\xbfone\r\n\xff\xfe\ntwo {batch_size}\nx\0y\n" + b"z" * 200_000 + b"\nthree\n")
    done = lines.once()
    assert done.code == 0
    assert lines.queue.commands() == ["one", "three"]
    result = done.err.splitlines()
    assert [sentence.split(" of ")[0] for sentence in result] == [f"stoker: line {number}" for number in (2, 3, 4, 5)]


def test_file_with_a_name_keeps_its_taken_lines(lines: Lines) -> None:
    lines.add("one")
    lines.once("--as", "experiments")
    lines.path = lines.path.rename(lines.path.with_name("moved.txt"))
    assert lines.once("--as", "experiments").out == ""
    lines.once()
    assert lines.queue.commands() == ["one", "one"]


def test_symlink_counts_as_the_same_file(lines: Lines) -> None:
    lines.add("one")
    lines.once()
    link = lines.path.with_name("link.txt")
    link.symlink_to(lines.path)
    lines.path = link
    assert lines.once().out == ""


@pytest.mark.parametrize(
    "options",
    [
        ("--finished", "gpu_queue.txt"),
        ("--finished", "nowhere/finished.txt"),
        ("--as", ""),
        ("--gpus", "-1"),
        ("--memory", "much"),
        ("--tag", ""),
        ("--directory", "nowhere"),
    ],
)
def test_invalid_options_are_refused(lines: Lines, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    lines.add("one")
    monkeypatch.chdir(lines.path.parent)
    done = lines.once(*options)
    assert (done.code, done.err.count("\n")) == (2, 1), done.err
    assert lines.queue.jobs() == []


def test_directory_and_unreadable_file_are_refused(lines: Lines) -> None:
    lines.path.mkdir()
    done = lines.once()
    assert (done.code, "is a directory" in done.err, done.err.count("\n")) == (2, True, 1)
    lines.path.rmdir()
    lines.path.symlink_to(lines.path.name)
    done = lines.once()
    assert (done.code, "cannot be read" in done.err, done.err.count("\n")) == (1, True, 1)
