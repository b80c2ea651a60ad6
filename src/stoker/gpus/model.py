"""A `Gpu`, its activity over a span of time (`Reading`), and a `Look` at all GPUs at once.

Every field of a reading may be `Unknown`, with a reason. Zero is a value: test with `known(...)`, never by truthiness.
"""

import functools
import re
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import msgspec

if TYPE_CHECKING:
    from typing_extensions import TypeIs

T = TypeVar("T")


class Unknown(msgspec.Struct, frozen=True):
    """An unavailable value with its reason, which is part of a sentence: no capital, no full stop."""

    reason: str


Maybe: TypeAlias = T | Unknown


def known(value: T | Unknown) -> "TypeIs[T]":
    return not isinstance(value, Unknown)


Link = Literal["nvlink", "switch", "node", "system"]
"""The connection of two GPUs, fastest first: NVLink, PCIe switches only, within a NUMA node, between nodes."""
LINKS: Final[tuple[Link, ...]] = get_args(Link)


class Gpu(msgspec.Struct, frozen=True, array_like=True):
    """A device, identified by its uuid. The index is for people to type."""

    uuid: str
    index: int
    name: Maybe[str]
    vendor: str
    """`nvidia`, `amd`, `intel`, `sim`, …: the name of a `gpus.visible.Vendor`."""
    minor: Maybe[int]
    """The N of its device node /dev/nvidiaN (or card number), which differs from NVML's and CUDA's order."""
    memory: Maybe[int]
    bus: Maybe[str]
    """The PCI address, such as 0000:65:00.0."""
    parent: str | None = None
    """The uuid of the GPU of a MIG slice."""
    links: tuple[tuple[str, Link], ...] = ()
    """Known links to other GPUs, by uuid."""


def is_model(name: str, wanted: str) -> bool:
    """True if a GPU's name contains one of the alternatives, separated by `|`, ignoring case.

    Numbers match as a whole: `a10` does not match `A100`. Spaces, hyphens and underscores are equal.
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
# It holds the memory of several clients, which the driver does not report.
MPS_SERVER: Final = "nvidia-cuda-mps-server"


class Utilization(NamedTuple):
    """The fraction of time with at least one running kernel since the previous look."""

    peak: float
    mean: float
    samples: int
    """The number of driver samples. With 1, a burst may be missed; 0 stands for a counter that covers all the time
    since the previous look."""


class Process(msgspec.Struct, frozen=True, array_like=True):
    """A process with a context or memory on a GPU, identified by pid and start time, never by pid alone."""

    pid: int
    started: Maybe[int]
    """Start time in clock ticks since boot, field 22 of /proc/PID/stat."""
    name: Maybe[str]
    user: Maybe[str]
    memory: Maybe[int]
    utilization: Maybe[float]
    memory_activity: Maybe[float] = _NOT_RECORDED
    """The fraction of time with device memory access by this process."""

    @property
    def is_identified(self) -> bool:
        """True for a known process that works for itself alone, unlike the MPS server."""
        return not isinstance(self.started, Unknown) and self.name != MPS_SERVER


Holder: TypeAlias = tuple[int, int]
"""Pid and start time of a process on a GPU."""


class Pipes(NamedTuple):
    """Activity of the chip's units since the previous look (GPM, Hopper and newer), between 0 and 1.

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
    """XID errors since the source was opened, oldest first."""
    uncorrected: Maybe[int] = _NOT_RECORDED
    """Uncorrectable ECC errors since the driver was loaded."""
    needs_reset: Maybe[bool] = _NOT_RECORDED
    """Memory rows await remapping, or pages retirement, by a reset."""
    remapping_failed: Maybe[bool] = _NOT_RECORDED
    """The memory has no spare rows left: the board should be replaced."""


class Reading(msgspec.Struct, frozen=True, array_like=True):
    """The activity of one GPU since the previous look."""

    uuid: str
    span: float
    """The seconds that this reading covers."""
    utilization: Maybe[Utilization]
    memory_used: Maybe[int]
    memory_total: Maybe[int]
    power: Maybe[float]
    """Watts: the mean over the span by the energy counter, or the driver's value."""
    power_limit: Maybe[float]
    energy: Maybe[float]
    """Joules since the driver was loaded, if there is a counter."""
    temperature: Maybe[float]
    """Degrees Celsius."""
    processes: Maybe[tuple[Process, ...]]
    pipes: Maybe[Pipes]
    memory_activity: Maybe[Utilization] = _NOT_RECORDED
    """The fraction of time with device memory access. A spinning collective leaves it at zero."""
    sm_clock: Maybe[float] = _NOT_RECORDED
    """MHz."""
    throttling: Maybe[tuple[str, ...]] = _NOT_RECORDED
    """Throttling reasons: `idle`, `power cap`, `hardware thermal`, …"""
    health: Maybe[DeviceHealth] = _NOT_RECORDED

    @property
    def vouched(self) -> float:
        """The seconds before the look that the utilization covers; 0 for a single sample."""
        is_momentary = not isinstance(self.utilization, Unknown) and self.utilization.samples == 1
        return 0.0 if is_momentary else self.span

    @classmethod
    def unknown(cls, uuid: str, reason: str, *, span: float = 0.0) -> "Reading":
        """A reading with all values unknown for one reason."""
        why = Unknown(reason)
        return cls(uuid, span, *(why,) * (len(cls.__struct_fields__) - 2))


Trust = Literal["call", "log", "events", "checkpoint", "output", "none"]
"""Sources of progress, most trusted first: a call of `stoker.step()` in the training loop, step counts in the log,
event files of a tracker, checkpoint files, any output at all, none."""


class JobProgress(NamedTuple):
    """The visible progress of a job besides its GPU use; None for invisible values."""

    steps: int | None = None
    """The number of steps seen, which only grows."""
    since: float | None = None
    """The time of the last step, on the clock of the observation."""
    trust: Trust = "none"
    cpu: float | None = None
    """The job's busy CPU cores since the previous look."""
    io: float | None = None
    """The job's I/O in bytes per second."""
    pids: tuple[int, ...] = ()
    """The job's processes on GPUs, according to the driver."""


class Look(msgspec.Struct, frozen=True, array_like=True):
    """All GPUs of the machine at one moment, by index: `readings[i]` belongs to `gpus[i]`."""

    source: str
    at: float
    """Monotonic seconds, for decisions."""
    wall: float
    """Seconds since the epoch, for people."""
    gpus: tuple[Gpu, ...]
    readings: tuple[Reading, ...]
    problem: Unknown | None = None
    """Why the whole machine could not be read. Empty `gpus` then do not mean that there are none."""
    note: str | None = None
    """A remark on all readings that is shown once, such as pids of another namespace."""
    job: JobProgress | None = None
    """The progress of the job, in a look of its supervisor."""


class SourceChoice(msgspec.Struct, frozen=True, array_like=True):
    """Why a source was chosen or rejected."""

    source: str
    taken: bool
    reason: str


NOT_SUPPORTED: Final = "not supported by this GPU"
NOT_REPORTED: Final = Unknown("this source of readings does not report it")


# A plausibility limit above every board sold and below the blank values of drivers (2**32 - 1 mW is 4,294,967 W).
MOST_WATTS = 10_000.0
# Some driver versions include reserved memory in "used" but not in "total": allows for rounding only.
MEMORY_SLACK = 1.02
COLDEST, HOTTEST = -40.0, 200.0
MOST_MEGAHERTZ = 10_000.0


def plausible_fraction(percent: float) -> Maybe[float]:
    """A percentage as a fraction between 0 and 1."""
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
