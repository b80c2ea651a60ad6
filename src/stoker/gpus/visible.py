"""The GPUs that are visible to a program, and those selected by a person.

A `Vendor` knows the environment variables that select its GPUs, and their device nodes. A new vendor is a `Vendor` in
the list at the end of this file, or a call of `register_vendor`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from stoker.errors import BadInputError
from stoker.gpus.model import Gpu, known

# CUDA reads a number at the start of an entry and ignores the rest.
_CUDA_NUMBER: Final = re.compile(r"[+-]?[0-9]+")
_HIP_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,8}")
_INDEX: Final = re.compile(r"[0-9]{1,9}")
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?")
# ROCm requires at least one digit of a uuid after "GPU-".
_SHORTEST_ROCM_UUID: Final = 5


def _every_gpu(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Sequence[Gpu]:  # noqa: ARG001 - one of the signatures of Vendor
    return gpus


def _position(gpu: Gpu, present: Sequence[Gpu]) -> str:
    """The index of a GPU among those of its vendor."""
    alike = sorted(other.index for other in present if other.vendor == gpu.vendor)
    return str(alike.index(gpu.index) if gpu.index in alike else gpu.index)


def _no_node(gpu: Gpu, present: Sequence[Gpu], root: Path) -> tuple[Path, ...]:  # noqa: ARG001 - one of the signatures of Vendor
    return ()


class Vendor(NamedTuple):
    """The way in which programs find a vendor's GPUs."""

    name: str
    variables: tuple[str, ...] = ()
    """The variables that select GPUs. Stoker sets the first one and removes the others."""
    seen: Callable[[Sequence[Gpu], Mapping[str, str]], Sequence[Gpu]] = _every_gpu
    """Selects the vendor's GPUs, in PCI order, that are visible in an environment."""
    entry: Callable[[Gpu, Sequence[Gpu]], str] = _position
    """The name of a GPU in the first variable, given all GPUs of the machine."""
    nodes: Callable[[Gpu, Sequence[Gpu], Path], tuple[Path, ...]] = _no_node
    """The device nodes of a GPU, given all GPUs and the root directory."""
    hidden_by_empty: bool = True
    """The first variable hides all GPUs if it is empty."""


def register_vendor(vendor: Vendor) -> None:
    """Adds a vendor, or replaces the one with this name."""
    VENDORS[vendor.name] = vendor


