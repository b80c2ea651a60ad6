"""`stoker queue`: create the queue, or check it."""

import sys
from typing import TYPE_CHECKING, Final

import click
import msgspec

from stoker.cli.options.common import Typed
from stoker.cli.options.queue import opened, queue_option, queue_url_of
from stoker.cli.options.selection import STATES
from stoker.cli.output import count_of, dry_run_option, json_option, print_json
from stoker.units import format_duration, parse_duration

if TYPE_CHECKING:
    from stoker.queue import State, Store


class QueueReady(msgspec.Struct, frozen=True):
    """A queue that can be used, as `--json` prints it."""

    queue: str
    kind: str
    version: int


class QueueWorker(msgspec.Struct, frozen=True):
    id: str
    host: str
    gpus: int
    paused: bool
    there: bool
    """Whether its heartbeat is recent."""
    silent: float
    """Seconds since its last heartbeat."""
    problem: str | None


class QueueHealth(msgspec.Struct, frozen=True):
    """What `stoker queue check` found, as `--json` prints it."""

    queue: str
    kind: str
    version: int
    paused: bool
    counts: dict[str, int]
    workers: list[QueueWorker]
    problems: list[str]


@click.group("queue")
def queue_command() -> None:
    """Create or check the queue."""


@queue_command.command("init", short_help="Create the queue.")
@json_option()
@queue_option
def init(as_json: bool, queue_url: str | None) -> int:
    """Create the queue: a file of your own, or the tables in the PostgreSQL database that STOKER_QUEUE names.

    A queue that is there already is left as it is.
    """
    from stoker.queue import init_queue

    with init_queue(queue_url_of(queue_url)) as store:
        ready = _ready(store)
    if as_json:
        print_json(ready)
    else:
        sys.stdout.write(f"the queue {ready.queue} is ready ({ready.kind}, version {ready.version})\n")
    return 0


@queue_command.command("check", short_help="Show the state of the queue, and any damage.")
@json_option()
@queue_option
def check(as_json: bool, queue_url: str | None) -> int:
    """Show the queue's jobs and workers, and look for damage; the exit code is 1 when something is wrong."""
    with opened(queue_url) as store:
        health = _health(store)
    if as_json:
        print_json(health)
    else:
        sys.stdout.write(_text(health))
    return 1 if health.problems else 0


def _ready(store: "Store") -> QueueReady:
    from stoker.queue.driver import VERSION, queue_address

    return QueueReady(store.place, queue_address(store.place).database.name, VERSION)


def _health(store: "Store") -> QueueHealth:
    ready = _ready(store)
    counts = {str(state): count for state, count in store.jobs.counts().items()}
    return QueueHealth(
        queue=ready.queue,
        kind=ready.kind,
        version=ready.version,
        paused=store.paused(),
        counts={state: counts[state] for state in STATES if state in counts},
        workers=_workers(store),
        problems=store.check(),
    )


def _workers(store: "Store") -> list[QueueWorker]:
    now = store.clock()
    return [
        QueueWorker(
            id=worker.id,
            host=worker.host,
            gpus=len(worker.view.gpus),
            paused=worker.paused,
            there=worker.is_there(now),
            silent=max(now - worker.seen, 0.0),
            problem=worker.view.problem,
        )
        for worker in store.workers.all()
    ]


def _text(health: QueueHealth) -> str:
    jobs = ", ".join(f"{count} {state}" for state, count in health.counts.items()) or "none"
    lines = [
        ("queue", f"{health.queue} ({health.kind}, version {health.version})" + (", paused" if health.paused else "")),
        ("jobs", jobs),
        *(("worker", _worker_line(worker)) for worker in health.workers),
        *([] if health.workers else [("workers", "none: `stoker work` starts one")]),
        *(("problem", problem) for problem in health.problems),
        *([] if health.problems else [("problems", "none")]),
    ]
    return "".join(f"{name:13}{value}\n" for name, value in lines)


def _worker_line(worker: QueueWorker) -> str:
    seen = "alive" if worker.there else f"last seen {format_duration(round(worker.silent))} ago"
    notes = [
        count_of(worker.gpus, "GPU"),
        seen,
        *(["paused"] if worker.paused else []),
        *([worker.problem] if worker.problem else []),
    ]
    return f"{worker.id} on {worker.host}: {', '.join(notes)}"


ENDED: Final[tuple["State", ...]] = ("succeeded", "failed", "cancelled")

PAST: Final = {"succeeded": "succeeded", "failed": "failed", "cancelled": "were cancelled"}


class Cleaning(msgspec.Struct, frozen=True):
    """What was deleted, as `--json` prints it."""

    verb: str
    queue: str
    dry_run: bool
    older_than: float
    states: tuple["State", ...]
    forgotten: int
    kept: int
    """Ended jobs in these states that are too recent, or that an unfinished job depends on."""


@click.command("clean")
@click.option(
    "--older-than",
    type=Typed("duration", parse_duration),
    default="30d",
    metavar="DURATION",
    help="Jobs that ended longer ago than this [30d].",
)
@click.option(
    "--state", "states", type=click.Choice(ENDED), multiple=True, help="Only jobs in this state (repeatable)."
)
@dry_run_option("Say how many there are, and delete none.")
@json_option("Print how many as JSON.")
@queue_option
def clean_command(
    older_than: float, states: tuple["State", ...], dry_run: bool, as_json: bool, queue_url: str | None
) -> int:
    """Delete jobs that ended long ago, with their attempts and stored output.

    Unfinished jobs and the jobs they depend on are never deleted.
    """
    meant = states or ENDED
    with opened(queue_url) as store:
        counts = store.jobs.counts()
        forgotten = store.jobs.forgettable(older_than, meant) if dry_run else store.jobs.clean(older_than, meant)
        left = max(sum(counts.get(state, 0) for state in meant) - forgotten, 0)
        done = Cleaning("clean", store.place, dry_run, older_than, meant, forgotten, left)
    if as_json:
        print_json(done)
    else:
        sys.stdout.write(_clean_text(done))
    return 0


def _clean_text(done: Cleaning) -> str:
    if not done.forgotten:
        kept = f"; {done.kept} that ended are more recent, or other jobs depend on them" if done.kept else ""
        return f"nothing to delete{kept}\n"
    would = "would be deleted" if done.dry_run else "deleted"
    how = "ended" if done.states == ENDED else " or ".join(PAST[state] for state in done.states)
    jobs = count_of(done.forgotten, "job")
    return f"{jobs} that {how} more than {format_duration(done.older_than)} ago {would}; {done.kept} kept\n"
