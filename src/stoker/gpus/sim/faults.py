"""Faults of a simulated machine on demand, which imitate failures of real drivers."""

import math
from typing import Final, Literal, get_args

import msgspec

from stoker.errors import BadInputError
from stoker.gpus.model import (
    NOT_SUPPORTED,
    DeviceHealth,
    Gpu,
    Maybe,
    Process,
    Reading,
    Unknown,
    known,
    plausible_celsius,
    plausible_fraction,
    plausible_memory_used,
    plausible_watts,
)
from stoker.gpus.sim.machine import SimMachine
from stoker.units import format_duration, parse_duration

FaultKind = Literal["lost", "unsupported", "hang", "absurd", "absent", "xid", "ecc"]
FaultField = Literal["utilization", "memory", "power", "processes", "temperature", "memory_activity"]

KINDS: Final[tuple[FaultKind, ...]] = get_args(FaultKind)
FIELDS: Final[tuple[FaultField, ...]] = get_args(FaultField)

LOST: Final = "GPU is lost"
# The XID of a GPU that fell off the bus.
XID_OF_LOST: Final = 79
ABSENT: Final = "the simulated machine has a fault: its GPUs are absent"
UNREADABLE: Final = "the simulated machine's faults.json cannot be read"
# The blank value of drivers, with all bits set.
_BLANK_32: Final = 2**32 - 1
_BLANK_64: Final = 2**64 - 1


class Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """A fault of one GPU or of all."""

    kind: FaultKind
    since: float
    """Monotonic seconds."""
    gpu: int | None = None
    """None for every GPU."""
    field: FaultField | None = None
    """For `unsupported` and `absurd` only."""
    seconds: float | None = None
    """For `hang` only: the duration of every look; None until the fault ends."""
    number: int | None = None
    """For `xid` and `ecc` only: the error or the count."""
    until: float | None = None
    """The end, if it ends by itself."""

    def active(self, now: float) -> bool:
        # A start in the future dates from before a reboot, when the clock restarted.
        return self.since <= now < (math.inf if self.until is None else self.until)

    @property
    def what(self) -> tuple[object, ...]:
        """The identity of the fault, which a machine has at most once. Each XID is a separate event."""
        return self.kind, self.gpu, self.field, self.number if self.kind == "xid" else None

    def touches(self, gpu: int) -> bool:
        return self.gpu is None or self.gpu == gpu

    def __str__(self) -> str:
        what = {
            "lost": "lost",
            "unsupported": f"{self.field} not supported",
            "hang": "every look hangs" + (f" for {format_duration(self.seconds)}" if self.seconds else ""),
            "absurd": f"{self.field} absurd",
            "absent": "absent",
            "xid": f"XID {self.number}",
            "ecc": f"{self.number} uncorrectable memory errors",
        }[self.kind]
        return f"{'every GPU' if self.gpu is None else f'GPU {self.gpu}'}: {what}"


def parse_fault(kind: str, argument: str | None, gpu: int | None, now: float, lasts: float | None) -> Fault:
    """Parses a fault: `lost`, `unsupported power`, `absurd memory`, `hang 30s`, `xid 31`, `absent`."""
    field: FaultField | None = None
    seconds: float | None = None
    number: int | None = None
    match kind:
        case "lost":
            _no_argument(kind, argument)
        case "absent":
            _no_argument(kind, argument)
            if gpu is not None:
                raise BadInputError("absent is a fault of the whole machine: leave --gpu out, or use lost")
        case "hang":
            seconds = None if argument is None else parse_duration(argument)
        case "unsupported" | "absurd":
            field = _field(kind, argument)
        case "xid":
            number = _number("which XID? Write it like xid 79", argument)
        case "ecc":
            number = _number("how many errors? Write it like ecc 2", argument or "1")
        case _:
            raise BadInputError(f"{kind!r} is not a fault: choose {', '.join(KINDS)}")
    return Fault(kind, now, gpu, field, seconds, number, None if lasts is None else now + lasts)


def _no_argument(kind: str, argument: str | None) -> None:
    if argument is not None:
        raise BadInputError(f"{kind} takes no {argument!r}: it is about the GPU as a whole")


def _field(kind: str, argument: str | None) -> FaultField:
    for field in FIELDS:
        if argument == field:
            return field
    raise BadInputError(f"say which field is {kind}: {', '.join(FIELDS)}")


def _number(question: str, argument: str | None) -> int:
    if argument is None or not argument.isascii() or not argument.isdigit():
        raise BadInputError(question)
    return int(argument)


def read_faults(machine: SimMachine, now: float) -> tuple[Fault, ...] | Unknown:
    """The current faults of the machine; unknown if its file is broken."""
    try:
        content = (machine.directory / "faults.json").read_bytes()
    except FileNotFoundError:
        return ()
    except OSError:
        return Unknown(UNREADABLE)
    try:
        faults = msgspec.json.decode(content, type=tuple[Fault, ...])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Unknown(UNREADABLE)
    return tuple(fault for fault in faults if fault.active(now))


