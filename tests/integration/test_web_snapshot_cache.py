"""The board: one look for all pages, which no mistake stops and which says when it is old."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import psycopg
import pytest

from stoker.queue import JobSpec, QueueAwayError, Store, init_queue, open_queue
from stoker.status.model import Snapshot
from stoker.status.snapshot import SnapshotBuilder
from stoker.web.config import Config
from stoker.web.sse import snapshot_cache as board_module
from stoker.web.sse.snapshot_cache import SnapshotCache
from tests.support.waiting import wait_for

T = TypeVar("T")


@contextlib.asynccontextmanager
async def started(directory: Path) -> AsyncIterator[SnapshotCache]:
    snapshot_cache = SnapshotCache(Config(queue=str(directory / "queue.db"), home=directory))
    snapshot_cache.start()
    try:
        yield snapshot_cache
    finally:
        snapshot_cache.stop()


async def until(snapshot_cache: SnapshotCache, number: int) -> Snapshot:
    """The first overview with this number of queued jobs."""
    async with asyncio.timeout(60):
        version = -1
        while snapshot_cache.latest is None or snapshot_cache.latest.counts.get("queued", 0) != number:
            version = await snapshot_cache.changed(version, 5.0)
    return snapshot_cache.latest


def test_snapshot_is_updated_without_requests(tmp_path: Path) -> None:
    async def story() -> None:
        async with started(tmp_path) as snapshot_cache:
            await until(snapshot_cache, 0)
            store.jobs.submit([JobSpec(command="true")])
            assert (await until(snapshot_cache, 1)).waiting[0].job.command == "true"

    with init_queue(str(tmp_path / "queue.db")) as store:
        asyncio.run(story())


def test_internal_error_is_reported_and_updates_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale(SnapshotBuilder):
        def observe(self, store: Store) -> Snapshot:
            if (tmp_path / "stale").exists():
                raise OSError("stale file handle")
            return super().observe(store)

    async def story() -> None:
        async with started(tmp_path) as snapshot_cache:
            await until(snapshot_cache, 0)
            (tmp_path / "stale").touch()
            async with asyncio.timeout(60):
                while snapshot_cache.problem is None:
                    snapshot_cache.refresh()
                    await snapshot_cache.changed(snapshot_cache.version, 0.5)
            assert "page.log" in snapshot_cache.problem
            (tmp_path / "stale").unlink()
            store.jobs.submit([JobSpec(command="true")])
            await until(snapshot_cache, 1)
            assert snapshot_cache.problem is None

    monkeypatch.setattr(board_module, "SnapshotBuilder", Stale)
    monkeypatch.setattr(board_module, "_RETRY_INTERVAL", 0.05)
    with init_queue(str(tmp_path / "queue.db")) as store:
        asyncio.run(story())


def test_hanging_queue_is_reported(tmp_path: Path) -> None:
    async def story() -> None:
        async with started(tmp_path) as snapshot_cache:
            await until(snapshot_cache, 0)
            assert snapshot_cache.problem is None
            snapshot_cache.read_at = time.monotonic() - 60
            assert snapshot_cache.problem == "the queue does not answer"

    with init_queue(str(tmp_path / "queue.db")):
        asyncio.run(story())


def test_hanging_database_counts_as_unreachable(postgres_url: str) -> None:
    init_queue(postgres_url).close()

    def answered(ask: Callable[[], T]) -> T:
        """The answer, asked for again while the busy server misses the short timeout."""
        (answer,) = wait_for(lambda: _unless_away(ask), named="an answer")
        return answer

    with (
        psycopg.connect(postgres_url) as somebody,
        answered(lambda: open_queue(postgres_url, timeout=0.2)) as queue,
    ):
        somebody.execute("LOCK TABLE stoker_jobs")
        with pytest.raises(QueueAwayError, match="timeout"):
            queue.jobs.counts()
        somebody.rollback()
        assert answered(queue.jobs.counts) == {}


def _unless_away(ask: Callable[[], T]) -> tuple[T] | None:
    try:
        return (ask(),)
    except QueueAwayError:
        return None
