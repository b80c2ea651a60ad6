"""A queue in each supported database: a test with this fixture runs on both."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.queue import Store, init_queue


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_url"))
    return str(tmp_path / "queue.db")


@pytest.fixture
def queue(url: str) -> Iterator[Store]:
    with init_queue(url) as opened:
        yield opened
