"""The worker beside the page: it comes back, whatever it dies of."""

import subprocess
import threading
from pathlib import Path

from stoker.cli.verbs.up import WorkerProcess
from tests.support.waiting import wait_for


class NoPauses(threading.Event):
    """Remembers for how long it was to be waited, and does not."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.asked.append(timeout)
        return self.is_set()


class ShortLived(WorkerProcess):
    """Its workers end at once, except the last of so many."""

    def __init__(self, lives: int, log: Path) -> None:
        self.lives = lives
        self.told: list[str] = []
        super().__init__((), {}, log, self.told.append)
        self.pauses = NoPauses()
        self._ending = self.pauses

    def _started(self) -> "subprocess.Popen[bytes]":
        self.lives -= 1
        return subprocess.Popen(["false"] if self.lives else ["sleep", "600"])


def test_a_worker_that_dies_at_once_is_tried_again_after_longer_and_longer_and_told_of_once(tmp_path: Path) -> None:
    log = tmp_path / "work.log"
    log.write_text("12:00:00 at work\nstoker: a worker is there already\n\n")
    with ShortLived(7, log) as reaper_process:
        wait_for(lambda: reaper_process.lives == 0, named="the worker that stays")
    assert reaper_process.pauses.asked == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]
    (told,) = reaper_process.told
    assert (
        told
        == "the worker ended with code 1 soon after its start (stoker: a worker is there already): it is tried again"
    )
    assert reaper_process._process.returncode == -15
