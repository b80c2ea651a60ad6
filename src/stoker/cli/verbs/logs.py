"""`stoker logs`: what a job printed, so far or as it comes."""

import signal
import sys
import time
from typing import TYPE_CHECKING

import click

from stoker.cli.options.queue import opened, queue_option
from stoker.cli.options.selection import JobName
from stoker.cli.output import json_option, note, print_json
from stoker.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from stoker.cli.tables.log import LogScreen
    from stoker.logs.model import LogUpdate
    from stoker.queue import Attempt, Job, Store


@click.command("logs")
@click.argument("job", type=JobName())
@click.option("-f", "--follow", is_flag=True, help="Follow the log until the job has ended, through its retries.")
@click.option("-n", "--lines", type=click.IntRange(min=0), metavar="LINES", help="Only the last LINES lines.")
@click.option(
    "--attempt", "number", type=click.IntRange(min=1), metavar="N", help="The log of this attempt [the last]."
)
@json_option("Print one JSON object; with -f, one per line.")
@queue_option
def logs_command(
    job: str, follow: bool, lines: int | None, number: int | None, as_json: bool, queue_url: str | None
) -> int:
    """Show what JOB printed. JOB is an id, the beginning of an id, or a name.

    The whole log, also from another machine while its worker is alive; otherwise its end, which the queue keeps.
    """
    _leave_nothing_behind()
    with opened(queue_url) as store:
        found = store.jobs.get(job)
        attempt = _attempt(store, found, number)
        if follow:
            _follow(store, found, attempt if number is not None else None, lines, as_json)
        elif attempt is None:
            _nothing_yet(store, found, as_json)
        else:
            _print(store, attempt, lines, as_json)
    return 0


def _leave_nothing_behind() -> None:
    """What is kept here of another machine's output goes also when the terminal is closed: as after Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def _attempt(store: "Store", job: "Job", number: int | None) -> "Attempt | None":
    """The one that is meant; None when there has been none and none was asked for."""
    attempts = store.attempts.of(job.id)
    if number is None:
        return attempts[-1] if attempts else None
    chosen = next((attempt for attempt in attempts if attempt.number == number), None)
    if chosen is None:
        had = "it has not started yet" if not attempts else f"its last one is {attempts[-1].number}"
        raise BadInputError(f"job {job.id} has no attempt {number}: {had}")
    return chosen


def _follow(store: "Store", job: "Job", attempt: "Attempt | None", lines: int | None, as_json: bool) -> None:
    from stoker.cli.options.queue import Listener
    from stoker.cli.tables.log import JobFollower

    with Listener(store) as listener:
        follower = JobFollower(store, listener, _screen(job, as_json), lines)
        if attempt is None:
            follower.follow_job(job)
        else:
            follower.follow_attempt(attempt)


def _screen(job: "Job", as_json: bool) -> "LogScreen":
    from stoker.cli.tables.log import JsonScreen, PipeScreen, TerminalScreen

    if as_json:
        return JsonScreen(job.id)
    return TerminalScreen() if sys.stdout.isatty() else PipeScreen()


def _print(store: "Store", attempt: "Attempt", lines: int | None, as_json: bool) -> None:
    from stoker.cli.tables.log import PipeScreen, TerminalScreen, end_line, note_tail
    from stoker.logs.model import LogUpdate

    collected: list[bytes] = []
    unfinished = b""
    screen = None if as_json else TerminalScreen() if sys.stdout.isatty() else PipeScreen()
    is_whole = True
    for update, is_tail in _updates(store, attempt, lines):
        if is_tail and is_whole:
            note_tail(store, attempt)
            is_whole = False
        unfinished = update.unfinished
        if screen is None:
            collected.append(update.finished)
        else:
            screen.show(LogUpdate(update.finished, b""))
    if screen is not None:
        screen.show(end_line(LogUpdate(b"", unfinished)))
        return
    text = b"".join([*collected, unfinished]).decode(errors="replace")
    whole = is_whole and lines is None
    print_json({"job": attempt.job, "attempt": attempt.number, "whole": whole, "text": text})


def _updates(store: "Store", attempt: "Attempt", lines: int | None) -> "Iterator[tuple[LogUpdate, bool]]":
    """What there is now, in steps, and whether it is only the tail."""
    from stoker.cli.tables.log import last_of
    from stoker.logs.follow import LogFollower
    from stoker.logs.reader import attempt_directory, has_log, stored_lines
    from stoker.paths import state_home
    from stoker.queue.logs import LAST_WITHIN

    if has_log(attempt_directory(state_home(), attempt)):
        store.logs.wait(attempt.id)
    elif lines is not None and attempt.ended is not None and store.clock() - attempt.ended >= LAST_WITHIN:
        # The tail may have enough lines: then nothing need be streamed.
        stored = stored_lines(store.logs.read(attempt.id), lines)
        if stored is not None:
            yield stored, False
            return
    follower = LogFollower(attempt, state_home(), continuous=True, complete=True)
    try:
        while True:
            update = follower.read(store)
            if lines is not None and any(update):
                update = last_of(follower, store, lines, update)
            yield update, follower.source == "tail" and any(update)
            if follower.is_caught_up:
                return
            time.sleep(follower.pause())
    finally:
        follower.close()


def _nothing_yet(store: "Store", job: "Job", as_json: bool) -> None:
    from stoker.queue.explanation import why

    note(f"job {job.id} has printed nothing: {why(store, job).reason}")
    if as_json:
        print_json({"job": job.id, "attempt": None, "whole": True, "text": ""})
