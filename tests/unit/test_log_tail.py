"""The tail of a running job's log in the queue."""

import os
from pathlib import Path
from typing import cast

import pytest

from stoker.engines import delivery
from stoker.engines.attempt import AttemptRecord, AttemptSpec
from stoker.engines.delivery import RUNNING_TAIL, TAIL, LogTail
from stoker.logs.reader import TailReader, read_tail
from stoker.queue import QueueAwayError, Store


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


def test_unchanged_log_is_not_read_and_a_failed_delivery_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, queue = AttemptRecord(tmp_path), Queue()
    excerpt = LogTail(record, cast(AttemptSpec, Assigned()))
    reads: list[int] = []

    def counting(path: Path, size: int) -> str:
        reads.append(size)
        return read_tail(path, size)

    monkeypatch.setattr(delivery, "read_tail", counting)

    def deliver() -> int:
        before = len(reads)
        excerpt.deliver(cast(Store, queue))
        return len(reads) - before

    record.output.write_bytes(b"50 %")
    assert deliver() > 0
    assert deliver() > 0, "it was written to just now, and may be again within the same tick"
    os.utime(record.output, (1e9, 1e9))
    assert [deliver(), deliver()] == [1, 0]
    record.output.write_bytes(b"51 %")
    os.utime(record.output, (1.1e9, 1.1e9))
    with monkeypatch.context() as away:
        away.setattr(queue, "write", _away)
        with pytest.raises(QueueAwayError):
            deliver()
    assert deliver() > 0
    assert queue.text == "51 %"


def _away(_attempt: str, _text: str) -> bool:
    raise QueueAwayError("the queue is away")