def visible_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs that a program with this environment sees, in its order.

    Indices count in PCI order, as with CUDA_DEVICE_ORDER=PCI_BUS_ID. CUDA's default puts the fastest GPU first, which
    is unknown outside the program on a machine with different GPUs.
    """
    seen: list[Gpu] = []
    for name in dict.fromkeys(gpu.vendor for gpu in gpus):
        own = sorted((gpu for gpu in gpus if gpu.vendor == name), key=lambda gpu: gpu.index)
        seen += _vendor(name).seen(own, environment)
    return tuple(seen)


def set_visible_gpus(environment: dict[str, str], gpus: Sequence[Gpu], present: Sequence[Gpu]) -> None:
    """Restricts a program to these GPUs, overriding its environment.

    `present`: all GPUs of the machine, since some are addressed by index only.
    """
    for vendor in VENDORS.values():
        for name in vendor.variables:
            environment.pop(name, None)
    entries: dict[str, list[str]] = {}
    for gpu in sorted(gpus, key=lambda gpu: gpu.index):
        vendor = _vendor(gpu.vendor)
        for variable in vendor.variables[:1]:
            entries.setdefault(variable, []).append(vendor.entry(gpu, present))
    environment |= {variable: ",".join(names) for variable, names in entries.items()}


def hiding_variables() -> tuple[str, ...]:
    """The variables that hide all GPUs of a vendor if they are empty."""
    hiding = (vendor.variables[0] for vendor in VENDORS.values() if vendor.variables and vendor.hidden_by_empty)
    return tuple(dict.fromkeys(hiding))


def device_nodes(gpus: Sequence[Gpu], root: Path) -> dict[str, tuple[Path, ...]]:
    """The device nodes of each GPU by uuid; none if they are unknown."""
    return {gpu.uuid: _vendor(gpu.vendor).nodes(gpu, gpus, root) for gpu in gpus}


def _vendor(name: str) -> Vendor:
    return VENDORS.get(name) or Vendor(name)


def select_gpus(gpus: Sequence[Gpu], text: str) -> tuple[Gpu, ...]:
    """The GPUs selected by `all`, `0,2`, `0-3`, a uuid or a uuid prefix, in the order given."""
    if text.strip().lower() == "all":
        return tuple(gpus)
    chosen: dict[str, Gpu] = {}
    for entry in text.split(","):
        chosen |= {gpu.uuid: gpu for gpu in _meant(gpus, entry.strip())}
    return tuple(chosen.values())


def _meant(gpus: Sequence[Gpu], entry: str) -> Sequence[Gpu]:
    numbers = _RANGE.fullmatch(entry)
    if not numbers:
        return _meant_by_uuid(gpus, entry)
    first, last = int(numbers[1]), int(numbers[2] or numbers[1])
    if first > last:
        raise BadInputError(f"{entry!r} runs backwards: write {last}-{first}")
    by_index = {gpu.index: gpu for gpu in gpus}
    for index in range(first, last + 1):
        if index not in by_index:
            there = ", ".join(map(str, sorted(by_index))) or "none at all"
            raise BadInputError(f"there is no GPU {index} here: this machine has {there}")
    return [by_index[index] for index in range(first, last + 1)]


def _meant_by_uuid(gpus: Sequence[Gpu], entry: str) -> Sequence[Gpu]:
    """The GPU with this uuid, or all its slices."""
    named: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        if gpu.parent:
            named.setdefault(gpu.parent.lower(), []).append(gpu)
    named |= {gpu.uuid.lower(): [gpu] for gpu in gpus}
    if entry.lower() in named:
        return named[entry.lower()]
    alike = [group for uuid, group in named.items() if entry and uuid.startswith(entry.lower())]
    if len(alike) == 1:
        return alike[0]
    there = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none at all"
    if alike:
        raise BadInputError(f"{entry!r} may be any of {len(alike)} GPUs: this machine has {there}")
    raise BadInputError(f"{entry!r} is no GPU here: write all, 0, 0,2, 0-3 or a uuid; this machine has {there}")


class _Physical(NamedTuple):
    """A GPU as counted by CUDA: itself, or its MIG slices."""

    uuid: str
    devices: list[Gpu]


def _physical(gpus: Sequence[Gpu]) -> list[_Physical]:
    groups: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(gpu.parent or gpu.uuid, []).append(gpu)
    # If a partitioned GPU is listed with its slices, only the slices are usable.
    return [_Physical(uuid, [gpu for gpu in group if gpu.parent] or group) for uuid, group in groups.items()]


def _seen_by_cuda(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Sequence[Gpu]:
    physical = _physical(gpus)
    variable = environment.get("CUDA_VISIBLE_DEVICES")
    if variable is None:
        chosen: Sequence[Gpu] = [each.devices[0] for each in physical]
    else:
        chosen = _chosen_by_cuda(physical, variable.split(","))
    slices = [gpu for gpu in chosen if gpu.parent]
    # A program sees at most one MIG slice, and no other GPU with it.
    return slices[:1] or chosen


def _chosen_by_cuda(physical: Sequence[_Physical], entries: Sequence[str]) -> Sequence[Gpu]:
    """The valid entries before the first invalid one; none if a GPU is named twice."""
    chosen: list[Gpu] = []
    find: Callable[[Sequence[_Physical], str], Gpu | None] | None = None
    for entry in entries:
        # The first entry decides: indices and uuids do not mix.
        find = find or (_cuda_number if _CUDA_NUMBER.match(entry.strip()) else _cuda_uuid)
        gpu = find(physical, entry.strip())
        if gpu is None:
            break
        if gpu in chosen:
            return ()
        chosen.append(gpu)
    return chosen


def _cuda_number(physical: Sequence[_Physical], entry: str) -> Gpu | None:
    match = _CUDA_NUMBER.match(entry)
    # No index has ten digits, and thousands of digits exceed Python's limit.
    number = int(match[0]) if match and len(match[0]) < 10 else -1
    return physical[number].devices[0] if 0 <= number < len(physical) else None


def _cuda_uuid(physical: Sequence[_Physical], entry: str) -> Gpu | None:
    """The single GPU or MIG slice with this uuid prefix."""
    by_uuid = {each.uuid: each.devices[0] for each in physical}
    by_uuid |= {gpu.uuid: gpu for each in physical for gpu in each.devices}
    if entry in by_uuid:
        return by_uuid[entry]
    alike = [gpu for uuid, gpu in by_uuid.items() if "-" in entry and uuid.startswith(entry)]
    return alike[0] if len(alike) == 1 else None


def _seen_by_rocr(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Sequence[Gpu]:
    """ROCm's runtime accepts indices and uuids mixed, up to the first invalid or repeated one."""
    variable = environment.get("ROCR_VISIBLE_DEVICES")
    if variable is None:
        return gpus
    chosen: list[Gpu] = []
    for entry in variable.split(","):
        gpu = _rocr_device(gpus, entry.strip().upper())
        if gpu is None or gpu in chosen:
            break
        chosen.append(gpu)
    return chosen


