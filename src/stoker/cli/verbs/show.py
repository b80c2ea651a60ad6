"""`stoker show`: one job or run, whole: what was asked for, what is the case, and why."""

import re
import shlex
import sys
import time
from typing import TYPE_CHECKING

import click

from stoker.cli.options.queue import opened, queue_option
from stoker.cli.options.selection import JobName
from stoker.errors import BadInputError, StokerError
from stoker.masking import masked_command
from stoker.paths import state_home
from stoker.runs.record import Record, Records
from stoker.runs.summary import Summary, in_a_word, summary_of
from stoker.units import format_duration

if TYPE_CHECKING:
    from stoker.queue import Job, Store


@click.command("show")
@click.argument("what", required=False, type=JobName(), metavar="[JOB|RUN]")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@queue_option
def show_command(what: str | None, as_json: bool, queue_url: str | None) -> int:
    """Show one job (an id, the beginning of one, or a name), or else one run, with its report if it has one.

    When nothing is named, the newest run.
    """
    records = Records(state_home())
    if what is None:
        _show_run(next(records.newest_first(), None), as_json)
    elif queue_url is None and (run := _run_of_this_id(records, what)) is not None:
        _show_run(run, as_json)
    else:
        _show_job_or_run(records, what, as_json, queue_url)
    return 0


def _run_of_this_id(records: Records, what: str) -> Record | None:
    """A whole id means one thing only: then no queue is asked, which may be away."""
    if not re.fullmatch(r"[0-9a-f]{8}", what):
        return None
    try:
        return records.find(what)
    except BadInputError:
        return None


def _show_job_or_run(records: Records, what: str, as_json: bool, queue_url: str | None) -> None:
    try:
        store = opened(queue_url)
    except StokerError as error:
        _show_run(_run_or_neither(records, what, error), as_json)
        return
    with store:
        try:
            job = store.job(what)
        except StokerError as error:
            run = _run_or_neither(records, what, error)
        else:
            _show_job(store, job, as_json)
            return
    _show_run(run, as_json)


def _run_or_neither(records: Records, what: str, no_job: StokerError) -> Record:
    try:
        return records.find(what)
    except BadInputError as no_run:
        raise BadInputError(f"{no_job}; {no_run}") from None


def _show_job(store: "Store", job: "Job", as_json: bool) -> None:
    from stoker.cli.tables.job import job_page

    page = job_page(store, job)
    sys.stdout.write(page.json() if as_json else page.text())


def _show_run(record: Record | None, as_json: bool) -> None:
    from stoker.cli.tables.job import run_json, run_text

    if record is None:
        sys.stdout.write("no runs yet: `stoker run -- COMMAND` makes one\n")
    else:
        sys.stdout.write(run_json(record) if as_json else run_text(record))


@click.command("why")
@click.argument("job", type=JobName())
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@queue_option
def why_command(job: str, as_json: bool, queue_url: str | None) -> int:
    """Say why JOB (an id, the beginning of one, or a name) waits, or what became of it."""
    from stoker.queue.surroundings import why

    with opened(queue_url) as store:
        found = store.job(job)
        reason = why(store, found)
    if as_json:
        import msgspec

        told = {"job": found.id, "state": found.state, "why": reason}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(told), indent=2).decode() + "\n")
    else:
        sys.stdout.write(f"{found.id}: {reason.reason}\n")
    return 0


@click.command("runs")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.option("--all", "everything", is_flag=True, help="All that are remembered, not only the newest 20.")
def runs_command(as_json: bool, everything: bool) -> int:
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
    from stoker.cli.tables.table import Column, print_table

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
