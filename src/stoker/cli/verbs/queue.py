"""`stoker queue` and `stoker clean`: create the queue, check it, delete old jobs."""

import sys
from typing import TYPE_CHECKING, Any, get_args

import click

from stoker.cli.options.common import Typed
from stoker.cli.options.queue import opened, queue_option, queue_url_of
from stoker.cli.output import count_of, dry_run_option, json_option, print_json
from stoker.queue.fields import State
from stoker.queue.model import ENDED
from stoker.units import format_duration, format_memory, parse_duration

if TYPE_CHECKING:
    from stoker.queue import Store, Worker


@click.group("queue")
def queue_command() -> None:
    """Create or check the queue."""


@queue_command.command("init", short_help="Create the queue.")
@json_option()
@queue_option
def init(as_json: bool, queue_url: str | None) -> int:
    """Create the queue: a file of your own, or the tables in the PostgreSQL database in STOKER_QUEUE. An existing queue
    is not changed.
    """
    from stoker.queue import init_queue

    with init_queue(queue_url_of(queue_url)) as store:
        ready = _identity(store)
    if as_json:
        print_json(ready)
    else:
        sys.stdout.write(f"the queue {ready['queue']} is ready ({ready['kind']}, version {ready['version']})\n")
    return 0


@queue_command.command("check", short_help="Show the state of the queue, and any damage.")
@json_option()
@queue_option
def check(as_json: bool, queue_url: str | None) -> int:
    """Show the queue's jobs and workers, and check for damage; the exit code is 1 if there is a problem."""
    with opened(queue_url) as store:
        counts, now = store.jobs.counts(), store.clock()
        health = {
            **_identity(store),
            "paused": store.paused(),
            "counts": {state: counts[state] for state in get_args(State) if state in counts},
            "workers": [_worker(worker, now) for worker in store.workers.all()],
            "problems": store.check(),
        }
    if as_json:
        print_json(health)
    else:
        sys.stdout.write(_text(health))
    return 1 if health["problems"] else 0


def _identity(store: "Store") -> dict[str, Any]:
    from stoker.queue.driver import VERSION, queue_address

    return {"queue": store.place, "kind": queue_address(store.place).database.name, "version": VERSION}


def _worker(worker: "Worker", now: float) -> dict[str, Any]:
    return {
        "id": worker.id,
        "host": worker.host,
        "gpus": len(worker.view.gpus) + sum(node.gpus for node in worker.view.nodes),
        "cluster": worker.view.cluster,
        "paused": worker.paused,
        "there": worker.is_there(now),
        "silent": max(now - worker.seen, 0.0),
        "problem": worker.view.problem,
    }


def _text(health: dict[str, Any]) -> str:
    paused = ", paused" if health["paused"] else ""
    jobs = ", ".join(f"{count} {state}" for state, count in health["counts"].items()) or "none"
    lines = [("queue", f"{health['queue']} ({health['kind']}, version {health['version']}){paused}"), ("jobs", jobs)]
    lines += [("worker", _worker_line(worker)) for worker in health["workers"]] or [
        ("workers", "none: `stoker work` starts one")
    ]
    lines += [("problem", problem) for problem in health["problems"]] or [("problems", "none")]
    return "".join(f"{name:13}{value}\n" for name, value in lines)


def _worker_line(worker: dict[str, Any]) -> str:
    seen = "alive" if worker["there"] else f"last seen {format_duration(round(worker['silent']))} ago"
    cluster = f"cluster {worker['cluster']}" if worker["cluster"] else ""
    notes = [cluster, count_of(worker["gpus"], "GPU"), seen, "paused" if worker["paused"] else "", worker["problem"]]
    return f"{worker['id']} on {worker['host']}: {', '.join(filter(None, notes))}"


@click.command("clean")
@click.option(
    "--older-than",
    type=Typed("duration", parse_duration),
    default="30d",
    metavar="DURATION",
    help="Minimum time since the end of a job [30d].",
)
@click.option(
    "--state", "states", type=click.Choice(ENDED), multiple=True, help="Only jobs in this state (repeatable)."
)
@dry_run_option("Print their number and delete none.")
@json_option("Print the number as JSON.")
@queue_option
def clean_command(
    older_than: float, states: tuple["State", ...], dry_run: bool, as_json: bool, queue_url: str | None
) -> int:
    """Delete jobs that ended long ago, with their attempts, stored output, and snapshots that no other job uses.

    Unfinished jobs and the jobs they depend on are never deleted.
    """
    meant = states or ENDED
    with opened(queue_url) as store:
        counts = store.jobs.counts()
        deleted = store.jobs.forgettable(older_than, meant) if dry_run else store.jobs.clean(older_than, meant)
        snapshots, size = (0, 0) if dry_run else store.blobs.forget_unused()
        kept = max(sum(counts.get(state, 0) for state in meant) - deleted, 0)
        place = store.place
    if as_json:
        done = {"verb": "clean", "queue": place, "dry_run": dry_run, "older_than": older_than, "states": meant}
        print_json({**done, "deleted": deleted, "kept": kept, "snapshot_bytes": size})
    elif not deleted:
        recent = f"; {kept} that ended are more recent, or other jobs depend on them" if kept else ""
        sys.stdout.write(f"nothing to delete{recent}\n")
    else:
        would = "would be deleted" if dry_run else "deleted"
        jobs = count_of(deleted, f"{' or '.join(states)} job".lstrip())
        code = f", with {format_memory(size)} of snapshots" if snapshots else ""
        sys.stdout.write(f"{jobs} that ended more than {format_duration(older_than)} ago {would}{code}; {kept} kept\n")
    return 0
