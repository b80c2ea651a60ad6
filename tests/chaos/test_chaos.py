"""Whatever is killed, and however often: every job comes to one outcome, one attempt at a time, with its output.

`python -m tests.chaos` does more of it.
"""

import contextlib
import os
import random
from pathlib import Path

import pytest

from stoker.queue import init_queue
from tests.support.havoc import Extent, Havoc
from tests.support.postgres import PostgresServer
from tests.support.work_site import WorkSite

# On a machine that does much else; alone it takes a fraction of that.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def seed() -> int:
    """Printed with a failure; `CHAOS_SEED` sets it."""
    return int(os.environ.get("CHAOS_SEED") or random.randrange(10**6))


def test_random_deaths_on_two_workers_and_their_database_lose_nothing(
    tmp_path: Path, mortal_server: PostgresServer, mortal_url: str, seed: int
) -> None:
    with init_queue(mortal_url) as store, contextlib.closing(WorkSite(tmp_path, store, queue=mortal_url)) as site:
        havoc = Havoc(site, mortal_url, Extent(jobs=100, kills=60, every=0.15), seed, mortal_server)
        havoc.run()
        assert havoc.findings() == []


def test_random_deaths_on_one_worker_with_a_file_lose_nothing(tmp_path: Path, seed: int) -> None:
    url = str(tmp_path / "queue.db")
    with init_queue(url) as store, contextlib.closing(WorkSite(tmp_path, store, queue=url)) as site:
        havoc = Havoc(site, url, Extent(jobs=40, kills=25, every=0.15, workers=1), seed, None)
        havoc.run()
        assert havoc.findings() == []
