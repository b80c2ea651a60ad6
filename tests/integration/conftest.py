"""Fixtures of the tests that need a real database."""

from tests.support.postgres import mortal_server, mortal_url, postgres_server, postgres_url
from tests.support.work_site import site

__all__ = ["mortal_server", "mortal_url", "postgres_server", "postgres_url", "site"]
