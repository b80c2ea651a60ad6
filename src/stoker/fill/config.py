"""The configuration of `fill`: programs, their GPUs, and their hours."""

import re
from time import struct_time
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from stoker.errors import BadInputError

# The limit of the pause after a program died at once, doubled each time.
LONGEST_BACKOFF: Final = 3600.0
_LONGEST: Final = 1e9

_Text = Annotated[str, Meta(pattern="^[^\\0]*$")]
Seconds = Annotated[float, Meta(ge=0, le=_LONGEST)]
Name = Annotated[str, Meta(pattern="^[^\\0]+$")]
"""A non-empty string without NUL, as the kernel requires."""


class WatchedGpus(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs watched for other users, and ignored programs."""

    name: Name
    gpus: str = "all"
    """A selection for `stoker.gpus.visible.select_gpus`."""
    ignore: tuple[str, ...] = ()
    """Names of executables, with the shell's wildcards `*` and `?`."""


class ProgramDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for one program or for all."""

    # Steps of an interactive session are seconds apart, experiments of a person a minute.
    idle_for: Seconds = 60.0
    settle: Seconds | None = None
    """The required idle time after another user has left; None for `idle_for`."""
    # Long enough to write a small checkpoint, short enough for a waiting user.
    grace: Seconds = 10.0
    """The delay between SIGTERM and SIGKILL."""
    # The cause of an immediate death probably persists.
    backoff: Annotated[float, Meta(ge=1, le=_LONGEST)] = 10.0
    """The first pause after the program died at once, doubled each time up to `LONGEST_BACKOFF`."""
    nice: Annotated[int, Meta(ge=0, le=19)] | None = None


class Background(ProgramDefaults, frozen=True, kw_only=True):
    """A program for idle GPUs."""

    name: Name
    command: Annotated[tuple[_Text, ...], Meta(min_length=1)]
    directory: Name | None = None
    """The directory; None for the current one."""
    gpus: str = "all"
    each: bool = False
    """One program for every GPU of `gpus`; otherwise one on all of them together, once all are idle."""
    log: Name | None = None
    """A file to append the output to; None for Stoker's console."""
    environment: dict[Annotated[str, Meta(pattern="^[A-Za-z_][A-Za-z0-9_]*$")], _Text] = {}
    """Variables added to Stoker's own."""


class TerminalRule(msgspec.Struct, frozen=True, kw_only=True):
    """A person at a terminal stops all programs. The section itself enables this by default."""

    enabled: bool = True
    whitelist: tuple[str, ...] = ()
    """Ignored users."""
    # A person who reads the screen types nothing for minutes.
    idle_seconds: Seconds = 300.0
    """A user without input for this long counts as absent."""


_DAY: Final = 24 * 60
_DAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_GROUPS: Final = {"daily": (0, 6), "weekdays": (0, 4), "weekend": (5, 6)}
_CLOCK: Final = re.compile(r"([0-9]{1,2}):([0-5][0-9])")
EVERY_DAY: Final = tuple(range(7))


class DailyHours(msgspec.Struct, frozen=True):
    """Daily hours. Hours past midnight belong to the day on which they start."""

    begin: int
    """Minutes after midnight."""
    end: int
    days: tuple[int, ...] = EVERY_DAY
    """Weekdays; 0 is Monday."""

    def contain(self, wall: struct_time) -> bool:
        """True if the time is within the hours."""
        minute, weekday, day_before = wall.tm_hour * 60 + wall.tm_min, wall.tm_wday, (wall.tm_wday - 1) % 7
        if self.begin < self.end:
            return weekday in self.days and self.begin <= minute < self.end
        return (weekday in self.days and minute >= self.begin) or (day_before in self.days and minute < self.end)


class FillConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The whole configuration with its origin."""

    # The default of gpu_mon; kernel events trigger scans at once anyway.
    interval: float = 10.0
    """The interval of scans in seconds."""
    watched: tuple[WatchedGpus, ...] = ()
    programs: tuple[Background, ...] = ()
    terminals: TerminalRule = TerminalRule(enabled=False)
    schedule: tuple[DailyHours, ...] = ()
    """Hours for background programs; empty for always."""
    ignore_shipped: bool = True
    """Also ignores Stoker's list of monitors (persistence daemon, exporters, display servers)."""
    holders_suffice: bool = False
    """A GPU that reports neither utilization nor processes counts as idle while nobody holds its device node. Otherwise
    it is unknown, and unknown is never idle."""
    source: str = ""
    """The file's path."""


def parse_hours(text: str, days: tuple[int, ...] = EVERY_DAY) -> DailyHours:
    """Parses hours such as `20:00-08:00`."""
    edges = [_minutes(edge.strip()) for edge in text.split("-")]
    if len(edges) != 2 or None in edges:
        raise BadInputError(f"{text!r} is not a time of day: write them like 20:00-08:00")
    begin, end = (edge for edge in edges if edge is not None)
    if begin % _DAY == end % _DAY and not (begin == 0 and end == _DAY):
        raise BadInputError(f"{text!r} ends when it begins: write 00:00-24:00 for the whole day")
    return DailyHours(begin % _DAY, end or _DAY, days)


def parse_days(text: str) -> tuple[int, ...]:
    """Parses weekdays: `mon-fri`, `sat,sun`, `fri-mon`, `weekdays`, `weekend` or `daily`."""
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
    for number, day in enumerate(_DAYS):
        if name in (day, day[:3]):
            return number
    raise BadInputError(f"{text!r} does not name days: write them like mon-fri, sat,sun or daily")


def _minutes(clock: str) -> int | None:
    match = _CLOCK.fullmatch(clock)
    minutes = int(match[1]) * 60 + int(match[2]) if match else _DAY + 1
    return minutes if minutes <= _DAY else None
