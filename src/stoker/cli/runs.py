"""`stoker runs`: the runs that are remembered here, newest first."""

import shlex
import sys
import time

import click

from stoker.masking import masked_command
from stoker.paths import state_home
from stoker.runs.record import Records
from stoker.runs.summary import Summary, in_a_word, summary_of
from stoker.units import format_duration


@click.command("runs")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.option("--all", "everything", is_flag=True, help="All that are remembered, not only the newest 20.")
def command(as_json: bool, everything: bool) -> int:
    """List runs: what each does or what became of it."""
    records = list(Records(state_home()).newest_first())
    shown = records if everything else records[:20]
    summaries = [summary_of(record) for record in shown]
    if as_json:
        import msgspec

        sys.stdout.write(msgspec.json.format(msgspec.json.encode(summaries), indent=2).decode() + "\n")
        return 0
    if not summaries:
        sys.stdout.write("no runs yet: `stoker run -- COMMAND` makes one\n")
        return 0
    _print(summaries)
    if len(records) > len(shown):
        sys.stdout.write(f"and {len(records) - len(shown)} more: --all shows them\n")
    return 0


def _print(summaries: list[Summary]) -> None:
    from stoker.cli.screen import Column, print_table

    columns = (
        Column("run"),
        Column("started", left_out=1),
        Column("for", "right", left_out=2),
        Column("what"),
        Column("exit", "right"),
        Column("command", gives="cut"),
    )
    rows = [
        (
            summary.id,
            time.strftime("%m-%d %H:%M", time.localtime(summary.started)),
            format_duration(round(summary.seconds)),
            in_a_word(summary),
            "" if summary.exit_code is None else str(summary.exit_code),
            masked_command(shlex.join(summary.command)),
        )
        for summary in summaries
    ]
    print_table(columns, rows)
