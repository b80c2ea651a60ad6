"""The memory that a `MockMachine` and the C library share: one file, mapped by both.

The C declarations are generated from these classes, so the two sides cannot drift apart. Writers take no
lock: what must change as a whole is either a slot with a word that is written last, or a pair of which one is
in use.
"""

import ctypes
from collections.abc import Iterator
from typing import Any, Final

MAGIC: Final = 0x4C4D564E4B434F4D
DEVICES: Final = 32
"""Physical GPUs and MIG devices together."""
FUNCTIONS: Final = 640
"""Room for every symbol that nvidia-ml-py names (408 in 13.615) to grow."""
FAULTS: Final = 32
HANGS: Final = 32
PROCESSES: Final = 64
RING: Final = 128
EVENTS: Final = 64
GPM_METRICS: Final = 64
"""Metric ids below this one can be given a value."""

NVLINK: Final = 1
"""In the matrix of `links`. Other values are levels of nvmlGpuTopologyLevel_t, and 0 stands for the system."""

PHYSICAL: Final = -1
"""The `parent` of a device that is not a MIG device."""
EVERY_DEVICE: Final = -1
EVERY_FUNCTION: Final = -1
NOT_AVAILABLE: Final = 2**64 - 1
"""What NVML says for the memory of a process when it is unknown."""
NO_INSTANCE: Final = 2**32 - 1
"""What NVML says for the GPU and compute instance of a process when there is no MIG."""

FREE, FIXED, FRESH = 0, 1, 2
"""Whether a slot is in use; for a process's utilization also whether its time is the stored one or now."""


class Process(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_uint64),
        ("pid", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("gpu_instance", ctypes.c_uint32),
        ("compute_instance", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
    )


class ProcessUtilization(ctypes.Structure):
    _fields_ = (
        ("timestamp", ctypes.c_uint64),
        ("pid", ctypes.c_uint32),
        ("sm", ctypes.c_uint32),
        ("memory", ctypes.c_uint32),
        ("encoder", ctypes.c_uint32),
        ("decoder", ctypes.c_uint32),
        ("slot", ctypes.c_uint32),
    )


class Sample(ctypes.Structure):
    _fields_ = (("timestamp", ctypes.c_uint64), ("value", ctypes.c_uint64))


class Ring(ctypes.Structure):
    """Driver samples, oldest first."""

    _fields_ = (("count", ctypes.c_uint32), ("samples", Sample * RING))


class Meter(ctypes.Structure):
    """The power now drawn, and the energy that had been used when that began."""

    _fields_ = (
        ("energy_mj", ctypes.c_uint64),
        ("since_us", ctypes.c_uint64),
        ("power_mw", ctypes.c_uint32),
        ("integrates", ctypes.c_uint32),
    )


class Device(ctypes.Structure):
    _fields_ = (
        ("uuid", ctypes.c_char * 96),
        ("name", ctypes.c_char * 96),
        ("pci_bus_id", ctypes.c_char * 32),
        ("memory_total", ctypes.c_uint64),
        ("memory_used", ctypes.c_uint64),
        ("memory_reserved", ctypes.c_uint64),
        ("memory_free", ctypes.c_uint64),
        ("index", ctypes.c_uint32),
        ("minor_number", ctypes.c_uint32),
        ("parent", ctypes.c_int32),
        ("mig_mode", ctypes.c_uint32),
        ("gpu_instance", ctypes.c_uint32),
        ("compute_instance", ctypes.c_uint32),
        ("utilization", ctypes.c_uint32),
        ("memory_utilization", ctypes.c_uint32),
        ("temperature", ctypes.c_int32),
        ("sm_clock", ctypes.c_uint32),
        ("throttling", ctypes.c_uint64),
        ("uncorrected_errors", ctypes.c_uint64),
        ("rows_pending", ctypes.c_uint32),
        ("rows_failed", ctypes.c_uint32),
        ("pages_pending", ctypes.c_uint32),
        ("enforced_limit_mw", ctypes.c_uint32),
        ("management_limit_mw", ctypes.c_uint32),
        ("samples_mode", ctypes.c_uint32),
        ("gpm_supported", ctypes.c_uint32),
        ("meter_in_use", ctypes.c_uint32),
        ("ring_in_use", ctypes.c_uint32),
        ("memory_ring_in_use", ctypes.c_uint32),
        ("gpm", ctypes.c_double * GPM_METRICS),
        ("meters", Meter * 2),
        ("rings", Ring * 2),
        ("memory_rings", Ring * 2),
        ("processes", Process * PROCESSES),
        ("utilizations", ProcessUtilization * PROCESSES),
    )


class Fault(ctypes.Structure):
    """What goes wrong in a function. A `serial` of 0 is a free slot; once it changes, hanging calls go on."""

    _fields_ = (
        ("serial", ctypes.c_uint32),
        ("function", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("hang_ms", ctypes.c_uint32),
        ("calls_before", ctypes.c_int32),
        ("calls_left", ctypes.c_int32),
    )


class Event(ctypes.Structure):
    """An XID error of a device."""

    _fields_ = (
        ("xid", ctypes.c_uint64),
        ("device", ctypes.c_int32),
        ("gpu_instance", ctypes.c_uint32),
    )


class State(ctypes.Structure):
    """The whole file. `hangs` has the process of each call that hangs now: believe it only while that runs."""

    _fields_ = (
        ("magic", ctypes.c_uint64),
        ("fingerprint", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("driver_version", ctypes.c_char * 80),
        ("nvml_version", ctypes.c_char * 80),
        ("cuda_version", ctypes.c_int32),
        ("init_error", ctypes.c_int32),
        ("device_count", ctypes.c_uint32),
        ("entry_count", ctypes.c_uint32),
        ("fault_count", ctypes.c_uint32),
        ("fault_serial", ctypes.c_uint32),
        ("max_in_flight", ctypes.c_uint32),
        ("event_count", ctypes.c_uint32),
        ("events", Event * EVENTS),
        ("faults", Fault * FAULTS),
        ("hangs", ctypes.c_int32 * HANGS),
        ("calls", ctypes.c_uint64 * FUNCTIONS),
        ("devices", Device * DEVICES),
        ("links", ctypes.c_uint32 * (DEVICES * DEVICES)),
    )


STRUCTURES: Final = (Process, ProcessUtilization, Sample, Ring, Meter, Device, Fault, Event, State)

C_TYPES: Final = {
    ctypes.c_char: "char",
    ctypes.c_int32: "int32_t",
    ctypes.c_uint32: "uint32_t",
    ctypes.c_uint64: "uint64_t",
    ctypes.c_double: "double",
}


def c_declarations() -> str:
    """The same structures in C, each with an assertion that it has the size that it has here."""
    return "\n".join(line for structure in STRUCTURES for line in _c_structure(structure))


def _c_structure(structure: type[ctypes.Structure]) -> Iterator[str]:
    name = structure.__name__
    yield "typedef struct {"
    for field, kind, *_ in structure._fields_:
        if issubclass(kind, ctypes.Array):
            yield f"    {_c_name(kind._type_)} {field}[{kind._length_}];"
        else:
            yield f"    {_c_name(kind)} {field};"
    yield f"}} {name};"
    yield f'_Static_assert(sizeof({name}) == {ctypes.sizeof(structure)}, "{name} differs from Python");'


def _c_name(kind: Any) -> str:
    return C_TYPES[kind] if kind in C_TYPES else str(kind.__name__)
