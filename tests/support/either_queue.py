"""A queue in each of the databases that there can be one in: what a test asks, it asks of both."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.queue import Store, init_queue


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place for one."""
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return str(tmp_path / "queue.db")


@pytest.fixture
def queue(url: str) -> Iterator[Store]:
    with init_queue(url) as opened:
        yield opened
