"""The `drm` source: AMD and Intel GPUs, read from sysfs and from the fdinfo of processes."""

import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Literal, NamedTuple

from stoker.gpus.fdinfo import (
    NEEDS_TWO_LOOKS,
    PCI_ADDRESS,
    ROCM_UNCOUNTED,
    SURELY_BUSY,
    Client,
    EngineCounters,
    EngineUse,
    OpenDevice,
    Survey,
    busiest,
    complaint,
    contents,
    survey,
)
from stoker.gpus.model import (
    NOT_REPORTED,
    NOT_SUPPORTED,
    Gpu,
    Look,
    Maybe,
    Process,
    Reading,
    Unknown,
    Utilization,
    known,
    plausible_celsius,
    plausible_fraction,
    plausible_megahertz,
    plausible_memory_total,
    plausible_memory_used,
    plausible_watts,
)
from stoker.gpus.processes import ProcessCache
from stoker.gpus.source import AbsentError

GONE: Final = "the GPU is no longer there"
INTEL_MEMORY: Final = "not reported by the i915/xe driver"

_VENDORS: Final[dict[str, Literal["amd", "intel"]]] = {"0x1002": "amd", "0x8086": "intel"}
_DEVICE_NODE: Final = re.compile(r"(?:card|renderD)[0-9]{1,9}")
_KINDS: Final = {"amd": "AMD GPU", "intel": "Intel GPU"}


class Card(NamedTuple):
    """One GPU with its directory in sysfs."""

    number: int
    vendor: Literal["amd", "intel"]
    address: str
    device: Path


def find_cards(root: Path) -> tuple[Card, ...]:
    """The AMD and Intel GPUs by PCI address. Cards without an address have no identity and are left out."""
    directory = root / "sys/class/drm"
    try:
        names = [entry.name for entry in directory.iterdir()]
    except FileNotFoundError:
        raise AbsentError("no graphics driver is loaded: /sys/class/drm is not there") from None
    except OSError as error:
        raise AbsentError(f"/sys/class/drm cannot be read: {complaint(error)}") from None
    # Skips connectors such as card0-DP-1.
    numbers = sorted(int(name[4:]) for name in names if re.fullmatch(r"card[0-9]{1,9}", name))
    cards: dict[str, Card] = {}
    for number in numbers:
        device = directory / f"card{number}" / "device"
        vendor, address = text(device, "vendor"), address_of(device)
        if known(vendor) and vendor in _VENDORS and address is not None:
            cards.setdefault(address, Card(number, _VENDORS[vendor], address, device))
    if not cards:
        raise AbsentError("there is no AMD or Intel GPU in /sys/class/drm")
    return tuple(sorted(cards.values(), key=lambda card: _order(card.address)))


def introduce(cards: tuple[Card, ...]) -> tuple[Gpu, ...]:
    """Describes the cards as GPUs."""
    uuids = [_uuid(card) for card in cards]
    times = Counter(uuids)
    gpus = []
    for index, (card, uuid) in enumerate(zip(cards, uuids, strict=True)):
        # Partitions of a board are different GPUs, but may share a number.
        unique = uuid if times[uuid] == 1 else f"PCI-{card.address}"
        total = memory_total(card)
        gpus.append(Gpu(unique, index, _model(card), card.vendor, card.number, total, card.address))
    return tuple(gpus)


def _uuid(card: Card) -> str:
    number = text(card.device, "unique_id")
    # Boards without a number report zero.
    if known(number) and re.fullmatch(r"[0-9a-f]{1,32}", number) and number.strip("0"):
        return f"GPU-{number}"
    return f"PCI-{card.address}"


def _model(card: Card) -> str:
    product = text(card.device, "product_name")
    if known(product):
        return product
    vendor, device = text(card.device, "vendor"), text(card.device, "device")
    if known(vendor) and known(device):
        return f"{_KINDS[card.vendor]} {vendor.removeprefix('0x')}:{device.removeprefix('0x')}"
    return _KINDS[card.vendor]


def address_of(device: Path) -> str | None:
    """The PCI address of a card's device directory."""
    name = Path(os.path.realpath(device)).name
    if PCI_ADDRESS.fullmatch(name):
        return name
    event = text(device, "uevent")
    if not known(event):
        return None
    match = re.search(rf"^PCI_SLOT_NAME=({PCI_ADDRESS.pattern})$", event, re.MULTILINE)
    return match[1] if match else None


