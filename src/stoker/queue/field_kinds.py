"""Kinds of job fields: parsing, formatting and limits of their values."""

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypedDict

import msgspec
from msgspec import Meta

from stoker.actions.subscription import LONGEST, check_url, parse_subscription
from stoker.errors import BadInputError
from stoker.queue.commands import LONGEST_COMMAND, Command, check_command, shell_text
from stoker.queue.provenance import check_environment, working_directory
from stoker.queue.slurm_options import check_slurm, read_slurm
from stoker.schedule import moment_text, parse_moment, parse_recurrence, recurrence_text
from stoker.units import LONGEST_SECONDS, format_duration, format_memory, parse_duration, parse_memory

ID: Final = re.compile(r"[0-9a-f]{8}")
LONGEST_LABEL: Final = 200

_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,19}")
# Names from drivers and Slurm: `NVIDIA A100-SXM4-80GB`, `nvidia_a100_3g.20gb`, `AMD Instinct MI300X (gfx942)`.
_GPU_NAME: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9 ._/()+-]*[A-Za-z0-9)+])?")
# Causes of failure, besides the names of rules.
_ENDS: Final = ("exit", "oom", "time-limit", "start", "lost")
# Host names and features of Slurm nodes.
_WORD: Final = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
# Names that `logs.metrics` recognizes in a log.
_METRIC: Final = re.compile(r"[A-Za-z][\w./@-]{0,47}", re.ASCII)
_YES: Final = frozenset({"on", "true", "yes", "1"})
_NO: Final = frozenset({"", "off", "false", "no", "0"})

# Types of the API, with limits.
Seconds = Annotated[float, Meta(ge=0, le=LONGEST_SECONDS)]
Written = Annotated[str, Meta(max_length=40)]
Label = Annotated[str, Meta(max_length=LONGEST_LABEL)]
JobName = Annotated[str, Meta(min_length=1, max_length=LONGEST_LABEL)]
Value = Annotated[str, Meta(max_length=128 * 1024)]


class FieldKind(msgspec.Struct, frozen=True, kw_only=True):
    """Parsing, formatting and limits of a field's values."""

    name: str
    read: Callable[[Any], Any]
    """Parses text or a JSON value."""
    write: Callable[[Any], str] = str
    """Formats a value as text for `read`."""
    check: Callable[[Any], None] = lambda _value: None
    """Raises for a value outside the limits."""
    json: Any = Annotated[str, Meta(max_length=LONGEST_LABEL)]
    """The type in the API."""
    metavar: str = "TEXT"
    has_unit: bool = False
    """It accepts a number or text with a unit."""


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise BadInputError(f"{str(value)[:40]!r} is not text")
    text = value.strip()
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInputError(f"{text[:40]!a} is not text in UTF-8") from None
    if "\0" in text:
        raise BadInputError(f"{text[:40]!a} has the character NUL in it")
    return text


def _check_label(value: str) -> None:
    if len(value) > LONGEST_LABEL or any(ord(letter) < 32 for letter in value):
        raise BadInputError(f"{value[:40]!r} is not one line of at most {LONGEST_LABEL} letters")


def _several(value: object) -> list[str]:
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value) if part]
    return list(value) if isinstance(value, Sequence) else []


def _check_tags(tags: Sequence[str]) -> None:
    for tag in tags:
        _check_label(tag)
        if not tag:
            raise BadInputError("a tag must not be empty")


def _command(value: object) -> Command:
    command: Command = value.strip() if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else ()
    check_command(command)
    return command


def _whole(value: object) -> int:
    if isinstance(value, str):
        if not _WHOLE.fullmatch(value.strip()):
            raise BadInputError(f"{value.strip()[:40]!r} is not a whole number")
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise BadInputError(f"{value!r} is not a whole number")
    return value


def _between(least: int, most: int) -> Callable[[int], None]:
    def check(value: int) -> None:
        if not least <= value <= most:
            raise BadInputError(f"must be between {least} and {most}, not {value}")

    return check


