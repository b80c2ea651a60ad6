"""Fixtures of the tests that need a real database."""

from tests.support.postgres import postgres_server, postgres_url
from tests.support.work_site import site

__all__ = ["postgres_server", "postgres_url", "site"]
