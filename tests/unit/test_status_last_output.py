"""Last output of running jobs: from local files, or from the queue."""

from collections.abc import Iterable
from pathlib import Path
from typing import cast

from stoker.queue import Store
from stoker.status.model import Progress
from stoker.status.progress import TAIL_SIZE, LastOutput, last_output, last_outputs
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


def lines(home: Path, queue: Queue, *names: str) -> dict[str, str]:
    attempts = [attempt(id=name, job=name) for name in names]
    return {name: said.line for name, said in last_outputs(cast("Store", queue), home, attempts).items()}


def test_all_tails_are_queried_at_once(tmp_path: Path) -> None:
    queue = Queue(a="one\n", b="two\n")
    assert lines(tmp_path, queue, "a", "b", "c") == {"a": "one", "b": "two"}
    queue.stored["a"] = "three\n"
    assert lines(tmp_path, queue, "a", "b", "c") == {"a": "three", "b": "two"}
    assert queue.asked == [["a", "b", "c"]] * 2


def test_local_log_is_read_from_its_file(tmp_path: Path) -> None:
    queue = Queue(a="old output\n")
    place = tmp_path / "attempts" / "a-1"
    place.mkdir(parents=True)
    (place / "output").write_text("x" * TAIL_SIZE + "\nits last line")
    assert lines(tmp_path, queue, "a") == {"a": "its last line"}
    assert queue.asked == []


def test_last_line_has_no_escapes_and_a_limited_length() -> None:
    assert last_output("one\n\x1b[31mtwo\x1b[0m\t\n \n\n") == LastOutput(None, ("one", "two"))
    assert last_output("") == LastOutput(None, ())
    long = last_output("x" * 1000).line
    assert (len(long), long[-1]) == (300, "…")


def test_few_last_lines_are_kept_with_their_indentation() -> None:
    said = last_output("one\ntwo\n\nthree\n  four\n\nbar 1%\rbar 2%")
    assert said.lines == ("two", "three", "  four", "bar 2%")
    assert said.line == "bar 2%"


def test_progress_bar_is_found_before_later_output() -> None:
    assert last_output("step 3/10\nsaved\n") == LastOutput(
        Progress(fraction=0.3, text="step 3/10"), ("step 3/10", "saved")
    )
