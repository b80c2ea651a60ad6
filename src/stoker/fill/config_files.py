"""Reads the configuration of `fill`: `[fill]` in stoker.toml, or an INI file of gpu_mon.

Both formats become the same sections. msgspec converts them key by key, so that all mistakes are reported at once.
"""

import configparser
import difflib
import math
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from stoker.errors import BadInputError
from stoker.fill.config import (
    EVERY_DAY,
    WHOLE_DAY,
    Background,
    DailyHours,
    FillConfig,
    GpuChoice,
    Schedule,
    TerminalRule,
    WatchedGpus,
    parse_days,
    parse_hours,
)
from stoker.paths import is_there
from stoker.settings import load_settings
from stoker.settings_path import config_path
from stoker.units import format_duration, parse_duration


class FillConfigError(BadInputError):
    """Every mistake in a configuration, one per line."""

    def __init__(self, problems: Iterable[str], valid_part: FillConfig | None = None) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(self.problems))
        self.valid_part = valid_part
        """The configuration without the mistakes, so that it can be checked against the machine as well."""


def find_config(named: str | None, environment: Mapping[str, str] = os.environ) -> FillConfig:
    """The file that was named, else `[fill]` in stoker.toml, else gpu_mon's file."""
    if named is not None:
        path = Path(named).expanduser()
        return read_toml(path) if path.suffix == ".toml" else read_ini(path)
    settings = config_path(environment)
    if (table := load_settings(environment=environment).fill) is not None:
        return config_of_table(table, settings)
    old = gpu_mon_path(environment)
    if is_there(old):
        return read_ini(old)
    raise BadInputError(
        f"there is nothing to fill with: write [[fill.program]] into {settings}, or a {old}, or use --config"
    )


def gpu_mon_path(environment: Mapping[str, str] = os.environ) -> Path:
    return Path(environment.get("HOME") or Path.home()) / ".config/gpu_mon.conf"


# The two formats


class Section(NamedTuple):
    """Keys and values of one section, whatever the format."""

    name: str
    title: str
    """How messages call it: `[process-0]`, `[[fill.program]] mine`."""
    values: Mapping[str, Any]


def read_toml(path: str | Path) -> FillConfig:
    """The configuration in `[fill]` of this file; `FillConfigError` lists all mistakes."""
    file = Path(path).expanduser()
    table = _toml(file).get("fill")
    if not isinstance(table, dict):
        raise FillConfigError([f"{file}: there is no [fill] in this file: write it, with [[fill.program]] below"])
    return config_of_table(table, str(file))


def config_of_table(table: Mapping[str, Any], source: str) -> FillConfig:
    """The configuration in the `[fill]` table of the file `source`."""
    reader = _Reader(source)
    plain = {key: value for key, value in table.items() if key not in _FILL_TABLES}
    ignored = reader.values(Section("ignore", "[fill]", {"ignore": plain.pop("ignore", [])}), WatchedGpus)
    programs = reader.tables(table, "program")
    watched = reader.tables(table, "watch") or [Section("gpu-all", "[fill]", {})]
    names = [section.name for section in (*programs, *watched)]
    for name in {name for name in names if names.count(name) > 1}:
        reader.problem(f"[fill] names two sections {name!r}: choose another name for one of them")
    config = reader.config(
        Section("defaults", "[fill]", plain),
        watched,
        programs,
        terminals=reader.tables(table, "terminals", named=False),
        schedule=reader.tables(table, "schedule", named=False),
        missing_program="add [[fill.program]] with name = and command =",
    )
    everywhere = ignored.get("ignore", ())
    watched_gpus = [msgspec.structs.replace(each, ignore=(*each.ignore, *everywhere)) for each in config.watched]
    return reader.result(msgspec.structs.replace(config, watched=tuple(watched_gpus)))


