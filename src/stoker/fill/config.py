"""The configuration of `fill`: which GPUs are filled with which programs, and when."""

import math
import re
from datetime import datetime, timedelta
from time import struct_time
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from stoker.errors import BadInputError

GpuChoice = Literal["all"] | tuple[str, ...]
"""All GPUs, or indices, ranges and uuids as typed: `stoker.gpus.visible.select_gpus` knows which they are."""

# As often as people who watched for openers by hand found enough; where events come, they come at once anyway.
DEFAULT_INTERVAL: Final = 10.0
# Between two steps of an interactive session lie seconds, between two runs of a person who tries something a minute.
DEFAULT_IDLE_FOR: Final = 60.0
# Long enough to write a small checkpoint, short enough for somebody who waits for the memory.
DEFAULT_GRACE: Final = 10.0
# A program that died at once has most likely a cause that lasts: the pause doubles, up to an hour.
DEFAULT_BACKOFF: Final = 10.0
LONGEST_BACKOFF: Final = 3600.0
# Copying device memory to the host takes about a second for each ten gigabytes.
DEFAULT_CHECKPOINT_TIMEOUT: Final = 10.0
# A person who reads what is on the screen types nothing for minutes.
DEFAULT_TERMINAL_IDLE: Final = 300.0


DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
EVERY_DAY: Final = tuple(range(7))
_GROUPS: Final = {"daily": (0, 6), "all": (0, 6), "weekdays": (0, 4), "weekend": (5, 6), "weekends": (5, 6)}
_LONG: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_CLOCK: Final = re.compile(r"([0-9]{1,2}):([0-9]{2})")
_DAY: Final = 24 * 60
# Clocks change by quarters of an hour: a check at every quarter misses no change.
_QUARTER: Final = 15


