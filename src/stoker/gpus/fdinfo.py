"""Use of DRM GPUs by processes, from the kernel's counters for every open device file in /proc/PID/fdinfo."""

import os
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from stoker.gpus.model import Maybe, Unknown, known
from stoker.procfs import OUTSIDE, inside_pid_namespace

NEEDS_TWO_LOOKS: Final = "needs two looks"
OTHER_USERS: Final = "processes of other users cannot be seen without root"
UNCOUNTED: Final = "the driver does not count engine time per process"
NO_MEMORY: Final = "the driver does not report memory per process"
ROCM_UNCOUNTED: Final = "work through ROCm is not counted per process"

# Engine use with possibly invisible parts is a lower bound. It is reported only above the highest idle threshold in use
# (70 %), so that invisible work never looks idle.
SURELY_BUSY: Final = 0.8
# An engine class has at most this many rings on the largest boards. A counter that runs faster than all of them is
# invalid, or covers more than this span.
MOST_RINGS: Final = 64
# fdinfo and sysfs files have a page or two.
MOST_BYTES: Final = 2**20

PCI_ADDRESS: Final = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_NUMBER: Final = re.compile(r"([0-9]{1,20})(?:\s+(\S+))?")
_NANOSECONDS: Final[dict[str | None, int]] = {None: 1, "ns": 1}
_CYCLES: Final[dict[str | None, int]] = {None: 1}
_BYTES: Final[dict[str | None, int]] = {None: 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def contents(path: str) -> str:
    """The text of a small kernel file, read by plain system calls, since a look reads hundreds of files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = part = os.read(descriptor, 2**16)
        while part and len(text) < MOST_BYTES:
            part = os.read(descriptor, 2**16)
            text += part
    finally:
        os.close(descriptor)
    return text.decode("ascii", "replace")


class EngineCounter(NamedTuple):
    """The total work of a class of engines for a client."""

    busy: int
    """Nanoseconds, or cycles if `total` is given."""
    total: int | None
    """The GPU's clock in cycles at that moment."""
    capacity: int
    """The number of identical engines in the class."""


class Client(NamedTuple):
    """An open device file, from its fdinfo."""

    pdev: str | None
    id: str | None
    counted: bool
    """All its engine time is known; some drivers cannot count it, and a file can be truncated."""
    engines: Mapping[str, EngineCounter]
    memory: Maybe[int]


NOTHING_REPORTED: Final = Client(None, None, False, {}, Unknown(NO_MEMORY))


def parse(text: str) -> Client:
    """Parses the kernel's DRM client usage stats. Unreadable values count as missing."""
    # A last line without newline is truncated, and half a number is wrong.
    whole, _, cut = text.rpartition("\n")
    fields: dict[str, str] = {}
    for line in whole.split("\n"):
        key, colon, value = line.partition(":")
        if colon and key.startswith("drm-"):
            fields[key[4:]] = value.strip()
    engines = _engines(fields)
    readable = {name: engine for name, engine in engines.items() if engine is not None}
    # amdgpu lists an engine only after its first use. Other drivers list all engines, or none if the firmware schedules
    # and they cannot count.
    counting = bool(engines) or (fields.get("driver") == "amdgpu" and "client-id" in fields)
    counted = counting and not cut and len(readable) == len(engines)
    pdev = fields.get("pdev", "").lower()
    address = pdev if PCI_ADDRESS.fullmatch(pdev) else None
    return Client(address, fields.get("client-id"), counted, readable, _memory(fields))


def _engines(fields: Mapping[str, str]) -> dict[str, EngineCounter | None]:
    """The engines by name; None for invalid numbers."""
    engines: dict[str, EngineCounter | None] = {}
    for key, value in fields.items():
        kind, _, name = key.partition("-")
        capacity = _number(fields.get(f"engine-capacity-{name}", ""), _CYCLES) or 1
        if kind == "engine" and not name.startswith("capacity-"):
            busy = _number(value, _NANOSECONDS)
            engines[name] = None if busy is None else EngineCounter(busy, None, capacity)
        elif kind == "cycles" and f"engine-{name}" not in fields:
            busy = _number(value, _CYCLES)
            total = _number(fields.get(f"total-cycles-{name}", ""), _CYCLES)
            engines[name] = None if busy is None or total is None else EngineCounter(busy, total, capacity)
    return engines


def _memory(fields: Mapping[str, str]) -> Maybe[int]:
    # A GPU's own memory is "vram" in amdgpu and xe, "local" in i915; an integrated GPU uses system memory.
    for regions in (("vram", "local"), ("system",)):
        for kind in ("resident", "total", "memory"):
            prefixes = tuple(f"{kind}-{region}" for region in regions)
            amounts = [_number(value, _BYTES) for key, value in fields.items() if key.startswith(prefixes)]
            readable = [amount for amount in amounts if amount is not None]
            if readable and len(readable) == len(amounts):
                return sum(readable)
    return Unknown(NO_MEMORY)


def _number(text: str, units: Mapping[str | None, int]) -> int | None:
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in units:
        return None
    return int(match[1]) * units[match[2]]


class OpenDevice(NamedTuple):
    """A process that has a GPU's device file open."""

    pid: int
    node: str
    """The name of the device file: renderD128, card0."""
    client: Client


class Survey(NamedTuple):
    """Processes with open GPU device files, in the order of pids."""

    open_devices: tuple[OpenDevice, ...]
    rocm: frozenset[int]
    """The processes with ROCm's own device open, whose work fdinfo does not count."""
    unseen: str | None
    """Why there may be more processes."""


def survey(root: Path, asleep: Collection[str]) -> Survey:
    """Reads the open device files of all processes, except on suspended cards, since reading fdinfo can wake a GPU."""
    proc = str(root / "proc")
    try:
        with os.scandir(proc) as entries:
            pids = sorted(int(entry.name) for entry in entries if entry.name.isdecimal())
    except OSError as error:
        return Survey((), frozenset(), f"/proc cannot be read: {complaint(error)}")
    unseen = OUTSIDE if inside_pid_namespace(root) else None
    if 1 not in pids:
        unseen = OTHER_USERS  # the mount options of /proc hide them
    open_devices: list[OpenDevice] = []
    rocm: set[int] = set()
    for pid in pids:
        try:
            devices = _open_devices(f"{proc}/{pid}/fd")
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        except PermissionError:
            unseen = OTHER_USERS
            continue
        except OSError as error:
            unseen = f"the open files of process {pid} cannot be read: {complaint(error)}"
            continue
        for descriptor, device in devices:
            if device == "/dev/kfd":
                rocm.add(pid)
            elif (node := device.removeprefix("/dev/dri/")) not in asleep:
                client = _client(f"{proc}/{pid}/fdinfo/{descriptor}")
                if client is not None:
                    open_devices.append(OpenDevice(pid, node, client))
    return Survey(tuple(open_devices), frozenset(rocm), unseen)


def _open_devices(directory: str) -> list[tuple[str, str]]:
    """The descriptors in a /proc/PID/fd that refer to a GPU, each with its device."""
    devices = []
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                device = os.readlink(entry.path)  # noqa: PTH115 - a Path for every open file costs too much
            except OSError:
                continue  # it has just been closed
            if device.startswith("/dev/dri/") or device == "/dev/kfd":
                devices.append((entry.name, device))
    return devices


def _client(path: str) -> Client | None:
    try:
        return parse(contents(path))
    except (FileNotFoundError, ProcessLookupError):
        return None  # it has just been closed
    except OSError:
        return NOTHING_REPORTED


class EngineUse(NamedTuple):
    """The busy share of the busiest class of engines in a span, between 0 and 1."""

    share: float
    gap: str | None
    """Why it may have been more."""

    def certain(self) -> Maybe[float]:
        """The share; unknown if missing work could make the difference between idle and busy."""
        return self.share if self.gap is None or self.share >= SURELY_BUSY else Unknown(self.gap)


class Work(NamedTuple):
    """Engine use of one client over a span, by class of engines."""

    engines: Mapping[str, float]
    gap: str | None
    """Why it may have been more."""


def busiest(works: Iterable[Work], gap: str | None = None) -> EngineUse:
    """The total engine use of several clients. `gap`: why there may be more clients."""
    engines: dict[str, float] = {}
    for work in works:
        gap = work.gap or gap
        for name, share in work.engines.items():
            engines[name] = engines.get(name, 0.0) + share
    # Clocks are not read at the same instant and rings of a class overlap, so values slightly above 1 mean 1.
    return EngineUse(min(1.0, max(engines.values(), default=0.0)), gap)


class EngineCounters:
    """The counters of the previous look, by card and client."""

    def __init__(self) -> None:
        self._before: dict[str, dict[str, dict[str, EngineCounter]]] = {}

    def forget(self, card: str) -> None:
        self._before.pop(card, None)

    def began(self, card: str) -> bool:
        """True if there was a previous look."""
        return card in self._before

    def work(self, card: str, clients: Mapping[str, Client], span: float) -> dict[str, Work]:
        """The engine use of a card's clients since the previous look. Stores their counters."""
        before = self._before.get(card)
        self._before[card] = {
            name: _caught_up((before or {}).get(name, {}), client.engines) for name, client in clients.items()
        }
        if before is None or span <= 0:
            return dict.fromkeys(clients, Work({}, NEEDS_TWO_LOOKS))
        clocks = {name: engine.total for engines in before.values() for name, engine in engines.items()}
        return {name: _work(client, before.get(name, {}), clocks, span) for name, client in clients.items()}


def _caught_up(before: Mapping[str, EngineCounter], now: Mapping[str, EngineCounter]) -> dict[str, EngineCounter]:
    """The highest counters seen: one that went backwards counts only after it has caught up."""
    kept = dict(before)
    for name, engine in now.items():
        kept[name] = engine._replace(busy=max(engine.busy, before[name].busy)) if name in before else engine
    return kept


def _work(client: Client, before: Mapping[str, EngineCounter], clocks: Mapping[str, int | None], span: float) -> Work:
    complete = client.counted and before.keys() <= client.engines.keys()
    engines, gap = {}, None if complete else UNCOUNTED
    for name, engine in client.engines.items():
        # A new client has started in this span, so all its time belongs to it.
        start = before.get(name, EngineCounter(0, clocks.get(name), engine.capacity))
        share = _share(start, engine, span)
        if known(share):
            engines[name] = share
        else:
            gap = share.reason
    return Work(engines, gap)


def _share(before: EngineCounter, now: EngineCounter, span: float) -> Maybe[float]:
    if now.total is None:
        possible = span * 1e9
    elif before.total is None:
        return Unknown(NEEDS_TWO_LOOKS)
    else:
        possible = now.total - before.total
        if possible <= 0:
            return Unknown("the GPU's own clock did not advance since the look before")
    share = max(0, now.busy - before.busy) / (possible * now.capacity)
    if share > MOST_RINGS:
        return Unknown("the driver counted more engine time than there can have been")
    return share


def complaint(error: OSError) -> str:
    """The error as part of a sentence."""
    return (error.strerror or type(error).__name__).lower()
