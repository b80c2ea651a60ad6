"""Last output of running jobs: local files are read each time, the queue at a limited rate."""

from collections.abc import Iterable
from pathlib import Path
from typing import cast

from stoker.queue import Store
from stoker.status.model import Progress
from stoker.status.progress import TAIL_SIZE, LastOutput, LastOutputs, last_output
from tests.support.status_parts import attempt


class Queue:
    """Stored outputs, and how often they were queried."""

    def __init__(self, **stored: str) -> None:
        self.stored = stored
        self.asked: list[list[str]] = []
        self.logs = self

    def tails(self, attempts: Iterable[str], letters: int = 4096) -> dict[str, str]:
        self.asked.append(list(attempts))
        return {name: text[-letters:] for name, text in self.stored.items() if name in self.asked[-1]}


class OutputReader:
    """Reads last outputs at times that the test sets."""

    def __init__(self, home: Path, queue: Queue) -> None:
        self.now = 0.0
        self._queue = queue
        self._outputs = LastOutputs(home, lambda: self.now)

    def lines(self, *names: str) -> dict[str, str]:
        attempts = [attempt(id=name, job=name) for name in names]
        words = self._outputs.read(cast("Store", self._queue), attempts)
        return {name: said.line for name, said in words.items()}


def test_all_tails_are_queried_once_a_second(tmp_path: Path) -> None:
    queue = Queue(a="one\n", b="two\n")
    reader = OutputReader(tmp_path, queue)
    assert reader.lines("a", "b", "c") == {"a": "one", "b": "two"}
    queue.stored["a"] = "three\n"
    reader.now = 0.9
    assert reader.lines("a", "b", "c") == {"a": "one", "b": "two"}
    reader.now = 1.1
    assert reader.lines("a", "b", "c") == {"a": "three", "b": "two"}
    assert queue.asked == [["a", "b", "c"]] * 2


def test_tail_of_a_new_job_is_queried_at_once(tmp_path: Path) -> None:
    reader = OutputReader(tmp_path, Queue(a="one\n", b="two\n"))
    assert reader.lines("a") == {"a": "one"}
    assert reader.lines("a", "b") == {"a": "one", "b": "two"}
    assert reader.lines("b") == {"b": "two"}


def test_local_log_is_read_from_its_file(tmp_path: Path) -> None:
    queue = Queue(a="old output\n")
    reader = OutputReader(tmp_path, queue)
    place = tmp_path / "attempts" / "a-1"
    place.mkdir(parents=True)
    (place / "output").write_text("x" * TAIL_SIZE + "\nits last line")
    assert reader.lines("a") == {"a": "its last line"}
    assert queue.asked == []


def test_last_line_has_no_escapes_and_a_limited_length() -> None:
    assert last_output("one\n\x1b[31mtwo\x1b[0m\t\n \n\n") == LastOutput(None, "two")
    assert last_output("") == LastOutput(None, "")
    long = last_output("x" * 1000).line
    assert (len(long), long[-1]) == (300, "…")


def test_progress_bar_is_found_before_later_output() -> None:
    assert last_output("step 3/10\nsaved\n") == LastOutput(Progress(fraction=0.3, text="step 3/10"), "saved")
