"""What a GPU is doing, in a word and a sentence, as far as one reading tells."""

from typing import Final, Literal

from stoker.gpus.model import Gpu, Process, Reading, known
from stoker.units import format_duration, format_memory, format_percent

State = Literal["busy", "idle", "unknown"]

# A driver counts in whole percents: below one of them, nothing ran that it could see.
BUSY_FROM: Final = 0.01


def state_of(reading: Reading) -> tuple[State, str]:
    """One of three words, and why. Judged by the peak: a short burst is work too."""
    utilization = reading.utilization
    if not known(utilization):
        return "unknown", utilization.reason
    span = format_duration(reading.span)
    if utilization.peak >= BUSY_FROM:
        peak = f", peak {format_percent(utilization.peak)}" if utilization.peak > utilization.mean else ""
        return "busy", f"utilization {format_percent(utilization.mean)}{peak} over the last {span}"
    return "idle", f"nothing ran on it in the last {span}{_held(reading)}"


def _held(reading: Reading) -> str:
    if not known(reading.processes) or not reading.processes:
        return ""
    first = reading.processes[0]
    more = f" and {len(reading.processes) - 1} more" if len(reading.processes) > 1 else ""
    memory = f"{format_memory(first.memory)} held by " if known(first.memory) else "held by "
    return f"; {memory}{describe(first)}{more}"


def describe(process: Process) -> str:
    """`alice's python (pid 4242)`, with what is known of it."""
    owner = f"{process.user}'s " if known(process.user) else ""
    return f"{owner}{process.name if known(process.name) else 'process'} (pid {process.pid})"


def title(gpu: Gpu) -> str:
    return gpu.name if known(gpu.name) else gpu.uuid
