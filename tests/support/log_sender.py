"""Streams logs as the worker of another machine does, without a worker."""

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from stoker.engines.identity import WorkerIdentity
from stoker.queue import Attempt, Store, open_queue
from stoker.worker import log_streaming
from tests.support.attempts import WORKER


def copies_in(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keeps copies of remote logs there, in this process and those it starts."""
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    return place


class RemoteIdentity:
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def is_own(self, worker: str) -> bool:
        return worker == WORKER

    def directory_of(self, job: str, number: int) -> Path:
        return self.directory / "attempts" / f"{job}-{number}"


class LogSender:
    """What the worker there does, step by step, or by itself while it `works`."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(log_streaming, "_CHECK_EVERY", 0.0)
        monkeypatch.setattr(log_streaming, "_SEND_EVERY", 0.0)
        self._place = place
        self.restart()

    def restart(self) -> None:
        self._streaming = log_streaming.LogStreaming(cast(WorkerIdentity, RemoteIdentity(self._place)))

    def place_of(self, attempt: Attempt) -> Path:
        """The directory of an attempt, there; as long as it runs."""
        place = self._place / "attempts" / f"{attempt.job}-{attempt.number}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "attempt.json").write_text(f'{{"attempt": "{attempt.id}"}}')
        return place

    def end(self, attempt: Attempt) -> None:
        """Everything was delivered to the queue."""
        place = self.place_of(attempt)
        (place / "attempt.json").rename(place / "delivered.json")

    def send(self, store: Store) -> None:
        """One step."""
        self._streaming.note_change()
        self._streaming.step(store)

    def close(self) -> None:
        self._streaming.close()

    @contextmanager
    def works(self) -> Iterator[None]:
        """On the queue that `stoker` finds by itself."""
        ends = threading.Event()

        def work() -> None:
            with open_queue() as store:
                while not ends.wait(0.01):
                    self.send(store)
                self.close()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            ends.set()
            thread.join()
