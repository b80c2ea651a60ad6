"""`stoker serve`: the page and the HTTP API."""

from typing import Any

import click

from stoker.cli.page_options import page_config, page_options, run_page, until_signalled
from stoker.cli.queue_options import opened_or_created, queue_option, queue_url_of
from stoker.cli.telling import tell


@click.command("serve")
@page_options
@queue_option
def command(page: dict[str, Any], queue_url: str | None) -> int:
    """Serve the page: everything that these verbs do, from a phone or another machine.

    It runs nothing by itself: `stoker work` runs jobs, here or elsewhere; `stoker up` is both in one. Whoever has its
    link can submit jobs, and so run commands as you.
    """
    from stoker.cli.notifying import notifying

    config = page_config(page, queue_url_of(queue_url))
    from stoker.web.listening import listening_socket

    listener = listening_socket(config)
    opened_or_created(queue_url).close()

    with until_signalled(), notifying(config, tell):
        run_page(config, listener)
    return 0
