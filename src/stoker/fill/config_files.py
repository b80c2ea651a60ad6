"""Reads the configuration of `fill`, `[fill]` in stoker.toml or an INI file of gpu_mon, and checks it on this machine.

Both formats become the same sections, which msgspec converts and checks.
"""

import configparser
import os
import pwd
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from stoker.errors import BadInputError, did_you_mean
from stoker.fill.config import (
    EVERY_DAY,
    Background,
    DailyHours,
    FillConfig,
    ProgramDefaults,
    TerminalRule,
    WatchedGpus,
    parse_days,
    parse_hours,
)
from stoker.gpus.model import Gpu
from stoker.gpus.visible import select_gpus
from stoker.paths import is_directory, is_there
from stoker.settings import load_settings
from stoker.settings_path import config_path
from stoker.units import parse_duration


def find_config(named: str | None, environment: Mapping[str, str] = os.environ) -> FillConfig:
    """The named file, or `[fill]` in stoker.toml, or gpu_mon's file."""
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


class _Section(NamedTuple):
    """Keys and values of a section in either format."""

    title: str
    """The heading in the file: `[process-0]`, `[[fill.program]] mine`."""
    values: Mapping[str, Any]


class _FillTable(msgspec.Struct, frozen=True):
    """The tables below `[fill]`; its other keys are those of gpu_mon's `[defaults]`."""

    program: list[dict[str, Any]] = []
    watch: list[dict[str, Any]] = []
    terminals: dict[str, Any] | None = None
    schedule: dict[str, Any] | list[dict[str, Any]] = []
    ignore: Any = []
    """Programs ignored on all watched GPUs."""


def read_toml(path: Path) -> FillConfig:
    """The configuration in `[fill]` of this file."""
    try:
        table = tomllib.loads(_text(path)).get("fill")
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"{path}: this is not TOML: {error}") from None
    if not isinstance(table, dict):
        raise BadInputError(f"{path}: there is no [fill] in this file: write it, with [[fill.program]] below")
    return config_of_table(table, str(path))


def config_of_table(table: Mapping[str, Any], source: str) -> FillConfig:
    """The configuration in the `[fill]` table of the file `source`."""
    try:
        found = msgspec.convert(table, _FillTable)
        schedule = found.schedule if isinstance(found.schedule, list) else [found.schedule]
        config = _config(
            source,
            _Section("[fill]", {k: v for k, v in table.items() if k not in _FillTable.__struct_fields__}),
            [_table("[[fill.watch]]", each) for each in found.watch or [{"name": "gpu-all"}]],
            [_table("[[fill.program]]", each) for each in found.program],
            terminals=[] if found.terminals is None else [_Section("[fill.terminals]", found.terminals)],
            schedule=[_Section("[fill.schedule]", each) for each in schedule],
        )
        everywhere = _converted(_Section("[fill]", {"name": "gpu-all", "ignore": found.ignore}), WatchedGpus).ignore
    except msgspec.ValidationError as error:
        raise BadInputError(f"{source}: [fill] {_mistake(error)}") from None
    except BadInputError as error:
        raise BadInputError(f"{source}: {error}") from None
    watched = [msgspec.structs.replace(each, ignore=(*each.ignore, *everywhere)) for each in config.watched]
    return msgspec.structs.replace(config, watched=tuple(watched))


def _table(title: str, values: Mapping[str, Any]) -> _Section:
    return _Section(f"{title} {values.get('name', '')}".rstrip(), values)


