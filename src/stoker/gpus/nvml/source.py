"""The `nvml` source: all NVIDIA devices of the machine, initialized once and read at every look."""

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import pynvml

from stoker.gpus.model import Gpu, Link, Look, Reading, Unknown, known
from stoker.gpus.nvml import library
from stoker.gpus.nvml.device import Device, DeviceFunctions
from stoker.gpus.nvml.gpm import GpmMeter
from stoker.gpus.nvml.health import XidEvents
from stoker.gpus.nvml.processes import ProcessLists
from stoker.gpus.processes import ProcessCache
from stoker.gpus.source import AbsentError, Source

Answer = TypeVar("Answer")

# A failed initialization is retried at this interval, since each try can take seconds on a sick driver.
_RETRY_EVERY: Final = 5.0


class _LostDevice:
    """A device without a handle, which stays in the list with the reason."""

    def __init__(self, gpu: Gpu, place: int, why: str) -> None:
        self.gpu = gpu
        self.place = place
        self._why = why

    def read(self, at: float, wall: float) -> Reading:  # noqa: ARG002 - the signature of Device.read
        return Reading.unknown(self.gpu.uuid, self._why)

    def close(self) -> None:
        pass


class NvmlSource:
    """If NVML cannot be initialized, the GPUs come from the kernel, all unknown, until NVML answers."""

    name = "nvml"

    def __init__(self, root: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._monotonic = monotonic
        self._process_cache = ProcessCache(root)
        self._devices: tuple[Device | _LostDevice, ...] = ()
        self._events: XidEvents | None = None
        self._gpus: tuple[Gpu, ...] = ()
        self._lost_places: tuple[int, ...] = ()
        self._problem: Unknown | None = None
        self._tried_at = monotonic()
        self._initialise()

    def look(self) -> Look:
        at, wall = self._monotonic(), time.time()
        if self._problem and at - self._tried_at >= _RETRY_EVERY:
            self._tried_at = at
            self._initialise_again()
        if self._problem:
            readings = tuple(Reading.unknown(gpu.uuid, self._problem.reason) for gpu in self._gpus)
            return Look(self.name, at, wall, self._gpus, readings, problem=self._problem)
        if self._lost_places and at - self._tried_at >= _RETRY_EVERY:
            self._tried_at = at
            self._reopen_lost()
        self._process_cache.refresh()
        if self._events:
            self._events.collect()
        readings = tuple([device.read(at, wall) for device in self._devices])
        return Look(self.name, at, wall, self._gpus, readings, note=self._process_cache.note)

    def _close_devices(self) -> None:
        for device in self._devices:
            device.close()
        if self._events:
            self._events.close()

    def _reopen_lost(self) -> None:
        """Reopens all devices when a GPU that was lost at the start answers."""
        for place in self._lost_places:
            try:
                pynvml.nvmlDeviceGetHandleByIndex(place)
            except pynvml.NVMLError:
                continue
            self._close_devices()
            self._initialise_again()
            return

    def _initialise_again(self) -> None:
        with contextlib.suppress(AbsentError):  # the driver was unloaded; known GPUs stay in the list as unknown
            self._initialise()

    def _initialise(self) -> None:
        try:
            pynvml.nvmlInit()
            self._events = XidEvents()
            self._devices = tuple(self._open_devices(self._events))
        except pynvml.NVMLError as error:
            if error.value in library.NOTHING_HERE:
                raise AbsentError(_absence(error.value, self._root)) from None
            self._problem = library.unknown(error.value)
            self._gpus = self._gpus or gpus_of_kernel(self._root)
            return
        if not self._devices:
            raise AbsentError("the NVIDIA driver is loaded but knows no GPU")
        self._gpus = tuple(_with_links(self._devices))
        self._lost_places = tuple(device.place for device in self._devices if isinstance(device, _LostDevice))
        self._problem = None

    def _open_devices(self, events: XidEvents) -> Iterator[Device | _LostDevice]:
        functions = DeviceFunctions()
        processes = ProcessLists(self._process_cache)
        index = 0
        for place in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(place)
                uuid = pynvml.nvmlDeviceGetUUID(handle)
            except pynvml.NVMLError as error:
                yield self._lost(place, index, error)
                index += 1
                continue
            slices = list(_mig_slices(handle))
            if not slices:
                meter = GpmMeter.where_offered(handle)
                gpu = _describe(handle, handle, uuid, index, parent=None)
                device = Device(gpu, handle, handle, functions, processes, meter)
                events.register(handle, device.health)
                yield device
                index += 1
            # A GPU with MIG slices runs nothing itself, so its slices are the devices.
            for part in slices:
                gpu = _describe(part, handle, pynvml.nvmlDeviceGetUUID(part), index, parent=uuid)
                instance = _ask(pynvml.nvmlDeviceGetGpuInstanceId, part)
                meter = GpmMeter.where_offered(handle, instance) if known(instance) else None
                device = Device(gpu, part, handle, functions, processes, meter)
                events.register(handle, device.health, instance if known(instance) else None)
                yield device
                index += 1

    def _lost(self, place: int, index: int, error: Any) -> _LostDevice:
        of_kernel = gpus_of_kernel(self._root)
        why = library.unknown(error.value)
        if place < len(of_kernel):
            known_gpu = of_kernel[place]
            gpu = Gpu(known_gpu.uuid, index, known_gpu.name, "nvidia", known_gpu.minor, why, known_gpu.bus)
        else:
            gpu = Gpu(f"GPU-lost-{place}", index, why, "nvidia", why, why, why)
        return _LostDevice(gpu, place, why.reason)

    def close(self) -> None:
        self._process_cache.close()
        self._close_devices()
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def open_source(root: Path = Path("/"), argument: str = "") -> Source:  # noqa: ARG001 - the signature of a source's factory
    return NvmlSource(root)


def _absence(code: int, root: Path) -> str:
    if there := gpus_of_kernel(root):
        return (
            f"{library.reason(code)}, though the kernel has {len(there)} NVIDIA GPU(s): install the NVIDIA driver's "
            "library or give the container access to it"
        )
    return library.reason(code)


def _mig_slices(handle: object) -> Iterator[Any]:
    """The MIG devices of a GPU; none if MIG is off or unsupported."""
    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(handle)
        if current != pynvml.NVML_DEVICE_MIG_ENABLE:
            return
        for place in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(pynvml.NVMLError_NotFound):
                yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
    except pynvml.NVMLError:
        return


def _describe(handle: object, physical: object, uuid: str, index: int, *, parent: str | None) -> Gpu:
    memory = _ask(lambda device: int(pynvml.nvmlDeviceGetMemoryInfo(device).total), handle)
    bus = _ask(lambda device: str(pynvml.nvmlDeviceGetPciInfo(device).busId), physical)
    return Gpu(
        uuid=uuid,
        index=index,
        name=_ask(pynvml.nvmlDeviceGetName, handle),
        vendor="nvidia",
        minor=_ask(pynvml.nvmlDeviceGetMinorNumber, physical),
        memory=memory,
        # NVML pads the PCI domain to eight digits, the kernel to four.
        bus=bus[-12:].lower() if known(bus) else bus,
        parent=parent,
    )


# Kinds of links by the highest level of nvmlGpuTopologyLevel_t.
_LEVELS: Final[tuple[tuple[int, Link], ...]] = (
    (pynvml.NVML_TOPOLOGY_MULTIPLE, "switch"),
    (pynvml.NVML_TOPOLOGY_NODE, "node"),
    (pynvml.NVML_TOPOLOGY_SYSTEM, "system"),
)


def _with_links(devices: Sequence[Device | _LostDevice]) -> Iterator[Gpu]:
    """The GPUs with their links. MIG slices have none, since they cannot reach each other."""
    whole = [device for device in devices if isinstance(device, Device) and device.gpu.parent is None]
    links: dict[str, list[tuple[str, Link]]] = {device.gpu.uuid: [] for device in devices}
    read = _LinkFunctions()
    for first, second in combinations(whole, 2):
        if (link := read.between(first.board, second.board)) is not None:
            links[first.gpu.uuid].append((second.gpu.uuid, link))
            links[second.gpu.uuid].append((first.gpu.uuid, link))
    for device in devices:
        yield msgspec.structs.replace(device.gpu, links=tuple(links[device.gpu.uuid]))


class _LinkFunctions:
    """Queries the link of each pair of GPUs once, since links do not change while the driver is loaded."""

    def __init__(self) -> None:
        self._get_status = library.function("nvmlDeviceGetP2PStatus")
        self._get_ancestor = library.function("nvmlDeviceGetTopologyCommonAncestor")
        self._number = ctypes.c_uint()

    def between(self, first: object, second: object) -> Link | None:
        """The link; None if the driver does not report it."""
        if self._has_nvlink(first, second):
            return "nvlink"
        if self._get_ancestor(first, second, ctypes.byref(self._number)) != library.SUCCESS:
            return None
        return next((link for level, link in _LEVELS if self._number.value <= level), None)

    def _has_nvlink(self, first: object, second: object) -> bool:
        """True for a direct NVLink or NVSwitch, as `nvidia-smi topo -p2p n` shows by OK."""
        code = self._get_status(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK, ctypes.byref(self._number))
        return code == library.SUCCESS and self._number.value == pynvml.NVML_P2P_STATUS_OK


def _ask(call: Callable[[Any], Answer], handle: object) -> Answer | Unknown:
    try:
        return call(handle)
    except pynvml.NVMLError as error:
        return library.unknown(error.value)


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
    unreported = Unknown("the kernel driver does not report it")
    uuid = facts.get("GPU UUID", "")
    return Gpu(
        # An uninitialized GPU has question marks in its uuid.
        uuid=uuid if uuid.startswith("GPU-") and "?" not in uuid else f"PCI-{bus}",
        index=place,
        name=facts.get("Model") or unreported,
        vendor="nvidia",
        minor=int(facts["Device Minor"]) if facts.get("Device Minor", "").isdigit() else unreported,
        memory=unreported,
        bus=bus,
    )
