"""What the verbs that steer jobs have in common: their options, whom they leave alone and why, and what they tell."""

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

import click
import msgspec
from msgspec.structs import replace

from stoker.cli.options.queue import opened, queue_option
from stoker.cli.options.selection import JobName, Selection, TagName, state_choice
from stoker.errors import BadInputError
from stoker.queue.fields import State
from stoker.queue.model import Job, Place, Side
from stoker.queue.steering import CANCEL, HOLD, RELEASE, RETRY, Verb, label, moving, moving_beside, why_not_any_more

if TYPE_CHECKING:
    from stoker.queue import State

Function = Callable[..., Any]


class Request(msgspec.Struct, frozen=True):
    """What the options of every steering verb say."""

    selection: Selection
    dry_run: bool
    as_json: bool
    queue_url: str | None


class Changed(msgspec.Struct, frozen=True):
    id: str
    name: str
    what: str


class Unchanged(msgspec.Struct, frozen=True):
    id: str
    name: str
    why: str


class Report(msgspec.Struct, frozen=True):
    """What a verb did, as `--json` prints it."""

    verb: str
    queue: str
    dry_run: bool
    changed: list[Changed]
    unchanged: list[Unchanged]


def request_options(*among: "State", tag_option: str = "--tag") -> Callable[[Function], Function]:
    """JOB..., the choice by tag, state or all, --dry-run, --json and --queue, handed over as one `request`."""
    options = (
        click.argument("jobs", nargs=-1, type=JobName(*among), metavar="[JOB]..."),
        click.option(tag_option, "chosen_tag", type=TagName(), metavar="TAG", help="All jobs that have this tag."),
        click.option(
            "--state", "states", type=state_choice(), multiple=True, help="All jobs in this state; may be repeated."
        ),
        click.option("--all", "everything", is_flag=True, help="All jobs that it can be done to."),
        click.option("--dry-run", is_flag=True, help="Say what would happen, and change nothing."),
        click.option("--json", "as_json", is_flag=True, help="Print what was changed and what was not as JSON."),
        queue_option,
    )

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def with_request(
            *,
            jobs: tuple[str, ...],
            chosen_tag: str | None,
            states: "tuple[State, ...]",
            everything: bool,
            dry_run: bool,
            as_json: bool,
            queue_url: str | None,
            **others: Any,
        ) -> Any:
            selection = Selection(jobs, chosen_tag, states, everything, tag_option)
            return function(request=Request(selection, dry_run, as_json, queue_url), **others)

        command: Function = with_request
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def steer(verb: Verb, request: Request) -> int:
    """Does it to the jobs that are meant, and tells what became of each; 1 when nothing was changed."""
    with opened(request.queue_url) as store:
        jobs = request.selection.jobs(store, verb.among)
        now = store.clock()
        obstacles = {job.id: verb.obstacle(job, now) for job in jobs}
        able = [job for job in jobs if obstacles[job.id] is None]
        if request.dry_run:
            became = {job.id: verb.expected(job) for job in able}
        else:
            became = verb.apply(store, [job.id for job in able]) if able else {}
        unchanged = [
            Unchanged(job.id, job.name, obstacles[job.id] or why_not_any_more(store, job.id, verb))
            for job in jobs
            if job.id not in became
        ]
        changed = [Changed(job.id, job.name, became[job.id]) for job in jobs if job.id in became]
        report = Report(verb.name, store.place, request.dry_run, changed, unchanged)
    return tell(report, verb.done, request, verb.among)


def tell(report: Report, done: str, request: Request, among: "tuple[State, ...]") -> int:
    """Prints what was done on stdout, what was not on stderr, or both as JSON; the exit code."""
    if request.as_json:
        print_json(report)
    would = "would be " if report.dry_run else ""
    if not request.as_json:
        sys.stdout.write("".join(f"{label(job.id, job.name)}: {would}{job.what}\n" for job in report.changed))
        was_not = "would not be" if report.dry_run else "was not"
        sys.stderr.write(
            "".join(f"stoker: job {label(job.id, job.name)} {was_not} {done}: {job.why}\n" for job in report.unchanged)
        )
    if not report.changed and not report.unchanged:
        sys.stderr.write(f"stoker: {request.selection.nothing(among)}\n")
    return 0 if report.changed else 1


def print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


@click.command("cancel")
@request_options(*CANCEL.among)
def cancel_command(request: Request) -> int:
    """Cancel jobs. One that runs is asked to stop: `stoker wait` waits until it has.

    JOB is an id, the beginning of one, or the name of a job or a sweep.
    """
    return steer(CANCEL, request)


@click.command("hold")
@request_options(*HOLD.among)
def hold_command(request: Request) -> int:
    """Keep jobs that wait from starting, until `stoker release`.

    JOB is an id, the beginning of one, or the name of a job or a sweep.
    """
    return steer(HOLD, request)


@click.command("release")
@request_options(*RELEASE.among)
def release_command(request: Request) -> int:
    """Let jobs that are held start when it is their turn.

    JOB is an id, the beginning of one, or the name of a job or a sweep.
    """
    return steer(RELEASE, request)


@click.command("retry")
@request_options(*RETRY.among)
def retry_command(request: Request) -> int:
    """Let jobs that ended run again, with all their retries; one that waits for its next try starts at once.

    JOB is an id, the beginning of one, or the name of a job or a sweep. A sweep, --tag and --all mean those that failed
    or were cancelled; to repeat what succeeded name the job, or write --state succeeded.
    """
    return steer(RETRY, request)


PLACES: Final = ("up", "down", "first", "last")
SIDES: Final = ("before", "after")
AMONG: Final[tuple[State, ...]] = ("queued", "held")


@click.command("move")
@click.argument("place", metavar="up|down|first|last|before OTHER|after OTHER", type=click.Choice([*PLACES, *SIDES]))
@request_options(*AMONG)
def move_command(place: str, request: Request) -> int:
    """Move jobs that wait within the queue: `stoker move first JOB...`, or `stoker move before OTHER JOB...`.

    JOB and OTHER are ids, beginnings of ids, or names; JOB also that of a sweep. Several jobs keep their order among
    themselves. A job is moved among those of its own priority; beside another job that waits, it takes the priority of
    that one.
    """
    if place in SIDES:
        return _beside(cast("Side", place), request)
    return steer(moving(cast("Place", place)), request)


def _beside(side: Side, request: Request) -> int:
    """The first of the words is the other job; the rest says, as ever, which ones are meant."""
    if not request.selection.words:
        raise BadInputError(f"{side} which job? Write it first, as in `stoker move {side} OTHER JOB...`")
    other, *words = request.selection.words
    with opened(request.queue_url) as store:
        neighbour = store.job(other)
    verb = moving_beside(neighbour.id, side)
    if obstacle := verb.obstacle(neighbour, 0.0):
        raise BadInputError(f"nothing can be moved {side} job {neighbour.id}: {obstacle}")

    def why_not(job: Job, now: float) -> str | None:
        return f"it is the job that the others go {side}" if job.id == neighbour.id else verb.obstacle(job, now)

    chosen = replace(request.selection, words=tuple(words))
    return steer(replace(verb, obstacle=why_not), replace(request, selection=chosen))
