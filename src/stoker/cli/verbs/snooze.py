"""`stoker snooze`: "it will be quiet now, on purpose": leaves a run or a job alone for a while."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from stoker.cli.options.common import DURATION
from stoker.cli.options.queue import opened, queue_option
from stoker.cli.options.selection import JobName
from stoker.errors import BadInputError, StokerError
from stoker.paths import state_home
from stoker.units import format_duration

if TYPE_CHECKING:
    from stoker.queue import Job, Store
    from stoker.runs.record import Record


@click.command("snooze")
@click.argument("words", nargs=-1, type=JobName("running"), metavar="DURATION [RUN|JOB]")
@click.option("--end", is_flag=True, help="End the snooze now: `stoker snooze --end [RUN|JOB]`.")
@queue_option
def snooze_command(words: tuple[str, ...], end: bool, queue_url: str | None) -> int:
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
    # Who names a queue means a job of that one, unless it is this very run.
    record = _here(name) if queue_url is None or name == os.environ.get("STOKER_RUN") else None
    if record is not None:
        _snooze_here(record, seconds)
    else:
        _snooze_named(name, seconds, queue_url)
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


def _snooze_named(name: str, seconds: float, queue_url: str | None) -> None:
    """What the queue knows by this name, or the beginning of an id; only then what begins so on this machine."""
    from stoker.queue.model import NoSuchJobError

    with contextlib.ExitStack() as stack:
        try:
            store = stack.enter_context(opened(queue_url))
            job = _job(store, name)
        except StokerError as error:
            is_clear = isinstance(error, BadInputError) and not isinstance(error, NoSuchJobError)
            if is_clear or queue_url is not None:
                raise
            _snooze_here(_begins_here(name, error), seconds)
        else:
            _snooze_job(store, job, seconds)


def _job(store: "Store", name: str) -> "Job":
    from stoker.queue.model import NoSuchJobError

    job = store.job(name)
    if job.state != "running" and name not in (job.id, job.name):
        # What merely begins like a job that has ended may be meant for something else.
        raise NoSuchJobError(_not_running(job))
    return job


def _snooze_job(store: "Store", job: "Job", seconds: float) -> None:
    """In its record if it runs here, or else through the queue: its worker hears of it, wherever that is."""
    here = None if job.attempt is None else _here(f"{job.id}-{job.attempts}")
    if here is not None:
        _snooze_here(here, seconds)
        return
    from stoker.queue.provenance import login_name

    if job.state != "running" or job.attempt is None or not store.snooze(job.attempt, seconds, login_name()):
        raise BadInputError(_not_running(job))
    _tell(f"job {job.id}", seconds)


def _not_running(job: "Job") -> str:
    return f"job {job.id} does not run: there is nothing to snooze"


def _tell(what: str, seconds: float) -> None:
    if seconds > 0:
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        sys.stdout.write(f"{what} is left alone for {format_duration(seconds)}, until {until}\n")
    else:
        sys.stdout.write(f"{what} is watched again\n")


def _here(name: str) -> "Record | None":
    """What runs on this machine and has exactly this id: an attempt at a job, the job itself, or a run."""
    return next(_running_here(lambda own: name in (own, own.rpartition("-")[0])), None)


def _begins_here(name: str, no_job: StokerError) -> "Record":
    """The only thing that runs on this machine and whose id begins so."""
    found = list(_running_here(lambda own: own.partition("-")[0].startswith(name)))
    if not found:
        raise BadInputError(f"{_why_not_here(name)}; {no_job}")
    if len(found) > 1:
        some = ", ".join(record.id for record in found[:4])
        raise BadInputError(f"{name!r} fits {len(found)} runs ({some}): write more of it")
    return found[0]


def _why_not_here(name: str) -> str:
    from stoker.runs.record import Records

    try:
        record = Records(state_home()).find(name)
    except BadInputError as error:
        return str(error)
    return f"run {record.id} has ended: there is nothing to snooze"


def _running_here(fits: Callable[[str], bool]) -> "Iterator[Record]":
    """Attempts at jobs and runs whose ids fit, the newest of each first."""
    from stoker.runs.record import Records

    for records in (Records(state_home(), "attempts"), Records(state_home())):
        yield from (record for record in records.newest_first() if fits(record.id) and _is_running(record))


def _is_running(record: "Record") -> bool:
    return record.status().state != "ended" and record.is_alive(record.spec())
