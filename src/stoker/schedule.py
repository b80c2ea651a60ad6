"""Parses times and recurrences: `22:00`, `+2h`, `0 3 * * *`. Pure: time is an argument.

A recurrence is in cron's syntax, followed by a time zone: `0 3 * * * Europe/Berlin`. Clock changes are handled like in
cron: a skipped time moves to the moment of the change, a repeated time counts once. A recurrence with `*` as hours
follows real time, so an hourly one stays hourly.
"""

import functools
import math
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta, tzinfo
from itertools import product
from pathlib import Path
from typing import Final, NamedTuple

from stoker.errors import BadInputError
from stoker.units import LONGEST_SECONDS, parse_duration

_CLOCK: Final = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])(?::([0-5][0-9]))?")
# Between a date and an hour of one digit.
_SHORT_HOUR: Final = re.compile(r"(?<=[0-9])([ T])(?=[0-9]:)")
_ZONE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9_+-]+)*")
_MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_DAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_SHORT: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
}
_FIELDS: Final = (
    ("minute", 0, 59, ()),
    ("hour", 0, 23, ()),
    ("day of the month", 1, 31, ()),
    ("month", 1, 12, _MONTHS),
    ("day of the week", 0, 7, _DAYS),
)
# February 29th is up to eight years away.
_MOST_DAYS: Final = 9 * 366
_MINUTE: Final = timedelta(minutes=1)
_HOW: Final = "write it like '0 3 * * *': minute, hour, day of the month, month, day of the week"


def parse_moment(text: str, now: float, zone: tzinfo | None = None) -> float:
    """Seconds since the epoch of `22:00` (the next one), `+2h`, `2026-11-19`, `2026-11-19 22:00`, with or without an
    offset from UTC. `zone`: the person's time zone; None for this machine's."""
    written = text.strip()
    if written.startswith("+"):
        seconds = parse_duration(written[1:])
        if seconds > LONGEST_SECONDS:
            raise BadInputError(f"{text!r} is more than ten years away")
        return float(math.ceil(now + seconds))
    today = datetime.fromtimestamp(now, zone).replace(tzinfo=zone)
    if clock := _CLOCK.fullmatch(written):
        hour, minute, second = (int(part or 0) for part in clock.groups())
        found = today.replace(hour=hour, minute=minute, second=second, microsecond=0)
        return next(at for days in (0, 1, 2) if (at := (found + timedelta(days=days)).timestamp()) > now)
    try:
        moment = datetime.fromisoformat(_SHORT_HOUR.sub(r"\g<1>0", written))
    except ValueError:
        raise BadInputError(f"{text!r} is not a time: write it like 22:00, +2h or '2026-11-19 22:00'") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=zone)).timestamp()


def moment_text(moment: float) -> str:
    """Text that `parse_moment` parses to the same moment."""
    exact = datetime.fromtimestamp(moment).astimezone()
    return exact.isoformat(sep=" ", timespec="seconds" if exact.microsecond == 0 else "microseconds")


