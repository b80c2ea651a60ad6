"""Parses and formats durations, memory sizes, percentages and lists: `90s`, `8GiB`, `20%`, `a, b and c`."""

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence

from stoker.errors import BadInputError

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
    "b": 1,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_DURATION_PART = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)(ms|[smhd])")
# Ten years: no machine runs that long, and float arithmetic stays exact far below it.
LONGEST_SECONDS = 10 * 365 * 86400.0
# A list with one more than this many names is still shown whole.
_MOST_NAMES = 3
_MEMORY = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([a-z]+)")


def parse_duration(text: str) -> float:
    """Seconds in `90s`, `1h30m`, `250ms` or a bare number of seconds."""
    written = text.strip().lower()
    if re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,15})?", written):
        return float(written)
    parts = _DURATION_PART.findall(written)
    if not parts or "".join(number + unit for number, unit in parts) != written:
        raise BadInputError(f"{text!r} is not a duration: write it like 90s, 5m or 1h30m")
    return math.fsum(float(number) * _SECONDS[unit] for number, unit in parts)


def parse_length(text: str) -> float:
    """A duration valid for a rule or a time limit."""
    seconds = parse_duration(text)
    if seconds > LONGEST_SECONDS:
        raise BadInputError(f"{text!r} is longer than any machine runs: write it like 90s, 5m or 1h30m")
    return seconds


def parse_positive_duration(text: str) -> float:
    seconds = parse_duration(text)
    if seconds <= 0:
        raise BadInputError(f"{text!r} must be greater than zero")
    return seconds


def parse_memory(text: str) -> int:
    """Bytes in `8GiB`, `512M` (binary, as usual for GPUs) or `8GB` (decimal)."""
    match = _MEMORY.fullmatch(text.strip().lower())
    if not match or match[2] not in _BYTES:
        raise BadInputError(f"{text!r} is not an amount of memory: write it like 8GiB or 512MiB")
    return int(float(match[1]) * _BYTES[match[2]])


def parse_fraction(text: str) -> float:
    """A fraction between 0 and 1 from `20%` or `0.2`; a bare 1 is ambiguous and refused."""
    written = text.strip()
    try:
        if written.endswith("%"):
            value = float(written[:-1]) / 100
        else:
            value = float(written)
            if value >= 1:
                raise BadInputError(f"{text!r} is not clear as a percentage: write {written}% or, say, 0.2")
    except ValueError:
        raise BadInputError(f"{text!r} is not a percentage: write it like 20% or 0.2") from None
    if not 0 <= value <= 1:
        raise BadInputError(f"{text!r} is out of range: a percentage is between 0% and 100%")
    return value


def format_duration(seconds: float) -> str:
    """`0.5s`, `42s`, `5m`, `1h05m`, `2d03h`: at most two units."""
    if seconds < 10 and seconds != int(seconds):
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    for big, small, unit, below in ((60, 1, "m", "s"), (3600, 60, "h", "m"), (86400, 3600, "d", "h")):
        if whole < big * (60 if unit != "h" else 24) or unit == "d":
            rest = whole % big // small
            return f"{whole // big}{unit}{rest:02d}{below}" if rest else f"{whole // big}{unit}"
    raise AssertionError("unreachable: days take any number")


def format_memory(amount: int) -> str:
    """`0 B`, `512 MiB`, `7.9 GiB`, `80 GiB`."""
    for unit, size in _UNITS:
        if amount >= size:
            value = amount / size
            return f"{value:.1f} {unit}" if value < 10 and unit in ("GiB", "TiB") else f"{value:.0f} {unit}"
    return f"{amount} B"


def memory_formatter(wanted: int, amounts: Iterable[int]) -> Callable[[int], str]:
    """`format_memory` with enough decimals to show that an amount is below `wanted`: `12.0 GiB`, `11.7 GiB`."""
    less = [amount for amount in amounts if amount < wanted]
    if all(parse_memory(format_memory(amount)) < parse_memory(format_memory(wanted)) for amount in less):
        return format_memory
    unit, size = next(((unit, size) for unit, size in _UNITS if wanted >= size), ("B", 1))
    shown = next(
        digits
        for digits in range(1, 16)
        if all(f"{a / size:.{digits}f}" != f"{wanted / size:.{digits}f}" for a in less)
    )
    return lambda amount: f"{amount / size:.{shown}f} {unit}"


def format_percent(fraction: float) -> str:
    """`37%`, and `0.5%` below ten percent."""
    percent = fraction * 100
    return f"{percent:.1f}".removesuffix(".0") + "%" if percent < 10 else f"{percent:.0f}%"


def clock_time(wall: float, now: float) -> str:
    """`14:02` today, with the date on other days."""
    then, today = time.localtime(wall), time.localtime(now)
    return time.strftime("%H:%M" if then[:3] == today[:3] else "%Y-%m-%d %H:%M", then)


def about_when(wall: float, now: float) -> str:
    """An estimated time with adequate precision: `in about 40 min`, `tomorrow about 14:00`."""
    seconds = wall - now
    if seconds < 60:
        return "in less than a minute"
    for below, step in ((600, 60), (3600, 300), (3 * 3600, 1800), (12 * 3600, 3600)):
        if (rounded := round(seconds / step) * step) < below:
            hours, minutes = divmod(rounded // 60, 60)
            parts = [f"{hours} h"] * (hours > 0) + [f"{minutes} min"] * (minutes > 0)
            return f"in about {' '.join(parts)}"
    then, today = time.localtime(wall + 1800), time.localtime(now)
    days = round((time.mktime((*then[:3], 12, 0, 0, 0, 0, -1)) - time.mktime((*today[:3], 12, 0, 0, 0, 0, -1))) / 86400)
    day = ("today", "tomorrow")[days] if days < 2 else time.strftime("%A" if days < 7 else "%Y-%m-%d", then)
    return f"{day} about {then.tm_hour:02}:00"


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `3rd`, `11th`."""
    ending = "th" if number % 100 in {11, 12, 13} else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number:,}{ending}"


def capitalized(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def name_some(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b, c and 4 others`."""
    if len(names) > _MOST_NAMES + 1:
        return f"{', '.join(names[:_MOST_NAMES])} and {len(names) - _MOST_NAMES} others"
    return list_all(names)


def list_all(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]
