"""`stoker serve` or `stoker up` as a person starts it, on a free port, with a way in."""

import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from stoker.queue import open_queue
from tests.support.waiting import wait_for

# Everything is compiled and imported within a few seconds, also on a machine that is busy.
PATIENCE = 60.0


class PageSite:
    """One running page: where it is, how to get in, and what it says."""

    def __init__(self, *arguments: str, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [str(Path(sys.executable).parent / "stoker"), *arguments],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said: list[str] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            link = self.hear(r"(https?://\S+)/login#(\S+)")
        except BaseException:
            self.process.kill()  # nobody gets to know of it
            self.process.wait()
            raise
        self.address, self.token = link[1], link[2]

    def hear(self, pattern: str) -> "re.Match[str]":
        """Waits for a line that has this in it."""
        ends = time.monotonic() + PATIENCE
        while time.monotonic() < ends:
            with contextlib.suppress(queue.Empty):
                line = self._lines.get(timeout=0.5)
                if found := re.search(pattern, line):
                    return found
            if self.process.poll() is not None and self._lines.empty() and not self._reader.is_alive():
                break
        raise AssertionError(f"{pattern!r} was not said within {PATIENCE:g} s: {self.said}")

    def client(self, **options: Any) -> httpx.Client:
        """One that has the token."""
        return httpx.Client(
            base_url=self.address, headers={"Authorization": f"Bearer {self.token}"}, timeout=PATIENCE, **options
        )

    def end(self) -> int:
        self.process.terminate()
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.said.append(line)
                self._lines.put(line)


def stop_jobs(home: Path) -> None:
    """Those that a page's worker runs would go on without it."""
    with open_queue(str(home / "queue.db")) as store:
        store.jobs.cancel(job.id for job in store.jobs.find(states=["queued", "held", "running"], limit=1000))
        wait_for(lambda: not store.attempts.running(), deadline=PATIENCE, named="the end of its jobs")


@contextlib.contextmanager
def page_site(*arguments: str, **environment: str) -> Iterator[PageSite]:
    site = PageSite(*arguments, environment=environment)
    try:
        yield site
    finally:
        if site.process.poll() is None:
            site.end()
