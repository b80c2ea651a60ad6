"""`stoker list`, `show`, `why`, `diff` and `runs`: jobs and runs, many or one."""

import gc
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple, get_args

import click
from msgspec import to_builtins

from stoker.cli.options.queue import opened, queue_option
from stoker.cli.options.selection import JobName, TagName, words_of_query
from stoker.cli.output import count_of, json_option, note, print_json, print_json_list
from stoker.cli.tables.jobs import job_json, print_jobs, print_runs, rows_of, run_text, show_json, show_text, summed_up
from stoker.errors import BadInputError, StokerError
from stoker.masking import masked, masked_notify
from stoker.paths import state_home
from stoker.queue.explanation import QueueContext, Why, read_context
from stoker.queue.fields import State
from stoker.queue.listing import GROUP_PREFIX
from stoker.queue.model import ENDED, Job, Order
from stoker.queue.search import MOST_SORTED, SORTS, Query, Sort, parse_query, parse_sort
from stoker.status.forecast import reasons_of, why
from stoker.status.job_columns import JobRow, columns_of
from stoker.status.job_text import job_title

if TYPE_CHECKING:
    from stoker.queue import Store
    from stoker.queue.groups import Group
    from stoker.runs.record import Record, Records

_NO_RUNS: Final = "no runs yet: `stoker run -- COMMAND` makes one\n"
# A screenful: running jobs, the next ones, and the last to end.
_MOST_WAITING: Final = 20
_MOST_ENDED: Final = 5
_MOST_FOUND: Final = 50
_ALL: Final = 2**31 - 1
# By how a line of a diff begins.
_OF_LINE: Final = {b"+": "\x1b[32m", b"-": "\x1b[31m", b"@": "\x1b[36m"}
_PLAIN: Final = "\x1b[0m"


class _Wanted(NamedTuple):
    """The options of `list` without a search."""

    states: frozenset[State]
    tag: str | None
    waiting: int
    """How many running or waiting jobs of each state."""
    ended: int
    group: str = ""
    """Only jobs of this group."""
    folded: bool = False
    """Whether a group is one row."""


@click.command("list")
@click.argument("query", nargs=-1, metavar="[SEARCH]...")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(get_args(State)), help="Only jobs in this state (repeatable)."
)
@click.option("--tag", type=TagName(), metavar="TAG", help="Only jobs with this tag.")
@click.option("--group", metavar="NAME", default="", help="Only jobs of this group, each by itself.")
@click.option("--unfold", is_flag=True, help="Each job by itself, not one row for a group.")
@click.option("--sort", metavar="COLUMN", help=f"Sort by {', '.join(SORTS)}; with - in front, the other way round.")
@click.option("--all", "everything", is_flag=True, help="All jobs.")
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="At most N of each kind (running, queued, ended …); with a search or --sort, N in all.",
)
@json_option("Print a JSON list.")
@queue_option
def list_command(
    query: tuple[str, ...],
    states: tuple[State, ...],
    tag: str | None,
    group: str,
    unfold: bool,
    sort: str | None,
    everything: bool,
    limit: int | None,
    as_json: bool,
    queue_url: str | None,
) -> int:
    """List the jobs of the queue: running, waiting in the order of their start, and the last to end.

    Jobs of a group are one row, unless --state, --tag, --group or --unfold is given.

    SEARCH lists the jobs that match, newest first: `stoker list resnet state:failed since:2d lr=1e-3`. Words are
    searched in name, command, tags and id; name:, command:, id:, tag:, group:, user:, machine:, state:, since: and
    before: search one field, and KEY=VALUE a parameter.
    """
    # A hundred thousand rows hold no cycles, and looking for them takes half of the time.
    gc.disable()
    if query or sort is not None:
        found = parse_query(words_of_query(query)).narrowed(states, tag, group)
        return _list_matches(found, parse_sort(sort or ""), _ALL if everything else limit, as_json, queue_url)
    # Jobs of a given state are the question, so more than the last few are shown.
    ended = _MOST_WAITING if states else _MOST_ENDED
    most = (_ALL, _ALL) if everything else (limit, limit) if limit else (_MOST_WAITING, ended)
    folded = not (unfold or states or tag or group or as_json)
    wanted = _Wanted(frozenset(states or get_args(State)), tag, *most, group, folded)
    with opened(queue_url) as store:
        context = read_context(store)
        jobs = _jobs(store, wanted)
        if as_json:
            _print_json(rows_of(store, jobs, reasons_of(store, jobs, context), context))
        else:
            _print(store, wanted, jobs, context)
    return 0


def _list_matches(query: Query, sort: Sort, limit: int | None, as_json: bool, queue_url: str | None) -> int:
    """The jobs that match a search; all of them when they are sorted by submission."""
    with opened(queue_url) as store:
        context = read_context(store)
        most = min(limit or _MOST_FOUND, _ALL)
        found = store.jobs.search(query, sort, limit=most)
        jobs, more = found.jobs, found.next is not None
        rows = rows_of(
            store, jobs, reasons_of(store, jobs, context) if as_json else _words(store, jobs, context), context
        )
    if as_json:
        _print_json(rows)
        return 0
    if jobs:
        print_jobs(rows)
        sys.stdout.write(f"\n{count_of(len(jobs), 'job')}{'; more match: --all shows them' if more else ''}\n")
    else:
        sys.stdout.write("no jobs match\n")
    if found.cut:
        note(f"more than {MOST_SORTED:,} jobs match: the newest {MOST_SORTED:,} of them were sorted")
    return 0


