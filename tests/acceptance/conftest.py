"""Fixtures of the commands that need a queue."""

from tests.support.postgres import mortal_server, mortal_url, postgres_server, postgres_url
from tests.support.queue_jobs import queue
from tests.support.work_site import site

__all__ = ["mortal_server", "mortal_url", "postgres_server", "postgres_url", "queue", "site"]
