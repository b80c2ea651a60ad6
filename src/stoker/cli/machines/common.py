"""Shared by the verbs of `stoker machines`: connections, the machines added from here, and their jobs."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
import msgspec

from stoker.cli.options.queue import SLOW_POLL, Listener, patiently
from stoker.cli.output import count_of, note
from stoker.errors import StokerError
from stoker.paths import private_directory, state_home, write_atomically
from stoker.status.machines import worker_home
from stoker.units import format_duration

if TYPE_CHECKING:
    from stoker.queue import Store, Worker

F = TypeVar("F", bound=Callable[..., Any])

# As in GNU timeout.
_TIMED_OUT: Final = 124


def ssh_option(command: F) -> F:
    return click.option(
        "--ssh", metavar="COMMAND", help="How to connect, with ssh's own options: 'ssh -p 2222' [ssh]."
    )(command)


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


# Jobs of a machine


def jobs_of(store: "Store", workers: "Sequence[Worker]") -> list[str]:
    homes = {worker_home(worker.id) for worker in workers}
    return [attempt.job for attempt in store.attempts.running() if worker_home(attempt.worker) in homes]


def wait_until_empty(store: "Store", workers: "Sequence[Worker]", timeout: float | None) -> None:
    deadline = None if timeout is None else time.monotonic() + timeout
    noted = False
    with Listener(store) as listener:
        while jobs := patiently(lambda: jobs_of(store, workers), deadline):
            if not noted:
                note(f"waiting for {count_of(len(jobs), 'job')} on {workers[0].host}: {some_of(jobs)}")
                noted = True
            left = SLOW_POLL if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise StokerError(
                    f"{count_of(len(jobs), 'job')} on {workers[0].host} had not ended after "
                    f"{format_duration(timeout or 0.0)}: {some_of(jobs)}; no more jobs start there",
                    exit_code=_TIMED_OUT,
                )
            listener.wait(min(SLOW_POLL, left))


def some_of(jobs: Sequence[str]) -> str:
    return ", ".join(jobs[:4]) + (f" and {len(jobs) - 4} more" if len(jobs) > 4 else "")


# Connections to machines added from here


class KnownMachine(msgspec.Struct, frozen=True, kw_only=True):
    """The connection to a machine."""

    destination: str
    ssh: str
    python: str | None = None


def _file() -> Path:
    return state_home() / "machines.json"


def known_machines() -> dict[str, KnownMachine]:
    """By host. An unreadable file counts as missing: the machine can be named as for ssh."""
    try:
        return msgspec.json.decode(_file().read_bytes(), type=dict[str, KnownMachine])
    except (OSError, msgspec.DecodeError):
        return {}


def host_of(name: str) -> str:
    """The host of a machine given as for ssh, if it was added from here."""
    found = [host for host, machine in known_machines().items() if machine.destination == name]
    return found[0] if found else name


def workers_of(store: "Store", host: str) -> "list[Worker]":
    return [worker for worker in store.workers.all() if worker.host == host and not worker.view.removed]


def remember(host: str, machine: KnownMachine) -> None:
    private_directory(_file().parent)
    write_atomically(_file(), msgspec.json.encode(known_machines() | {host: machine}))


def forget(name: str) -> None:
    left = {host: machine for host, machine in known_machines().items() if host != host_of(name)}
    if left != known_machines():
        write_atomically(_file(), msgspec.json.encode(left))
