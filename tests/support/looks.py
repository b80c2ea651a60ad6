"""Gpus, readings and looks made by hand."""

from typing import Any

import msgspec

from stoker.gpus.model import Gpu, Look, Maybe, Process, Reading, Unknown, Utilization

GIB = 2**30


def a_gpu(index: int = 0, **changes: Any) -> Gpu:
    gpu = Gpu(f"GPU-{index:08d}", index, "Test GPU", "nvidia", index + 2, 80 * GIB, f"0000:{index:02x}:00.0")
    return msgspec.structs.replace(gpu, **changes)


def a_process(pid: int = 4242, **changes: Any) -> Process:
    return msgspec.structs.replace(Process(pid, 77, "python", "alice", 8 * GIB, 0.5), **changes)


def a_reading(gpu: Gpu | None = None, utilization: Maybe[float] = 0.0, *, span: float = 1.0, **changes: Any) -> Reading:
    used = utilization if isinstance(utilization, Unknown) else Utilization(utilization, utilization, 6)
    reading = Reading(
        uuid=(gpu or a_gpu()).uuid,
        span=span,
        utilization=used,
        memory_used=GIB,
        memory_total=80 * GIB,
        power=100.0,
        power_limit=700.0,
        energy=5000.0,
        temperature=40.0,
        processes=(),
        pipes=Unknown("only Hopper and newer GPUs tell"),
    )
    return msgspec.structs.replace(reading, **changes)


def a_look(
    *utilizations: Maybe[float],
    at: float = 100.0,
    wall: float = 1_790_000_000.0,
    span: float = 1.0,
    **changes: Any,
) -> Look:
    """A look at one GPU for each utilization given."""
    gpus = tuple(a_gpu(index) for index in range(len(utilizations)))
    readings = tuple(a_reading(gpu, used, span=span) for gpu, used in zip(gpus, utilizations, strict=True))
    return msgspec.structs.replace(Look("test", at, wall, gpus, readings), **changes)
