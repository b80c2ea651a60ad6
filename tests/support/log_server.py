"""A job whose log is read on the page, without a network or a worker."""

import os
import threading
from pathlib import Path

from fastapi import FastAPI

from stoker.queue import JobSpec, Store
from stoker.web.app import create_app
from stoker.web.app_state import AppState
from stoker.web.auth.key_file import User
from stoker.web.auth.keys import Keys
from stoker.web.config import Config
from stoker.web.sse.log_channels import LogChannels
from stoker.web.sse.snapshot_cache import SnapshotCache
from tests.support.asgi_page import AsgiPage
from tests.support.attempts import start


class StaticSnapshotCache(SnapshotCache):
    """No overview is read: these pages need to know only whether the server ends."""

    def __init__(self) -> None:
        self._stopping = threading.Event()


class Place:
    """A queue with one job that runs, here or `elsewhere`, and the application that shows its log."""

    def __init__(self, store: Store, home: Path, elsewhere: Path | None = None) -> None:
        self.store = store
        self.home = home
        self.job = store.jobs.submit([JobSpec(command="train")])[0]
        self.attempt = self.start()
        self.directory = (elsewhere or home) / "attempts" / f"{self.job}-1"
        self.output = self.directory / "output"
        config = Config(queue=None, home=home)
        keys = Keys(home)
        user = keys.by_token(keys.first().secret)
        assert user is not None
        self.user: User = user
        self.app_state = AppState(config, keys)
        self.app_state.snapshot_cache = StaticSnapshotCache()
        self.app = create_app(self.app_state)

    def start(self) -> str:
        return start(self.store, self.job).id

    def prints(self, data: bytes) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with self.output.open("ab") as file:
            file.write(data)

    def rewrites(self, data: bytes) -> None:
        """As the log writer does: finished lines stay and the unfinished rest is overwritten."""
        finished = self.output.read_bytes().rpartition(b"\n")[0]
        assert data.startswith(finished)
        with self.output.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), data[len(finished) :], len(finished))
            file.truncate(len(data))

    async def get(self, what: str) -> bytes:
        """The body of an answer."""
        async with self.page(what) as asked:
            await asked.ended()
            assert asked.status == 200, asked.body
            return asked.body

    def page(self, what: str = "log/live", app: FastAPI | None = None, **headers: str) -> AsgiPage:
        root = "" if what.startswith("log/live") else "/api/v1"
        address = what if what.startswith("/") else f"{root}/jobs/{self.job}/attempts/1/{what}"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return AsgiPage(app or self.app, address, self.user, named)

    @property
    def channels(self) -> LogChannels:
        return self.app_state.log_channels
