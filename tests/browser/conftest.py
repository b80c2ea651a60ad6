"""Fixtures of the browser tests."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.browser import chromium
from tests.support.postgres import postgres_server, postgres_url

__all__ = ["postgres_server", "postgres_url"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for longer: while there is one, its event loop runs in this thread, and no test can have its own."""
    with chromium() as started:
        yield started
