"""The tail of a running job's log in the queue."""

from pathlib import Path
from typing import cast

import pytest

from stoker.engines.attempt import AttemptRecord, AttemptSpec
from stoker.engines.delivery import RUNNING_TAIL, TAIL, LogTail
from stoker.logs.reader import TailReader
from stoker.queue import Store


class Queue:
    """Keeps one output."""

    def __init__(self) -> None:
        self.text = ""
        self.logs = self

    def write(self, _attempt: str, text: str, **_: bool) -> bool:
        self.text = text
        return True


class Assigned:
    attempt = "a"
    log_limit = 2**30
    fitting = None


@pytest.mark.parametrize("lines_between", [1, 100, 500, 2000, 3000])
def test_follower_gets_every_line_once(tmp_path: Path, lines_between: int) -> None:
    record, queue = AttemptRecord(tmp_path), Queue()
    excerpt, reader = LogTail(record, cast(AttemptSpec, Assigned())), TailReader(lambda: queue.text)
    printed, read = b"", b""
    for begin in range(0, 10 * lines_between, lines_between):
        printed += b"".join(b"step %6d loss 0.1\n" % number for number in range(begin, begin + lines_between))
        record.output.write_bytes(printed)
        excerpt.deliver(cast(Store, queue))
        read += reader.read().finished
    assert read == printed


def test_quiet_job_causes_few_writes(tmp_path: Path) -> None:
    record, queue = AttemptRecord(tmp_path), Queue()
    excerpt = LogTail(record, cast(AttemptSpec, Assigned()))
    sizes = []
    for more in (3 * TAIL, 10, 10, TAIL, 10):
        with record.output.open("ab") as file:
            file.write(b"x" * (more - 1) + b"\n")
        excerpt.deliver(cast(Store, queue))
        sizes.append(len(queue.text))
    assert [size > RUNNING_TAIL for size in sizes] == [True, False, False, True, False]


def test_progress_bar_is_delivered_again_only_when_it_changes(tmp_path: Path) -> None:
    record, queue = AttemptRecord(tmp_path), Queue()
    excerpt = LogTail(record, cast(AttemptSpec, Assigned()))
    written = []
    for bar in (b"train 101/600", b"train 249/600", b"train 249/600"):
        with record.output.open("r+b" if record.output.exists() else "wb") as file:
            file.write(b"epoch 1\n" + bar)
        queue.text = ""
        excerpt.deliver(cast(Store, queue))
        written.append(queue.text)
    assert written == ["epoch 1\ntrain 101/600", "epoch 1\ntrain 249/600", ""]
