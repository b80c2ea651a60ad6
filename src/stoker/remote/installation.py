"""Steps that add a machine to the queue over ssh, and that remove it. Each is idempotent."""

import base64
import hashlib
import platform
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final

import msgspec

from stoker.actions.systemd import quoted
from stoker.errors import BadInputError, StokerError
from stoker.masking import without_passwords
from stoker.remote.ssh import RemoteError, RemoteMachine
from stoker.remote.wheels import Wheel, dependency_wheels, stoker_wheel
from stoker.units import format_memory
from stoker.version import __version__

# A shared queue needs its driver; reports on hung jobs need stacks.
_DRIVER_EXTRA: Final = "postgres"
_REPORT_EXTRA: Final = "report"
# An environment takes 60 MiB, and its installation as much again.
_SPACE: Final = 150 * 2**20
_LOCAL_HOSTS: Final = re.compile(r"localhost|127\.[\d.]+|::1|/.*|")

Report = Callable[[str], None]
"""Prints the line of a completed step."""


class MachineFacts(msgspec.Struct, frozen=True):
    """Facts about a machine."""

    host: str
    user: str
    home: str
    system: str
    machine: str
    python: str
    executable: str
    uv: str
    data: str
    config: str
    free: int
    systemd: bool


class WorkerFiles:
    """Paths of a worker's files on its machine. Their names contain the host, because machines may share a home."""

    def __init__(self, facts: MachineFacts) -> None:
        name = re.sub(r"[^\w.-]", "_", facts.host)
        data, config = PurePosixPath(facts.data), PurePosixPath(facts.config)
        self.venvs = str(data / "venvs")
        self.unit = str(config / "systemd/user" / f"stoker-worker-{name}.service")
        self.environment = str(config / "stoker" / f"worker-{name}.env")
        self.launcher = str(data / f"start-worker-{name}")
        self.pid_file = str(data / f"worker-{name}.pid")
        self.log = str(data / f"worker-{name}.log")
        self._home = facts.home
        # Patterns of the files that name an environment.
        self.users = [str(config / "systemd/user/stoker-worker-*.service"), str(data / "start-worker-*")]

    def shown(self, path: str) -> str:
        """For people: `~/.config/…`."""
        return f"~{path.removeprefix(self._home)}" if path.startswith(f"{self._home}/") else path


class WorkerRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `stoker machines add`."""

    queue: str
    """The whole address, with its password."""
    worker_options: tuple[str, ...] = ()
    offline: bool = False
    use_systemd: bool = True


class Installation(msgspec.Struct, frozen=True):
    """A worker that was started, or already ran as requested."""

    facts: MachineFacts
    unit: str
    """The path of its unit; empty without systemd."""
    started: bool


def planned(request: WorkerRequest) -> list[str]:
    """The steps of a dry run, which does not connect."""
    packages = "this installation's packages" if request.offline else "packages from its index"
    command = shlex.join(("stoker", "work", *request.worker_options))
    how = "as a systemd user unit where there is a user instance, otherwise detached"
    how = how if request.use_systemd else "detached, without systemd"
    return [
        "connect, and check for Linux, Python 3.11 or newer and free space",
        f"install Stoker {__version__} as it runs here, with {packages}, into a virtual environment of its own",
        "write the queue's address into an environment file of mode 0600",
        f"reach the queue {without_passwords(request.queue)} from there",
        f"start `{command}` {how}",
        "wait until the worker has registered",
    ]


def ask_facts(remote: RemoteMachine) -> MachineFacts:
    try:
        return msgspec.convert(_ask(remote, "look at", "facts"), MachineFacts)
    except msgspec.ValidationError as error:
        raise StokerError(f"{remote.destination} answered something that is not understood: {error}") from None


def install_worker(remote: RemoteMachine, request: WorkerRequest, report: Report) -> Installation:
    """Installs and starts the worker. Errors contain the step, the machine's message and advice."""
    facts = ask_facts(remote)
    check_facts(facts, remote.destination)
    tool = "uv" if facts.uv else "pip"
    report(f"connected to {facts.host}: {facts.system} {facts.machine}, Python {facts.python}, {tool}")
    layout = WorkerFiles(facts)
    venv = _install(remote, request, facts, layout, report)
    variables = {"STOKER_QUEUE": request.queue}
    try:
        remote.ask("check_queue", venv=venv, environment=variables)
    except RemoteError as error:
        raise queue_error(remote.destination, request.queue, str(error)) from None
    report(f"reached the queue {without_passwords(request.queue)} from there")
    unit = layout.unit if request.use_systemd and facts.systemd else ""
    if unit and not _ask(remote, "turn on lingering on", "linger"):
        raise StokerError(
            f"the worker would end with your last login on {remote.destination}: run `sudo loginctl enable-linger "
            f"{facts.user}` there and repeat this, or pass --no-systemd"
        )
    command = (f"{venv}/bin/stoker", "work", *request.worker_options)
    files = {layout.environment: (environment_text(variables), 0o600)}
    if unit:
        files[unit] = (worker_unit(facts.host, command, layout.environment), 0o644)
        obsolete = layout.launcher
    else:
        files[layout.launcher] = (launcher_text(command, layout.environment), 0o700)
        obsolete = layout.unit
        _ask(remote, "stop the worker on", "stop", unit=layout.unit, pid_file="")
    paths = {"unit": unit, "launcher": layout.launcher, "pid_file": layout.pid_file, "log": layout.log}
    started = _ask(remote, "start the worker on", "start", files=files, **paths)
    _ask(remote, "remove a file on", "remove", paths=[obsolete])
    report(f"wrote the queue's address to {layout.shown(layout.environment)}, readable by {facts.user} alone")
    how = (
        f"by systemd, as {PurePosixPath(unit).name}"
        if unit
        else f"without systemd; it writes to {layout.shown(layout.log)}"
    )
    report(f"{'started the worker' if started else 'the worker was running'} {how}")
    return Installation(facts, unit, started)