def read_ini(path: str | Path) -> FillConfig:
    """The configuration in a file of gpu_mon's; `FillConfigError` lists all mistakes."""
    file = Path(path).expanduser()
    reader = _Reader(str(file))
    parser = configparser.ConfigParser(interpolation=_Interpolation())
    try:
        parser.read_string(_text(file), source=str(file))
    except configparser.MissingSectionHeaderError as error:
        raise FillConfigError([f"{file}:{error.lineno}: there is no [section] above this line"]) from None
    except configparser.ParsingError as error:
        raise FillConfigError(
            f"{file}:{line}: this is neither a [section] nor key = value: write # before a comment"
            for line, _text in error.errors
        ) from None
    except configparser.DuplicateOptionError as error:
        repeated = f"[{error.section}] has {error.option!r} already: remove one of them"
        raise FillConfigError([f"{file}:{error.lineno}: {repeated}"]) from None
    except configparser.DuplicateSectionError as error:
        repeated = f"[{error.section}] is there already: give one of them another name"
        raise FillConfigError([f"{file}:{error.lineno}: {repeated}"]) from None
    sections: dict[str, list[Section]] = {kind: [] for kind in _INI_SECTIONS}
    for name in parser.sections():
        kind = _ini_kind(name)
        if kind is None:
            near = _nearest(name.partition("-")[0], _INI_SECTIONS)
            hint = f"did you mean {_INI_SECTIONS[near]}?" if near else f"use {', '.join(_INI_SECTIONS.values())}"
            reader.problem(f"[{name}] is not a section: {hint}")
        else:
            sections[kind].append(Section(name, f"[{name}]", reader.ini_values(parser, name, _INI_STRUCTS[kind])))
    if not sections["gpu"]:
        reader.problem("no GPU is watched: add a section [gpu-all] with gpus = ALL")
    defaults = sections["defaults"] or [Section("defaults", "[defaults]", {})]
    return reader.result(
        reader.config(
            defaults[0],
            sections["gpu"],
            sections["process"],
            terminals=sections["tty"],
            schedule=sections["schedule"],
            missing_program="add a section [process-0] with cmd = and gpus =",
        )
    )


class _Interpolation(configparser.BasicInterpolation):
    """`%(key)s` refers to another key; a percent sign alone stands for itself, as in `20%`."""

    def before_get(
        self,
        parser: MutableMapping[str, Mapping[str, str]],
        section: str,
        option: str,
        value: str,
        defaults: Mapping[str, str],
    ) -> str:
        return super().before_get(parser, section, option, re.sub(r"%%|%(?!\()", "%%", value), defaults)


