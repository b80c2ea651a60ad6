"""The table of GPUs: with colours and bars on a terminal, plain otherwise."""

import sys
import time
from collections.abc import Iterator
from socket import gethostname
from typing import Final

from stoker.cli.tables.table import Column, Styled, bar, fits, print_lines, rich_text, table_lines, terminal
from stoker.gpus.model import Gpu, Look, Reading, known
from stoker.gpus.quarantine import QuarantinedGpu, QuarantineFile
from stoker.gpus.report import GpuActivity, describe, faults_of, state_of, title
from stoker.paths import state_home
from stoker.units import clock_time, format_memory, format_percent

_COLOURS: Final[dict[GpuActivity, str]] = {"busy": "green", "idle": "yellow", "unknown": "red"}

_COLUMNS: Final = (
    Column("GPU", "right"),
    Column("name", gives="cut", least=8, left_out=1),
    Column("state"),
    Column("utilization"),
    Column("memory"),
    Column("power", "right", left_out=2),
    Column("who", gives="wrap", least=24),
)
# Shown only if a GPU has one.
_FAULT: Final = Column("fault", gives="wrap", least=24)


def print_look(look: Look) -> None:
    screen = terminal()
    print_lines(screen, table_of(look, None if screen is None else screen.width))


def print_topology(look: Look) -> None:
    """The links between GPUs, like `nvidia-smi topo -m`."""
    screen = terminal()
    columns = [Column("GPU", "right"), *(Column(str(gpu.index)) for gpu in look.gpus)]
    rows = [[str(gpu.index), *(_link(gpu, other) for other in look.gpus)] for gpu in look.gpus]
    print_lines(screen, table_lines(columns, rows, None if screen is None else screen.width))


def _link(gpu: Gpu, other: Gpu) -> str:
    if gpu.uuid == other.uuid:
        return Styled(("-", "dim"))
    link = dict(gpu.links).get(other.uuid, "?")
    return Styled((link, "green" if link == "nvlink" else ""))


def show_live(looks: Iterator[Look], every: float) -> None:
    """The table, redrawn at every look; without a terminal, one table after another."""
    screen = terminal()
    if screen is None:
        for look in looks:
            print_lines(None, live_view(look, None))
            sys.stdout.flush()
        return
    from rich.console import Group
    from rich.live import Live

    with Live(console=screen, screen=True, auto_refresh=False) as live:
        for look in looks:
            lines = live_view(look, screen.width, f"every {every:g} s, Ctrl-C ends")
            live.update(Group(*map(rich_text, lines)), refresh=True)


def live_view(look: Look, width: int | None, hint: str = "") -> list[str]:
    clock = time.strftime("%H:%M:%S", time.localtime(look.wall))
    lines: list[str] = [Styled((f"{clock}  {look.source}  {hint}".rstrip(), "dim"))]
    if look.gpus:
        lines += table_of(look, width)
    if look.problem:
        lines.append(Styled((f"the GPUs cannot be read: {look.problem.reason}", "red")))
    if look.note:
        lines.append(Styled((look.note, "yellow")))
    return lines


def table_of(look: Look, width: int | None) -> list[str]:
    """With bars if the terminal is wide enough."""
    from stoker.engines.local.reserved_gpus import reserved_gpus

    reserved = reserved_gpus(state_home(), gethostname())
    quarantined = QuarantineFile(state_home(), gethostname()).out_of_rotation()
    faults = [_fault(reading, quarantined.get(reading.uuid), look.wall) for reading in look.readings]
    columns = (*_COLUMNS, _FAULT) if any(faults) else _COLUMNS
    rows = [
        [
            [*_row(gpu, reading, reserved.get(gpu.uuid, ""), bars=bars), fault][: len(columns)]
            for gpu, reading, fault in zip(look.gpus, look.readings, faults, strict=True)
        ]
        for bars in (True, False)
    ]
    if width is None:
        return list(table_lines(columns, rows[1], None))
    if fits(columns, rows[0], width):
        return list(table_lines(columns, rows[0], width))
    narrow = [column._replace(name="use") if column.name == "utilization" else column for column in columns]
    return list(table_lines(narrow, rows[1], width))


def _row(gpu: Gpu, reading: Reading, kept: str, *, bars: bool) -> list[str]:
    state, reason = state_of(reading)
    utilization = reading.utilization
    return [
        str(gpu.index),
        title(gpu).removeprefix("NVIDIA "),
        Styled((state, _COLOURS[state])),
        _share(utilization.mean, format_percent(utilization.mean), bars)
        if known(utilization)
        else Styled(("?", "red")),
        _memory(reading, bars),
        _power(reading),
        Styled((reason, "red")) if state == "unknown" else _who(reading, kept),
    ]


def _fault(reading: Reading, quarantine: QuarantinedGpu | None, now: float) -> str:
    faults = faults_of(reading)
    if quarantine is not None:
        others = [fault for fault in faults if fault not in quarantine.reason]
        faults = [f"quarantined since {clock_time(quarantine.since, now)}: {quarantine.reason}", *others]
    return Styled(("; ".join(faults), "red"))


def _memory(reading: Reading, bars: bool) -> str:
    used, total = reading.memory_used, reading.memory_total
    if known(used) and known(total):
        return _share(used / total, f"{format_memory(used)} of {format_memory(total)}", bars)
    return "?"


def _power(reading: Reading) -> str:
    if not known(reading.power):
        return "?"
    return f"{reading.power:.0f} W" + (f" of {reading.power_limit:.0f}" if known(reading.power_limit) else "")


def _who(reading: Reading, kept: str) -> str:
    if not known(reading.processes):
        return Styled((f"? {reading.processes.reason}", "dim"))
    amounts = [f" {format_memory(p.memory)}" if known(p.memory) else "" for p in reading.processes]
    who = ", ".join(describe(p) + amount for p, amount in zip(reading.processes, amounts, strict=True)) or "nobody"
    return f"{who}; {kept}" if kept else who


def _share(share: float, caption: str, bars: bool) -> str:
    return bar(share, caption) if bars else caption
