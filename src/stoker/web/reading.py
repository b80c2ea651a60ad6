"""How what people type is understood, field by field: text as in a form, or values as in a request."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from stoker.errors import BadInputError
from stoker.fit.model import SearchOptions
from stoker.fit.overrides import Overrides
from stoker.fit.spec import FitSpec, kept
from stoker.masking import MASK
from stoker.queue.commands import Command, check_command
from stoker.queue.model import JobSpec
from stoker.queue.provenance import check_environment, working_directory
from stoker.queue.store import Store
from stoker.queue.sweep import Sweep, check_sweeps, parse_sweep, sweep_of
from stoker.rules.registry import Stored, policies_of
from stoker.units import parse_duration, parse_fraction, parse_memory

# Ten years, as on the command line: no machine runs that long.
_LONGEST: Final = 10 * 365 * 86400.0

_WHOLE: Final = re.compile(r"[+-]?[0-9]{1,19}")
_YES: Final = frozenset({"on", "true", "yes", "1"})
_NO: Final = frozenset({"", "off", "false", "no", "0"})


class Fit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be said of how a batch size is found, as `stoker fit` calls it."""

    base: int = SearchOptions().base
    multiple: int = SearchOptions().multiple
    max: int = SearchOptions().most
    margin: float | str = SearchOptions().margin
    effective: int | None = None
    batch_arg: str | None = None
    batch_env: str | None = None
    probe_args: str = ""
    retries_oom: int = FitSpec().retries_oom


def _command(value: str | Sequence[str] | None) -> Command:
    command: Command = value.strip() if isinstance(value, str) else tuple(value or ())
    check_command(command)
    return command


def _line(value: str | None) -> str:
    text = (value or "").strip()
    _refuse_no_text(text)
    return text