def _rocr_device(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if _INDEX.fullmatch(entry):
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    alike = [gpu for gpu in gpus if len(entry) >= _SHORTEST_ROCM_UUID and gpu.uuid.upper().startswith(entry)]
    return alike[0] if len(alike) == 1 else None


def _seen_by_hip(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Sequence[Gpu]:
    """HIP selects among the runtime's GPUs. It treats an empty variable as unset, and ignores repetitions."""
    variable = environment.get("HIP_VISIBLE_DEVICES") or environment.get("CUDA_VISIBLE_DEVICES")
    if not variable:
        return gpus
    chosen: dict[str, Gpu] = {}
    for entry in variable.split(","):
        gpu = _hip_device(gpus, entry)
        if gpu is None:
            break
        chosen[gpu.uuid] = gpu
    return list(chosen.values())


def _hip_device(gpus: Sequence[Gpu], entry: str) -> Gpu | None:
    if _HIP_NUMBER.fullmatch(entry):
        return gpus[int(entry)] if int(entry) < len(gpus) else None
    return next((gpu for gpu in gpus if entry.startswith("GPU-") and gpu.uuid.startswith(entry)), None)


def _seen_by_amd(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Sequence[Gpu]:
    return _seen_by_hip(_seen_by_rocr(gpus, environment), environment)


def _uuid(gpu: Gpu, present: Sequence[Gpu]) -> str:  # noqa: ARG001 - one of the signatures of Vendor
    return gpu.uuid


def _rocr_entry(gpu: Gpu, present: Sequence[Gpu]) -> str:
    """ROCm identifies boards with a serial number by uuid, others by index."""
    return gpu.uuid if gpu.uuid.startswith("GPU-") else _position(gpu, present)


def _nvidia_nodes(gpu: Gpu, present: Sequence[Gpu], root: Path) -> tuple[Path, ...]:
    """The node, which MIG slices share. A missing one counts, since the driver creates it at first use."""
    minor = gpu.minor
    if not known(minor):
        minor = next((other.minor for other in present if other.uuid == gpu.parent), minor)
    return (root / f"dev/nvidia{minor}",) if known(minor) else ()


def _simulated_nodes(gpu: Gpu, present: Sequence[Gpu], root: Path) -> tuple[Path, ...]:
    """Simulated GPUs have a node only if a test has created one."""
    return tuple(node for node in _nvidia_nodes(gpu, present, root) if node.exists())


def _drm_nodes(gpu: Gpu, present: Sequence[Gpu], root: Path) -> tuple[Path, ...]:  # noqa: ARG001 - one of the signatures of Vendor
    from stoker.gpus.drm import nodes_at

    return nodes_at(gpu.bus, root) if known(gpu.bus) else ()


# HIP selects among the GPUs that ROCR leaves, by its own variable or CUDA's.
VENDORS: Final[dict[str, Vendor]] = {}
for _each in (
    Vendor("nvidia", ("CUDA_VISIBLE_DEVICES",), _seen_by_cuda, _uuid, _nvidia_nodes),
    Vendor("sim", ("CUDA_VISIBLE_DEVICES",), _seen_by_cuda, _uuid, _simulated_nodes),
    Vendor(
        "amd",
        ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
        _seen_by_amd,
        _rocr_entry,
        _drm_nodes,
    ),
    Vendor("intel", ("ZE_AFFINITY_MASK",), nodes=_drm_nodes, hidden_by_empty=False),
):
    register_vendor(_each)
