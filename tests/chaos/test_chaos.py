"""Whatever fails, and however often: every job comes to one outcome, its own, one attempt at a time, with its output.

`make chaos` does more of it. `CHAOS_SEED` sets the seed, which is printed with a failure.
"""

import contextlib
import os
import random
from pathlib import Path
from typing import Final

import pytest

from stoker.queue import init_queue
from tests.support.chaos import KINDS, LONG, ChaosRun, Extent
from tests.support.postgres import PostgresServer
from tests.support.work_site import WorkSite

# On a machine that does much else; alone it takes a fraction of that.
pytestmark = pytest.mark.timeout(600)

# A machine that stands still for longer than a lease takes longer than all the others together.
SHORT: Final = frozenset(KINDS) - LONG


@pytest.fixture
def seed() -> int:
    return int(os.environ.get("CHAOS_SEED") or random.randrange(10**6))


def test_random_faults_on_two_machines_and_postgres_lose_no_job(
    tmp_path: Path, mortal_server: PostgresServer, mortal_url: str, seed: int
) -> None:
    assert (
        _findings(tmp_path, mortal_url, Extent(16, 0.1, machines=2, kinds=SHORT, longest_job=1.0), seed, mortal_server)
        == []
    )


def test_random_faults_on_one_machine_with_sqlite_lose_no_job(tmp_path: Path, seed: int) -> None:
    (tmp_path / "queue").mkdir()
    url = str(tmp_path / "queue" / "queue.db")
    assert _findings(tmp_path, url, Extent(12, 0.1, machines=1, kinds=SHORT, longest_job=1.0), seed, None) == []


def _findings(directory: Path, url: str, extent: Extent, seed: int, server: PostgresServer | None) -> list[str]:
    with contextlib.ExitStack() as place:
        store = place.enter_context(init_queue(url))
        site = place.enter_context(contextlib.closing(WorkSite(directory, store, queue=url)))
        chaos = place.enter_context(contextlib.closing(ChaosRun(site, url, extent, seed, server)))
        chaos.run()
        return chaos.findings()
