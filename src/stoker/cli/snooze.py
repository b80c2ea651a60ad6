"""`stoker snooze`: "it will be quiet now, on purpose": leaves a run alone for a while."""

import getpass
import os
import sys
import time
from typing import TYPE_CHECKING

import click

from stoker.cli.options import DURATION
from stoker.errors import BadInputError
from stoker.places import state_home
from stoker.units import format_duration

if TYPE_CHECKING:
    from stoker.runs.record import Record


@click.command("snooze")
@click.argument("duration", type=DURATION, required=False)
@click.argument("run", required=False)
@click.option("--end", is_flag=True, help="End the snooze now.")
def command(duration: float | None, run: str | None, end: bool) -> int:
    """Leave RUN alone for DURATION: it is not stopped for idleness until then, and its window begins anew after that.

    RUN is the id of a run, or of a job of the queue that runs on this machine. Inside either it may be left out: Stoker
    exports it as STOKER_RUN.
    """
    from stoker.runs.record import Snooze

    if end and run is None and duration is not None:
        raise BadInputError("--end takes no duration: write `stoker snooze --end` inside the job, or set STOKER_RUN")
    if not end and duration is None:
        raise BadInputError("for how long? Write it like `stoker snooze 30m`")
    name = run or os.environ.get("STOKER_RUN")
    if not name:
        raise BadInputError("which run? Write its id after the duration: `stoker runs` lists them")
    record = _running(name)
    if end or duration is None:
        record.write_snooze(None)
        sys.stdout.write(f"run {record.id} is watched again\n")
        return 0
    record.write_snooze(Snooze(time.monotonic() + duration, time.time() + duration, getpass.getuser()))
    until = time.strftime("%H:%M:%S", time.localtime(time.time() + duration))
    sys.stdout.write(f"run {record.id} is left alone for {format_duration(duration)}, until {until}\n")
    return 0


def _running(name: str) -> "Record":
    """The run, or the attempt at a job, that this is the id of or the beginning of one."""
    from stoker.runs.record import Records

    attempts = [record for record in Records(state_home(), "attempts").newest_first() if record.id.startswith(name)]
    for record in attempts:
        if record.status().state != "ended" and record.is_alive(record.spec()):
            return record
    try:
        record = Records(state_home()).find(name)
    except BadInputError:
        if not attempts:
            raise
        record = attempts[0]
    if record.status().state == "ended" or not record.is_alive(record.spec()):
        raise BadInputError(f"run {record.id} has ended: there is nothing to snooze")
    return record
