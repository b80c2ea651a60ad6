"""Lists the signals that each GPU offers to rules, and the consequences of missing ones."""

from typing import Final, Literal, NamedTuple

from stoker.gpus.model import Gpu, Look, Reading, Unknown, known

SignalName = Literal["utilization", "memory activity", "GPM", "power", "faults", "processes", "shares of processes"]


class Signal(NamedTuple):
    """One signal of one GPU."""

    name: SignalName
    is_offered: bool
    words: str
    """Its quality, or why it is missing."""


class GpuSignals(NamedTuple):
    """The signals of one GPU, and the limitations by missing ones."""

    gpu: Gpu
    signals: tuple[Signal, ...]
    weaknesses: tuple[str, ...]


_NOT_TOLD: Final = "the driver does not say"


def signals_of(look: Look) -> tuple[GpuSignals, ...]:
    """The signals of each GPU, from a look after the first, since counters need a previous look."""
    return tuple(
        GpuSignals(
            gpu, signals := _signals(reading), _weaknesses(reading, {one.name for one in signals if one.is_offered})
        )
        for gpu, reading in zip(look.gpus, look.readings, strict=True)
    )


def _signals(reading: Reading) -> tuple[Signal, ...]:
    memory = reading.memory_activity
    pipes = reading.pipes.dram if known(reading.pipes) else reading.pipes
    return (
        Signal("utilization", known(reading.utilization), _utilization_in_words(reading)),
        Signal("memory activity", known(memory), _there(memory)),
        Signal("GPM", known(pipes), _there(pipes)),
        Signal("power", known(reading.power), _there(reading.power)),
        Signal("faults", known(reading.health), _there(reading.health)),
        Signal("processes", known(reading.processes), _there(reading.processes)),
        _shares(reading),
    )


def _there(value: object) -> str:
    return value.reason if isinstance(value, Unknown) else "yes"


def _reason(value: object) -> str:
    return value.reason if isinstance(value, Unknown) else _NOT_TOLD


def _utilization_in_words(reading: Reading) -> str:
    used = reading.utilization
    if not known(used):
        return _reason(used)
    return {0: "a counter of all the time", 1: "one sample per look"}.get(used.samples, f"{used.samples} samples")


def _shares(reading: Reading) -> Signal:
    if not known(reading.processes):
        return Signal("shares of processes", False, _reason(reading.processes))
    missing = [process.utilization for process in reading.processes if not known(process.utilization)]
    if missing:
        return Signal("shares of processes", False, _reason(missing[0]))
    return Signal("shares of processes", True, "yes" if reading.processes else "no process is there to tell by")


def _weaknesses(reading: Reading, offered: set[SignalName]) -> tuple[str, ...]:
    if "utilization" not in offered:
        return (f"utilization is unknown ({_reason(reading.utilization)}): no rule ever acts on it",)
    found = []
    if known(reading.utilization) and reading.utilization.samples == 1:
        found.append("one sample per look: a short burst of work can be missed, so windows need at least 60 looks")
    if not offered & {"memory activity", "GPM"}:
        by = "hangs are told by power only" if "power" in offered else "hangs cannot be told from work"
        found.append(f"memory activity is not reported: {by}")
    if "faults" not in offered:
        found.append("faults are not reported: a board that failed looks like one that waits")
    if "processes" not in offered:
        found.append("processes are not listed: the work of other people counts as the job's")
    elif "shares of processes" not in offered:
        found.append("the share of each process is not reported: a GPU that several use is unknown, never idle")
    return tuple(found)
