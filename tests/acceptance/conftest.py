"""Fixtures of the commands that need a queue, or GPUs to fill."""

import pytest

from tests.support.fill_site import filling
from tests.support.postgres import mortal_server, mortal_url, postgres_server, postgres_url
from tests.support.queue_jobs import queue
from tests.support.work_site import site

__all__ = ["filling", "mortal_server", "mortal_url", "postgres_server", "postgres_url", "queue", "site"]


@pytest.fixture(autouse=True)
def _a_slow_helper_is_no_hung_driver(_a_machine_of_its_own: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it may take seconds to start: tests of a driver that hangs set a deadline of their own."""
    monkeypatch.setenv("STOKER_DEADLINE", "60s")


@pytest.fixture(autouse=True)
def _unused_gpus_count_at_once(_a_machine_of_its_own: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most jobs of the tests use no GPU: they are judged by `--for` from the start, not by its twelvefold."""
    monkeypatch.setenv("STOKER_UNUSED_FOR", "0s")
