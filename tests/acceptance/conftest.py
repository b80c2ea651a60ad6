"""Fixtures of the commands that need a queue, or GPUs to fill."""

from tests.support.fill_site import filling
from tests.support.postgres import mortal_server, mortal_url, postgres_server, postgres_url
from tests.support.queue_jobs import queue
from tests.support.work_site import site

__all__ = ["filling", "mortal_server", "mortal_url", "postgres_server", "postgres_url", "queue", "site"]
