"""The worker started by the web server: it is restarted after any exit."""

import subprocess
import threading
from pathlib import Path

import pytest

from stoker.cli.verbs.up import WorkerProcess
from tests.support.waiting import wait_for


class NoPauses(threading.Event):
    """Records the requested pauses without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.asked.append(timeout)
        return self.is_set()


class ShortLived(WorkerProcess):
    """Its workers end at once, except the last."""

    def __init__(self, lives: int, log: Path) -> None:
        self.lives = lives
        super().__init__((), {}, log)
        self.pauses = NoPauses()
        self._ending = self.pauses

    def _started(self) -> "subprocess.Popen[bytes]":
        self.lives -= 1
        return subprocess.Popen(["false"] if self.lives else ["sleep", "600"])


def test_failing_worker_is_restarted_with_backoff_and_reported_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "work.log"
    log.write_text("12:00:00 at work\nstoker: a worker is there already\n\n")
    with ShortLived(7, log) as worker:
        wait_for(lambda: worker.lives == 0, named="the worker that stays")
    assert worker.pauses.asked == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    assert capfd.readouterr().out[9:] == (
        "the worker ended with code 1 right after its start (stoker: a worker is there already); trying again\n"
    )
    assert worker._process.returncode == -15