def _number(least: int, most: int = 2**31 - 1) -> FieldKind:
    limited = Annotated[int, Meta(ge=least, le=most)]
    return FieldKind(name="number", read=_whole, check=_between(least, most), json=limited, metavar="N")


def read_flag(value: object) -> bool:
    """Parses a flag from JSON or from a check box."""
    if not isinstance(value, str):
        return bool(value)
    if value.strip().lower() not in _YES | _NO:
        raise BadInputError(f"{value[:40]!r} is neither on nor off")
    return value.strip().lower() in _YES


def _memory(value: object) -> int:
    if isinstance(value, str) and not value.strip().isdecimal():
        return parse_memory(value)
    return _whole(value)


def _memory_text(amount: int) -> str:
    readable = format_memory(amount).replace(" ", "")
    if parse_memory(readable) == amount:
        return readable
    return f"{amount // 2**20}MiB" if amount % 2**20 == 0 else f"{amount}B"


def _check_ram(amount: int) -> None:
    if not 2**20 <= amount < 2**63:
        raise BadInputError(f"{amount} bytes is not the memory of a program: write it like 64GiB")


def _gpu_model(value: object) -> str:
    return "|".join(part.strip() for part in _text(value).split("|"))


def _check_gpu_model(alternatives: str) -> None:
    _check_label(alternatives)
    if not all(_GPU_NAME.fullmatch(part) for part in alternatives.split("|")):
        raise BadInputError(
            f"{alternatives[:40]!r} is not the name of a GPU: write a part of it, or several, like a100|h100"
        )


def _check_words(what: str, example: str) -> Callable[[Sequence[str]], None]:
    def check(words: Sequence[str]) -> None:
        for word in words:
            if not _WORD.fullmatch(word):
                raise BadInputError(f"{word[:40]!r} cannot be {what}: write it like {example}")

    return check


def _words(what: str, example: str, metavar: str) -> FieldKind:
    """The kind of a list of names without spaces or commas."""
    return FieldKind(
        name=metavar.lower(),
        read=lambda value: tuple(dict.fromkeys(map(_text, _several(value)))),
        write=", ".join,
        check=_check_words(what, example),
        json=Annotated[list[Annotated[str, Meta(max_length=253)]], Meta(max_length=100)],
        metavar=metavar,
    )


