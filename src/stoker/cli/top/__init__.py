"""`stoker top`: GPUs and jobs live in the terminal, with keys to act on the selected job."""

from typing import TYPE_CHECKING

import click

from stoker.cli.options.queue import opened_or_created, queue_option, queue_url_of
from stoker.cli.output import json_option, print_json
from stoker.errors import BadInputError

if TYPE_CHECKING:
    from stoker.status.model import Snapshot


@click.command("top")
@click.option("--once", is_flag=True, help="Print it once as text.")
@json_option("Print it once as JSON.")
@queue_option
def top_command(once: bool, as_json: bool, queue_url: str | None) -> int:
    """Watch GPUs and jobs live, and act on them: ? shows the keys, q quits."""
    from stoker.cli.top.session import TopSession
    from stoker.cli.top.terminal import TopTerminal
    from stoker.paths import state_home
    from stoker.status.snapshot import SnapshotBuilder

    if once and as_json:
        raise BadInputError("--once and --json exclude each other: choose one")
    if not (once or as_json or TopTerminal.is_there()):
        raise BadInputError("top needs a terminal: --once prints it once as text, --json as JSON")
    home = state_home()
    with opened_or_created(queue_url) as store:
        if as_json:
            return _print_json(SnapshotBuilder(home).observe(store))
        if once:
            return _print(SnapshotBuilder(home).observe(store))
        with TopTerminal() as terminal:
            return TopSession(store, home, terminal, queue_url_of(queue_url)).run()


def _print_json(snapshot: "Snapshot") -> int:
    import msgspec

    from stoker.masking import masked

    print_json(masked(msgspec.to_builtins(snapshot)))
    return 0


def _print(snapshot: "Snapshot") -> int:
    from stoker.cli.tables.table import console, print_lines, width_of
    from stoker.cli.top.screen import UNCUT, whole

    screen = console()
    print_lines(screen, whole(snapshot, width_of(screen) or UNCUT))
    return 0