def _jobs(store: "Store", wanted: _Wanted) -> list[Job]:
    """One query per state: both databases answer it from an index, however many jobs have ended."""
    if wanted.group:
        return [job for job in store.jobs.members(f"{GROUP_PREFIX}{wanted.group}") if job.state in wanted.states]
    jobs: list[Job] = []
    orders: tuple[tuple[State, Order], ...] = (("running", "newest"), ("queued", "queue"), ("held", "newest"))
    for state, order in orders:
        if state in wanted.states:
            jobs += store.jobs.find(states=[state], tag=wanted.tag, order=order, limit=wanted.waiting)
    chosen = [state for state in ENDED if state in wanted.states]
    # A tag has its own index, whatever the state.
    queries = [chosen] if wanted.tag is not None and chosen else [[state] for state in chosen]
    ended = [job for one in queries for job in store.jobs.find(states=one, tag=wanted.tag, limit=wanted.ended)]
    ended.sort(key=lambda job: job.ended or 0.0, reverse=True)
    return jobs + ended[: wanted.ended]


def _words(store: "Store", jobs: list[Job], context: QueueContext) -> list[Why | None]:
    """Why each is in its state, for a table, which has a word of that: ended jobs have none."""
    words = iter(reasons_of(store, [job for job in jobs if job.state not in ENDED], context))
    return [None if job.state in ENDED else next(words) for job in jobs]


def _print_json(rows: list[JobRow]) -> None:
    columns = columns_of("json")
    print_json_list(
        job_json(row.job)
        | {column.key: column.text(row) for column in columns}
        | {"figures": row.figures, "why": to_builtins(row.why)}
        for row in rows
    )


def _print(store: "Store", wanted: _Wanted, jobs: list[Job], context: QueueContext) -> None:
    counts = store.jobs.counts()
    groups = store.groups.several({job.group for job in jobs if job.group}) if wanted.folded else {}
    if jobs:
        print_jobs(rows_of(store, jobs, _words(store, jobs, context), context), groups)
        sys.stdout.write("\n")
    elif not counts:
        sys.stdout.write("no jobs yet: `stoker submit -- COMMAND` makes one\n")
    else:
        sys.stdout.write("no jobs match\n")
    shown = sum(job.group not in groups for job in jobs) + sum(group.total for group in groups.values())
    more = sum(count for state, count in counts.items() if state in wanted.states) - shown
    hidden = f" ({more:,} more: --all shows them)" if more > 0 and not (wanted.tag or wanted.group) else ""
    sys.stdout.write(f"{summed_up(counts, context)}{hidden}\n")


@click.command("show")
@click.argument("what", required=False, type=JobName(), metavar="[JOB|RUN]")
@json_option()
@queue_option
def show_command(what: str | None, as_json: bool, queue_url: str | None) -> int:
    """Show a job or a run, with its report if it was stopped. Without a name: the newest run.

    JOB is an id, the beginning of an id, or a name; of a group, all its jobs are listed.
    """
    from stoker.runs.record import Records

    records = Records(state_home())
    if what is None:
        _show_run(next(records.newest_first(), None), as_json)
    elif queue_url is None and (run := _run_of_this_id(records, what)) is not None:
        _show_run(run, as_json)
    else:
        _show_job_or_run(records, what, as_json, queue_url)
    return 0


def _run_of_this_id(records: "Records", what: str) -> "Record | None":
    """The run with exactly this id: then the queue, which may be down, is not needed."""
    if not re.fullmatch(r"[0-9a-f]{8}", what):
        return None
    try:
        return records.find(what)
    except BadInputError:
        return None


def _show_job_or_run(records: "Records", what: str, as_json: bool, queue_url: str | None) -> None:
    from stoker.status.detail import read_detail

    try:
        with opened(queue_url) as store:
            if len(jobs := store.jobs.named(what)) > 1:
                _show_group(store, jobs, as_json)
                return
            detail = read_detail(store, store.jobs.get(what).id, state_home())
            hosts = {worker.id: worker.host for worker in store.workers.all()}
    except StokerError as no_job:
        try:
            run = records.find(what)
        except BadInputError as no_run:
            raise BadInputError(f"{no_job}; {no_run}") from None
        _show_run(run, as_json)
        return
    if as_json:
        print_json(show_json(detail, hosts, state_home()))
    else:
        sys.stdout.write(show_text(detail, state_home()))


def _show_group(store: "Store", jobs: list[Job], as_json: bool) -> None:
    """How far the group is, and its jobs in the order of their submission."""
    group, context = store.groups.get(jobs[0].group), read_context(store)
    rows = rows_of(store, jobs, _words(store, jobs, context), context)
    if as_json:
        print_json({"group": masked(to_builtins(group)), "jobs": [job_json(job) for job in jobs]})
        return
    sys.stdout.write(f"{_in_words(group)}\n\n")
    print_jobs(rows)


