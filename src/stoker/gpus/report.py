"""A look as text, and as JSON for other programs (docs/reference/json.md), where null means unknown."""

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from stoker.gpus.model import Gpu, Look, Process, Reading, Unknown, known
from stoker.gpus.nvidia import RESET_XIDS, describe_xid
from stoker.gpus.quarantine import QuarantinedGpu
from stoker.units import format_duration, format_memory, format_percent

GpuActivity = Literal["busy", "idle", "unknown"]

# Drivers count in whole percent.
BUSY_FROM: Final = 0.01


def state_of(reading: Reading) -> tuple[GpuActivity, str]:
    """State and reason. The peak decides, since a short burst is work, too."""
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
    """`alice's python (pid 4242)`, as far as known."""
    owner = f"{process.user}'s " if known(process.user) else ""
    return f"{owner}{process.name if known(process.name) else 'process'} (pid {process.pid})"


def faults_of(reading: Reading) -> list[str]:
    """Descriptions of faults; empty for a healthy GPU and for an unknown one."""
    health = reading.health
    if not known(health):
        return []
    faults = [describe_xid(xid) for xid in dict.fromkeys(health.xids)]
    if known(health.uncorrected) and health.uncorrected:
        errors = "error" if health.uncorrected == 1 else "errors"
        faults.append(f"{health.uncorrected} uncorrectable memory {errors}")
    if health.needs_reset is True or not RESET_XIDS.isdisjoint(health.xids):
        faults.append("needs a reset")
    if health.remapping_failed is True:
        faults.append("has no spare memory rows left: replace it")
    return faults


def title(gpu: Gpu) -> str:
    return gpu.name if known(gpu.name) else gpu.uuid


def look_as_json(look: Look, quarantined: Mapping[str, QuarantinedGpu] = {}) -> bytes:
    """A list of objects, one per GPU, indented for people."""
    return msgspec.json.format(msgspec.json.encode(gpus_of(look, quarantined)), indent=2)


def look_as_line(look: Look, quarantined: Mapping[str, QuarantinedGpu] = {}) -> bytes:
    """One line with time, source and the same list."""
    gpus = gpus_of(look, quarantined)
    return msgspec.json.encode({"time": round(look.wall, 3), "source": look.source, "gpus": gpus})


def gpus_of(look: Look, quarantined: Mapping[str, QuarantinedGpu] = {}) -> list[dict[str, Any]]:
    """One object per GPU. An unreadable machine is one unknown entry, never an empty list.

    An empty list would make "all GPUs are idle" true. `quarantined`: GPUs out of rotation, by uuid.
    """
    if look.problem and not look.gpus:
        why = look.problem
        nothing = Gpu(uuid="", index=-1, name=why, vendor="", minor=why, memory=why, bus=why)
        entry = _entry(nothing, Reading.unknown("", why.reason), None)
        return [{**entry, "index": None, "uuid": None, "vendor": None}]
    return [
        _entry(gpu, reading, quarantined.get(gpu.uuid)) for gpu, reading in zip(look.gpus, look.readings, strict=True)
    ]


def _entry(gpu: Gpu, reading: Reading, quarantine: QuarantinedGpu | None) -> dict[str, Any]:
    state, reason = state_of(reading)
    utilization = reading.utilization
    activity = reading.memory_activity
    return {
        "index": gpu.index,
        "uuid": gpu.uuid,
        "name": _or_null(gpu.name),
        "vendor": gpu.vendor,
        "minor": _or_null(gpu.minor),
        "parent": gpu.parent,
        "links": dict(gpu.links),
        "state": state,
        "reason": reason,
        "utilization": utilization.mean if known(utilization) else None,
        "utilization_peak": utilization.peak if known(utilization) else None,
        "utilization_samples": utilization.samples if known(utilization) else None,
        "memory_activity": activity.mean if known(activity) else None,
        "memory_activity_peak": activity.peak if known(activity) else None,
        "seconds": round(reading.span, 3),
        "memory_used": _or_null(reading.memory_used),
        "memory_total": _or_null(reading.memory_total),
        "power_watts": _or_null(reading.power),
        "power_limit_watts": _or_null(reading.power_limit),
        "energy_joules": _or_null(reading.energy),
        "temperature_celsius": _or_null(reading.temperature),
        "sm_clock_mhz": _or_null(reading.sm_clock),
        "throttling": _or_null(reading.throttling),
        "faults": faults_of(reading),
        "quarantine": None if quarantine is None else {"reason": quarantine.reason, "since": quarantine.since},
        "health": _health(reading),
        "processes": [_process(p) for p in reading.processes] if known(reading.processes) else None,
        "pipes": _pipes(reading),
        "unknown": _reasons(gpu, reading),
    }


def _process(process: Process) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "name": _or_null(process.name),
        "user": _or_null(process.user),
        "memory": _or_null(process.memory),
        "utilization": _or_null(process.utilization),
        "memory_activity": _or_null(process.memory_activity),
        "started": _or_null(process.started),
    }


def _pipes(reading: Reading) -> dict[str, float | None] | None:
    pipes = reading.pipes
    if not known(pipes):
        return None
    return {name: _or_null(value) for name, value in pipes._asdict().items()}


def _health(reading: Reading) -> dict[str, Any] | None:
    health = reading.health
    if not known(health):
        return None
    return {name: _or_null(value) for name, value in health._asdict().items()}


def _reasons(gpu: Gpu, reading: Reading) -> dict[str, str]:
    """The reasons for null values."""
    fields = {
        "name": gpu.name,
        "minor": gpu.minor,
        "utilization": reading.utilization,
        "memory_used": reading.memory_used,
        "memory_total": reading.memory_total,
        "power_watts": reading.power,
        "power_limit_watts": reading.power_limit,
        "energy_joules": reading.energy,
        "temperature_celsius": reading.temperature,
        "memory_activity": reading.memory_activity,
        "sm_clock_mhz": reading.sm_clock,
        "throttling": reading.throttling,
        "health": reading.health,
        "processes": reading.processes,
        "pipes": reading.pipes,
    }
    return {name: value.reason for name, value in fields.items() if isinstance(value, Unknown)}


def _or_null(value: Any) -> Any:
    return None if isinstance(value, Unknown) else value
