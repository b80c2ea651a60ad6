"""`stoker snooze`: "it will be quiet now, on purpose": leaves a run or a job alone for a while."""

import os
import sys
import time
from typing import TYPE_CHECKING

import click

from stoker.cli.options import DURATION
from stoker.cli.queue_options import opened, queue_option
from stoker.cli.selection import JobName
from stoker.errors import BadInputError, StokerError
from stoker.places import state_home
from stoker.units import format_duration

if TYPE_CHECKING:
    from stoker.queue import Job, Store
    from stoker.runs.record import Record


@click.command("snooze")
@click.argument("words", nargs=-1, type=JobName("running"), metavar="DURATION [RUN|JOB]")
@click.option("--end", is_flag=True, help="End the snooze now: `stoker snooze --end [RUN|JOB]`.")
@queue_option
def command(words: tuple[str, ...], end: bool, queue_url: str | None) -> int:
    """Leave RUN alone for DURATION: it is not stopped for idleness until then, and its window begins anew after that.

    RUN is the id of a run on this machine, or a job of the queue that runs anywhere: its id, the beginning of one, or
    its name. Inside either it may be left out: Stoker exports it as STOKER_RUN.
    """
    seconds, named = (0.0, words) if end else (_duration(words), words[1:])
    if len(named) > 1:
        raise BadInputError(f"one run at a time: {' '.join(named)!r} names {len(named)}")
    name = named[0] if named else os.environ.get("STOKER_RUN")
    if not name:
        after = "--end" if end else "the duration"
        raise BadInputError(f"which run? Write its id after {after}: `stoker runs` and `stoker list` show them")
    record = _attempt_here(name)
    if record is None:
        try:
            record = _run_here(name)
        except BadInputError as no_run:
            _snooze_job(name, seconds, queue_url, no_run)
            return 0
    _snooze_here(record, seconds)
    return 0


def _duration(words: tuple[str, ...]) -> float:
    if not words:
        raise BadInputError("for how long? Write it like `stoker snooze 30m`")
    seconds: float = DURATION.convert(words[0], None, None)
    return seconds


def _snooze_here(record: "Record", seconds: float) -> None:
    from stoker.queue.provenance import login_name
    from stoker.runs.record import Snooze

    if seconds > 0:
        record.write_snooze(Snooze(time.monotonic() + seconds, time.time() + seconds, login_name()))
    else:
        record.write_snooze(None)
    _tell(f"run {record.id}", seconds)


def _snooze_job(name: str, seconds: float, queue_url: str | None, no_run: BadInputError) -> None:
    """Through the queue: its worker hears of it, wherever that is."""
    try:
        store = opened(queue_url)
    except StokerError as error:
        raise BadInputError(f"{no_run}; {error}") from None
    with store:
        job = _job(store, name, no_run)
        here = None if job.attempt is None else _attempt_here(f"{job.id}-{job.attempts}")
        if here is not None:
            _snooze_here(here, seconds)
            return
        from stoker.queue.provenance import login_name

        if job.state != "running" or job.attempt is None or not store.snooze(job.attempt, seconds, login_name()):
            raise BadInputError(f"job {job.id} does not run: there is nothing to snooze")
    _tell(f"job {job.id}", seconds)


def _job(store: "Store", name: str, no_run: BadInputError) -> "Job":
    try:
        return store.job(name)
    except BadInputError as no_job:
        raise BadInputError(f"{no_run}; {no_job}") from None


def _tell(what: str, seconds: float) -> None:
    if seconds > 0:
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        sys.stdout.write(f"{what} is left alone for {format_duration(seconds)}, until {until}\n")
    else:
        sys.stdout.write(f"{what} is watched again\n")


def _attempt_here(name: str) -> "Record | None":
    """The attempt at a job that runs on this machine and that this is the id of, or the beginning of one."""
    from stoker.runs.record import Records

    for record in Records(state_home(), "attempts").newest_first():
        if record.id.startswith(name) and _is_running(record):
            return record
    return None


def _run_here(name: str) -> "Record":
    from stoker.runs.record import Records

    record = Records(state_home()).find(name)
    if not _is_running(record):
        raise BadInputError(f"run {record.id} has ended: there is nothing to snooze")
    return record


def _is_running(record: "Record") -> bool:
    return record.status().state != "ended" and record.is_alive(record.spec())