def read_seconds(value: object) -> float:
    """Parses text like `2h`, or a number of seconds."""
    if isinstance(value, str):
        return parse_duration(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadInputError(f"{value!r} is not a duration: write it like 90s, 5m or 1h30m")
    return float(value)


def seconds_text(seconds: float) -> str:
    """Formats seconds without loss for `read_seconds`."""
    readable = format_duration(seconds)
    return readable if parse_duration(readable) == seconds else f"{seconds:.15f}".rstrip("0").rstrip(".") + "s"


def check_seconds(seconds: float) -> None:
    if not math.isfinite(seconds) or not 0 <= seconds <= LONGEST_SECONDS:
        raise BadInputError(f"{seconds:g} s is not between zero and ten years: write it like 90s or 2h")


def _check_limit(seconds: float) -> None:
    check_seconds(seconds)
    if seconds == 0:
        raise BadInputError("must be greater than zero: leave it out for no limit")


def _moment(value: object) -> float:
    if isinstance(value, str):
        return parse_moment(value, time.time())
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BadInputError(f"{value!r} is not a time: write it like 22:00, +2h or '2026-11-19 22:00'")
    return float(value)


def _check_moment(moment: float) -> None:
    # Years 1970 to 9999.
    if not 0 <= moment < 253_402_300_800:
        raise BadInputError(f"{moment:g} is not a time in seconds since 1970: write it like 22:00, +2h or 2026-11-19")


def _recurrence(value: object) -> str:
    return recurrence_text(_text(value))


def _check_recurrence(text: str) -> None:
    _check_label(text)
    parse_recurrence(text)


def _check_ends(ends: Sequence[str]) -> None:
    from stoker.rules.registry import rule_types  # imported lazily: most commands need no rules

    names = [*_ENDS, *(one.name for one in rule_types())]
    for end in ends:
        kind, _, code = end.partition(":")
        is_code = kind == "exit" and code.isdecimal() and 0 < int(code) < 256
        if not is_code and end not in names:
            known = ", ".join([*_ENDS, "exit:75", *(name for name in names if name not in _ENDS)])
            raise BadInputError(f"{end[:40]!r} is not an end of a job: choose among {known}")


def choice(*values: str) -> FieldKind:
    def check(value: object) -> None:
        if value not in values:
            raise BadInputError(f"{str(value)[:40]!r} is not one of {', '.join(values)}")

    return FieldKind(name="choice", read=str, check=check, json=Literal[values], metavar="|".join(values))


def _directory(value: object) -> str:
    path = _text(value)
    if not path.startswith("/"):
        raise BadInputError("a job needs a directory to start in: write an absolute path, like /home/me/project")
    return working_directory(path)


def _environment(value: object) -> dict[str, str]:
    if isinstance(value, str):
        pairs = [line.partition("=") for line in value.splitlines() if line.strip()]
        if bare := [name for name, equals, _value in pairs if not equals]:
            raise BadInputError(f"{bare[0][:40]!r} sets no variable: write NAME=VALUE on each line")
        return {name.strip(): text for name, _equals, text in pairs}
    return dict(value) if isinstance(value, Mapping) else {}


def _check_policy(policy: Mapping[str, object]) -> None:
    from stoker.rules.registry import policies_of

    policies_of(policy)


def _check_actions(texts: Sequence[str]) -> None:
    from stoker.actions.catalogue import check_actions

    check_actions(texts)


def _notify(value: object) -> tuple[str, ...]:
    texts = value.split() if isinstance(value, str) else map(_text, value) if isinstance(value, Sequence) else []
    return tuple(dict.fromkeys(str(parse_subscription(text)) for text in texts))


def _check_notify(entries: Sequence[str]) -> None:
    for entry in entries:
        if url := parse_subscription(entry).url:
            check_url(url)


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise BadInputError(f"{str(value)[:40]!r} is not a mapping")
    return dict(value)


class SlurmOptions(TypedDict, total=False):
    """A job's options for Slurm."""

    partition: Label
    account: Label
    qos: Label
    constraint: Label
    reservation: Label
    sbatch: Annotated[list[Label], Meta(max_length=100, description="Further options of sbatch.")]


def _check_group(name: str) -> None:
    _check_label(name)
    if ID.fullmatch(name) or "/" in name:
        raise BadInputError(
            f"{name[:40]!r} cannot be the name of a group: it looks like the id of a job, or has / in it"
        )


def _check_metrics(names: Sequence[str]) -> None:
    for name in names:
        if not _METRIC.fullmatch(name):
            raise BadInputError(f"{name[:40]!r} cannot be a figure of a log: write its name there, like val_loss")


TEXT: Final = FieldKind(name="text", read=_text, check=_check_label, json=Label)
GROUP: Final = FieldKind(name="group", read=_text, check=_check_group, json=Label, metavar="NAME")
TAGS: Final = FieldKind(
    name="tags",
    read=lambda value: tuple(dict.fromkeys(map(_text, _several(value)))),
    write=", ".join,
    check=_check_tags,
    json=Annotated[list[Label], Meta(max_length=100)],
)
METRICS: Final = FieldKind(
    name="metrics",
    read=lambda value: tuple(dict.fromkeys(map(_text, _several(value)))),
    write=", ".join,
    check=_check_metrics,
    json=Annotated[list[Annotated[str, Meta(max_length=48)]], Meta(max_length=12)],
    metavar="NAME",
)
JOBS: Final = FieldKind(
    name="jobs",
    read=lambda value: tuple(dict.fromkeys(_several(value))),
    write=", ".join,
    json=Annotated[list[JobName], Meta(max_length=1000)],
    metavar="JOB",
)
ACTIONS: Final = FieldKind(
    name="action",
    read=lambda value: tuple(line.strip() for line in (value.splitlines() if isinstance(value, str) else value)),
    write="\n".join,
    check=_check_actions,
    json=Annotated[list[Annotated[str, Meta(max_length=LONGEST_COMMAND)]], Meta(max_length=20)],
    metavar="ACTION",
)
NOTIFY: Final = FieldKind(
    name="notification",
    read=_notify,
    write=" ".join,
    check=_check_notify,
    json=Annotated[list[Annotated[str, Meta(max_length=LONGEST)]], Meta(max_length=20)],
    metavar="WHEN|URL",
)
COMMAND: Final = FieldKind(
    name="command",
    read=_command,
    write=shell_text,
    json=Annotated[str, Meta(max_length=LONGEST_COMMAND)] | Annotated[list[Value], Meta(max_length=10_000)],
)
COUNT: Final = _number(0)
SIZE: Final = _number(1)
NODES: Final = _number(1, 1024)
INTEGER: Final = _number(1 - 2**31)
MEMORY: Final = FieldKind(
    name="memory",
    read=_memory,
    write=_memory_text,
    check=_between(0, 2**63 - 1),
    json=Annotated[int, Meta(ge=0, le=2**63 - 1)] | Written,
    metavar="SIZE",
    has_unit=True,
)
RAM: Final = msgspec.structs.replace(MEMORY, check=_check_ram)
GPU_MODEL: Final = FieldKind(name="model", read=_gpu_model, check=_check_gpu_model, json=Label, metavar="MODEL")
MACHINE: Final = FieldKind(
    name="machine",
    read=_text,
    check=lambda name: _check_words("the name of a machine", "gpu-box")([name]),
    json=Annotated[str, Meta(max_length=253)],
    metavar="NAME",
)
MACHINES: Final = _words("the name of a machine", "gpu-box", "NAME")
LABELS: Final = _words("a label of a machine", "ib", "LABEL")
DURATION: Final = FieldKind(
    name="duration",
    read=read_seconds,
    write=seconds_text,
    check=check_seconds,
    json=Seconds | Written,
    metavar="DURATION",
    has_unit=True,
)
MOMENT: Final = FieldKind(
    name="time",
    read=_moment,
    write=moment_text,
    check=_check_moment,
    json=Annotated[float, Meta(ge=0, lt=253_402_300_800)] | Written,
    metavar="TIME",
    has_unit=True,
)
RECURRENCE: Final = FieldKind(name="recurrence", read=_recurrence, check=_check_recurrence, json=Label, metavar="CRON")
ENDS: Final = FieldKind(
    name="end",
    read=lambda value: tuple(dict.fromkeys(map(_text, _several(value)))),
    write=", ".join,
    check=_check_ends,
    json=Annotated[list[Written], Meta(max_length=100)],
    metavar="ENDS",
)
LIMIT: Final = msgspec.structs.replace(DURATION, check=_check_limit)
FLAG: Final = FieldKind(name="flag", read=read_flag, write=lambda on: "on" if on else "off", json=bool)
DIRECTORY: Final = FieldKind(
    name="directory",
    read=_directory,
    json=Annotated[str, Meta(max_length=4096)],
    metavar="DIR",
)
ENVIRONMENT: Final = FieldKind(name="environment", read=_environment, check=check_environment, json=dict[str, Value])
POLICY: Final = FieldKind(
    name="policy", read=_mapping, check=_check_policy, json=dict[str, str | int | float | bool | None]
)
MAPPING: Final = FieldKind(name="mapping", read=_mapping, json=dict[str, Any])
SLURM: Final = FieldKind(name="slurm", read=read_slurm, check=check_slurm, json=SlurmOptions)
FACT: Final = FieldKind(name="fact", read=lambda value: value, json=Any)
