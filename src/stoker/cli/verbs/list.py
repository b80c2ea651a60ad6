"""`stoker list`: the jobs of the queue: what runs, what waits in its order, and what ended last."""

import sys
from typing import TYPE_CHECKING, Final, NamedTuple, get_args

import click

from stoker.cli.options.queue import opened, queue_option
from stoker.cli.options.selection import TagName, state_choice
from stoker.cli.tables.jobs import print_jobs, rows_of, summed_up
from stoker.queue.explanation import Surroundings, Why, explain
from stoker.queue.fields import State
from stoker.queue.model import ENDED, Job, Order
from stoker.status.job_columns import JobRow, columns_of

if TYPE_CHECKING:
    from stoker.queue import Store

# A screenful: what runs, what is next, and what has just ended.
_MOST_WAITING: Final = 20
_MOST_ENDED: Final = 5
_ALL: Final = 2**31 - 1


class _Wanted(NamedTuple):
    """What a person wants to see."""

    states: frozenset[State]
    tag: str | None
    waiting: int
    """How many that run or wait, of each state."""
    ended: int


@click.command("list")
@click.option("--state", "states", multiple=True, type=state_choice(), help="Only these (repeatable).")
@click.option("--tag", type=TagName(), metavar="TAG", help="Only jobs with this tag.")
@click.option("--all", "everything", is_flag=True, help="All that are remembered.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="At most N of a kind (running, queued, ended …)."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@queue_option
def list_command(
    states: tuple[State, ...],
    tag: str | None,
    everything: bool,
    limit: int | None,
    as_json: bool,
    queue_url: str | None,
) -> int:
    """List the jobs of the queue: what runs, what waits in the order in which it will start, and what ended last."""
    # Who asks for certain states wants to see them, and not just the last few.
    ended = _MOST_WAITING if states else _MOST_ENDED
    most = (_ALL, _ALL) if everything else (limit, limit) if limit else (_MOST_WAITING, ended)
    wanted = _Wanted(frozenset(states or get_args(State)), tag, *most)
    from stoker.queue.surroundings import look_around

    with opened(queue_url) as store:
        around = look_around(store)
        jobs = _jobs(store, wanted)
        reasons = _reasons(store, jobs, around)
        if as_json:
            _print_json(rows_of(jobs, reasons, around))
        else:
            _print(store, wanted, jobs, reasons, around)
    return 0


def _jobs(store: "Store", wanted: _Wanted) -> list[Job]:
    """One question for each state: that is how both databases answer from an index, however many have ended."""
    jobs: list[Job] = []
    orders: tuple[tuple[State, Order], ...] = (("running", "newest"), ("queued", "queue"), ("held", "newest"))
    for state, order in orders:
        if state in wanted.states:
            jobs += store.jobs(states=[state], tag=wanted.tag, order=order, limit=wanted.waiting)
    chosen = [state for state in ENDED if state in wanted.states]
    # Those of one tag are found by it, whatever their state.
    questions = [chosen] if wanted.tag is not None and chosen else [[state] for state in chosen]
    ended = [job for one in questions for job in store.jobs(states=one, tag=wanted.tag, limit=wanted.ended)]
    ended.sort(key=lambda job: job.ended or 0.0, reverse=True)
    return jobs + ended[: wanted.ended]


def _reasons(store: "Store", jobs: list[Job], around: Surroundings) -> list[Why]:
    reasons = []
    ahead = 0
    needs = store.needs_of([job.id for job in jobs if job.state == "queued" and (job.after or job.after_any)])
    for job in jobs:
        reasons.append(explain(job, around, needs, ahead))
        ahead += job.state == "queued"
    return reasons


def _print_json(rows: list[JobRow]) -> None:
    import msgspec

    from stoker.cli.tables.job import job_json

    columns = columns_of("json")
    told = [
        job_json(row.job) | {column.key: column.text(row) for column in columns} | {"why": msgspec.to_builtins(row.why)}
        for row in rows
    ]
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(told), indent=2).decode() + "\n")


def _print(store: "Store", wanted: _Wanted, jobs: list[Job], reasons: list[Why], around: Surroundings) -> None:
    counts = store.counts()
    if jobs:
        print_jobs(rows_of(jobs, reasons, around))
        sys.stdout.write("\n")
    elif not counts:
        sys.stdout.write("no jobs yet: `stoker submit -- COMMAND` makes one\n")
    else:
        sys.stdout.write("no such jobs\n")
    more = sum(count for state, count in counts.items() if state in wanted.states) - len(jobs)
    hidden = f" ({more:,} more than are shown: --all shows them)" if more > 0 and wanted.tag is None else ""
    sys.stdout.write(f"{summed_up(counts, around)}{hidden}\n")