def _ini_kind(name: str) -> str | None:
    if name in ("defaults", "tty"):
        return name
    return next((kind for kind in ("gpu", "process", "schedule") if name.startswith(kind)), None)


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(file))
    except tomllib.TOMLDecodeError as error:
        raise FillConfigError([f"{file}: this is not TOML: {error}"]) from None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise FillConfigError([f"{file}: this file does not exist: write it, or name another"]) from None
    except OSError as error:
        raise FillConfigError([f"{file}: this file cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError:
        raise FillConfigError([f"{file}: this file is not UTF-8: save it as UTF-8"]) from None


# From sections to the configuration


class _Reader:
    """Converts sections and collects what is wrong with them."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._problems: list[str] = []

    def problem(self, message: str) -> None:
        self._problems.append(f"{self._source}: {message}")

    def result(self, config: FillConfig) -> FillConfig:
        if self._problems:
            raise FillConfigError(self._problems, config)
        return config

    def tables(self, parent: Mapping[str, Any], kind: str, *, named: bool = True) -> list[Section]:
        """The tables below [fill] of one kind: one, or an array of them."""
        value = parent.get(kind, [])
        tables = value if isinstance(value, list) and kind != "terminals" else [value] if kind in parent else []
        title = f"[[fill.{kind}]]" if named else f"[fill.{kind}]"
        sections = []
        for number, table in enumerate(tables):
            if not isinstance(table, dict):
                self.problem(f"[fill] {kind}: {table!r} is not a table: write {title} with keys below it")
            elif not named:
                sections.append(Section(kind, title, table))
            else:
                name = table.get("name")
                if not isinstance(name, str) or not name.strip():
                    self.problem(f"{title} number {number + 1} has no name: add name =")
                    name = f"{kind}-{number}"
                values = {key: each for key, each in table.items() if key != "name"}
                sections.append(Section(name.strip(), f"{title} {name.strip()}", values))
        return sections

    def ini_values(self, parser: configparser.ConfigParser, name: str, struct: type[msgspec.Struct]) -> dict[str, str]:
        """The section's values, with those of [DEFAULT] that it can use."""
        values = {}
        for key in parser[name]:
            if key in parser.defaults() and _ALIASES.get(key, key) not in _types(struct):
                continue
            try:
                values[key] = parser.get(name, key)
            except configparser.InterpolationError as error:
                self.problem(f"[{name}] {key}: {_bad_reference(error)}: write %% for a percent sign")
        return values

    def config(
        self,
        defaults: Section,
        watched: Sequence[Section],
        programs: Sequence[Section],
        *,
        terminals: Sequence[Section],
        schedule: Sequence[Section],
        missing_program: str,
    ) -> FillConfig:
        common = self.values(defaults, _Defaults)
        general = {key: common.pop(key) for key in ("interval", "ignore_shipped") if key in common}
        if not programs:
            self.problem(f"there is no program to run: {missing_program}")
        found = [self._program(section, common) for section in programs]
        # A section on terminals enables the check unless it says otherwise.
        rule = {"enabled": True, **self.values(terminals[0], TerminalRule)} if terminals else {}
        return FillConfig(
            **general,
            watched=tuple(WatchedGpus(name=each.name, **self.values(each, WatchedGpus)) for each in watched),
            programs=tuple(program for program in found if program is not None),
            terminals=TerminalRule(**rule),
            schedule=self._schedule(schedule),
            source=self._source,
        )

    def _program(self, section: Section, common: Mapping[str, Any]) -> Background | None:
        values = self.values(section, Background)
        if "command" in values:
            return Background(**{**common, **values, "name": section.name})
        if not {"command", "cmd"} & section.values.keys():
            self.problem(f"{section.title} has no command: add cmd = and the program to run")
        return None

    def _schedule(self, sections: Sequence[Section]) -> Schedule | None:
        hours: list[DailyHours] = []
        for section in sections:
            values = self.values(section, _Hours)
            if not section.values:
                self.problem(f"{section.title} has no hours: add hours = 20:00-08:00")
            days = values.get("days", EVERY_DAY)
            hours += [DailyHours(each.begin, each.end, days) for each in values.get("hours", (WHOLE_DAY,))]
        return Schedule(tuple(hours)) if sections else None

    def values(self, section: Section, struct: type[msgspec.Struct]) -> dict[str, Any]:
        """The section's values by the struct's field names, without those that are invalid."""
        types = _types(struct)
        values: dict[str, Any] = {}
        for key, value in section.values.items():
            name = _ALIASES.get(key, key)
            if name not in types:
                near = _nearest(
                    key,
                    [
                        *types,
                        *(_FILL_TABLES if struct is _Defaults else ()),
                        *(alias for alias, field in _ALIASES.items() if field in types),
                    ],
                )
                hint = f"did you mean {near!r}?" if near else f"it takes {', '.join(sorted(types))}"
                self.problem(f"{section.title} has no key {key!r}: {hint}")
            elif name in values:
                self.problem(f"{section.title} {key}: the same is written twice: remove one of them")
            else:
                try:
                    values[name] = _converted(name, value, types[name])
                except BadInputError as error:
                    comment = isinstance(value, str) and _TRAILING_COMMENT.search(value)
                    hint = "; put a comment on a separate line" if comment else ""
                    self.problem(f"{section.title} {key}: {error}{hint}")
        return values


class _Defaults(Background, frozen=True, kw_only=True):
    """What may be set for all programs."""

    interval: float = 0.0
    ignore_shipped: bool = True


class _Hours(msgspec.Struct):
    hours: tuple[str, ...] = ()
    days: tuple[int, ...] = ()


_PER_PROGRAM: Final = frozenset({"command", "directory", "gpus", "each", "log", "environment"})


def _types(struct: type[msgspec.Struct]) -> dict[str, Any]:
    types = {field.name: field.type for field in msgspec.structs.fields(struct) if field.name != "name"}
    return types if struct is not _Defaults else {k: v for k, v in types.items() if k not in _PER_PROGRAM}


def _converted(name: str, value: Any, kind: Any) -> Any:
    if name in _PARSERS:
        return _PARSERS[name](value)
    if isinstance(value, str):
        value = value.strip().lower()
        if name == "mps_thread_percentage":
            value = value.removesuffix("%")
        if kind is bool:
            value = configparser.ConfigParser.BOOLEAN_STATES.get(value, value)
    try:
        return msgspec.convert(value, kind, strict=not isinstance(value, str))
    except msgspec.ValidationError:
        raise BadInputError(f"{value!r} is not valid: write {_EXPECTED.get(name, 'true or false')}") from None


def _bad_reference(error: configparser.InterpolationError) -> str:
    if isinstance(error, configparser.InterpolationMissingOptionError):
        return f"%({error.reference})s refers to a key that is not there"
    if isinstance(error, configparser.InterpolationDepthError):
        return "its references form a circle"
    return "a reference is not closed"


def _nearest(name: str, known: Iterable[str]) -> str | None:
    near = difflib.get_close_matches(name.lower(), list(known), n=1)
    return near[0] if near else None


# Values that have a notation of their own

_RANGE: Final = re.compile(r"([0-9]{1,9})\s*-\s*([0-9]{1,9})")
# An index, a uuid or the beginning of one: it has digits in it and no spaces.
_GPU: Final = re.compile(r"(?=.*[0-9])[A-Za-z0-9][A-Za-z0-9:._/-]*")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TRAILING_COMMENT: Final = re.compile(r"\s[;#]")
_GPU_FORMS: Final = "write all, 0, 0,2, 0-3 or a uuid"


def _duration(least: float = 0.0) -> Callable[[Any], float]:
    def convert(value: Any) -> float:
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


def _names(value: Any) -> tuple[str, ...]:
    """A list, or text with commas."""
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise BadInputError(f"{value!r} is not a list of names: write them with commas between them")
    return tuple(entry.strip() for entry in entries if entry.strip())


def _gpus(value: Any) -> GpuChoice:
    written = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    if any(isinstance(each, bool) or not isinstance(each, int | str) for each in written):
        raise BadInputError(f"{value!r} does not name GPUs: {_GPU_FORMS}")
    entries = [entry for each in written if (entry := str(each).strip())]
    if [entry.lower() for entry in entries] == ["all"]:
        return "all"
    for entry in entries:
        numbers = _RANGE.fullmatch(entry)
        if numbers and int(numbers[1]) > int(numbers[2]):
            raise BadInputError(f"{entry!r} runs backwards: write {numbers[2]}-{numbers[1]}")
        if not numbers and not _GPU.fullmatch(entry):
            raise BadInputError(f"{entry!r} is not a GPU: {_GPU_FORMS}")
    if not entries:
        raise BadInputError(f"no GPU is named: {_GPU_FORMS}")
    return tuple(dict.fromkeys(entry.replace(" ", "") for entry in entries))


def _command(value: Any) -> tuple[str, ...]:
    """Words as a shell would split them, or a list of words as they are."""
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        words = value
    elif isinstance(value, str):
        try:
            words = shlex.split(value)
        except ValueError:
            raise BadInputError(f"{value!r} has a quote that is not closed: close it, or write \\ before it") from None
    else:
        raise BadInputError(f"{value!r} is not a command: write it as text, or as a list of words in quotes")
    if not words or not words[0]:
        raise BadInputError("there is no command: write the program to run")
    if any("\0" in word for word in words):
        raise BadInputError("a command cannot contain a zero byte")
    return tuple(words)


def _environment(value: Any) -> dict[str, str]:
    """A table of variables, or `NAME=value` words as a shell would split them."""
    if isinstance(value, dict):
        if any(isinstance(each, bool) or not isinstance(each, str | int | float) for each in value.values()):
            raise BadInputError("the value of a variable is text: put it into quotes")
        pairs = {name: str(each) for name, each in value.items()}
    else:
        words = _command(value)
        if not all("=" in word for word in words):
            raise BadInputError(f"{value!r} does not set variables: write them like NAME=value OTHER='two words'")
        pairs = dict(word.split("=", 1) for word in words)
    for name in pairs:
        if not _VARIABLE.fullmatch(name):
            raise BadInputError(f"{name!r} is not the name of a variable: use letters, digits and _")
        if name == "CUDA_VISIBLE_DEVICES":
            raise BadInputError("CUDA_VISIBLE_DEVICES is set by Stoker: use gpus to say which ones the program may use")
    return pairs


def _path(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadInputError(f"{value!r} is not a path: write one, or remove the line")
    try:
        return str(Path(value.strip()).expanduser())
    except RuntimeError:
        raise BadInputError("the home directory is unknown: write the whole path") from None


_PARSERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "interval": _duration(0.1),
    "idle_for": _duration(),
    "settle": _duration(),
    "grace": _duration(),
    "backoff": _duration(1.0),
    "checkpoint_timeout": _duration(0.1),
    "idle_seconds": _duration(),
    "command": _command,
    "directory": _path,
    "log": _path,
    "gpus": _gpus,
    "environment": _environment,
    "ignore": _names,
    "whitelist": _names,
    "hours": lambda value: tuple(map(parse_hours, _names(value) or ("",))),
    "days": lambda value: parse_days(",".join(_names(value))),
}
_EXPECTED: Final = {
    "nice": "a whole number from 0 to 19",
    "ionice": "idle, or best-effort:N with N from 0 (first) to 7 (last)",
    "mps_priority": "0 or 1",
    "mps_thread_percentage": "a percentage from 1 to 100",
    "preempt": "stop or checkpoint",
}
# Names in gpu_mon's file, and short ones.
_ALIASES: Final = {
    "interval_seconds": "interval",
    "ignore_programs": "ignore",
    "cmd": "command",
    "dir": "directory",
    "idle": "idle_seconds",
    "env": "environment",
}
_FILL_TABLES: Final = ("program", "watch", "terminals", "schedule")
_INI_SECTIONS: Final = {
    "defaults": "[defaults]",
    "gpu": "[gpu-all]",
    "process": "[process-0]",
    "tty": "[tty]",
    "schedule": "[schedule]",
}
_INI_STRUCTS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "defaults": _Defaults,
    "gpu": WatchedGpus,
    "process": Background,
    "tty": TerminalRule,
    "schedule": _Hours,
}