def read_ini(path: Path) -> FillConfig:
    """The configuration in a file of gpu_mon."""
    parser = configparser.ConfigParser()
    found: dict[str, list[_Section]] = {kind: [] for kind in _INI_SECTIONS}
    text = _text(path)
    try:
        parser.read_string(text, source=str(path))
        for name in parser.sections():
            kind = next((kind for kind in _INI_SECTIONS if name.startswith(kind)), None)
            if kind is None or (kind in ("defaults", "tty") and name != kind):
                raise BadInputError(
                    f"[{name}] is not a section: use [defaults], [gpu-…], [process-…], [tty] or [schedule-…]"
                )
            keys = _keys(_INI_SECTIONS[kind])
            # A section inherits the keys of [DEFAULT] that it can use.
            values = {key: parser.get(name, key) for key in parser[name] if key not in parser.defaults() or key in keys}
            found[kind].append(_Section(f"[{name}]", {"name": name, **values} if "name" in keys else values))
        if not found["gpu"]:
            raise BadInputError("no GPU is watched: add a section [gpu-all] with gpus = ALL")
        defaults = found["defaults"] or [_Section("[defaults]", {})]
        return _config(
            str(path), defaults[0], found["gpu"], found["process"], terminals=found["tty"], schedule=found["schedule"]
        )
    except configparser.Error as error:
        raise BadInputError(f"{path}: {' '.join(str(error).split())}") from None
    except BadInputError as error:
        raise BadInputError(f"{path}: {error}") from None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInputError(f"{path}: this file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInputError(f"{path}: this file is not UTF-8: save it as UTF-8") from None


# From sections to the configuration


class _Defaults(ProgramDefaults, frozen=True, kw_only=True):
    """The settings of `[defaults]` and `[fill]`."""

    interval: Annotated[float, Meta(ge=0.1, le=1e9)] = FillConfig().interval
    ignore_shipped: bool = True


class _Hours(msgspec.Struct, frozen=True):
    hours: tuple[str, ...] = ("00:00-24:00",)
    days: tuple[int, ...] = EVERY_DAY


_INI_SECTIONS: Final[Mapping[str, type[msgspec.Struct]]] = {
    "defaults": _Defaults,
    "gpu": WatchedGpus,
    "process": Background,
    "tty": TerminalRule,
    "schedule": _Hours,
}
# The names in gpu_mon's file, and short names.
_ALIASES: Final = {
    "interval_seconds": "interval",
    "ignore_programs": "ignore",
    "cmd": "command",
    "dir": "directory",
    "idle": "idle_seconds",
    "env": "environment",
}
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


def _config(
    source: str,
    defaults: _Section,
    watched: Sequence[_Section],
    programs: Sequence[_Section],
    *,
    terminals: Sequence[_Section],
    schedule: Sequence[_Section],
) -> FillConfig:
    if not programs:
        raise BadInputError("there is no program to run: add a section with its command")
    general = _converted(defaults, _Defaults)
    shared = {key: value for key, value in defaults.values.items() if key in _keys(ProgramDefaults)}
    return FillConfig(
        interval=general.interval,
        ignore_shipped=general.ignore_shipped,
        watched=tuple(_converted(each, WatchedGpus) for each in watched),
        programs=tuple(_converted(_Section(each.title, {**shared, **each.values}), Background) for each in programs),
        terminals=_converted(terminals[0], TerminalRule) if terminals else FillConfig().terminals,
        schedule=tuple(hours for section in schedule for hours in _schedule(section)),
        source=source,
    )


def _schedule(section: _Section) -> Iterator[DailyHours]:
    found = _converted(section, _Hours)
    if not section.values:
        raise BadInputError(f"{section.title} has no hours: add hours = 20:00-08:00")
    for text in found.hours:
        try:
            yield parse_hours(text, found.days)
        except BadInputError as error:
            raise BadInputError(f"{section.title} hours: {error}") from None


def _converted(section: _Section, struct: type[_Struct]) -> _Struct:
    """Converts a section. Raises BadInputError for the first mistake, with section and key."""
    keys = _keys(struct)
    values: dict[str, Any] = {}
    for key, value in section.values.items():
        if key not in keys:
            # A key in [fill] may belong to one of its tables.
            tables = _FillTable.__struct_fields__ if struct is _Defaults else ()
            raise BadInputError(f"{section.title} has no key {key!r}: {did_you_mean(key, [*keys, *tables])}")
        name = _ALIASES.get(key, key)
        try:
            values[name] = _PARSERS[name](value) if name in _PARSERS else value
        except BadInputError as error:
            raise BadInputError(f"{section.title} {key}: {error}") from None
    try:
        return msgspec.convert(values, struct, strict=False)
    except msgspec.ValidationError as error:
        raise BadInputError(f"{section.title} {_mistake(error)}") from None


def _keys(struct: type[msgspec.Struct]) -> list[str]:
    fields = struct.__struct_fields__
    return [*fields, *(alias for alias, field in _ALIASES.items() if field in fields)]


def _mistake(error: msgspec.ValidationError) -> str:
    problem, _, path = str(error).partition(" - at ")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return f"has no {missing[1]}: add {missing[1]} ="
    key = path.rpartition("$.")[2].rstrip("`")
    return f"{key}: {problem[:1].lower()}{problem[1:]}"


# Values that may be written in several ways; msgspec checks the result.


def _duration(value: Any) -> Any:
    return parse_duration(value) if isinstance(value, str) else value


def _flag(value: Any) -> Any:
    """Accepts yes and no, on and off."""
    if not isinstance(value, str):
        return value
    try:
        return configparser.ConfigParser.BOOLEAN_STATES[value.strip().lower()]
    except KeyError:
        raise BadInputError(f"{value!r} is neither yes nor no") from None


def _names(value: Any) -> Any:
    """Accepts a list, or text with commas."""
    return [name for entry in value.split(",") if (name := entry.strip())] if isinstance(value, str) else value


def _gpus(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _words(value: Any) -> Any:
    """Accepts a shell command line, or a list of words."""
    try:
        words = shlex.split(value) if isinstance(value, str) else value
    except ValueError:
        raise BadInputError(f"{value!r} has a quote that is not closed: close it, or write \\ before it") from None
    if words == [""]:
        raise BadInputError("there is no command: write the program to run")
    return words


def _environment(value: Any) -> dict[str, str]:
    """Accepts a table of variables, or `NAME=value` words in shell syntax."""
    pairs = value.items() if isinstance(value, dict) else [str(word).partition("=")[::2] for word in _words(value)]
    variables = {name: str(text) for name, text in pairs}
    if "CUDA_VISIBLE_DEVICES" in variables:
        raise BadInputError("CUDA_VISIBLE_DEVICES is set by Stoker: use gpus to say which ones the program may use")
    return variables


def _path(value: Any) -> Any:
    # Unlike Path.expanduser, this keeps the name of an unknown user.
    return os.path.expanduser(value.strip()) or None if isinstance(value, str) else value  # noqa: PTH111


_PARSERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("interval", "idle_for", "settle", "grace", "backoff", "idle_seconds"), _duration),
    **dict.fromkeys(("each", "enabled", "ignore_shipped"), _flag),
    **dict.fromkeys(("ignore", "whitelist", "hours"), _names),
    **dict.fromkeys(("directory", "log"), _path),
    "command": _words,
    "gpus": _gpus,
    "environment": _environment,
    "days": lambda value: parse_days(",".join(map(str, value)) if isinstance(value, list) else str(value)),
}