class Recurrence(NamedTuple):
    """The fields of cron, each with its allowed numbers."""

    minutes: Sequence[int]
    hours: Sequence[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """Sunday is 0."""
    any_hour: bool
    any_day: bool
    any_weekday: bool
    zone: str
    """Empty for this machine's time zone."""

    def is_on(self, day: date) -> bool:
        """Like cron: if both kinds of days are restricted, either suffices."""
        if day.month not in self.months:
            return False
        of_month, of_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return of_month and of_week if self.any_day or self.any_weekday else of_month or of_week


@functools.lru_cache(maxsize=1000)
def parse_recurrence(text: str) -> Recurrence:
    words = text.split()
    if words and words[0].lower() in _SHORT:
        words = [*_SHORT[words[0].lower()].split(), *words[1:]]
    zone = words.pop() if len(words) == len(_FIELDS) + 1 else ""
    if len(words) != len(_FIELDS):
        raise BadInputError(f"{text[:60]!r} does not say when: {_HOW}")
    if zone:
        _zone(zone)
    numbers = [_numbers(word, *field) for word, field in zip(words, _FIELDS, strict=True)]
    minutes, hours, days, months, weekdays = numbers
    found = Recurrence(
        minutes=sorted(minutes),
        hours=sorted(hours),
        days=frozenset(days),
        months=frozenset(months),
        weekdays=frozenset(day % 7 for day in weekdays),
        any_hour=words[1].startswith("*"),
        any_day=words[2].startswith("*"),
        any_weekday=words[4].startswith("*"),
        zone=zone,
    )
    if not any(found.is_on(date(2024, 1, 1) + timedelta(days=number)) for number in range(_MOST_DAYS)):
        raise BadInputError(f"{text[:60]!r} never happens: no such day is in any year")
    return found


def _numbers(word: str, what: str, low: int, high: int, names: Sequence[str]) -> set[int]:
    found: set[int] = set()
    for part in word.lower().split(","):
        span, slash, step = part.partition("/")
        first, dash, last = span.partition("-")
        try:
            every = int(step) if slash else 1
            start = low if span == "*" else _number(first, names, low)
            end = high if span == "*" or (slash and not dash) else _number(last, names, low) if dash else start
        except ValueError:
            raise BadInputError(f"{part[:40]!r} is not a {what}: {_HOW}") from None
        if not (low <= start <= end <= high) or every < 1:
            raise BadInputError(f"{part[:40]!r} is not a {what} from {low} to {high}: {_HOW}")
        found.update(range(start, end + 1, every))
    return found


def _number(text: str, names: Sequence[str], low: int) -> int:
    return names.index(text) + low if text in names else int(text)


def recurrence_text(text: str, zone: str | None = None) -> str:
    """The recurrence with single spaces between its fields, followed by its time zone, by default this machine's."""
    found = parse_recurrence(text)
    words = text.split()
    written = " ".join(words)
    if found.zone:
        return written
    here = local_zone(os.environ) if zone is None else zone
    return f"{written} {here}" if here else written


def local_zone(environment: Mapping[str, str], root: Path = Path("/")) -> str:
    """The name of this machine's time zone; empty if unknown."""
    candidates = [environment.get("TZ", "").removeprefix(":")]
    try:
        candidates.append(str((root / "etc/localtime").readlink()).rpartition("zoneinfo/")[2])
    except OSError:
        candidates.append("" if (root / "etc/localtime").exists() else "UTC")
    for name in candidates:
        try:
            if name:
                _zone(name)
                return name
        except BadInputError:
            continue
    return ""


def _zone(name: str) -> tzinfo:
    from zoneinfo import ZoneInfo  # costs a short command milliseconds

    try:
        if _ZONE.fullmatch(name):
            return ZoneInfo(name)
    except (OSError, ValueError, KeyError):
        pass
    raise BadInputError(f"{name[:40]!r} is not a time zone: write it like Europe/Berlin")


def next_time(recurrence: str, after: float) -> float:
    """The first moment of the recurrence after this one, in seconds since the epoch. Raises BadInputError."""
    rule = parse_recurrence(recurrence)
    zone: tzinfo = _zone(rule.zone) if rule.zone else datetime.fromtimestamp(after).astimezone().tzinfo or UTC
    day = datetime.fromtimestamp(after, zone).date()
    for _ in range(_MOST_DAYS):
        if rule.is_on(day) and (found := [at for at in _moments(rule, day, zone) if at > after]):
            return min(found)
        day += timedelta(days=1)
    raise BadInputError(f"{recurrence[:60]!r} never happens: no such day is in any year")


def _moments(rule: Recurrence, day: date, zone: tzinfo) -> list[float]:
    found: list[float] = []
    for hour, minute in product(rule.hours, rule.minutes):
        first, second = (
            datetime(day.year, day.month, day.day, hour, minute, tzinfo=zone, fold=fold).astimezone(UTC)
            for fold in (0, 1)
        )
        if first < second:  # the clock shows it twice
            found += [first.timestamp(), second.timestamp()] if rule.any_hour else [first.timestamp()]
        elif first == second:
            found.append(first.timestamp())
        elif not rule.any_hour:  # the clock skips it
            found.append(_change_between(second, first, zone).timestamp())
    return found


def _change_between(early: datetime, late: datetime, zone: tzinfo) -> datetime:
    """The moment at which the clock is set forward."""
    before = early.astimezone(zone).utcoffset()
    while late - early > _MINUTE:
        middle = early + (late - early) // 2
        if middle.astimezone(zone).utcoffset() == before:
            early = middle
        else:
            late = middle
    return late.replace(second=0, microsecond=0)


def following(recurrence: str, started: float, now: float) -> float:
    """When a recurring job that began then runs again. One run makes up for missed times."""
    found = next_time(recurrence, started)
    while found <= now and (later := next_time(recurrence, found)) <= now:
        found = later
    return found
