"""`stoker machines add`: install a worker on a machine over ssh, start it, and wait until it is at work."""

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from stoker.cli.machines.common import KnownMachine, remember, report, ssh_option
from stoker.cli.options.queue import opened, patiently, queue_option
from stoker.cli.output import count_of, dry_run_option
from stoker.cli.verbs.work import work_command
from stoker.errors import BadInputError, StokerError

if TYPE_CHECKING:
    from stoker.queue import Store, Worker
    from stoker.remote.installation import Installation, WorkerRequest
    from stoker.remote.ssh import RemoteMachine

# A worker registers within seconds of its start; a busy machine, or one with many GPUs, takes longer.
_REGISTERS_WITHIN: Final = 90.0
_LOOKS: Final = 10.0
_BETWEEN_LOOKS: Final = 0.25


@click.command("add", short_help="Install a worker on a machine over ssh, and start it.")
@click.argument("destination", metavar="[USER@]HOST")
@click.argument("worker_options", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTION...]")
@ssh_option
@click.option("--python", metavar="PROGRAM", help="The Python to use there [the first that is 3.11 or newer].")
@click.option("--offline", is_flag=True, help="Also send the packages of this installation, and use no package index.")
@click.option("--no-systemd", is_flag=True, help="Start the worker detached, even if systemd is available.")
@dry_run_option("Print the steps without connecting.")
@queue_option
def add(
    destination: str,
    worker_options: tuple[str, ...],
    ssh: str | None,
    python: str | None,
    offline: bool,
    no_systemd: bool,
    dry_run: bool,
    queue_url: str | None,
) -> int:
    """Install a worker on a machine over ssh, start it, and wait until it is at work.

    It uses the system's ssh with your configuration, agent and known hosts. It installs your version of Stoker in a new
    virtual environment on the machine and runs the worker as a systemd user unit. Options of `stoker work` follow `--`.
    Repeat the command to upgrade, to change options, or after a failure.
    """
    from stoker.remote.installation import WorkerRequest, planned
    from stoker.remote.ssh import DEFAULT_SSH, RemoteMachine, checked_destination, ssh_words

    _check_worker_options(worker_options)
    command = ssh or DEFAULT_SSH
    ssh_words(command)
    checked_destination(destination)
    with opened(queue_url) as store:
        address = store.shared_address()
        if address is None:
            raise BadInputError(
                f"the queue {store.place} is a file, which other machines cannot share: create one in PostgreSQL by "
                "`stoker queue init --queue postgresql://…`, and name it by --queue or STOKER_QUEUE"
            )
        request = WorkerRequest(
            queue=address, worker_options=worker_options, offline=offline, use_systemd=not no_systemd
        )
        if dry_run:
            sys.stdout.writelines(f"would {step}\n" for step in planned(request))
            return 0
        with RemoteMachine(destination, command, python) as remote:
            host = _install(store, remote, request)
    remember(host, KnownMachine(destination=destination, ssh=command, python=python))
    return 0


def _install(store: "Store", remote: "RemoteMachine", request: "WorkerRequest") -> str:
    """Installs the worker, waits until it is registered in the queue, and returns its host."""
    from stoker.remote.installation import install_worker

    before = {worker.id for worker in store.workers.all()}
    done = install_worker(remote, request, report)
    worker = _registered(store, remote, done, before if done.started else set())
    report(f"{worker.host}: {_abilities(worker)}")
    return worker.host


def _check_worker_options(words: Sequence[str]) -> None:
    """Validates the options before anything is installed."""
    refused = {
        "--queue": "the machine gets the address of this queue: name another by --queue before --",
        "--until-empty": "the worker is to stay: start `stoker work --until-empty` there by hand",
        "--help": "`stoker work --help` shows the options",
    }
    for word in words:
        if (why := refused.get(word.partition("=")[0])) is not None:
            raise BadInputError(f"{word.partition('=')[0]} cannot be given to the worker: {why}")
    with work_command.make_context("stoker work", list(words)):
        pass


def _registered(store: "Store", remote: "RemoteMachine", done: "Installation", before: set[str]) -> "Worker":
    """The machine's worker after its first report. Raises StokerError with its output if it fails."""
    from stoker.remote.installation import worker_state

    ends = time.monotonic() + _REGISTERS_WITHIN
    host = done.facts.host
    while True:
        now = patiently(store.clock, ends)
        found = [one for one in store.workers.all() if one.host == host and one.id not in before and one.is_there(now)]
        # Its first report may come before its first look at the GPUs.
        seen = [
            one for one in found if one.view.gpus or one.view.nodes or one.view.absent or now - one.started > _LOOKS
        ]
        if seen or (found and time.monotonic() > ends):
            return (seen or found)[-1]
        running, said = worker_state(remote, done)
        if not running or time.monotonic() > ends:
            what = "ended right after its start" if not running else "did not register"
            raise StokerError(
                f"the worker on {remote.destination} {what}: {said or 'it printed nothing'}; "
                "correct that, and repeat this"
            )
        time.sleep(_BETWEEN_LOOKS)


def _abilities(worker: "Worker") -> str:
    """`8 GPUs, at work`."""
    view = worker.view
    count = count_of(len(view.gpus) + sum(node.gpus for node in view.nodes), "GPU")
    if worker.paused:
        return f"{count}, drained: `stoker machines resume {worker.host}` lets jobs start"
    if view.problem and not view.absent:
        return f"{count}, at work, but {view.problem}"
    return f"{'no GPU' if view.absent else count}, at work"