# On this machine


def check(config: FillConfig, gpus: Sequence[Gpu] | None, environment: Mapping[str, str] = os.environ) -> None:
    """Raises BadInputError with all problems on this machine. `gpus`: None if they cannot be read."""
    problems = [] if gpus is None else list(_gpu_problems(config, gpus))
    for program in config.programs:
        problems += _program_problems(program, environment)
    if problems:
        raise BadInputError("\n".join(f"{config.source}: {problem}" for problem in problems))


def hints(config: FillConfig) -> Iterator[str]:
    """Probable mistakes that do not prevent a start."""
    for user in config.terminals.whitelist:
        try:
            pwd.getpwnam(user)
        except KeyError:
            yield f"{config.source}: whitelist: there is no user {user!r} on this machine: the name has no effect"


def _gpu_problems(config: FillConfig, gpus: Sequence[Gpu]) -> Iterator[str]:
    watched: set[str] = set()
    taken: dict[str, str] = {}
    sections: list[WatchedGpus | Background] = [*config.watched, *config.programs]
    for section in sections:
        try:
            chosen = select_gpus(gpus, section.gpus)
        except BadInputError as error:
            yield f"{section.name} gpus: {error}"
            continue
        for gpu in chosen:
            if isinstance(section, WatchedGpus):
                watched.add(gpu.uuid)
            elif gpu.uuid not in watched:
                yield f"{section.name} gpus: GPU {gpu.index} is not watched: name it in a section of watched GPUs too"
            elif taken.setdefault(gpu.uuid, section.name) != section.name:
                other = taken[gpu.uuid]
                yield f"{section.name} gpus: {other} has GPU {gpu.index} already: give each GPU to one program only"


def _program_problems(program: Background, environment: Mapping[str, str]) -> Iterator[str]:
    directory, log, command = program.directory, program.log, program.command[0]
    if directory is not None and not (is_directory(directory) and os.access(directory, os.X_OK)):
        yield f"{program.name}: {directory} is not a directory that you may enter: create it, or write another"
    if log is not None and (is_directory(log) or not os.access(log if is_there(log) else Path(log).parent, os.W_OK)):
        yield f"{program.name}: {log} cannot be written: create its directory, allow it, or write another file"
    # A path is relative to the program's directory.
    path = str(Path(directory) / command) if directory is not None and "/" in command else command
    if not shutil.which(path, path=program.environment.get("PATH", environment.get("PATH"))):
        yield f"{program.name}: {path} is not a program that can be run: install it, or correct the path"
