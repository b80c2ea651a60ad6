"""Values of a configuration as people write them: text in an INI file, text, numbers and lists in a TOML file."""

import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Final

from stoker.errors import BadInputError
from stoker.fill.config import GpuChoice
from stoker.fill.schedule import DailyHours, parse_days, parse_hours
from stoker.units import format_duration, parse_duration

_BOOLEANS: Final = {
    "1": True, "yes": True, "true": True, "on": True,
    "0": False, "no": False, "false": False, "off": False,
}  # fmt: skip
_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,9}")
_RANGE: Final = re.compile(r"([0-9]{1,9})\s*-\s*([0-9]{1,9})")
_INDEX: Final = re.compile(r"[0-9]{1,9}")
# A uuid, or the beginning of one: it has digits in it and no spaces.
_UUID: Final = re.compile(r"(?=.*[0-9])[A-Za-z0-9][A-Za-z0-9:._/-]*")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_BEST_EFFORT: Final = re.compile(r"best-effort(?::([0-7]))?")
# What Linux gives to a program that asks for no level of its own.
_USUAL_LEVEL: Final = "4"


def text(value: object) -> str:
    if not isinstance(value, str):
        raise BadInputError(f"{value!r} is not text: put it into quotes")
    if not value.strip():
        raise BadInputError("there is nothing there: write a value, or remove the line")
    return value.strip()


def path(value: object) -> str:
    """A path, `~` being the home of whoever starts Stoker."""
    written = text(value)
    try:
        return str(Path(written).expanduser())
    except RuntimeError:
        raise BadInputError(f"nobody's home is known for {written!r}: write the whole path") from None


def boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _BOOLEANS:
        return _BOOLEANS[value.strip().lower()]
    raise BadInputError(f"{value!r} is neither yes nor no: write true or false")


def duration(least: float = 0.0) -> Callable[[object], float]:
    """Seconds from `90s`, `5m` or a number of seconds."""

    def convert(value: object) -> float:
        if isinstance(value, str):
            seconds = parse_duration(value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            seconds = float(value)
        else:
            raise BadInputError(f"{value!r} is not a duration: write it like 90s, 5m or 1h30m")
        if seconds < least:
            raise BadInputError(f"{value!r} is too short: write {format_duration(least)} or more")
        return seconds

    return convert


def whole(least: int, most: int) -> Callable[[object], int]:
    """A whole number in a range."""

    def convert(value: object) -> int:
        if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
            number = int(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            number = value
        else:
            raise BadInputError(f"{value!r} is not a whole number: write one from {least} to {most}")
        if not least <= number <= most:
            raise BadInputError(f"{number} is out of range: write a number from {least} to {most}")
        return number

    return convert


def percentage(value: object) -> int:
    """From 1 to 100, with or without the sign."""
    return whole(1, 100)(value.strip().removesuffix("%") if isinstance(value, str) else value)


def names(value: object) -> tuple[str, ...]:
    """A list, or text with commas; nothing at all is an empty list."""
    if isinstance(value, str):
        entries: list[object] = list(value.split(","))
    elif isinstance(value, list):
        entries = value
    else:
        raise BadInputError(f"{value!r} is not a list of names: write them with commas between them")
    return tuple(text(entry) for entry in entries if not isinstance(entry, str) or entry.strip())


def gpus(value: object) -> GpuChoice:
    """`all` in any case, or indices, ranges and uuids."""
    written = value if isinstance(value, list) else value.split(",") if isinstance(value, str) else [value]
    for each in written:
        if isinstance(each, bool) or not isinstance(each, int | str):
            raise BadInputError(f"{each!r} is no GPU: write all, 0, 0,2, 0-3 or a uuid")
    entries = [str(each).strip() for each in written]
    if [entry.lower() for entry in entries] == ["all"]:
        return "all"
    chosen = tuple(dict.fromkeys(_gpu(entry) for entry in entries if entry))
    if not chosen:
        raise BadInputError("no GPU is named: write all, 0, 0,2, 0-3 or a uuid")
    return chosen


def _gpu(entry: str) -> str:
    numbers = _RANGE.fullmatch(entry)
    if numbers and int(numbers[1]) > int(numbers[2]):
        raise BadInputError(f"{entry!r} runs backwards: write {numbers[2]}-{numbers[1]}")
    if numbers:
        return f"{int(numbers[1])}-{int(numbers[2])}"
    if _INDEX.fullmatch(entry):
        return str(int(entry))
    if not _UUID.fullmatch(entry):
        raise BadInputError(f"{entry!r} is no GPU: write all, 0, 0,2, 0-3 or a uuid")
    return entry


def command(value: object) -> tuple[str, ...]:
    """Words as a shell would split them, or a list of words as they are."""
    if isinstance(value, list):
        if not all(isinstance(word, str) for word in value):
            raise BadInputError("a command's words are text: put each of them into quotes")
        words = value
    else:
        try:
            words = shlex.split(text(value))
        except ValueError:
            raise BadInputError(f"{value!r} has a quote that is not closed: close it, or write \\ before it") from None
    if not words or not words[0]:
        raise BadInputError("there is no command: write the program that is to run")
    if any("\0" in word for word in words):
        raise BadInputError("a command cannot have a zero byte in it: remove it")
    return tuple(words)


def environment(value: object) -> dict[str, str]:
    """A table of variables, or `NAME=value` words as a shell would split them."""
    if isinstance(value, dict):
        pairs = {name: _variable_value(each) for name, each in value.items()}
    else:
        words = command(value)
        if not all("=" in word for word in words):
            raise BadInputError(f"{value!r} are no variables: write them like NAME=value OTHER='two words'")
        pairs = dict(word.split("=", 1) for word in words)
    for name in pairs:
        if not _VARIABLE.fullmatch(name):
            raise BadInputError(f"{name!r} cannot be a variable's name: use letters, digits and _")
        if name == "CUDA_VISIBLE_DEVICES":
            raise BadInputError("CUDA_VISIBLE_DEVICES is set by Stoker: say with gpus which ones the program may use")
    return pairs


def _variable_value(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise BadInputError(f"{value!r} is not a variable's value: put it into quotes")
    return str(value)


def hours(value: object) -> tuple[DailyHours, ...]:
    """One stretch of the day or more."""
    return tuple(map(parse_hours, names(value) or ("",)))


def days(value: object) -> tuple[int, ...]:
    return parse_days(",".join(names(value)))


def ionice(value: object) -> str:
    written = text(value).lower()
    match = _BEST_EFFORT.fullmatch(written)
    if match:
        return f"best-effort:{match[1] or _USUAL_LEVEL}"
    if written != "idle":
        raise BadInputError(f"{value!r} is no class of disk access: write idle, or best-effort:7 (0 is first, 7 last)")
    return written


def one_of(*known: str) -> Callable[[object], str]:
    def convert(value: object) -> str:
        if not isinstance(value, str) or value.strip().lower() not in known:
            raise BadInputError(f"{value!r} is not known here: write {' or '.join(known)}")
        return value.strip().lower()

    return convert
