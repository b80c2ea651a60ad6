"""The table of GPUs: with colours and bars on a terminal, plain otherwise."""

import sys
import time
from collections.abc import Iterator
from socket import gethostname
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from stoker.cli.tables.table import CellText, Column, bar, console, fits, print_lines, table_lines, width_of
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
# Only where a GPU has one.
_FAULT: Final = Column("fault", gives="wrap", least=24)


def print_look(look: Look) -> None:
    screen = console()
    print_lines(screen, table_of(look, width_of(screen)))


def show_live(looks: Iterator[Look], every: float) -> None:
    """The table, redrawn at every look; without a terminal, one table after the other."""
    screen = console()
    if not screen.is_terminal:
        for look in looks:
            screen.print(live_view(look, None), soft_wrap=True)
            sys.stdout.flush()
        return
    from rich.live import Live

    with Live(console=screen, screen=True, auto_refresh=False) as live:
        for look in looks:
            live.update(live_view(look, screen.width, f"every {every:g} s, Ctrl-C ends"), refresh=True)


def live_view(look: Look, width: int | None, hint: str = "") -> RenderableType:
    clock = time.strftime("%H:%M:%S", time.localtime(look.wall))
    lines: list[RenderableType] = [Text(f"{clock}  {look.source}  {hint}".rstrip(), style="dim")]
    if look.gpus:
        lines += table_of(look, width)
    if look.problem:
        lines.append(Text(f"the GPUs cannot be read: {look.problem.reason}", style="red"))
    if look.note:
        lines.append(Text(look.note, style="yellow"))
    return Group(*lines)


def table_of(look: Look, width: int | None) -> list[Text]:
    """With bars where the terminal has room."""
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
        return table_lines(columns, rows[1], None)
    if fits(columns, rows[0], width):
        return table_lines(columns, rows[0], width)
    narrow = [column._replace(name="use") if column.name == "utilization" else column for column in columns]
    return table_lines(narrow, rows[1], width)


def _row(gpu: Gpu, reading: Reading, kept: str, *, bars: bool) -> list[CellText]:
    state, reason = state_of(reading)
    utilization = reading.utilization
    return [
        str(gpu.index),
        title(gpu).removeprefix("NVIDIA "),
        Text(state, style=_COLOURS[state]),
        _share(utilization.mean, format_percent(utilization.mean), bars) if known(utilization) else Text("?", "red"),
        _memory(reading, bars),
        _power(reading),
        Text(reason, style="red") if state == "unknown" else _who(reading, kept),
    ]


def _fault(reading: Reading, quarantine: QuarantinedGpu | None, now: float) -> Text:
    faults = faults_of(reading)
    if quarantine is not None:
        others = [fault for fault in faults if fault not in quarantine.reason]
        faults = [f"quarantined since {clock_time(quarantine.since, now)}: {quarantine.reason}", *others]
    return Text("; ".join(faults), style="red")


def _memory(reading: Reading, bars: bool) -> Text:
    used, total = reading.memory_used, reading.memory_total
    if known(used) and known(total):
        return _share(used / total, f"{format_memory(used)} of {format_memory(total)}", bars)
    return Text("?")


def _power(reading: Reading) -> str:
    if not known(reading.power):
        return "?"
    return f"{reading.power:.0f} W" + (f" of {reading.power_limit:.0f}" if known(reading.power_limit) else "")


def _who(reading: Reading, kept: str) -> Text:
    if not known(reading.processes):
        return Text(f"? {reading.processes.reason}", style="dim")
    amounts = [f" {format_memory(p.memory)}" if known(p.memory) else "" for p in reading.processes]
    who = ", ".join(describe(p) + amount for p, amount in zip(reading.processes, amounts, strict=True)) or "nobody"
    return Text(f"{who}; {kept}" if kept else who)


def _share(share: float, caption: str, bars: bool) -> Text:
    return bar(share, caption) if bars else Text(caption)