def add_fault(machine: SimMachine, fault: Fault) -> None:
    """Adds a fault, which replaces the same earlier one."""
    with machine.locked():
        there = _readable(machine)
        _write(machine, (*(one for one in there if one.what != fault.what), fault))


def clear_faults(machine: SimMachine, kind: str | None = None, gpu: int | None = None) -> tuple[Fault, ...]:
    """Removes all faults, or those of a kind or GPU, and returns them."""
    if kind is not None and kind not in KINDS:
        raise BadInputError(f"{kind!r} is not a fault: choose {', '.join(KINDS)}")
    with machine.locked():
        there = _readable(machine)
        removed = tuple(one for one in there if kind in (None, one.kind) and gpu in (None, one.gpu))
        _write(machine, tuple(one for one in there if one not in removed))
    return removed


def _readable(machine: SimMachine) -> tuple[Fault, ...]:
    faults = read_faults(machine, machine.clock())
    return () if isinstance(faults, Unknown) else faults


def _write(machine: SimMachine, faults: tuple[Fault, ...]) -> None:
    machine.replace(machine.directory / "faults.json", msgspec.json.encode(faults))


def faulty_gpu(gpu: Gpu, faults: tuple[Fault, ...]) -> Gpu:
    """The device as described by a driver with these faults."""
    if any(fault.kind == "unsupported" and fault.field == "memory" for fault in faults if fault.touches(gpu.index)):
        return msgspec.structs.replace(gpu, memory=Unknown(NOT_SUPPORTED))
    return gpu


def faulty_reading(gpu: Gpu, reading: Reading, faults: tuple[Fault, ...]) -> Reading:
    """The reading as given by a driver with these faults."""
    for fault in faults:
        if not fault.touches(gpu.index):
            continue
        if fault.kind == "lost":
            return _lost(reading)
        if fault.kind in ("xid", "ecc"):
            reading = _unhealthy(reading, fault)
        elif fault.kind == "unsupported" and fault.field is not None:
            reading = _without(reading, fault.field)
        elif fault.kind == "absurd" and fault.field is not None:
            reading = _absurd(reading, fault.field)
    return reading


def _lost(reading: Reading) -> Reading:
    """An unreadable GPU whose loss the driver has reported."""
    why = Unknown(LOST)
    before = reading.health.xids if known(reading.health) else ()
    health = DeviceHealth((*before, XID_OF_LOST), why, why, why)
    return msgspec.structs.replace(Reading.unknown(reading.uuid, LOST, span=reading.span), health=health)


def _unhealthy(reading: Reading, fault: Fault) -> Reading:
    if not known(reading.health) or fault.number is None:
        return reading
    health = reading.health
    if fault.kind == "xid":
        health = health._replace(xids=(*health.xids, fault.number))
    else:
        # A reset replaces the affected memory row by a spare one.
        health = health._replace(uncorrected=fault.number, needs_reset=True)
    return msgspec.structs.replace(reading, health=health)


def _without(reading: Reading, field: FaultField) -> Reading:
    why = Unknown(NOT_SUPPORTED)
    replace = msgspec.structs.replace
    match field:
        case "utilization":
            processes = _each(reading.processes, utilization=why)
            return replace(reading, utilization=why, processes=processes)
        case "memory":
            return replace(reading, memory_used=why, memory_total=why, processes=_each(reading.processes, memory=why))
        case "power":
            return replace(reading, power=why, power_limit=why, energy=why)
        case "temperature":
            return replace(reading, temperature=why)
        case "processes":
            return replace(reading, processes=why)
        case "memory_activity":
            return replace(reading, memory_activity=why, processes=_each(reading.processes, memory_activity=why))


def _absurd(reading: Reading, field: FaultField) -> Reading:
    """Blank values, which are rejected like those of a real driver."""
    replace = msgspec.structs.replace
    percent = plausible_fraction(_BLANK_32)
    used = plausible_memory_used(_BLANK_64, reading.memory_total)
    match field:
        case "utilization":
            return replace(reading, utilization=_never(percent))
        case "memory":
            return replace(reading, memory_used=used)
        case "power":
            blank = plausible_watts(_BLANK_32 / 1000)
            return replace(reading, power=blank, energy=_never(blank))
        case "temperature":
            return replace(reading, temperature=plausible_celsius(_BLANK_32))
        case "processes":
            return replace(reading, processes=_each(reading.processes, memory=used, utilization=percent))
        case "memory_activity":
            return replace(reading, memory_activity=_never(percent))


def _never(value: Maybe[float]) -> Unknown:
    """The reason for a value that fails every check."""
    return value if isinstance(value, Unknown) else Unknown("the driver reported a blank value")


def _each(processes: Maybe[tuple[Process, ...]], **changes: Maybe[int] | Maybe[float]) -> Maybe[tuple[Process, ...]]:
    if not known(processes):
        return processes
    return tuple(msgspec.structs.replace(process, **changes) for process in processes)