def _install(
    remote: RemoteMachine, request: WorkerRequest, facts: MachineFacts, layout: WorkerFiles, report: Report
) -> str:
    """The virtual environment with the local Stoker. A new version gets a new one; the old one is not changed."""
    wheel = stoker_wheel()
    venv = f"{layout.venvs}/{environment_name(wheel, facts)}"
    if _ask(remote, "look at", "is_installed", venv=venv):
        report(f"found Stoker {__version__} in {layout.shown(venv)}")
        return venv
    extras = [_DRIVER_EXTRA, _REPORT_EXTRA]
    wheels = [wheel]
    if request.offline:
        wheels += dependency_wheels(extras)
        check_portable(wheels, facts, remote.destination)
        if not any(one.name.startswith("py_spy-") for one in wheels):
            extras.remove(_REPORT_EXTRA)  # it is not installed here either
    _ask(
        remote,
        "install Stoker on",
        "install",
        venv=venv,
        wheel=wheel.name,
        wheels={one.name: base64.b64encode(one.content).decode() for one in wheels},
        extras=",".join(extras),
        offline=request.offline,
        uv=facts.uv,
    )
    report(f"installed Stoker {__version__} in {layout.shown(venv)}")
    return venv


def worker_state(remote: RemoteMachine, installation: Installation) -> tuple[bool, str]:
    """Whether the worker runs, and its last output."""
    layout = WorkerFiles(installation.facts)
    found = _ask(remote, "look at", "status", unit=installation.unit, pid_file=layout.pid_file, log=layout.log)
    return bool(found["running"]), str(found["said"])


def stop_worker(remote: RemoteMachine, facts: MachineFacts, report: Report, *, purge: bool) -> None:
    """Stops the worker, not its jobs, and removes its unit; with `purge` also the installation."""
    layout = WorkerFiles(facts)
    was_there = _ask(remote, "stop the worker on", "stop", unit=layout.unit, pid_file=layout.pid_file)
    report("stopped the worker" if was_there else "no worker was running")
    own = [layout.unit, layout.environment, layout.launcher, layout.pid_file, *([layout.log] if purge else [])]
    removed = _ask(remote, "remove files on", "remove", paths=own)
    if purge:
        removed += _ask(remote, "remove files on", "purge", venvs=layout.venvs, users=layout.users)
    report(f"removed {', '.join(map(layout.shown, removed))}" if removed else "nothing was installed")


# Local decisions


