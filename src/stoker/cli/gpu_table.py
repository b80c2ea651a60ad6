"""The table of GPUs that a person reads: with colours and bars on a terminal, plain where it is not one."""

import sys
from collections.abc import Iterator
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from stoker.cli.screen import console
from stoker.gpus.model import Gpu, Look, Maybe, Reading, known
from stoker.gpus.state import State, describe, state_of, title
from stoker.units import format_memory, format_percent

_COLOURS: Final[dict[State, str]] = {"busy": "green", "idle": "yellow", "unknown": "red"}
_BAR: Final = 10
_FULL_FROM: Final = 0.9


def print_look(look: Look) -> None:
    console().print(table_of(look))


def show_live(looks: Iterator[Look], every: float) -> None:
    """The table, redrawn at every look; where there is no terminal, one table after the other."""
    screen = console()
    if not screen.is_terminal:
        for look in looks:
            screen.print(live_view(look))
            sys.stdout.flush()
        return
    from rich.live import Live

    with Live(console=screen, screen=True, auto_refresh=False) as live:
        for look in looks:
            live.update(live_view(look, f"every {every:g} s, Ctrl-C ends"), refresh=True)


def live_view(look: Look, hint: str = "") -> RenderableType:
    lines: list[RenderableType] = [Text(f"{_clock(look.wall)}  {look.source}  {hint}".rstrip(), style="dim")]
    if look.gpus:
        lines.append(table_of(look))
    if look.problem:
        lines.append(Text(f"the GPUs cannot be read: {look.problem.reason}", style="red"))
    if look.note:
        lines.append(Text(look.note, style="yellow"))
    return Group(*lines)


def table_of(look: Look) -> Table:
    kept = _kept()
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("GPU", justify="right")
    table.add_column("name", overflow="ellipsis", no_wrap=True, min_width=8)
    table.add_column("state")
    table.add_column("utilization", no_wrap=True)
    table.add_column("memory", no_wrap=True)
    table.add_column("power", justify="right", no_wrap=True)
    table.add_column("who", overflow="fold", ratio=1)
    for gpu, reading in zip(look.gpus, look.readings, strict=True):
        table.add_row(*_row(gpu, reading, kept.get(gpu.uuid, "")))
    return table


def _kept() -> dict[str, str]:
    """What is said of the GPUs that this machine's worker keeps for a job, by uuid."""
    from socket import gethostname

    from stoker.places import state_home
    from stoker.worker.kept import kept_gpus

    return kept_gpus(state_home(), gethostname())


def _row(gpu: Gpu, reading: Reading, kept: str) -> list[RenderableType]:
    state, reason = state_of(reading)
    utilization = reading.utilization
    return [
        str(gpu.index),
        title(gpu).removeprefix("NVIDIA "),
        Text(state, style=_COLOURS[state]),
        _bar(utilization.mean, format_percent(utilization.mean)) if known(utilization) else Text("?", style="red"),
        _memory(reading),
        _power(reading),
        Text(reason, style="red") if state == "unknown" else _who(reading, kept),
    ]


def _memory(reading: Reading) -> Text:
    used, total = reading.memory_used, reading.memory_total
    if known(used) and known(total):
        return _bar(used / total, f"{format_memory(used)} of {format_memory(total)}")
    return Text("?")


def _power(reading: Reading) -> str:
    if not known(reading.power):
        return "?"
    return f"{reading.power:.0f} W" + (f" of {reading.power_limit:.0f}" if known(reading.power_limit) else "")


def _who(reading: Reading, kept: str) -> Text:
    if not known(reading.processes):
        return Text(f"? {reading.processes.reason}", style="dim")
    who = ", ".join(f"{describe(p)}{_amount(p.memory)}" for p in reading.processes) or "nobody"
    return Text(f"{who}; {kept}" if kept else who)


def _amount(memory: Maybe[int]) -> str:
    return f" {format_memory(memory)}" if known(memory) else ""


def _bar(share: float, caption: str) -> Text:
    full = min(round(share * _BAR), _BAR)
    if share > 0:
        full = max(full, 1)  # anything at all shows
    colour = "cyan" if share < _FULL_FROM else "magenta"
    return Text.assemble(("█" * full, colour), ("·" * (_BAR - full), "dim"), " ", caption)


def _clock(wall: float) -> str:
    import time

    return time.strftime("%H:%M:%S", time.localtime(wall))
