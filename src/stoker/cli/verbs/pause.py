"""`stoker pause` and `resume` for the queue or a worker, `stoker snooze` for a run."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.options.common import DURATION
from stoker.cli.options.queue import opened, queue_option
from stoker.cli.options.selection import JobName
from stoker.cli.output import (
    CHANGES_AS_JSON,
    Changed,
    ChangeReport,
    Unchanged,
    dry_run_option,
    json_option,
    print_changes,
)
from stoker.errors import BadInputError, StokerError
from stoker.paths import state_home
from stoker.queue.steering import already
from stoker.status.job_text import job_title
from stoker.units import format_duration

if TYPE_CHECKING:
    from stoker.queue import Job, Store, Worker
    from stoker.runs.record import Record


def _pause_options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = dry_run_option()(json_option(CHANGES_AS_JSON)(queue_option(command)))
    return click.option("--worker", metavar="HOST|ID", help="Only the workers of this host, or the one with this id.")(
        command
    )


@click.command("pause")
@_pause_options
def pause_command(worker: str | None, dry_run: bool, as_json: bool, queue_url: str | None) -> int:
    """Start no more jobs until `stoker resume`. Running jobs continue. Without --worker, no job of the queue starts
    anywhere. Restarting a worker ends its pause.
    """
    return _turn(True, worker, dry_run, as_json, queue_url)


@click.command("resume")
@_pause_options
def resume_command(worker: str | None, dry_run: bool, as_json: bool, queue_url: str | None) -> int:
    """Start jobs again after `stoker pause`: in the queue, or with --worker on one worker.

    A paused worker stays paused when the queue is resumed.
    """
    return _turn(False, worker, dry_run, as_json, queue_url)


def _turn(paused: bool, name: str | None, dry_run: bool, as_json: bool, queue_url: str | None) -> int:
    """Pauses or resumes. Returns 0 even if nothing changes."""
    verb, done = ("pause", "paused") if paused else ("resume", "resumed")
    changed: list[Changed] = []
    unchanged: list[Unchanged] = []
    with opened(queue_url) as store:
        place = store.place
        if name is not None:
            changed, unchanged = pause_workers(store, workers_named(store, name), paused, dry_run)
        elif store.paused() == paused:
            unchanged.append(Unchanged("queue", place, already(paused)))
        else:
            if not dry_run:
                store.pause(paused)
            changed.append(Changed("queue", place, done))
    print_changes(ChangeReport(verb, place, dry_run, changed, unchanged), done, _label, as_json=as_json)
    return 0


def pause_workers(
    store: "Store", workers: "list[Worker]", paused: bool, dry_run: bool = False
) -> tuple[list[Changed], list[Unchanged]]:
    """Pauses or resumes these workers; returns changed and unchanged ones."""
    changed: list[Changed] = []
    unchanged: list[Unchanged] = []
    for worker in workers:
        if worker.paused == paused:
            unchanged.append(Unchanged(worker.id, worker.host, already(paused)))
        elif dry_run or store.workers.pause(worker.id, paused):
            changed.append(Changed(worker.id, worker.host, "paused" if paused else "resumed"))
        else:
            unchanged.append(Unchanged(worker.id, worker.host, "it has just been deleted"))
    return changed, unchanged


def _label(name: str, place: str) -> str:
    return f"the queue {place}" if name == "queue" else f"worker {name} on {place}"


def workers_named(store: "Store", text: str) -> list["Worker"]:
    """The live workers of a host, or the worker whose id begins with the text."""
    workers, now = store.workers.all(), store.clock()
    if on_host := [worker for worker in workers if worker.host == text]:
        if live := [worker for worker in on_host if worker.is_there(now)]:
            return live
        silent = format_duration(round(now - max(worker.seen for worker in on_host)))
        raise StokerError(f"the worker on {text} was last seen {silent} ago: a worker that restarts is not paused")
    found = [worker for worker in workers if worker.id == text] or [
        worker for worker in workers if text and worker.id.startswith(text)
    ]
    if len(found) > 1:
        some = ", ".join(worker.id for worker in found[:4])
        raise BadInputError(f"{text!r} fits several workers ({some}): write more of it")
    if not found:
        hosts = ", ".join(sorted({worker.host for worker in workers}))
        known = f"there are some on {hosts}" if hosts else "none was ever started"
        raise BadInputError(f"there is no worker {text!r} in {store.place}: {known}")
    return found


@click.command("snooze")
@click.argument("words", nargs=-1, type=JobName("running"), metavar="DURATION [RUN|JOB]")
@click.option("--end", is_flag=True, help="End the snooze now: `stoker snooze --end [RUN|JOB]`.")
@queue_option
def snooze_command(words: tuple[str, ...], end: bool, queue_url: str | None) -> int:
    """Pause the rules of RUN for DURATION; its windows start over afterwards.

    RUN is the id of a run on this machine, or a running job of the queue: its id, the beginning of its id, or its name.
    It is optional inside a run or job, because Stoker sets STOKER_RUN.
    """
    if not words and not end:
        raise BadInputError("for how long? Write it like `stoker snooze 30m`")
    seconds, named = (0.0, words) if end else (DURATION.convert(words[0], None, None), words[1:])
    if len(named) > 1:
        raise BadInputError(f"one run at a time: {' '.join(named)!r} names {len(named)}")
    name = named[0] if named else os.environ.get("STOKER_RUN")
    if not name:
        after = "--end" if end else "the duration"
        raise BadInputError(f"which run? Write its id after {after}: `stoker runs` and `stoker list` show them")
    # --queue selects a job of that queue, unless it is this run itself.
    record = _here(name) if queue_url is None or name == os.environ.get("STOKER_RUN") else None
    what = _snooze_here(record, seconds) if record is not None else _snooze_named(name, seconds, queue_url)
    if seconds > 0:
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + seconds))
        sys.stdout.write(f"{what} is snoozed for {format_duration(seconds)}, until {until}\n")
    else:
        sys.stdout.write(f"{what} is watched again\n")
    return 0


def _snooze_here(record: "Record", seconds: float) -> str:
    """Snoozes a run of this machine; its name."""
    from stoker.queue.provenance import login_name
    from stoker.runs.record import Snooze

    until = Snooze(time.monotonic() + seconds, time.time() + seconds, login_name()) if seconds > 0 else None
    record.write_snooze(until)
    return f"run {record.id}"


def _snooze_named(name: str, seconds: float, queue_url: str | None) -> str:
    """Snoozes a job of the queue; if there is none, the run on this machine whose id begins with the name."""
    from stoker.queue.model import NoSuchJobError

    with contextlib.ExitStack() as stack:
        try:
            store = stack.enter_context(opened(queue_url))
            job = store.jobs.get(name)
        except StokerError as error:
            is_clear = isinstance(error, BadInputError) and not isinstance(error, NoSuchJobError)
            if is_clear or queue_url is not None:
                raise
            return _snooze_here(_begins_here(name, error), seconds)
        return _snooze_job(store, job, seconds)


def _snooze_job(store: "Store", job: "Job", seconds: float) -> str:
    """Through its record if it runs here, otherwise through the queue, which its worker reads."""
    from stoker.queue.provenance import login_name

    if job.attempt is not None and (here := _here(f"{job.id}-{job.attempts}")) is not None:
        return _snooze_here(here, seconds)
    if job.state != "running" or job.attempt is None or not store.attempts.snooze(job.attempt, seconds, login_name()):
        raise BadInputError(f"job {job_title(job)} is not running: there is nothing to snooze")
    return f"job {job_title(job)}"


def _here(name: str) -> "Record | None":
    """The attempt, job or run on this machine with exactly this id."""
    return next(_running_here(lambda own: name in (own, own.rpartition("-")[0])), None)


def _begins_here(name: str, no_job: StokerError) -> "Record":
    """The only run on this machine whose id begins with the name."""
    found = list(_running_here(lambda own: own.partition("-")[0].startswith(name)))
    if not found:
        raise BadInputError(f"there is no run {name!r} here that has not ended; {no_job}")
    if len(found) > 1:
        some = ", ".join(record.id for record in found[:4])
        raise BadInputError(f"{name!r} fits {len(found)} runs ({some}): write more of it")
    return found[0]


def _running_here(fits: Callable[[str], bool]) -> "Iterator[Record]":
    """Attempts and runs with matching ids, the newest of each first."""
    from stoker.runs.record import Records

    for records in (Records(state_home(), "attempts"), Records(state_home())):
        for record in records.newest_first():
            if fits(record.id) and record.status().state != "ended" and record.is_alive(record.spec()):
                yield record
