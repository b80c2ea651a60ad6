"""The NVIDIA GPUs that the kernel driver knows, read from /proc: it answers even when NVML does not."""

import contextlib
from pathlib import Path

from stoker.gpus.model import Gpu, Unknown


def gpus_of_kernel(root: Path) -> tuple[Gpu, ...]:
    """Every GPU under /proc/driver/nvidia/gpus, in PCI order, which is NVML's."""
    directory = root / "proc/driver/nvidia/gpus"
    found: list[Gpu] = []
    with contextlib.suppress(OSError):
        for place, bus in enumerate(sorted(entry.name for entry in directory.iterdir())):
            found.append(_gpu(place, bus, directory / bus / "information"))
    return tuple(found)


def _gpu(place: int, bus: str, information: Path) -> Gpu:
    facts: dict[str, str] = {}
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in information.read_text().splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
    untold = Unknown("the kernel driver does not tell")
    uuid = facts.get("GPU UUID", "")
    return Gpu(
        # An uninitialised GPU has question marks for a uuid.
        uuid=uuid if uuid.startswith("GPU-") and "?" not in uuid else f"PCI-{bus}",
        index=place,
        name=facts.get("Model") or untold,
        vendor="nvidia",
        minor=int(facts["Device Minor"]) if facts.get("Device Minor", "").isdigit() else untold,
        memory=untold,
        bus=bus,
    )