def check_facts(facts: MachineFacts, destination: str) -> None:
    if facts.system != "Linux":
        raise StokerError(f"{destination} runs {facts.system}: Stoker's worker needs Linux")
    if facts.free < _SPACE:
        raise StokerError(
            f"{destination} has {format_memory(facts.free)} free for {facts.data}: Stoker needs "
            f"{format_memory(_SPACE)}, so free some space there"
        )


def check_portable(wheels: Sequence[Wheel], facts: MachineFacts, destination: str) -> None:
    """Packages with compiled code fit only the same Python and processor."""
    here = (*platform.python_version_tuple()[:2], platform.machine())
    there = (*facts.python.split(".")[:2], facts.machine)
    if here != there and not all(wheel.is_portable for wheel in wheels):
        raise BadInputError(
            f"--offline: {destination} has Python {'.'.join(there[:2])} on {there[2]}, and the packages here are for "
            f"Python {'.'.join(here[:2])} on {here[2]}: name such a Python by --python, or leave out --offline"
        )


def environment_name(wheel: Wheel, facts: MachineFacts) -> str:
    """`0.2.0-1f3c9a2b44d0-py3.11-x86_64`: one environment per content, Python and processor type."""
    digest = hashlib.sha256(wheel.content).hexdigest()[:12]
    return f"{__version__}-{digest}-py{'.'.join(facts.python.split('.')[:2])}-{facts.machine}"


def environment_text(variables: Mapping[str, str]) -> str:
    """A file with the same meaning for systemd and shells. A quote in an address can be written as %27."""
    lines = []
    for name, value in variables.items():
        if re.search(r"[\n\r\0]", value):
            raise BadInputError(f"{name} contains a line break: correct the address of the queue")
        lines.append(f"{name}='{value.replace(chr(39), '%27')}'\n")
    return "# Written by `stoker machines add`.\n" + "".join(lines)


def worker_unit(host: str, command: Sequence[str], environment: str) -> str:
    """The user unit of a worker. Jobs survive its stop, and an out-of-memory job ends no other."""
    return f"""# Written by `stoker machines add`.
[Unit]
Description=Stoker worker
# The home may be shared with machines that are not meant.
ConditionHost={host}
StartLimitIntervalSec=0

[Service]
EnvironmentFile={environment.replace("%", "%%")}
ExecStart={" ".join(quoted(word) for word in command)}
Restart=always
RestartSec=10
KillMode=process
Delegate=yes
DelegateSubgroup=stoker-worker
OOMPolicy=continue

[Install]
WantedBy=default.target
"""


def launcher_text(command: Sequence[str], environment: str) -> str:
    """A script that becomes the worker, for machines without systemd."""
    return f"""#!/bin/sh
# Written by `stoker machines add`.
set -a
. {shlex.quote(environment)}
exec {shlex.join(command)}
"""


def queue_error(destination: str, queue: str, said: str) -> StokerError:
    said = without_passwords(said.removeprefix("stoker: "))
    if _LOCAL_HOSTS.fullmatch(queue_host(queue)):
        return StokerError(
            f"{destination} cannot use the queue: {said}; its address names this machine itself: pass --queue with an "
            "address that is valid on both machines"
        )
    return StokerError(
        f"{destination} cannot use the queue: {said}; let the database accept connections from there, and repeat this"
    )


def queue_host(queue: str) -> str:
    """The first host, as parsed by libpq."""
    from psycopg.conninfo import conninfo_to_dict

    return str(conninfo_to_dict(queue).get("host") or "").partition(",")[0]


_ADVICE: Final = (
    (r"No space left|Disk quota|os error 28", "free some space there, and repeat this"),
    (r"ensurepip|No module named venv", "install python3-venv or uv there, and repeat this"),
    (
        r"No matching distribution|No solution found|Failed to fetch|name resolution|Connection|timed out|connect",
        "it may not reach a package index: --offline sends the packages of this installation",
    ),
    (r"Permission denied", "give the user of that login access, and repeat this"),
)


def advice(said: str) -> str:
    """Advice for the message of a failed step."""
    return next((what for pattern, what in _ADVICE if re.search(pattern, said)), "correct that, and repeat this")


def _ask(remote: RemoteMachine, step: str, do: str, **request: Any) -> Any:
    try:
        return remote.ask(do, **request)
    except RemoteError as error:
        raise StokerError(f"cannot {step} {remote.destination}: {error}; {advice(str(error))}") from None
