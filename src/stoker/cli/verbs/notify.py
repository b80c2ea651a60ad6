"""`stoker notify`: tell people what happens in the queue, where no page does it."""

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

import click

from stoker.cli.options.common import log
from stoker.cli.options.queue import opened, queue_option
from stoker.errors import BadInputError, StokerError
from stoker.settings import load_settings
from stoker.settings_path import config_path

if TYPE_CHECKING:
    from stoker.settings import Notifications


@click.command("notify")
@click.option("--test", is_flag=True, help="Send one message to every URL, and say which failed.")
@queue_option
def notify_command(test: bool, queue_url: str | None) -> int:
    """Tell people what happens in the queue, by the URLs under [notify] in stoker.toml, until Ctrl-C.

    `stoker serve` and `stoker up` do this too; several at once tell everything once together.
    """
    wanted = load_settings().notify
    if not wanted.urls:
        raise BadInputError(
            f'there is nobody to tell: write urls = ["…"] under [notify] in {config_path(os.environ)}'
            " (docs/how-to/notifications.md)"
        )
    return _test(wanted) if test else _run(wanted, queue_url)


def _test(wanted: "Notifications") -> int:
    from stoker.actions.notify import AppriseChannel

    code = 0
    for number, url in enumerate(wanted.urls, 1):
        channel = AppriseChannel(url)
        label = f"URL {number} of {len(wanted.urls)}"
        try:
            channel.prepare(f"[notify]: {label}")
            channel.send("Stoker: a test", _test_text(wanted))
        except StokerError as error:
            code = 1
            sys.stderr.write(f"stoker: {label}: {error}\n")
        else:
            sys.stdout.write(f"{label} ({channel.scheme}): sent\n")
    return code


def _test_text(wanted: "Notifications") -> str:
    link = f"\n{wanted.link}" if wanted.link else ""
    return f"This is a test: messages of Stoker on {os.uname().nodename} arrive here.{link}"


def _run(wanted: "Notifications", queue_url: str | None) -> int:
    from stoker.notifications.notifier import Notifier

    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda _number, _frame: stop.set())
    crier = Notifier(wanted, "", lambda: opened(queue_url), log)
    people = "1 URL" if len(wanted.urls) == 1 else f"{len(wanted.urls)} URLs"
    log(f"telling {people} of: {', '.join(wanted.events)}")
    crier.run(stop)
    return 0
