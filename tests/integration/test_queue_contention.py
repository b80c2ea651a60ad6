"""Sixteen processes claim jobs from one queue: none is claimed twice, none is lost."""

from pathlib import Path

import pytest

from stoker.queue import init_queue
from tests.support.deep import DEEP
from tests.support.queue_contention import BATCH, crowd

# The benchmark of the queue does the same for a minute.
SECONDS = 2.0 if DEEP else 1.0


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_sixteen_processes_never_claim_the_same_job(
    request: pytest.FixtureRequest, tmp_path: Path, database: str
) -> None:
    url = str(tmp_path / "queue.db") if database == "sqlite" else str(request.getfixturevalue("postgres_url"))
    with init_queue(url) as queue:
        assert crowd(queue, url, 16, SECONDS, tmp_path) >= BATCH