class WatchedGpus(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs that are watched for others, and the programs on them that do not count."""

    name: str
    gpus: GpuChoice = "all"
    ignore: tuple[str, ...] = ()
    """Names of executables; `*` and `?` stand for what they stand for in a shell."""


class Background(msgspec.Struct, frozen=True, kw_only=True):
    """A program that runs where nobody else is."""

    name: str
    command: tuple[str, ...]
    directory: str | None = None
    """None: where Stoker was started."""
    gpus: GpuChoice = "all"
    each: bool = False
    """One program for every GPU of `gpus`; otherwise one on all of them together, once all of them are idle."""
    log: str | None = None
    """A file that the output is appended to. None: Stoker's own console."""
    environment: dict[str, str] = {}
    """What is added to Stoker's own."""
    idle_for: float = DEFAULT_IDLE_FOR
    settle: float | None = None
    """How long nobody must have been there after another user has left. None: as long as `idle_for`."""
    grace: float = DEFAULT_GRACE
    """Between SIGTERM and SIGKILL."""
    backoff: float = DEFAULT_BACKOFF
    """The first pause after the program died at once; doubled each time, up to `LONGEST_BACKOFF`."""
    nice: Annotated[int, Meta(ge=0, le=19)] | None = None
    ionice: Annotated[str, Meta(pattern="^(idle|best-effort(:[0-7])?)$")] | None = None
    """`idle`, or `best-effort:N` with N from 0 (first) to 7 (last)."""
    mps_priority: Annotated[int, Meta(ge=0, le=1)] | None = None
    """CUDA_MPS_CLIENT_PRIORITY: 0 is normal, 1 is below normal."""
    mps_thread_percentage: Annotated[int, Meta(ge=1, le=100)] | None = None
    """CUDA_MPS_ACTIVE_THREAD_PERCENTAGE."""
    preempt: Literal["stop", "checkpoint"] = "stop"
    checkpoint_timeout: float = DEFAULT_CHECKPOINT_TIMEOUT
    """After that long a checkpoint has failed, and the program is stopped."""

    @property
    def idle_after_visitor(self) -> float:
        """`settle`, or `idle_for` where it was not set."""
        return self.idle_for if self.settle is None else self.settle

    @property
    def mps_environment(self) -> dict[str, str]:
        """The variables that give this program the lowest priority in CUDA MPS."""
        wanted = {
            "CUDA_MPS_CLIENT_PRIORITY": self.mps_priority,
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": self.mps_thread_percentage,
        }
        return {name: str(value) for name, value in wanted.items() if value is not None}


class TerminalRule(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a person at a terminal stops everything."""

    enabled: bool = False
    whitelist: tuple[str, ...] = ()
    """Users who do not count."""
    idle_seconds: float = DEFAULT_TERMINAL_IDLE
    """Somebody who typed nothing for so long is not there."""


class DailyHours(msgspec.Struct, frozen=True):
    """One stretch of the day. One that runs past midnight belongs to the day on which it begins."""

    begin: int
    """Minutes after midnight."""
    end: int
    days: tuple[int, ...] = EVERY_DAY
    """0 is Monday."""

    def contains(self, weekday: int, minute: int) -> bool:
        if self.begin < self.end:
            return weekday in self.days and self.begin <= minute < self.end
        return (weekday in self.days and minute >= self.begin) or ((weekday - 1) % 7 in self.days and minute < self.end)


WHOLE_DAY: Final = DailyHours(0, _DAY)


class Schedule(msgspec.Struct, frozen=True):
    """Any of these stretches allows."""

    hours: tuple[DailyHours, ...]

    def allows(self, wall: datetime | struct_time) -> bool:
        """Whether programs may run when the clock on the wall shows this."""
        if isinstance(wall, struct_time):
            weekday, minute = wall.tm_wday, wall.tm_hour * 60 + wall.tm_min
        else:
            weekday, minute = wall.weekday(), wall.hour * 60 + wall.minute
        return any(each.contains(weekday, minute) for each in self.hours)

    def next_change(self, wall: datetime) -> datetime | None:
        """When `allows` will next say something else, in the same time zone; None when it never will.

        Without a time zone it is this machine's. The clock is followed through real time, so that an hour which
        comes twice, or not at all, is counted as it will be.
        """
        now = self.allows(wall)
        step = math.gcd(_QUARTER, *(edge for each in self.hours for edge in (each.begin, each.end))) * 60
        past_step = (wall.minute * 60 + wall.second) % step
        moment = wall.replace(microsecond=0).timestamp() - past_step
        # A week and a day: no schedule repeats later, not even one that the clock's change has cut a piece out of.
        for number in range(1, int(timedelta(days=8).total_seconds()) // step + 1):
            then = datetime.fromtimestamp(moment + number * step, wall.tzinfo)
            if self.allows(then) != now:
                return then
        return None


class FillConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, and where it was written."""

    interval: float = DEFAULT_INTERVAL
    """Seconds between two scans."""
    watched: tuple[WatchedGpus, ...] = ()
    programs: tuple[Background, ...] = ()
    terminals: TerminalRule = TerminalRule()
    schedule: Schedule | None = None
    """When background programs may run. None: always."""
    ignore_shipped: bool = True
    """Whether the monitors on Stoker's own list (persistence daemon, exporters, display servers) are ignored too."""
    holders_suffice: bool = False
    """Whether a GPU that tells neither utilization nor processes counts as idle while nobody holds its device node.
    Otherwise it is unknown, and unknown is never idle."""
    source: str = ""
    """The file's path."""


def parse_hours(text: str, days: str = "daily") -> DailyHours:
    """One entry from what a person wrote: `20:00-08:00` and `mon-fri`, `sat,sun` or `daily`."""
    edges = [_minutes(edge.strip()) for edge in text.split("-")]
    if len(edges) != 2 or None in edges:
        raise BadInputError(f"{text!r} is not a time of day: write them like 20:00-08:00")
    begin, end = (edge for edge in edges if edge is not None)
    if begin % _DAY == end % _DAY and not (begin == 0 and end == _DAY):
        raise BadInputError(f"{text!r} ends when it begins: write 00:00-24:00 for the whole day")
    return DailyHours(begin % _DAY, end, parse_days(days)) if end else DailyHours(begin, _DAY, parse_days(days))


def parse_days(text: str) -> tuple[int, ...]:
    """Weekdays from `mon-fri`, `sat,sun`, `fri-mon`, `weekdays`, `weekend` or `daily`."""
    found: set[int] = set()
    for entry in text.lower().split(","):
        first, dash, last = (part.strip() for part in entry.partition("-"))
        if first in _GROUPS and not dash:
            begin, end = _GROUPS[first]
        else:
            begin = _day(first, text)
            end = _day(last, text) if dash else begin
        found |= {day % 7 for day in range(begin, end + 1 if begin <= end else end + 8)}
    return tuple(sorted(found))


def _day(name: str, text: str) -> int:
    for number, names in enumerate(zip(DAYS, _LONG, strict=True)):
        if name in names:
            return number
    raise BadInputError(f"{text!r} does not name days: write them like mon-fri, sat,sun or daily")


def _minutes(clock: str) -> int | None:
    match = _CLOCK.fullmatch(clock)
    if not match or int(match[2]) > 59:
        return None
    minutes = int(match[1]) * 60 + int(match[2])
    return minutes if minutes <= _DAY else None
