"""Which GPUs are meant: by a program's environment, as CUDA and ROCm read it, and by what a person typed."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from stoker.errors import BadInputError
from stoker.gpus.model import Gpu, Vendor

# CUDA reads a number off the front of an entry and does not mind what follows it.
_CUDA_NUMBER: Final = re.compile(r"[+-]?[0-9]+")
_HIP_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,8}")
_INDEX: Final = re.compile(r"[0-9]{1,9}")
_RANGE: Final = re.compile(r"([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?")
# ROCm wants at least one digit of a uuid after its "GPU-".
_SHORTEST_ROCM_UUID: Final = 5


def visible_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    """The GPUs of this machine that a program with this environment would see, in the order in which it would.

    Numbers in these variables count in PCI order here, as with CUDA_DEVICE_ORDER=PCI_BUS_ID: CUDA's default puts
    the fastest first, which nobody outside the program can know on a machine with different GPUs.
    """
    seen: list[Gpu] = []
    for vendor in dict.fromkeys(gpu.vendor for gpu in gpus):
        own = sorted((gpu for gpu in gpus if gpu.vendor == vendor), key=lambda gpu: gpu.index)
        if vendor == "amd":
            seen += _seen_by_hip(_seen_by_rocr(own, environment), environment)
        elif vendor == "intel":
            seen += own
        else:
            seen += _seen_by_cuda(own, environment.get("CUDA_VISIBLE_DEVICES"))
    return tuple(seen)


def select_gpus(gpus: Sequence[Gpu], text: str) -> tuple[Gpu, ...]:
    """The GPUs that a person meant by `all`, `0,2`, `0-3`, a uuid or the beginning of one, in the order typed."""
    if text.strip().lower() == "all":
        return tuple(gpus)
    chosen: dict[str, Gpu] = {}
    for entry in text.split(","):
        chosen |= {gpu.uuid: gpu for gpu in _meant(gpus, entry.strip())}
    return tuple(chosen.values())


class _Physical(NamedTuple):
    """A GPU as CUDA counts them: itself, or the MIG slices that it was cut into."""

    uuid: str
    devices: list[Gpu]


def _physical(gpus: Sequence[Gpu]) -> list[_Physical]:
    groups: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        groups.setdefault(gpu.parent or gpu.uuid, []).append(gpu)
    # Where the cut GPU is listed beside its slices, only the slices can be used.
    return [_Physical(uuid, [gpu for gpu in group if gpu.parent] or group) for uuid, group in groups.items()]


def _seen_by_cuda(gpus: Sequence[Gpu], variable: str | None) -> Sequence[Gpu]:
    physical = _physical(gpus)
    if variable is None:
        chosen: Sequence[Gpu] = [each.devices[0] for each in physical]
    else:
        chosen = _chosen_by_cuda(physical, variable.split(","))
    slices = [gpu for gpu in chosen if gpu.parent]
    # A program sees one MIG slice at the most, and no other GPU beside it.
    return slices[:1] or chosen


def _chosen_by_cuda(physical: Sequence[_Physical], entries: Sequence[str]) -> Sequence[Gpu]:
    """The valid entries before the first invalid one; none at all when a GPU is named twice."""
    chosen: list[Gpu] = []
    find: Callable[[Sequence[_Physical], str], Gpu | None] | None = None
    for entry in entries:
        # The first entry decides: to numbers a uuid is invalid, and the other way round.
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
    # Ten digits are no GPU's number, and thousands of them are more than Python cares to convert.
    number = int(match[0]) if match and len(match[0]) < 10 else -1
    return physical[number].devices[0] if 0 <= number < len(physical) else None


def _cuda_uuid(physical: Sequence[_Physical], entry: str) -> Gpu | None:
    """The one GPU or MIG slice whose uuid begins like this."""
    by_uuid = {each.uuid: each.devices[0] for each in physical}
    by_uuid |= {gpu.uuid: gpu for each in physical for gpu in each.devices}
    if entry in by_uuid:
        return by_uuid[entry]
    alike = [gpu for uuid, gpu in by_uuid.items() if "-" in entry and uuid.startswith(entry)]
    return alike[0] if len(alike) == 1 else None


def _seen_by_rocr(gpus: Sequence[Gpu], environment: Mapping[str, str]) -> Sequence[Gpu]:
    """ROCm's runtime takes numbers and uuids mixed, up to the first that is invalid or named twice."""
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
    """HIP chooses among what the runtime left. To it an empty variable is an unset one, and twice is once."""
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
    """The GPU with this uuid, or all slices of the GPU with this uuid."""
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


# All that chooses among GPUs. HIP and its older name choose among what ROCR left over, so they would choose twice.
_CHOOSING: Final = (
    "CUDA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "GPU_DEVICE_ORDINAL",
    "ZE_AFFINITY_MASK",
)
_VARIABLES: Final[Mapping[Vendor, str]] = {
    "nvidia": "CUDA_VISIBLE_DEVICES",
    "sim": "CUDA_VISIBLE_DEVICES",
    "amd": "ROCR_VISIBLE_DEVICES",
    "intel": "ZE_AFFINITY_MASK",
}


def set_visible_gpus(environment: dict[str, str], gpus: Sequence[Gpu], present: Sequence[Gpu]) -> None:
    """Lets a program see these GPUs. What it chose itself does not count: it may be somebody else's.

    `present`: all GPUs of the machine, for those that can be named by their place among them only.
    """
    for name in _CHOOSING:
        environment.pop(name, None)
    named: dict[str, list[str]] = {}
    for gpu in sorted(gpus, key=lambda gpu: gpu.index):
        named.setdefault(_VARIABLES[gpu.vendor], []).append(_name(gpu, present))
    environment |= {variable: ",".join(names) for variable, names in named.items()}


def _name(gpu: Gpu, present: Sequence[Gpu]) -> str:
    """How the vendor's library is told of a GPU: by uuid, or by its number where that has none or takes none."""
    if gpu.vendor in ("nvidia", "sim") or (gpu.vendor == "amd" and gpu.uuid.startswith("GPU-")):
        return gpu.uuid
    alike = sorted(other.index for other in present if other.vendor == gpu.vendor)
    return str(alike.index(gpu.index) if gpu.index in alike else gpu.index)
