"""`stoker gpus` and `stoker record`: readings as a table, as JSON, or in a file."""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING

import click

from stoker.cli.options.common import DURATION, open_prober, source_options
from stoker.cli.output import count_of, json_option, note
from stoker.errors import BadInputError, StokerError
from stoker.gpus.model import Look, SourceChoice
from stoker.gpus.prober import Prober
from stoker.gpus.recording import RecordingWriter
from stoker.gpus.spawn import forked
from stoker.paths import state_home
from stoker.units import format_duration

if TYPE_CHECKING:
    from stoker.gpus.quarantine import QuarantineFile


@click.command("gpus")
@json_option("Print a JSON list of GPUs.")
@click.option("--watch", is_flag=True, help="Show the table live until Ctrl-C.")
@click.option("--follow", is_flag=True, help="Print one JSON line per look until Ctrl-C.")
@click.option("--every", type=DURATION, metavar="DURATION", help="Time between looks with --watch or --follow [1s].")
@click.option("--gpus", "chosen", metavar="GPUS", default="all", help="Only these: 0,2 or 0-3 or uuids [all].")
@click.option("--topology", is_flag=True, help="Show the links between GPUs: NVLink, switch, NUMA node or system.")
@click.option("--explain", is_flag=True, help="Explain why each source of readings was used or not.")
@click.option("--release", metavar="GPU", help="Put a GPU back into rotation: its index or uuid, or all.")
@click.option("--quarantine", metavar="GPU", help="Take a GPU out of rotation until it is released.")
@click.option("--reason", metavar="TEXT", help="With --quarantine: the reason.")
@source_options
def gpus_command(
    as_json: bool,
    watch: bool,
    follow: bool,
    every: float | None,
    chosen: str,
    topology: bool,
    explain: bool,
    release: str | None,
    quarantine: str | None,
    reason: str | None,
    source: str | None,
    deadline: float | None,
) -> int:
    """Show what this machine's GPUs are doing: busy, idle or unknown, and why."""
    if as_json + watch + follow + topology > 1:
        raise BadInputError("--json, --watch, --follow and --topology exclude each other: choose one")
    if every is not None and not (watch or follow):
        raise BadInputError("--every needs --watch or --follow")
    if reason is not None and quarantine is None:
        raise BadInputError("--reason needs --quarantine")
    if release is not None and quarantine is not None:
        raise BadInputError("--release and --quarantine exclude each other: choose one")
    if (release is not None or quarantine is not None) and (as_json or watch or follow or topology or explain):
        raise BadInputError("--release and --quarantine cannot be combined with options that show GPUs")
    if release is not None:
        return _release(release)
    prober = open_prober(source, deadline, start=forked)
    _import_output(as_json=as_json or follow)
    with contextlib.ExitStack() as goodbye:
        goodbye.callback(prober.leave)
        if quarantine is not None:
            return _quarantine(prober.look(), quarantine, reason)
        look = _narrowed(prober.look(), chosen)
        if explain:
            _explain(prober.choices)
        if topology:
            return _show_topology(look)
        if watch:
            from stoker.cli.tables.gpus import show_live

            with contextlib.suppress(KeyboardInterrupt):  # the documented way to end it
                show_live(looks_of(prober, look, chosen, every or 1.0), every or 1.0)
            return 0
        if follow:
            return _follow(looks_of(prober, look, chosen, every or 1.0))
        return _show_json(look) if as_json else _show_table(look)


def _import_output(*, as_json: bool) -> None:
    """Imports what prints the first look, while its helper starts."""
    modules = ("gpus.quarantine", "gpus.report") if as_json else ("cli.tables.gpus", "engines.local.reserved_gpus")
    for module in modules:
        import_module(f"stoker.{module}")


def looks_of(prober: Prober, first: Look, chosen: str, every: float, duration: float | None = None) -> Iterator[Look]:
    """The first look, then one per interval; missed ones are skipped."""
    yield first
    begun = due = time.monotonic()
    while True:
        due = max(due + every, time.monotonic())
        if duration is not None and due - begun > duration:
            return
        time.sleep(max(due - time.monotonic(), 0))
        yield _narrowed(prober.look(), chosen)


