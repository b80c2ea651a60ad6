"""`stoker logs`: what a job printed, so far or as it comes."""

import signal
import sys
from typing import TYPE_CHECKING

import click

from stoker.cli.options.queue import opened, queue_option
from stoker.cli.options.selection import JobName
from stoker.errors import BadInputError

if TYPE_CHECKING:
    from stoker.cli.tables.log import LogScreen
    from stoker.logs.readers import Piece
    from stoker.queue import Attempt, Job, Store


@click.command("logs")
@click.argument("job", type=JobName())
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended, through its retries.")
@click.option("-n", "--lines", type=click.IntRange(min=0), metavar="LINES", help="Only the last so many lines.")
@click.option("--attempt", "number", type=click.IntRange(min=1), metavar="N", help="Of this attempt, not the last one.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; with -f, one for each line.")
@queue_option
def logs_command(
    job: str, follow: bool, lines: int | None, number: int | None, as_json: bool, queue_url: str | None
) -> int:
    """Show what JOB (an id, the beginning of one, or a name) printed.

    All of it, also when it ran on another machine, as long as a worker is there; else its end, which the queue keeps.
    """
    _leave_nothing_behind()
    with opened(queue_url) as store:
        found = store.job(job)
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
    attempts = store.attempts(job.id)
    if number is None:
        return attempts[-1] if attempts else None
    chosen = next((attempt for attempt in attempts if attempt.number == number), None)
    if chosen is None:
        had = "it has not started yet" if not attempts else f"its last one is {attempts[-1].number}"
        raise BadInputError(f"job {job.id} has no attempt {number}: {had}")
    return chosen


def _follow(store: "Store", job: "Job", attempt: "Attempt | None", lines: int | None, as_json: bool) -> None:
    from stoker.cli.options.queue import Listener
    from stoker.cli.tables.follow import Follower

    with Listener(store) as listener:
        follower = Follower(store, listener, _screen(job, as_json), lines)
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
    from stoker.cli.tables.follow import say_it_is_the_end

    (finished, unfinished), is_all = _read(store, attempt, lines)
    text = finished + unfinished
    if not is_all:
        say_it_is_the_end(store, attempt)
    if as_json:
        whole = is_all and lines is None
        told = {"job": attempt.job, "attempt": attempt.number, "whole": whole, "text": text.decode(errors="replace")}
        _print_json(told)
        return
    sys.stdout.buffer.write(text)
    if unfinished:
        sys.stdout.buffer.write(b"\n")
    sys.stdout.buffer.flush()


def _read(store: "Store", attempt: "Attempt", lines: int | None) -> tuple["Piece", bool]:
    """What it printed, and whether that is all that was asked for."""
    from stoker.logs.readers import directory_of, has_output, last_lines, reader_of
    from stoker.paths import state_home

    is_here = has_output(directory_of(state_home(), attempt))
    if is_here:
        store.wait_for_log(attempt.id)
    if lines is not None and not is_here and (kept := _kept_lines(store, attempt, lines)) is not None:
        return kept, True
    reader = reader_of(store, state_home(), attempt)
    try:
        piece = reader.read()
        return last_lines(piece, lines), reader.is_whole
    finally:
        reader.close()


def _kept_lines(store: "Store", attempt: "Attempt", count: int) -> "Piece | None":
    """The last so many lines of an attempt that has ended, if the queue has them: then nobody need lend it all."""
    from stoker.logs.readers import LAST_WITHIN, TailReader, last_lines

    if attempt.ended is None or store.clock() - attempt.ended < LAST_WITHIN:
        return None
    end = TailReader(lambda: store.log(attempt.id)).read()
    # One more: the first line there may lack its beginning.
    has_enough = end.finished.count(b"\n") + bool(end.unfinished) > count
    return last_lines(end, count) if has_enough else None


def _nothing_yet(store: "Store", job: "Job", as_json: bool) -> None:
    from stoker.cli.options.queue import note
    from stoker.queue.surroundings import why

    note(f"job {job.id} has printed nothing: {why(store, job).reason}")
    if as_json:
        _print_json({"job": job.id, "attempt": None, "whole": True, "text": ""})


def _print_json(told: object) -> None:
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(told), indent=2).decode() + "\n")
