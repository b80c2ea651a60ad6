"""A `Gpu`, what it did over a span of time (`Reading`), and a `Look` at all GPUs at once.

Every field of a reading may be `Unknown`, with the reason in words. Zero is a value, not an absence: test with
`known(...)`, never by truth.
"""

import functools
import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import msgspec

if TYPE_CHECKING:
    from typing_extensions import TypeIs

T = TypeVar("T")


class Unknown(msgspec.Struct, frozen=True):
    """A value that is not available, and why. The reason is part of a sentence: no capital, no full stop."""

    reason: str


Maybe: TypeAlias = T | Unknown


def known(value: T | Unknown) -> "TypeIs[T]":
    return not isinstance(value, Unknown)


Link = Literal["nvlink", "switch", "node", "system"]
"""How two GPUs are connected, the fastest first: by NVLink, through PCIe switches alone, within one NUMA node, between
nodes."""
LINKS: Final[tuple[Link, ...]] = get_args(Link)


class Gpu(msgspec.Struct, frozen=True, array_like=True):
    """One device. Its identity is the uuid; the index is for people to type."""

    uuid: str
    index: int
    name: Maybe[str]
    vendor: str
    """`nvidia`, `amd`, `intel`, `sim`, …: the name of a `gpus.visible.Vendor`."""
    minor: Maybe[int]
    """The N of its device node /dev/nvidiaN (or card number): neither NVML's order nor CUDA's."""
    memory: Maybe[int]
    bus: Maybe[str]
    """PCI address such as 0000:65:00.0."""
    parent: str | None = None
    """For a MIG device: the uuid of the GPU that it is a slice of."""
    links: tuple[tuple[str, Link], ...] = ()
    """How it is connected to other GPUs, by their uuids, as far as known."""


def is_model(name: str, wanted: str) -> bool:
    """Whether the name of a GPU contains one of these, separated by `|`, in upper or lower case.

    Numbers are matched whole: `a10` is not in `A100`. Spaces, hyphens and underscores are the same.
    """
    return _model_pattern(wanted).search(name) is not None


@functools.cache
def _model_pattern(wanted: str) -> re.Pattern[str]:
    return re.compile("|".join(map(_part_pattern, wanted.split("|"))), re.IGNORECASE)


def _part_pattern(part: str) -> str:
    words = "[ _-]*".join(map(re.escape, re.split(r"[ _-]+", part.strip())))
    before = r"(?<![0-9])" if part[:1].isdigit() else ""
    after = r"(?![0-9])" if part[-1:].isdigit() else ""
    return f"{before}{words}{after}"


_NOT_RECORDED: Final = Unknown("not recorded")
# It works for several clients and holds their memory; the driver does not report which.
MPS_SERVER: Final = "nvidia-cuda-mps-server"


class Utilization(NamedTuple):
    """The fraction of time in which at least one kernel ran since the look before."""

    peak: float
    mean: float
    samples: int
    """The number of driver samples: 1 means that a burst may have been missed; 0 means a counter that covers all the
    time since the look before."""


class Process(msgspec.Struct, frozen=True, array_like=True):
    """A process that holds a context or memory on a GPU. Its identity is pid plus start time, never pid alone."""

    pid: int
    started: Maybe[int]
    """Start time in clock ticks since boot, field 22 of /proc/PID/stat."""
    name: Maybe[str]
    user: Maybe[str]
    memory: Maybe[int]
    utilization: Maybe[float]
    memory_activity: Maybe[float] = _NOT_RECORDED
    """The fraction of time in which this process had the device memory read or written."""

    @property
    def is_identified(self) -> bool:
        """Whether it is a process of this machine that works for itself alone, which the MPS server does not."""
        return not isinstance(self.started, Unknown) and self.name != MPS_SERVER


Holder: TypeAlias = tuple[int, int]
"""Pid and start time of a process on a GPU."""


class Pipes(NamedTuple):
    """Activity of the parts of the chip since the look before (GPM, Hopper and newer), as fractions of 1.

    A spinning collective keeps utilization at 100 % while these stay near zero.
    """

    graphics: Maybe[float]
    sm: Maybe[float]
    tensor: Maybe[float]
    dram: Maybe[float]
    pcie: Maybe[float] = _NOT_RECORDED
    """Bytes per second, both directions."""
    nvlink: Maybe[float] = _NOT_RECORDED
    """Bytes per second, both directions, all links."""