def _in_words(group: "Group") -> str:
    cap = "" if group.at_most is None else f"; at most {group.at_most} at once"
    notify = f"; notify: {', '.join(masked_notify(group.notify))}" if group.notify else ""
    return f"{group.name}: {group.progress}{cap}{notify}"


def _show_run(record: "Record | None", as_json: bool) -> None:
    if record is None:
        sys.stdout.write(_NO_RUNS)
    elif as_json:
        from stoker.runs.record import summary_of

        print_json(summary_of(record))
    else:
        sys.stdout.write(run_text(record))


@click.command("why")
@click.argument("job", type=JobName())
@click.option("-v", "--verbose", is_flag=True, help="Say it of each machine and each GPU.")
@json_option()
@queue_option
def why_command(job: str, verbose: bool, as_json: bool, queue_url: str | None) -> int:
    """Say in one sentence why JOB waits, or how it ended; of a group, how far it is.

    JOB is an id, the beginning of an id, or a name.
    """
    with opened(queue_url) as store:
        found, *others = store.jobs.named(job)
        if others:
            return _why_of_group(store, [found, *others], as_json)
        reason = why(store, found)
    if as_json:
        print_json({"job": found.id, "state": found.state, "why": reason})
    else:
        details = reason.details if verbose else ()
        sys.stdout.write("".join(f"{line}\n" for line in (f"{job_title(found)}: {reason.reason}", *details)))
    return 0


def _why_of_group(store: "Store", jobs: list[Job], as_json: bool) -> int:
    """How far it is, and why the first of its jobs that wait do not run."""
    group = store.groups.get(jobs[0].group)
    waiting = [job for job in jobs if job.state in {"queued", "held"}][:1]
    reasons = [(job, why(store, job)) for job in waiting]
    if as_json:
        first = [{"job": job.id, "state": job.state, "why": reason} for job, reason in reasons]
        print_json({"group": group, "first_waiting": first[0] if first else None})
        return 0
    sys.stdout.write(f"{_in_words(group)}\n")
    for job, reason in reasons:
        sys.stdout.write(f"{job_title(job)}, which is next: {reason.reason}\n")
    return 0


@click.command("diff")
@click.argument("job", type=JobName())
@click.argument("other", type=JobName(), required=False)
@json_option()
@queue_option
def diff_command(job: str, other: str | None, as_json: bool, queue_url: str | None) -> int:
    """Show how the code of JOB, submitted with --snapshot, differed from its commit; or how that of OTHER differs.

    JOB and OTHER are ids, the beginnings of ids, or names. It works on every machine that reaches the queue.
    """
    from stoker.queue.code.comparison import CodeChanges, compare, read_changes

    with opened(queue_url) as store:
        first = store.jobs.get(job)
        second = None if other is None else store.jobs.get(other)
        if second is None:
            changes = read_changes(store.blobs, first)
        else:
            changes = CodeChanges(b"".join(compare(store.blobs, first, second)), ())
    if as_json:
        compared = {"job": first.id, "commit": first.commit, "other": None if second is None else second.id}
        names = [path.decode(errors="replace") for path in changes.untracked]
        print_json({**compared, "diff": changes.difference.decode(errors="replace"), "untracked": names})
    elif changes.text:
        _print_lines(changes.text.splitlines(keepends=True))
    else:
        base = f"commit {first.commit}" if first.commit else "an empty directory"
        note(f"the code of job {first.id} is the same as {base if second is None else f'that of job {second.id}'}")
    return 0


def _print_lines(lines: Iterable[bytes]) -> None:
    """The bytes as they are; on a terminal in colour, and without what would control it."""
    if not sys.stdout.isatty():
        sys.stdout.flush()
        sys.stdout.buffer.writelines(lines)
        return
    for line in lines:
        text = "".join(
            letter if letter.isprintable() or letter == "\t" else "\N{REPLACEMENT CHARACTER}"
            for letter in line.decode(errors="replace").rstrip("\r\n")
        )
        colour = _OF_LINE.get(line[:1], "")
        sys.stdout.write(f"{colour}{text}{_PLAIN if colour else ''}\n")


@click.command("runs")
@json_option("Print a JSON list.")
@click.option("--all", "everything", is_flag=True, help="All runs, not only the newest 20.")
def runs_command(as_json: bool, everything: bool) -> int:
    """List runs and how they ended."""
    from stoker.runs.record import Records, summary_of

    records = list(Records(state_home()).newest_first())
    shown = records if everything else records[:20]
    summaries = [summary_of(record) for record in shown]
    if as_json:
        print_json(summaries)
        return 0
    if not summaries:
        sys.stdout.write(_NO_RUNS)
        return 0
    print_runs(summaries)
    if len(records) > len(shown):
        sys.stdout.write(f"and {len(records) - len(shown)} more: --all shows them\n")
    return 0
