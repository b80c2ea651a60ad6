"""What the feed from a file lives through: a database or a disk that goes away, a death in the middle of a write."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.feeds.text_file import FileAwayError, FinishedFile
from stoker.queue import Job, JobSpec, Store, init_queue
from tests.support.feeding import Feeders, Queue
from tests.support.postgres import PostgresServer
from tests.support.waiting import wait_for


@pytest.fixture
def feeders(tmp_path: Path) -> Iterator[Feeders]:
    there = Feeders(tmp_path)
    yield there
    there.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with init_queue(str(tmp_path / "queue.db")) as opened:
        yield opened


def succeeded(store: Store, *commands: str) -> list[Job]:
    return [store.jobs.get(name) for name in store.jobs.submit([JobSpec(command=command) for command in commands])]


def test_feed_waits_for_an_unreachable_queue_and_reports_it_once(
    tmp_path: Path, feeders: Feeders, mortal_server: PostgresServer, mortal_url: str
) -> None:
    path = tmp_path / "gpu_queue.txt"
    queue = Queue(mortal_url)
    path.write_text("one\n")
    finished = tmp_path / "finished.txt"
    feeder = feeders.start("file", str(path), "--queue", mortal_url, "--finished", str(finished))
    wait_for(lambda: feeder.taken == ["one"], named="the first job")
    mortal_server.kill()
    try:
        path.write_text("one\ntwo\n")
        wait_for(lambda: "waiting, and trying again" in feeder.err, named="the complaint")
    finally:
        mortal_server.start()
    wait_for(lambda: feeder.taken[-1] == "two", named="the second job")
    assert queue.commands() == ["one", "two"]
    queue.run("two", "succeeded")
    wait_for(finished.exists, named="the finished command")
    assert [line.split(" (")[-1] for line in feeder.err.splitlines()] == [
        "waiting, and trying again)",
        "stoker: it works again: going on",
    ]
    assert feeder.end() == 130


@pytest.mark.parametrize("written", [0, 1, 3, 8])
def test_crash_while_writing_the_finished_file_loses_no_line(tmp_path: Path, store: Store, written: int) -> None:
    path = tmp_path / "finished.txt"
    jobs = succeeded(store, "one", "two")
    FinishedFile(path).append(succeeded(store, "zero"))
    # The ids are written after the commands, and these were cut off.
    with (tmp_path / ".finished.txt.stoker").open("a") as ids:
        ids.write(jobs[0].id[:3])
    with path.open("a") as file:
        file.write("one\ntwo\n"[:written])
    FinishedFile(path).append(jobs)
    FinishedFile(path).append(jobs)
    lines = path.read_text().splitlines()
    assert lines[0] == "zero"
    assert lines[-2:] == ["one", "two"]
    assert lines.count("one") <= 2


def test_several_feeders_write_one_finished_file(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "finished.txt"
    jobs = succeeded(store, *map(str, range(40)))

    def append_all() -> None:
        for count in range(1, 41):
            FinishedFile(path).append(jobs[:count])

    threads = [threading.Thread(target=append_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text().split() == [str(number) for number in range(40)]


def test_unwritable_finished_file_is_reported(tmp_path: Path, store: Store) -> None:
    (tmp_path / "finished.txt").mkdir()
    with pytest.raises(FileAwayError, match="finished commands cannot be written to"):
        FinishedFile(tmp_path / "finished.txt").append(succeeded(store, "one"))


def test_unwritable_finished_file_does_not_stop_the_feed(tmp_path: Path, feeders: Feeders) -> None:
    path, place = tmp_path / "gpu_queue.txt", tmp_path / "place"
    place.mkdir()
    queue = Queue(str(tmp_path / "queue.db"))
    path.write_text("one\n")
    feeder = feeders.start("file", str(path), "--queue", queue.url, "--finished", str(place / "finished.txt"))
    wait_for(lambda: feeder.taken == ["one"], named="the first job")
    for leftover in place.iterdir():
        leftover.unlink()
    place.rmdir()
    queue.run("one", "succeeded")
    wait_for(lambda: "finished commands cannot be written" in feeder.err, named="the complaint")
    path.write_text("one\ntwo\n")
    wait_for(lambda: feeder.taken == ["one", "two"], named="the second job")
    place.mkdir()
    queue.run("two", "succeeded")
    finished = place / "finished.txt"
    wait_for(lambda: finished.exists() and finished.read_text() == "one\ntwo\n", named="both commands")