def _refuse_no_text(text: str) -> None:
    """Neither database takes these, and no terminal shows them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadInputError(f"{text[:40]!a} is not text in UTF-8") from None
    if "\0" in text:
        raise BadInputError(f"{text[:40]!a} has the character NUL in it")


def _tags(value: str | Sequence[str] | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(map(_line, _several(value))))


def _several(value: str | Sequence[str] | None) -> list[str]:
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value) if part]
    return list(value or ())


def needed(store: Store, value: str | Sequence[str] | None) -> tuple[str, ...]:
    """The ids of the jobs that are named."""
    return tuple(dict.fromkeys(job.id for text in _several(value) for job in store.named(text)))


def _number(usual: int) -> Callable[[str | int | None], int]:
    def read(value: str | int | None) -> int:
        found = _number_or_none(value)
        return usual if found is None else found

    return read


def _number_or_none(value: str | int | None) -> int | None:
    if isinstance(value, str):
        written = value.strip()
        if not written:
            return None
        if not _WHOLE.fullmatch(written):
            raise BadInputError(f"{written[:40]!r} is not a whole number")
        return int(written)
    return value


def flag(value: str | bool | None) -> bool:
    """Whether a box is ticked."""
    if not isinstance(value, str):
        return bool(value)
    written = value.strip().lower()
    if written not in _YES | _NO:
        raise BadInputError(f"{value[:40]!r} is neither on nor off")
    return written in _YES


def _memory(value: str | int | None) -> int | None:
    if not isinstance(value, str):
        return value
    written = value.strip()
    if written.isascii() and written.isdigit():
        return _number_or_none(written)
    return parse_memory(written) if written else None


def seconds_of(value: str | float | None) -> float | None:
    """`2h`, or seconds."""
    if isinstance(value, str):
        value = parse_duration(value) if value.strip() else None
    if value is not None and not 0 <= value <= _LONGEST:
        raise BadInputError("that is longer than any machine runs, or shorter than nothing: write it like 90s or 2h")
    return None if value is None else float(value)


def _backoff(value: str | float | None) -> float:
    seconds = seconds_of(value)
    return JobSpec(command="-").backoff if seconds is None else seconds


def _time_limit(value: str | float | None) -> float | None:
    seconds = seconds_of(value)
    if seconds == 0:
        raise BadInputError("a time limit must be longer than nothing: leave it empty for none")
    return seconds


def _directory(value: str | None) -> str:
    text = _line(value)
    if not text.startswith("/"):
        raise BadInputError("a job needs a directory to start in: write an absolute path, like /home/me/project")
    return working_directory(text)


def environment(value: str | Mapping[str, str] | None, earlier: Mapping[str, str]) -> dict[str, str]:
    """The variables. A masked value stands for that of the job they were told of."""
    if isinstance(value, str):
        pairs = [line.partition("=") for line in value.splitlines() if line.strip()]
        if bare := [name for name, equals, _value in pairs if not equals]:
            raise BadInputError(f"{bare[0][:40]!r} sets no variable: write NAME=VALUE on each line")
        value = {name.strip(): text for name, _equals, text in pairs}
    said = dict(value or {})
    for name, text in said.items():
        if text == MASK:
            if name not in earlier:
                raise BadInputError(f"{MASK} is what is shown for a value that is not: write the value of {name[:40]}")
            said[name] = earlier[name]
    check_environment(said)
    return said


def _on_loss(value: str | None) -> str:
    if value in {None, ""}:
        return JobSpec(command="-").on_loss
    if value not in {"retry", "hold"}:
        raise BadInputError(f"{str(value)[:40]!r} is not known: retry or hold is meant")
    return str(value)


def fraction(value: str | float) -> float:
    """`5%`, or 0.05."""
    found = parse_fraction(value) if isinstance(value, str) else float(value)
    if not 0 <= found <= 1:
        raise BadInputError("that is out of range: a percentage is between 0% and 100%")
    return found


def policy(value: Mapping[str, Any] | None) -> Stored:
    """The whole of it, as a job keeps it."""
    policies_of(value or {})
    return dict(value or {})


def fit(value: object, command: Command) -> dict[str, Any]:
    """How its batch size is found, as a job keeps it; empty when it is not."""
    if not isinstance(value, Mapping):
        if not flag(value if isinstance(value, str | bool) else None):
            return {}
        value = {}
    try:
        chosen = msgspec.convert(dict(value), Fit)
    except msgspec.ValidationError as error:
        raise BadInputError(f"a batch size cannot be found so: {error}") from None
    if not 0 <= chosen.retries_oom < 1000:
        raise BadInputError(f"{chosen.retries_oom} retries after running out of memory cannot be: a few are meant")
    terms = SearchOptions(
        base=chosen.base,
        multiple=chosen.multiple,
        most=chosen.max,
        margin=fraction(chosen.margin),
        effective=chosen.effective,
    )
    overrides = Overrides(argument=chosen.batch_arg, variable=chosen.batch_env, probe_arguments=chosen.probe_args)
    return kept(FitSpec(terms=terms, overrides=overrides, retries_oom=chosen.retries_oom), [command])


def sweeps(value: object) -> list[Sweep]:
    """One parameter a line, or by name."""
    if isinstance(value, str):
        found = [parse_sweep(line.strip()) for line in value.splitlines() if line.strip()]
    elif isinstance(value, Mapping):
        found = [
            parse_sweep(f"{name}={values}") if isinstance(values, str) else sweep_of(name, tuple(values))
            for name, values in value.items()
        ]
    else:
        return []
    check_sweeps(found, 1)
    return found


_USUAL: Final = JobSpec(command="-")
READ: Final[Mapping[str, Callable[[Any], object]]] = {
    "command": _command,
    "name": _line,
    "tags": _tags,
    "gpus": _number(_USUAL.gpus),
    "memory": _memory,
    "share": flag,
    "priority": _number(_USUAL.priority),
    "retries": _number(_USUAL.retries),
    "backoff": _backoff,
    "time_limit": _time_limit,
    "directory": _directory,
    "preemptible": flag,
    "on_loss": _on_loss,
    "batch_size": _number_or_none,
}
IDLE: Final[Mapping[str, tuple[str, Callable[[Any], object]]]] = {
    "idle_for": ("window", seconds_of),
    "idle_below": ("below", fraction),
    "idle_after": ("after", seconds_of),
}
