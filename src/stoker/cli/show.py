"""`stoker show`: one job or run, whole: what was asked for, what is the case, and why."""

import re
import sys
from typing import TYPE_CHECKING

import click

from stoker.cli.queue_options import opened, queue_option
from stoker.cli.selection import JobName
from stoker.errors import BadInputError, StokerError
from stoker.paths import state_home
from stoker.runs.record import Record, Records

if TYPE_CHECKING:
    from stoker.queue import Job, Store


@click.command("show")
@click.argument("what", required=False, type=JobName(), metavar="[JOB|RUN]")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@queue_option
def command(what: str | None, as_json: bool, queue_url: str | None) -> int:
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
    from stoker.cli.job_page import job_page

    page = job_page(store, job)
    sys.stdout.write(page.json() if as_json else page.text())


def _show_run(record: Record | None, as_json: bool) -> None:
    from stoker.cli.run_page import run_json, run_text

    if record is None:
        sys.stdout.write("no runs yet: `stoker run -- COMMAND` makes one\n")
    else:
        sys.stdout.write(run_json(record) if as_json else run_text(record))