def _order(address: str) -> tuple[int, ...]:
    """The numeric sort key of an address, whose domain can have more than four digits."""
    return tuple(int(part, 16) for part in re.split(r"[:.]", address))


def state_of(card: Card) -> Literal["awake", "asleep"] | Unknown:
    """The power state: an awake card can be read without waking it."""
    if address_of(card.device) != card.address:
        return Unknown(GONE)  # unplugged, or replaced by another GPU
    return "asleep" if text(card.device, "power/runtime_status") == "suspended" else "awake"


def nodes_of(card: Card) -> list[str]:
    """The names of this card in /dev/dri."""
    try:
        return [entry.name for entry in (card.device / "drm").iterdir()]
    except OSError:
        return []


def nodes_at(address: str, root: Path) -> tuple[Path, ...]:
    """The device nodes of the GPU at a PCI address, without the control nodes of older kernels."""
    for device in (root / "sys/class/drm").glob("card*/device"):
        if address_of(device) == address.lower():
            names = sorted(path.name for path in device.glob("drm/*") if _DEVICE_NODE.fullmatch(path.name))
            return tuple(root / "dev/dri" / name for name in names)
    return ()


def monitors_of(card: Card) -> list[Path]:
    """The card's hardware monitors. The monitor of the whole card has the lowest number."""
    try:
        found = list((card.device / "hwmon").glob("hwmon*"))
    except OSError:
        return []
    numbered = [path for path in found if path.name[5:].isdecimal()]
    return sorted(numbered, key=lambda path: int(path.name[5:]))


def memory_total(card: Card) -> Maybe[int]:
    if card.vendor == "intel":
        return Unknown(INTEL_MEMORY)
    total = number(card.device, "mem_info_vram_total")
    return plausible_memory_total(total) if known(total) else total


def memory_used(card: Card, total: Maybe[int]) -> Maybe[int]:
    if card.vendor == "intel":
        return Unknown(INTEL_MEMORY)
    used = number(card.device, "mem_info_vram_used")
    return plausible_memory_used(used, total) if known(used) else used


def busy_now(card: Card) -> Maybe[float]:
    """The driver's instantaneous utilization; only amdgpu has one."""
    percent = number(card.device, "gpu_busy_percent")
    return plausible_fraction(percent) if known(percent) else percent


def memory_activity_now(card: Card) -> Maybe[Utilization]:
    """The instantaneous activity of the memory controller."""
    percent = number(card.device, "mem_busy_percent")
    share = plausible_fraction(percent) if known(percent) else percent
    return Utilization(share, share, 1) if known(share) else share


def first_number(directories: list[Path], *names: str) -> Maybe[int]:
    """The first number in these files, or why the first existing file has none."""
    why = Unknown(NOT_SUPPORTED)
    for name in names:
        for directory in directories:
            found = number(directory, name)
            if known(found):
                return found
            if why.reason == NOT_SUPPORTED:
                why = found
    return why


def number(directory: Path, name: str) -> Maybe[int]:
    """The integer in a file."""
    written = text(directory, name)
    if not known(written):
        return written
    if re.fullmatch(r"-?[0-9]{1,20}", written) is None:
        return Unknown(f"{name} contains {written[:20]!r}, which is not a number")
    return int(written)


def text(directory: Path, name: str) -> Maybe[str]:
    """The stripped content of a file."""
    try:
        written = contents(f"{directory}/{name}").strip()
    except FileNotFoundError:
        return Unknown(NOT_SUPPORTED)
    except OSError as error:
        return Unknown(f"{name} cannot be read: {complaint(error)}")
    return written or Unknown(f"{name} is empty")


ASLEEP: Final = "the GPU is asleep"


class _Sensors(NamedTuple):
    """Values of a card's hardware monitors."""

    power: Maybe[float]
    limit: Maybe[float]
    energy: Maybe[float]
    temperature: Maybe[float]
    clock: Maybe[float]


class _Used(NamedTuple):
    """Use of one card by processes."""

    busy: EngineUse
    processes: Maybe[tuple[Process, ...]]


