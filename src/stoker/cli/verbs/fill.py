"""`stoker fill`: background programs on idle GPUs, and `stoker fill status`."""

import os
import sys
import time
from typing import TYPE_CHECKING

import click

from stoker.cli.options.common import open_prober, source_options
from stoker.cli.output import count_of, json_option, log, note, print_json
from stoker.errors import StokerError
from stoker.paths import state_home

if TYPE_CHECKING:
    from stoker.fill.config import FillConfig
    from stoker.fill.status import FillStatus
    from stoker.gpus.prober import Prober


@click.group("fill", invoke_without_command=True)
@click.option("--config", "file", metavar="FILE", help="A TOML file, or an INI file of gpu_mon [stoker.toml].")
@click.option("--check", is_flag=True, help="Check the configuration and start nothing.")
@source_options
@click.pass_context
def fill_command(
    context: click.Context, file: str | None, check: bool, source: str | None, deadline: float | None
) -> int | None:
    """Run background programs on idle GPUs, and stop each as soon as somebody else needs its GPU."""
    if context.invoked_subcommand is not None:
        return None
    from stoker.fill.config_files import hints

    with open_prober(source, deadline, sharing="start") as prober:
        config = _checked(file, prober)
        for hint in hints(config):
            note(hint)
        if check:
            sys.stdout.write(f"{config.source}: {count_of(len(config.programs), 'program')}, no errors\n")
            return 0
        return _fill(config, prober)


@fill_command.command("status", short_help="Show what runs in the background on each GPU.")
@json_option()
def status(as_json: bool) -> int:
    """Show what runs in the background on each GPU, the reason, and the GPU-hours so far."""
    import socket

    from stoker.fill.status import StatusFile
    from stoker.procfs import Identity, boot_id, is_alive

    found = StatusFile(state_home(), socket.gethostname()).read()
    alive = found is not None and found.boot == boot_id() and is_alive(Identity(found.pid, found.started))
    if as_json:
        print_json({"running": alive, "status": found})
    elif found is None:
        sys.stdout.write("`stoker fill` has never run here\n")
    else:
        _print(found, alive)
    return 0 if alive else 1


def _fill(config: "FillConfig", prober: "Prober") -> int:
    import socket
    from pathlib import Path

    from stoker.fill.claims import KILLED_LATELY
    from stoker.fill.filler import Filler
    from stoker.fill.status import lock

    lock(state_home(), socket.gethostname(), KILLED_LATELY)
    return Filler(config, prober, state_home(), log, root=Path(os.environ.get("STOKER_ROOT", "/"))).run()


def _checked(file: str | None, prober: "Prober") -> "FillConfig":
    from stoker.fill.config_files import check, find_config
    from stoker.gpus.source import AbsentError

    try:
        look = prober.look()
    except AbsentError as absent:
        raise StokerError(f"{absent}: there is nothing to fill") from None
    config = find_config(file)
    check(config, look.gpus if look.problem is None else None)
    return config


def _print(found: "FillStatus", alive: bool) -> None:
    from stoker.cli.tables.table import Column, print_table
    from stoker.units import format_duration

    columns = (
        Column("GPU"),
        Column("program", gives="cut"),
        Column("state"),
        Column("for", "right", left_out=1),
        Column("GPU-hours", "right", left_out=2),
        Column("preempted", "right", left_out=3),
        Column("why", gives="wrap", least=28),
    )
    rows = [
        (
            ", ".join(map(str, slot.indices)),
            slot.program,
            slot.state if alive else "not watched",
            format_duration(round(time.time() - slot.since)),
            f"{slot.gpu_hours:.1f}",
            str(slot.preemptions),
            slot.why,
        )
        for slot in found.slots
    ]
    print_table(columns, rows)
    total = sum(slot.gpu_hours for slot in found.slots)
    times = sum(slot.preemptions for slot in found.slots)
    sys.stdout.write(f"{total:.1f} GPU-hours given to background work, {count_of(times, 'preemption')}\n")
    if found.veto:
        sys.stdout.write(f"nothing runs now: {found.veto}\n")
    for remark in found.notes:
        sys.stdout.write(f"note: {remark}\n")
    if not alive:
        sys.stdout.write(f"`{found.owner}` is not running: this is its last state\n")
