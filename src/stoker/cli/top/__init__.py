"""`stoker top`: GPUs and jobs live in the terminal, with keys to act on the selected job."""

import click
from msgspec import to_builtins

from stoker.cli.options.queue import opened_or_created, queue_option, queue_url_of
from stoker.cli.output import json_option, print_json
from stoker.errors import BadInputError


@click.command("top")
@click.option("--once", is_flag=True, help="Print it once as text.")
@json_option("Print it once as JSON.")
@queue_option
def top_command(once: bool, as_json: bool, queue_url: str | None) -> int:
    """Watch GPUs and jobs live, and act on them: ? shows the keys, q quits."""
    from stoker.cli.tables import table
    from stoker.cli.top.screen import UNCUT, whole
    from stoker.cli.top.session import TopSession
    from stoker.cli.top.terminal import TopTerminal
    from stoker.masking import masked
    from stoker.paths import state_home
    from stoker.status.snapshot import SnapshotBuilder

    if once and as_json:
        raise BadInputError("--once and --json exclude each other: choose one")
    if not (once or as_json or TopTerminal.is_there()):
        raise BadInputError("top needs a terminal: --once prints it once as text, --json as JSON")
    home = state_home()
    with opened_or_created(queue_url) as store:
        if as_json:
            print_json(masked(to_builtins(SnapshotBuilder(home).observe(store))))
            return 0
        if once:
            screen = table.terminal()
            width = UNCUT if screen is None else screen.width
            lines = whole(SnapshotBuilder(home).observe(store), width)
            if screen is None:
                table.print_lines(None, (line.plain for line in lines))
            else:
                screen.print(*lines, sep="\n", no_wrap=True, overflow="ignore", crop=False, soft_wrap=True)
            return 0
        with TopTerminal() as terminal:
            return TopSession(store, home, terminal, queue_url_of(queue_url)).run()
