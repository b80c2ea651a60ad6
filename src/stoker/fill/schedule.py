"""The hours in which background programs may run: `20:00-08:00` on `mon-fri`, in local time."""

import math
import re
from datetime import datetime, timedelta
from time import struct_time
from typing import Final

import msgspec

from stoker.errors import BadInputError

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
EVERY_DAY: Final = tuple(range(7))
_GROUPS: Final = {"daily": (0, 6), "all": (0, 6), "weekdays": (0, 4), "weekend": (5, 6), "weekends": (5, 6)}
_LONG: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_CLOCK: Final = re.compile(r"([0-9]{1,2}):([0-9]{2})")
_DAY: Final = 24 * 60
# Clocks are set forward and back by quarters of an hour: whoever looks at every quarter misses no such change.
_QUARTER: Final = 15


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


def parse_hours(text: str, days: str = "daily") -> DailyHours:
    """One entry from what a person wrote: `20:00-08:00` and `mon-fri`, `sat,sun` or `daily`."""
    edges = [_minutes(edge.strip()) for edge in text.split("-")]
    if len(edges) != 2 or None in edges:
        raise BadInputError(f"{text!r} are no hours: write them like 20:00-08:00")
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
    raise BadInputError(f"{text!r} are no days: write them like mon-fri, sat,sun or daily")


def _minutes(clock: str) -> int | None:
    match = _CLOCK.fullmatch(clock)
    if not match or int(match[2]) > 59:
        return None
    minutes = int(match[1]) * 60 + int(match[2])
    return minutes if minutes <= _DAY else None
