"""Whether work is started: what `stoker pause` and `stoker resume` have in common."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
import msgspec

from stoker.cli.options.queue import opened, queue_option
from stoker.cli.verbs.steer import print_json
from stoker.errors import BadInputError, StokerError
from stoker.queue.pausing import PAUSE, RESUME, Direction, already

if TYPE_CHECKING:
    from stoker.queue import Store, Worker


class Pausing(msgspec.Struct, frozen=True):
    """What the options of both verbs say."""

    worker: str | None
    dry_run: bool
    as_json: bool
    queue_url: str | None


class Subject(msgspec.Struct, frozen=True, omit_defaults=True):
    """The queue, or one worker; and what became of it, or why nothing did."""

    queue: str = ""
    id: str = ""
    host: str = ""
    what: str = ""
    why: str = ""

    def __str__(self) -> str:
        return f"the queue {self.queue}" if self.queue else f"worker {self.id} on {self.host}"


class PauseReport(msgspec.Struct, frozen=True):
    """What was done, as `--json` prints it."""

    verb: str
    dry_run: bool
    changed: list[Subject]
    unchanged: list[Subject]


def pausing_options(function: Callable[..., Any]) -> Callable[..., Any]:
    import functools

    @functools.wraps(function)
    def with_pausing(*, worker: str | None, dry_run: bool, as_json: bool, queue_url: str | None) -> Any:
        return function(Pausing(worker, dry_run, as_json, queue_url))

    command: Callable[..., Any] = queue_option(with_pausing)
    command = click.option("--json", "as_json", is_flag=True, help="Print what was changed and what was not as JSON.")(
        command
    )
    command = click.option("--dry-run", is_flag=True, help="Say what would happen, and change nothing.")(command)
    return click.option("--worker", metavar="HOST|ID", help="Only the workers of this host, or the one with this id.")(
        command
    )


def turn(direction: Direction, asked: Pausing) -> int:
    """Pauses or resumes what was asked for. That it is so already is no mistake: the code is 0."""
    with opened(asked.queue_url) as store:
        if asked.worker is None:
            changed, unchanged = _queue(direction, store, asked)
        else:
            changed, unchanged = _workers(direction, store, asked, _meant(store, asked.worker))
    report = PauseReport(direction.verb, asked.dry_run, changed, unchanged)
    if asked.as_json:
        print_json(report)
        return 0
    would = "would be" if asked.dry_run else "is"
    sys.stdout.write("".join(f"{subject} {would} {subject.what}\n" for subject in changed))
    sys.stderr.write("".join(f"stoker: {subject} was not {direction.done}: {subject.why}\n" for subject in unchanged))
    return 0


def _queue(direction: Direction, store: "Store", asked: Pausing) -> tuple[list[Subject], list[Subject]]:
    if store.paused() == direction.paused:
        return [], [Subject(queue=store.place, why=already(direction))]
    if not asked.dry_run:
        direction.queue(store)
    return [Subject(queue=store.place, what=direction.done)], []


def _workers(
    direction: Direction, store: "Store", asked: Pausing, meant: list["Worker"]
) -> tuple[list[Subject], list[Subject]]:
    changed, unchanged = [], []
    for worker in meant:
        subject = Subject(id=worker.id, host=worker.host)
        if worker.paused == direction.paused:
            unchanged.append(msgspec.structs.replace(subject, why=already(direction)))
        elif asked.dry_run or direction.worker(store, worker.id):
            changed.append(msgspec.structs.replace(subject, what=direction.done))
        else:
            unchanged.append(msgspec.structs.replace(subject, why="it has just been forgotten"))
    return changed, unchanged


def _meant(store: "Store", text: str) -> list["Worker"]:
    """The workers of a host that are there now, or the one whose id begins so."""
    workers = store.workers()
    on_host = [worker for worker in workers if worker.host == text]
    if on_host:
        return _present(store, on_host, text)
    by_id = [worker for worker in workers if worker.id == text] or [
        worker for worker in workers if worker.id.startswith(text)
    ]
    if not by_id or not text:
        hosts = ", ".join(sorted({worker.host for worker in workers}))
        known = f"there are some on {hosts}" if hosts else "none was ever started"
        raise BadInputError(f"there is no worker {text!r} in {store.place}: {known}")
    if len(by_id) > 1:
        raise BadInputError(
            f"{text!r} fits several workers ({', '.join(worker.id for worker in by_id[:4])}): write more of it"
        )
    return by_id


def _present(store: "Store", workers: list["Worker"], host: str) -> list["Worker"]:
    from stoker.units import format_duration

    now = store.clock()
    present = [worker for worker in workers if worker.is_there(now)]
    if not present:
        silent = format_duration(round(now - max(worker.seen for worker in workers)))
        raise StokerError(
            f"the worker on {host} was last heard of {silent} ago: one that is started anew is not paused"
        )
    return present


@click.command("pause")
@pausing_options
def pause_command(asked: Pausing) -> int:
    """Start nothing more, until `stoker resume`. What runs goes on.

    Without --worker nothing of the queue is started anywhere. A worker that is started anew is not paused.
    """
    return turn(PAUSE, asked)


@click.command("resume")
@pausing_options
def resume_command(asked: Pausing) -> int:
    """Go on after `stoker pause`: the queue, or with --worker one worker. A worker's own pause outlasts the queue's."""
    return turn(RESUME, asked)
