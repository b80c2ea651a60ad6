"""AMD and Intel cards as the kernel shows them in /sys/class/drm: which there are, what their files say."""

import os
import re
from collections import Counter
from pathlib import Path
from typing import Final, Literal, NamedTuple

from stoker.gpus import plausible
from stoker.gpus.fdinfo import PCI_ADDRESS, complaint, contents
from stoker.gpus.model import NOT_SUPPORTED, Gpu, Maybe, Unknown, known
from stoker.gpus.source import AbsentError

GONE: Final = "the GPU is no longer there"
INTEL_MEMORY: Final = "not reported by the i915/xe driver"

_VENDORS: Final[dict[str, Literal["amd", "intel"]]] = {"0x1002": "amd", "0x8086": "intel"}
_KINDS: Final = {"amd": "AMD GPU", "intel": "Intel GPU"}


class Card(NamedTuple):
    """One GPU and where the kernel shows it."""

    number: int
    vendor: Literal["amd", "intel"]
    address: str
    device: Path


def find_cards(root: Path) -> tuple[Card, ...]:
    """The AMD and Intel GPUs by PCI address; one without an address could not be told from another."""
    directory = root / "sys/class/drm"
    try:
        names = [entry.name for entry in directory.iterdir()]
    except FileNotFoundError:
        raise AbsentError("no graphics driver is loaded: /sys/class/drm is not there") from None
    except OSError as error:
        raise AbsentError(f"/sys/class/drm cannot be read: {complaint(error)}") from None
    # card0-DP-1 is a screen's socket, not a GPU.
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
    """The cards as the rest of the program knows them."""
    uuids = [_uuid(card) for card in cards]
    times = Counter(uuids)
    gpus = []
    for index, (card, uuid) in enumerate(zip(cards, uuids, strict=True)):
        # Boards that share a number, as slices of one can, are still different GPUs.
        unique = uuid if times[uuid] == 1 else f"PCI-{card.address}"
        total = memory_total(card)
        gpus.append(Gpu(unique, index, _model(card), card.vendor, card.number, total, card.address))
    return tuple(gpus)


def _uuid(card: Card) -> str:
    number = text(card.device, "unique_id")
    # A board without a number of its own says zero.
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
    """Addresses sort as numbers: the domain can have more than four digits."""
    return tuple(int(part, 16) for part in re.split(r"[:.]", address))


def state_of(card: Card) -> Literal["awake", "asleep"] | Unknown:
    """Whether the card can be read now, found out without waking it."""
    if address_of(card.device) != card.address:
        return Unknown(GONE)  # Unplugged, or another GPU has taken its number.
    return "asleep" if text(card.device, "power/runtime_status") == "suspended" else "awake"


def nodes_of(card: Card) -> list[str]:
    """The names in /dev/dri that stand for this card."""
    try:
        return [entry.name for entry in (card.device / "drm").iterdir()]
    except OSError:
        return []


def monitors_of(card: Card) -> list[Path]:
    """The card's hardware monitors: that of the whole card was registered first and has the lowest number."""
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
    return plausible.memory_total(total) if known(total) else total


def memory_used(card: Card, total: Maybe[int]) -> Maybe[int]:
    if card.vendor == "intel":
        return Unknown(INTEL_MEMORY)
    used = number(card.device, "mem_info_vram_used")
    return plausible.memory_used(used, total) if known(used) else used


def busy_now(card: Card) -> Maybe[float]:
    """The driver's own figure of this instant, as a fraction of 1; only amdgpu has one."""
    percent = number(card.device, "gpu_busy_percent")
    return plausible.fraction(percent) if known(percent) else percent


def first_number(directories: list[Path], *names: str) -> Maybe[int]:
    """The first number that one of these files holds; else why the first of them that is there does not."""
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
    """The whole number that a file holds."""
    written = text(directory, name)
    if not known(written):
        return written
    if re.fullmatch(r"-?[0-9]{1,20}", written) is None:
        return Unknown(f"{name} says {written[:20]!r}, which is not a number")
    return int(written)


def text(directory: Path, name: str) -> Maybe[str]:
    """What a file says, without the space around it."""
    try:
        written = contents(f"{directory}/{name}").strip()
    except FileNotFoundError:
        return Unknown(NOT_SUPPORTED)
    except OSError as error:
        return Unknown(f"{name} cannot be read: {complaint(error)}")
    return written or Unknown(f"{name} is empty")
