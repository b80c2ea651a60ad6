"""`stoker cancel`, `hold`, `release`, `retry`, `move` and `tag`: one verb applied to a selection of jobs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, cast, get_args

import click
import msgspec
from msgspec.structs import replace

from stoker.cli.options.queue import opened, queue_option
from stoker.cli.options.selection import JobName, Selection, TagName
from stoker.cli.output import (
    CHANGES_AS_JSON,
    Changed,
    ChangeReport,
    Unchanged,
    dry_run_option,
    json_option,
    note,
    print_changes,
)
from stoker.errors import BadInputError
from stoker.queue.fields import State
from stoker.queue.model import Job, Place, Side
from stoker.queue.steering import CANCEL, HOLD, RELEASE, RETRY, Verb, moving, moving_beside, tagging, why_not_any_more
from stoker.status.job_text import job_title

Function = Callable[..., Any]


class Request(msgspec.Struct, frozen=True):
    """The options that these verbs share."""

    selection: Selection
    dry_run: bool
    as_json: bool
    queue_url: str | None


def request_options(*among: State, tag_option: str = "--tag") -> Callable[[Function], Function]:
    """Adds JOB..., selection by tag, state or all, --dry-run, --json and --queue, passed as one `request`."""
    options = (
        click.argument("jobs", nargs=-1, type=JobName(*among), metavar="[JOB]..."),
        click.option(tag_option, "chosen_tag", type=TagName(), metavar="TAG", help="All jobs with this tag."),
        click.option(
            "--state",
            "states",
            type=click.Choice(get_args(State)),
            multiple=True,
            help="All jobs in this state (repeatable).",
        ),
        click.option(
            "--match", metavar="SEARCH", help="All jobs that match a search, like 'name:resnet since:2d lr=1e-3'."
        ),
        click.option("--all", "everything", is_flag=True, help="All jobs to which it applies."),
        dry_run_option(),
        json_option(CHANGES_AS_JSON),
        queue_option,
    )

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def command(**given: Any) -> Any:
            words, tag, states = given.pop("jobs"), given.pop("chosen_tag"), given.pop("states")
            selection = Selection(words, tag, states, given.pop("everything"), tag_option, given.pop("match"))
            common = {name: given.pop(name) for name in ("dry_run", "as_json", "queue_url")}
            return function(request=Request(selection, **common), **given)

        return functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)

    return decorate


def steer(verb: Verb, request: Request) -> int:
    """Applies the verb to the selected jobs and prints the result of each; returns 1 if nothing changed."""
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
        report = ChangeReport(verb.name, store.place, request.dry_run, changed, unchanged)
    return print_job_changes(report, verb.done, jobs, request, verb.among)


def print_job_changes(
    report: ChangeReport, done: str, jobs: Sequence[Job], request: Request, among: tuple[State, ...]
) -> int:
    """Prints the result of each job; returns the exit code."""
    titles = {job.id: job_title(job) for job in jobs}
    print_changes(report, done, lambda name, _called: titles[name], as_json=request.as_json, noun="job ")
    if not report.changed and not report.unchanged:
        note(request.selection.nothing(among))
    return 0 if report.changed else 1


def _command(verb: Verb, text: str) -> click.Command:
    @request_options(*verb.among)
    def command(request: Request) -> int:
        return steer(verb, request)

    return click.command(verb.name, help=text)(command)


_JOB: Final = "JOB is an id, the beginning of an id, or the name of a job or group."

cancel_command = _command(
    CANCEL, f"Cancel jobs. Running jobs get a stop request; `stoker wait` waits for their end.\n\n{_JOB}"
)
hold_command = _command(HOLD, f"Prevent waiting jobs from starting until `stoker release`.\n\n{_JOB}")
release_command = _command(RELEASE, f"Let held jobs start again.\n\n{_JOB}")
retry_command = _command(
    RETRY,
    "Run ended jobs again, with all their retries; a job that waits for its next retry may start at once.\n\n"
    f"{_JOB} A group, --tag and --all select jobs that failed or were cancelled; to repeat a job that succeeded, "
    "name it, or write --state succeeded.",
)

PLACES: Final = ("up", "down", "first", "last")
SIDES: Final = ("before", "after")
AMONG: Final[tuple[State, ...]] = ("queued", "held")


@click.command("move")
@click.argument("place", metavar="up|down|first|last|before OTHER|after OTHER", type=click.Choice([*PLACES, *SIDES]))
@request_options(*AMONG)
def move_command(place: str, request: Request) -> int:
    """Move waiting jobs within the queue: `stoker move first JOB...`, or `stoker move before OTHER JOB...`.

    JOB and OTHER are ids, beginnings of ids, or names; JOB may be a group. Several jobs keep their order. A job moves
    among those of its own priority; before or after another job, it takes the priority of that one.
    """
    if place in SIDES:
        return _beside(cast("Side", place), request)
    return steer(moving(cast("Place", place)), request)


def _beside(side: Side, request: Request) -> int:
    """The first name is the other job; the rest are the jobs to move."""
    if not request.selection.words:
        raise BadInputError(f"{side} which job? Write it first, as in `stoker move {side} OTHER JOB...`")
    other, *words = request.selection.words
    with opened(request.queue_url) as store:
        neighbour = store.jobs.get(other)
    verb = moving_beside(neighbour.id, side)
    if obstacle := verb.obstacle(neighbour, 0.0):
        raise BadInputError(f"nothing can be moved {side} job {job_title(neighbour)}: {obstacle}")
    excluded = {neighbour.id: f"the others go {side} it"}
    chosen = replace(request.selection, words=tuple(words))
    return steer(replace(verb, excluded=excluded), replace(request, selection=chosen))


@click.command("tag")
@click.argument("tag", type=TagName())
@request_options()
@click.option("--remove", is_flag=True, help="Remove the tag instead.")
def tag_command(tag: str, remove: bool, request: Request) -> int:
    """Add a tag to jobs in any state, or remove it: `stoker tag night JOB...`.

    JOB is an id, the beginning of an id, or the name of a job or group.
    """
    return steer(tagging(tag, remove=remove), request)