def open_source(root: Path, argument: str = "") -> "DrmSource":  # noqa: ARG001 - the signature of a source's factory
    """Opens the source. Raises `AbsentError` if there is no AMD or Intel GPU below `root`."""
    return DrmSource(root)


class DrmSource:
    """Reads the GPUs that existed when it was opened, in the order of their PCI addresses."""

    name = "drm"

    def __init__(self, root: Path, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._monotonic = monotonic
        self._cards = find_cards(root)
        self._gpus = introduce(self._cards)
        self._process_cache = ProcessCache(root, pids_from="proc")
        self._ledger = EngineCounters()
        self._joules: dict[str, tuple[float, float]] = {}
        """Time and value of the last reading of each card's energy counter."""
        self._last: float | None = None

    def look(self) -> Look:
        at, wall = self._monotonic(), time.time()
        span = 0.0 if self._last is None else max(0.0, at - self._last)
        self._last = at
        self._process_cache.refresh()
        states = {card.address: state_of(card) for card in self._cards}
        nodes = {node: card.address for card in self._cards for node in nodes_of(card)}
        if "awake" in states.values():
            seen = survey(self._root, {node for node in nodes if states[nodes[node]] == "asleep"})
        else:
            seen = Survey((), frozenset(), None)
        open_devices = _by_card(seen.open_devices, nodes)
        readings = []
        for card, gpu in zip(self._cards, self._gpus, strict=True):
            state = states[card.address]
            if isinstance(state, Unknown):
                self._ledger.forget(card.address)
                self._joules.pop(card.address, None)
                readings.append(Reading.unknown(gpu.uuid, state.reason, span=span))
            elif state == "asleep":
                self._joules.pop(card.address, None)
                readings.append(_sleeping(card, gpu, span))
            else:
                used = self._used(card, gpu, open_devices.get(card.address, []), seen, span)
                readings.append(self._read(card, gpu, used, at, span))
        note = f"Not every process on the GPUs may be listed: {seen.unseen}." if seen.unseen else None
        return Look(self.name, at, wall, self._gpus, tuple(readings), note=note)

    def close(self) -> None:
        self._process_cache.close()

    def _read(self, card: Card, gpu: Gpu, used: _Used, at: float, span: float) -> Reading:
        total = memory_total(card)
        sensors = self._sensors(card, at)
        return Reading(
            gpu.uuid,
            span,
            _utilization(card, used.busy),
            memory_used(card, total),
            total,
            sensors.power,
            sensors.limit,
            sensors.energy,
            sensors.temperature,
            used.processes,
            Unknown(NOT_SUPPORTED),
            memory_activity_now(card),
            sensors.clock,
            NOT_REPORTED,
            NOT_REPORTED,
        )

    def _used(self, card: Card, gpu: Gpu, open_devices: list[OpenDevice], seen: Survey, span: float) -> _Used:
        clients, owners = _distinct(open_devices)
        began = self._ledger.began(card.address) and span > 0
        work = self._ledger.work(card.address, clients, span)
        busy = busiest(work.values(), seen.unseen if began else NEEDS_TWO_LOOKS)
        if not open_devices and seen.unseen is not None:
            return _Used(busy, Unknown(seen.unseen))
        own: dict[int, list[str]] = {}
        for name, pid in owners.items():
            own.setdefault(pid, []).append(name)
        processes: dict[int, Process] = {}
        for device_file in open_devices:
            pid = device_file.pid
            memory: Maybe[int]
            share: Maybe[float]
            if pid in processes:
                continue
            if pid in own:
                memory = _sum((clients[name].memory for name in own[pid]), gpu.memory)
                gap = ROCM_UNCOUNTED if pid in seen.rocm else None
                share = busiest((work[name] for name in own[pid]), gap).certain()
            else:
                memory = share = Unknown(f"counted with process {owners[_name(device_file)]}, which shares it")
            processes[pid] = self._process_cache.process(pid, memory, share)
        return _Used(busy, tuple(processes.values()))

    def _sensors(self, card: Card, at: float) -> _Sensors:
        monitors = monitors_of(card)
        energy = _energy(monitors)
        # The limit is a cap in amdgpu, and a maximum in i915 and xe; xe has no first temperature.
        limit = first_number(monitors, "power1_cap", "power1_max")
        heat = first_number(monitors, "temp1_input", "temp2_input")
        hertz = first_number(monitors, "freq1_input")
        return _Sensors(
            self._power(card, monitors, energy, at),
            plausible_watts(limit / 1e6) if known(limit) else limit,
            energy,
            plausible_celsius(heat / 1e3) if known(heat) else heat,
            plausible_megahertz(hertz / 1e6) if known(hertz) else hertz,
        )

    def _power(self, card: Card, monitors: list[Path], energy: Maybe[float], at: float) -> Maybe[float]:
        """The mean over the span by the energy counter, or the driver's value."""
        before = self._joules.pop(card.address, None)
        mean: Maybe[float] = Unknown(NEEDS_TWO_LOOKS)
        if known(energy):
            self._joules[card.address] = (at, energy)
            if before is not None and at > before[0]:
                mean = _watts_between(before, (at, energy))
            if known(mean):
                return mean
        measured = first_number(monitors, "power1_average", "power1_input")
        if known(measured):
            return plausible_watts(measured / 1e6)
        return mean if known(energy) else measured


def _utilization(card: Card, engines: EngineUse) -> Maybe[Utilization]:
    if card.vendor == "amd":
        share = busy_now(card)
        # The driver's value is instantaneous. Bursts between looks show only in the engine counters, which exclude ROCm
        # and are a lower bound.
        if known(share):
            share = max(share, engines.share)
        elif engines.share >= SURELY_BUSY:
            share = engines.share
        return Utilization(share, share, 1) if known(share) else share
    share = engines.certain()
    return Utilization(share, share, 0) if known(share) else share


def _sleeping(card: Card, gpu: Gpu, span: float) -> Reading:
    """The reading of a suspended GPU: it is idle, and must not be woken."""
    why = Unknown(ASLEEP)
    # amdgpu answers these two without waking the board.
    total = memory_total(card)
    used = memory_used(card, total)
    idle = Utilization(0.0, 0.0, 1)
    return Reading(
        gpu.uuid,
        span,
        idle,
        used,
        total,
        why,
        why,
        why,
        why,
        (),
        Unknown(NOT_SUPPORTED),
        memory_activity=idle,
        sm_clock=why,
        throttling=NOT_REPORTED,
        health=NOT_REPORTED,
    )


def _by_card(open_devices: Iterable[OpenDevice], nodes: dict[str, str]) -> dict[str, list[OpenDevice]]:
    """Open devices by the PCI address of their card, from fdinfo or from the name of the node."""
    cards: dict[str, list[OpenDevice]] = {}
    for device_file in open_devices:
        address = device_file.client.pdev or nodes.get(device_file.node)
        if address is not None:
            cards.setdefault(address, []).append(device_file)
    return cards


def _name(device_file: OpenDevice) -> str:
    """The identity of a client, which may have its file open several times."""
    return device_file.client.id or f"{device_file.pid} on {device_file.node}"


def _distinct(open_devices: Iterable[OpenDevice]) -> tuple[dict[str, Client], dict[str, int]]:
    """The distinct clients, and the lowest pid among the processes that share each."""
    clients: dict[str, Client] = {}
    owners: dict[str, int] = {}
    for device_file in open_devices:
        name = _name(device_file)
        if name not in clients:
            clients[name], owners[name] = device_file.client, device_file.pid
    return clients, owners


def _sum(amounts: Iterable[Maybe[int]], most: Maybe[int]) -> Maybe[int]:
    total = 0
    for amount in amounts:
        if not known(amount):
            return amount
        total += amount
    return plausible_memory_used(total, most)


def _energy(monitors: list[Path]) -> Maybe[float]:
    microjoules = first_number(monitors, "energy1_input")
    if not known(microjoules):
        return microjoules
    if microjoules < 0:
        return Unknown(f"the driver reported {microjoules} µJ, which is impossible")
    return microjoules / 1e6


def _watts_between(before: tuple[float, float], now: tuple[float, float]) -> Maybe[float]:
    if now[1] < before[1]:
        return Unknown("the energy counter went backwards")
    return plausible_watts((now[1] - before[1]) / (now[0] - before[0]))
