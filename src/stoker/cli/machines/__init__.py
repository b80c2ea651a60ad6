"""`stoker machines`: list the machines of the queue, add one over ssh, drain it, resume it, remove it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from stoker.cli.machines.add import add
from stoker.cli.machines.common import host_of, report, wait_until_empty
from stoker.cli.machines.remove import remove
from stoker.cli.options.common import DURATION
from stoker.cli.options.queue import opened, queue_option
from stoker.cli.output import (
    CHANGES_AS_JSON,
    ChangeReport,
    dry_run_option,
    json_option,
    note,
    print_changes,
    print_json,
)
from stoker.cli.tables.table import Column, print_table
from stoker.cli.verbs.pause import pause_workers, workers_named
from stoker.errors import BadInputError
from stoker.queue.explanation import spoken
from stoker.status.machines import machines_of, worker_home

if TYPE_CHECKING:
    from stoker.queue import Store, Worker
    from stoker.status.model import Machine


class MachineRow(msgspec.Struct, frozen=True, kw_only=True):
    """One machine, as `--json` prints it."""

    host: str
    worker: str
    state: str
    """`at work`, `drained`, `stopped` or `not seen`."""
    gpus: int
    engine: str
    version: str
    labels: list[str]
    jobs: list[str]
    """The ids of the jobs that run there."""
    seen: float
    """Seconds since its last heartbeat."""
    problem: str | None


@click.group("machines", invoke_without_command=True)
@json_option()
@queue_option
@click.pass_context
def machines_command(context: click.Context, as_json: bool, queue_url: str | None) -> int:
    """List the machines of the queue, or add, drain, resume and remove one.

    A machine is a worker: `stoker work`, by hand or by `stoker machines add`. Those that stopped more than a day ago
    are not listed.
    """
    given = {"as_json": as_json, "queue_url": queue_url}
    # `machines --json drain` means `machines drain --json`.
    context.default_map = {
        verb: {name: value for name, value in given.items() if value} for verb in machines_command.commands
    }
    if context.invoked_subcommand is None:
        with opened(queue_url) as store:
            rows = _rows(store)
        if as_json:
            print_json(rows)
        elif rows:
            _print(rows)
        else:
            note("this queue has no machines: `stoker machines add user@host` adds one")
    return 0


def _rows(store: "Store") -> list[MachineRow]:
    attempts, now = store.attempts.running(), store.clock()
    jobs: dict[str, list[str]] = {}
    for attempt in attempts:
        jobs.setdefault(worker_home(attempt.worker), []).append(attempt.job)
    return [
        MachineRow(
            host=machine.host,
            worker=machine.worker,
            state=_state(machine),
            gpus=len(machine.gpus) + sum(node.gpus for node in machine.nodes),
            engine=machine.engine,
            version=machine.version,
            labels=list(machine.labels),
            jobs=jobs.get(worker_home(machine.worker), []),
            seen=max(0.0, now - machine.seen),
            problem=None if machine.absent else machine.problem,
        )
        for machine in machines_of(store.workers.all(), attempts, {}, now)
    ]


def _state(machine: "Machine") -> str:
    if not machine.there:
        return "stopped" if machine.left else "not seen"
    return "drained" if machine.paused else "at work"


def _print(rows: Sequence[MachineRow]) -> None:
    columns = [
        Column("host", gives="middle"),
        Column("GPUs", justify="right"),
        Column("engine", left_out=3),
        Column("version", left_out=2),
        Column("state"),
        Column("labels", left_out=5),
        Column("jobs", justify="right"),
        Column("last seen", left_out=1),
        Column("problem", gives="wrap", left_out=4),
    ]
    cells = [
        [
            row.host,
            str(row.gpus),
            row.engine,
            row.version or "?",
            row.state,
            ", ".join(row.labels),
            str(len(row.jobs)),
            f"{spoken(row.seen)} ago",
            row.problem or "",
        ]
        for row in rows
    ]
    used = {"labels": any(row.labels for row in rows), "problem": any(row.problem for row in rows)}
    shown = [number for number, column in enumerate(columns) if used.get(column.name, True)]
    print_table([columns[number] for number in shown], [[row[number] for number in shown] for row in cells])


@machines_command.command("drain", short_help="Start no more jobs on a machine; running jobs continue.")
@click.argument("host", metavar="HOST")
@click.option("--wait", is_flag=True, help="Wait until no job runs there.")
@click.option(
    "--timeout", type=DURATION, metavar="DURATION", help="With --wait: give up after this long, with code 124."
)
@dry_run_option()
@json_option(CHANGES_AS_JSON)
@queue_option
def drain(host: str, wait: bool, timeout: float | None, dry_run: bool, as_json: bool, queue_url: str | None) -> int:
    """Start no more jobs on a machine until `stoker machines resume`. Running jobs continue.

    This is the same as `stoker pause --worker`. Restarting the worker ends the drain.
    """
    if timeout is not None and not wait:
        raise BadInputError("--timeout needs --wait")
    with opened(queue_url) as store:
        workers = _turn(store, "drain", host, dry_run, as_json)
        if wait and not dry_run:
            wait_until_empty(store, workers, timeout)
            if not as_json:
                report(f"{workers[0].host}: no job runs there")
    return 0


@machines_command.command("resume", short_help="Start jobs on a drained machine again.")
@click.argument("host", metavar="HOST")
@dry_run_option()
@json_option(CHANGES_AS_JSON)
@queue_option
def resume(host: str, dry_run: bool, as_json: bool, queue_url: str | None) -> int:
    """Start jobs on a drained machine again."""
    with opened(queue_url) as store:
        _turn(store, "resume", host, dry_run, as_json)
    return 0


def _turn(store: "Store", verb: str, host: str, dry_run: bool, as_json: bool) -> "list[Worker]":
    workers = workers_named(store, host_of(host))
    changed, unchanged = pause_workers(store, workers, verb == "drain", dry_run)
    done = "drained" if verb == "drain" else "resumed"
    changes = ChangeReport(
        verb, store.place, dry_run, [msgspec.structs.replace(one, what=done) for one in changed], unchanged
    )
    print_changes(changes, done, lambda worker, place: f"{place} (worker {worker})", as_json=as_json)
    return workers


for _command in (add, remove):
    machines_command.add_command(_command)
