"""The other side of `visible`: an environment in which a program sees the GPUs that it is given, and no others."""

from collections.abc import Mapping, Sequence
from typing import Final

from stoker.gpus.model import Gpu, Vendor

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


def give(environment: dict[str, str], gpus: Sequence[Gpu], present: Sequence[Gpu]) -> None:
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
