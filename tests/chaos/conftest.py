"""Fixtures of the tests that kill at random."""

from tests.support.postgres import mortal_server, mortal_url

__all__ = ["mortal_server", "mortal_url"]
