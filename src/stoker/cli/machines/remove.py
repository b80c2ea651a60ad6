"""`stoker machines remove`: stop the worker of a machine over ssh, and remove it."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
import msgspec

from stoker.cli.machines.common import (
    KnownMachine,
    forget,
    host_of,
    jobs_of,
    known_machines,
    report,
    some_of,
    ssh_option,
    wait_until_empty,
    workers_of,
)
from stoker.cli.options.queue import opened, queue_option
from stoker.cli.output import count_of, dry_run_option, note
from stoker.cli.verbs.pause import pause_workers, workers_named
from stoker.errors import BadInputError, StokerError

if TYPE_CHECKING:
    from stoker.queue import Store, Worker


@click.command("remove", short_help="Stop the worker of a machine, and remove it.")
@click.argument("host", metavar="HOST")
@ssh_option
@click.option("--wait", is_flag=True, help="Wait until no job runs there.")
@click.option(
    "--now", is_flag=True, help="Do not wait for running jobs: they continue, and their outcomes are delivered."
)
@click.option("--purge", is_flag=True, help="Also delete the installation.")
@click.option("--gone", is_flag=True, help="Do not connect: the machine is gone for good.")
@dry_run_option("Print the steps without connecting.")
@queue_option
def remove(
    host: str,
    ssh: str | None,
    wait: bool,
    now: bool,
    purge: bool,
    gone: bool,
    dry_run: bool,
    queue_url: str | None,
) -> int:
    """Stop the worker of a machine over ssh, and remove its unit and the file with the queue's address. HOST is a name
    from `stoker machines`, or an ssh destination. If jobs run there, --wait or --now is required.
    """
    if now and (wait or purge):
        other = "--wait" if wait else "--purge"
        raise BadInputError(f"--now and {other} exclude each other: running jobs need what is installed there")
    with opened(queue_url) as store:
        way = _way_to(store, host, ssh)
        if dry_run:
            _print_removal(way.destination, workers_of(store, host_of(host)), purge, gone)
            return 0
        if gone:
            name = host_of(host)
            pause_workers(store, workers_of(store, name), True)
        else:
            name = _stop(store, host, way, wait=wait, now=now, purge=purge)
        moment = store.clock()
        for worker in workers_of(store, name):
            # A worker started by hand continues.
            if gone or not worker.is_there(moment):
                store.workers.farewell(worker.id, removed=True)
            elif worker.paused:
                store.workers.pause(worker.id, False)
                note(f"worker {worker.id} on {name} was not started by `stoker machines add`: stop it there")
    forget(name)
    report(f"{name}: removed")
    return 0


def _print_removal(destination: str, workers: "Sequence[Worker]", purge: bool, gone: bool) -> None:
    steps = [f"drain worker {worker.id} on {worker.host}" for worker in workers]
    if not gone:
        steps.append(f"stop the worker on {destination}, and remove its unit and the queue's address")
    if purge and not gone:
        steps.append("delete the virtual environment and the log")
    sys.stdout.writelines(f"would {step}\n" for step in [*steps, "remove the machine from the list"])


def _way_to(store: "Store", name: str, ssh: str | None) -> KnownMachine:
    """The connection to a machine that was added from here, works for this queue, or is given as for ssh."""
    from stoker.remote.ssh import DEFAULT_SSH

    known = known_machines().get(host_of(name))
    if known is not None:
        return known if ssh is None else msgspec.structs.replace(known, ssh=ssh)
    if "@" not in name and not workers_of(store, name):
        workers_named(store, name)  # says which there are
    return KnownMachine(destination=name, ssh=ssh or DEFAULT_SSH)


def _stop(store: "Store", name: str, way: KnownMachine, *, wait: bool, now: bool, purge: bool) -> str:
    """Drains the machine and stops its worker; returns the machine's own host name."""
    from stoker.remote.installation import ask_facts, stop_worker
    from stoker.remote.ssh import RemoteMachine

    with RemoteMachine(way.destination, way.ssh, way.python) as remote:
        facts = ask_facts(remote)
        if facts.host != host_of(name) and "@" not in name:
            raise StokerError(
                f"{way.destination} is the machine {facts.host}, not {name}: name it as for ssh, user@host"
            )
        _drain_for_removal(store, facts.host, wait=wait, now=now)
        stop_worker(remote, facts, report, purge=purge)
    return facts.host


def _drain_for_removal(store: "Store", host: str, *, wait: bool, now: bool) -> None:
    """Ensures that no job starts there, and that none runs there unless requested. A refusal changes nothing."""
    workers = workers_of(store, host)
    drained, _ = pause_workers(store, workers, True)
    jobs = jobs_of(store, workers)
    if jobs and wait:
        wait_until_empty(store, workers, None)
    elif jobs and not now:
        for one in drained:
            store.workers.pause(one.id, False)
        raise StokerError(
            f"{count_of(len(jobs), 'job')} on {host} would lose the worker ({some_of(jobs)}): pass --wait to wait for "
            f"{'it' if len(jobs) == 1 else 'them'}, or --now"
        )
