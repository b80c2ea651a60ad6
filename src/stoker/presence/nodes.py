"""The device nodes that stand for each GPU, and what makes two nodes the same."""

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeAlias

from stoker.gpus.cards import address_of
from stoker.gpus.model import Gpu, known

NodeId: TypeAlias = tuple[int, int]

# No file system has this number: what it stands beside is a device number.
_DEVICE: Final = -1
_DRM_NODE: Final = re.compile(r"(?:card|renderD)[0-9]{1,9}")


def device_nodes(gpus: Sequence[Gpu], root: Path) -> dict[str, tuple[Path, ...]]:
    """The nodes of each GPU by its uuid; none where it cannot be told which they are.

    Slices of one GPU have its node in common: whoever opens it may be on any of them. NVIDIA's node is named even
    when it is not there yet, since the driver makes it at first use.
    """
    drm = _drm_nodes(root)
    minors = {gpu.uuid: gpu.minor for gpu in gpus}
    nodes: dict[str, tuple[Path, ...]] = {}
    for gpu in gpus:
        if gpu.vendor in ("amd", "intel"):
            nodes[gpu.uuid] = drm.get(gpu.bus.lower(), ()) if known(gpu.bus) else ()
            continue
        minor = gpu.minor
        if not known(minor) and gpu.parent in minors:
            minor = minors[gpu.parent]
        node = root / f"dev/nvidia{minor}"
        nodes[gpu.uuid] = (node,) if known(minor) and (gpu.vendor == "nvidia" or node.exists()) else ()
    return nodes


def identity(found: os.stat_result) -> NodeId:
    """What two nodes have in common when they are one device: its number, since a container has nodes of its own."""
    if stat.S_ISCHR(found.st_mode):
        return (_DEVICE, found.st_rdev)
    return (found.st_dev, found.st_ino)


def _drm_nodes(root: Path) -> dict[str, tuple[Path, ...]]:
    """The nodes in /dev/dri by PCI address, as sysfs knows them."""
    nodes: dict[str, tuple[Path, ...]] = {}
    for device in (root / "sys/class/drm").glob("card*/device"):
        address = address_of(device)
        if address is not None:
            # Beside the nodes, older kernels list control nodes, which no program opens.
            names = sorted(path.name for path in device.glob("drm/*") if _DRM_NODE.fullmatch(path.name))
            nodes[address] = tuple(root / "dev/dri" / name for name in names)
    return nodes