class DeviceHealth(NamedTuple):
    """Faults that the driver has reported."""

    xids: tuple[int, ...] = ()
    """XID errors since the source was opened, the oldest first."""
    uncorrected: Maybe[int] = _NOT_RECORDED
    """Uncorrectable ECC errors since the driver was loaded."""
    needs_reset: Maybe[bool] = _NOT_RECORDED
    """Whether rows of the memory wait for a reset to be remapped, or pages to be retired."""
    remapping_failed: Maybe[bool] = _NOT_RECORDED
    """Whether the memory has run out of spare rows: the board should be replaced."""


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """What one GPU did since the look before."""

    uuid: str
    span: float
    """Seconds that this reading covers."""
    utilization: Maybe[Utilization]
    memory_used: Maybe[int]
    memory_total: Maybe[int]
    power: Maybe[float]
    """Watts: the mean over the span if there is an energy counter, else the driver's figure."""
    power_limit: Maybe[float]
    energy: Maybe[float]
    """Joules since the driver was loaded, where there is a counter."""
    temperature: Maybe[float]
    """Degrees Celsius."""
    processes: Maybe[tuple[Process, ...]]
    pipes: Maybe[Pipes]
    memory_activity: Maybe[Utilization] = _NOT_RECORDED
    """The fraction of time in which the device memory was read or written. A spinning collective leaves it at zero."""
    sm_clock: Maybe[float] = _NOT_RECORDED
    """MHz."""
    throttling: Maybe[tuple[str, ...]] = _NOT_RECORDED
    """What holds the clocks down: `idle`, `power cap`, `hardware thermal`, …"""
    health: Maybe[DeviceHealth] = _NOT_RECORDED

    @property
    def vouched(self) -> float:
        """Seconds before the look that the utilization covers; 0 for a single sample."""
        is_momentary = not isinstance(self.utilization, Unknown) and self.utilization.samples == 1
        return 0.0 if is_momentary else self.span

    @classmethod
    def unknown(cls, uuid: str, reason: str, *, span: float = 0.0) -> "Reading":
        """A reading in which every value is unknown for one reason."""
        why = Unknown(reason)
        return cls(uuid, span, *(why,) * (len(cls.__struct_fields__) - 2))


Trust = Literal["call", "log", "events", "checkpoint", "output", "none"]
"""Where progress was seen, the most trusted first: a call of `stoker.step()` in the training loop, step counts in the
log, event files of a tracker, checkpoint files, any output at all, nowhere."""


class JobProgress(NamedTuple):
    """What the job has shown of its progress beside its use of GPUs. None: it cannot be seen."""

    steps: int | None = None
    """How many steps have been seen: a count that only grows."""
    since: float | None = None
    """When the last of them was seen, on the clock of the observation."""
    trust: Trust = "none"
    cpu: float | None = None
    """Cores that the job's processes kept busy since the look before."""
    io: float | None = None
    """Bytes per second that they read and wrote."""
    pids: tuple[int, ...] = ()
    """The job's processes that the driver lists on GPUs."""


class Look(msgspec.Struct, frozen=True, array_like=True):
    """All GPUs of the machine at one moment, in the order of their indices: `readings[i]` is of `gpus[i]`."""

    source: str
    at: float
    """Monotonic seconds: what decisions are made with."""
    wall: float
    """Seconds since the epoch: for people."""
    gpus: tuple[Gpu, ...]
    readings: tuple[Reading, ...]
    problem: Unknown | None = None
    """Why the machine as a whole could not be read. `gpus` may then be empty without meaning "no GPUs"."""
    note: str | None = None
    """A remark on all readings that is shown once, such as pids of another namespace."""
    job: JobProgress | None = None
    """What the job showed of its progress, where this is a look of its supervisor."""


class SourceChoice(msgspec.Struct, frozen=True, array_like=True):
    """Why a source was taken or left when several were tried."""

    source: str
    taken: bool
    reason: str


NOT_SUPPORTED: Final = "not supported by this GPU"
NOT_REPORTED: Final = Unknown("this source of readings does not report it")


# Plausibility of driver values. Above every board sold, below the blank values that drivers have returned
# (2**32 - 1 mW is 4,294,967 W).
MOST_WATTS = 10_000.0
# Driver reports include reserved memory in "used" in some versions and not in "total": allow rounding, no more.
MEMORY_SLACK = 1.02
COLDEST, HOTTEST = -40.0, 200.0
MOST_MEGAHERTZ = 10_000.0


def plausible_fraction(percent: float) -> Maybe[float]:
    """A percentage as a fraction of 1."""
    if 0 <= percent <= 100:
        return percent / 100
    return Unknown(f"the driver reported {percent:g} %, which is impossible")


def plausible_memory_used(used: int, total: Maybe[int]) -> Maybe[int]:
    if used < 0 or (not isinstance(total, Unknown) and used > total * MEMORY_SLACK):
        return Unknown(f"the driver reported {used} bytes in use, more than the GPU has")
    return used


def plausible_memory_total(total: int) -> Maybe[int]:
    if 0 < total < 2**50:
        return total
    return Unknown(f"the driver reported a memory of {total} bytes, which is impossible")


def plausible_watts(value: float) -> Maybe[float]:
    if 0 <= value <= MOST_WATTS:
        return value
    return Unknown(f"the driver reported {value:g} W, which is impossible")


def plausible_celsius(value: float) -> Maybe[float]:
    if COLDEST <= value <= HOTTEST:
        return value
    return Unknown(f"the driver reported {value:g} °C, which is impossible")


def plausible_megahertz(value: float) -> Maybe[float]:
    if 0 <= value <= MOST_MEGAHERTZ:
        return value
    return Unknown(f"the driver reported a clock of {value:g} MHz, which is impossible")