def _narrowed(look: Look, chosen: str) -> Look:
    if chosen == "all" or (look.problem and not look.gpus):
        return look
    from msgspec.structs import replace

    from stoker.gpus.visible import select_gpus

    uuids = {gpu.uuid for gpu in select_gpus(look.gpus, chosen)}
    kept = [(g, r) for g, r in zip(look.gpus, look.readings, strict=True) if g.uuid in uuids]
    return replace(look, gpus=tuple(gpu for gpu, _ in kept), readings=tuple(reading for _, reading in kept))


def _show_json(look: Look) -> int:
    from stoker.gpus.report import look_as_json

    sys.stdout.write(look_as_json(look, _quarantine_file().out_of_rotation()).decode() + "\n")
    return _code(look)


def _follow(looks: Iterator[Look]) -> int:
    from stoker.gpus.report import look_as_line

    file = _quarantine_file()
    with contextlib.suppress(KeyboardInterrupt):  # the documented way to end it
        for look in looks:
            sys.stdout.write(look_as_line(look, file.out_of_rotation()).decode() + "\n")
            sys.stdout.flush()
    return 0


def _show_table(look: Look) -> int:
    from stoker.cli.tables.gpus import print_look

    if look.gpus:
        print_look(look)
    return _code(look)


def _show_topology(look: Look) -> int:
    from stoker.cli.tables.gpus import print_topology

    if any(gpu.links for gpu in look.gpus):
        print_topology(look)
    elif not look.problem:
        note(f"{look.source} does not report how the GPUs are connected")
    return _code(look)


def _quarantine_file() -> "QuarantineFile":
    from stoker.gpus.quarantine import QuarantineFile

    return QuarantineFile(state_home(), gethostname())


def _release(chosen: str) -> int:
    from stoker.gpus.quarantine import release

    released = release(_quarantine_file(), chosen)
    for entry in released:
        click.echo(f"GPU {entry.index} is in rotation again; it was out of it because of: {entry.reason}")
    if not released:
        click.echo("no GPU was out of rotation")
    return 0


def _quarantine(look: Look, chosen: str, reason: str | None) -> int:
    from stoker.gpus.quarantine import take_out
    from stoker.gpus.visible import select_gpus

    if look.problem and not look.gpus:
        _code(look)
    text = " ".join((reason or "taken out by an administrator").split())
    if not text:
        raise BadInputError("--reason must not be empty")
    file = _quarantine_file()
    for gpu in select_gpus(look.gpus, chosen):
        take_out(file, gpu.uuid, gpu.index, text, time.time())
        click.echo(f"GPU {gpu.index} is out of rotation: 'stoker gpus --release {gpu.index}' brings it back")
    return 0


def _code(look: Look) -> int:
    """Unreadable GPUs are a failure too: scripts must not mistake them for idle."""
    if look.problem:
        raise StokerError(f"the GPUs cannot be read: {look.problem.reason}")
    if look.note:
        note(look.note)
    return 0


def _explain(choices: tuple[SourceChoice, ...]) -> None:
    for choice in choices:
        note(f"{choice.source}: {'used' if choice.taken else 'not used'}: {choice.reason}")


@click.command("record")
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--every", type=DURATION, default="5s", metavar="DURATION", help="Time between looks [5s].")
@click.option("--for", "duration", type=DURATION, metavar="DURATION", help="Stop after this long.")
@source_options
def record_command(file: Path, every: float, duration: float | None, source: str | None, deadline: float | None) -> int:
    """Append readings of all GPUs to FILE until Ctrl-C. A crash loses at most the last one."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    looks = 0
    with open_prober(source, deadline, start=forked) as prober:
        first = prober.look()
        with contextlib.closing(RecordingWriter(file)) as writer, contextlib.suppress(KeyboardInterrupt):
            note(f"recording {count_of(len(first.gpus), 'GPU')} to {file}, every {format_duration(every)}")
            for look in looks_of(prober, first, "all", every, duration):
                writer.append(look)
                looks += 1
    note(f"recorded {count_of(looks, 'look')} to {file}")
    return 0
