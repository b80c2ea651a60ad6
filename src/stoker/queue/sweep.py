"""Sweeps: `lr=1e-3,1e-4` and `seed=1..5` become one command for each combination of values."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from stoker.errors import BadInputError
from stoker.queue.commands import Command, check_command, filled, mentioned
from stoker.queue.field_kinds import LONGEST_LABEL
from stoker.queue.fields import JobSpec, spec_of

# More jobs at once are most likely a mistake.
MOST_JOBS: Final = 100_000

_NAME = r"[A-Za-z_][A-Za-z0-9_.-]*"
_COMMA = r"(?<!\\),"
_RANGE = r"(?a)([+-]?\d+)\.\.([+-]?\d+)(?:\.\.([+-]?\d+))?"
_RANGE_OF_OTHERS = r"(?ia)[+-]?[\d.]*\d(e[+-]?\d+)?\.\.[+-]?\d[\d.]*(e[+-]?\d+)?"
# Placeholders that are replaced at the start of the job.
_TAKEN: Final = {
    "id": "the job's id",
    "gpus": "how many GPUs the job was given",
    "nodes": "how many machines the job runs on",
    "node_rank": "which of its machines it is, from 0",
    "master_addr": "the address of its first machine",
    "master_port": "a port on its first machine",
}


class Sweep(NamedTuple):
    """One parameter with its values."""

    name: str
    values: Sequence[str]


def parse_sweep(text: str) -> Sweep:
    """Parses `NAME=A,B,C`. Each part may be a range like `1..5` or `0..10..2`."""
    name, equals, written = text.partition("=")
    if not equals or not re.fullmatch(_NAME, name):
        raise BadInputError(f"{text!r} is not a sweep: write it like lr=1e-3,1e-4 or seed=1..5")
    _refuse_taken(name)
    values: list[str] = []
    for part in re.split(_COMMA, written):
        values += _values(name, part)
        _refuse_too_many(len(values))
    return Sweep(name, values)


def sweep_of(name: str, values: Sequence[str]) -> Sweep:
    """A sweep over literal values."""
    if not re.fullmatch(_NAME, name):
        raise BadInputError(f"{name[:40]!r} cannot be swept: a name like lr or model.width can")
    _refuse_taken(name)
    if not values or not all(values):
        raise BadInputError(f"the sweep of {name!r} has an empty value: write it like {name}=1,2,3")
    _refuse_too_many(len(values))
    return Sweep(name, values)


def job_specs(
    values: Mapping[str, Any], commands: Iterable[Command], sweeps: Sequence[Sweep] = (), most: int = MOST_JOBS
) -> list[JobSpec]:
    """Jobs with these fields, one for each command and each combination of swept parameters."""
    names = [sweep.name for sweep in sweeps]
    if twice := [name for name in names if names.count(name) > 1]:
        raise BadInputError(f"{twice[0]!r} is swept twice: write all its values into one --sweep")
    templates = list(commands)
    _refuse_too_many(len(templates) * math.prod(len(sweep.values) for sweep in sweeps), most)
    return [
        spec_of({**values, "command": command, "name": name})
        for template in templates
        for command, name in _variants(template, values.get("name", ""), sweeps)
    ]


def _variants(command: Command, name: str, sweeps: Sequence[Sweep]) -> Iterator[tuple[Command, str]]:
    """Command and name (like `bert lr=1e-3 seed=1`) of each combination. The last sweep varies fastest."""
    names = [sweep.name for sweep in sweeps]
    words = (command,) if isinstance(command, str) else command
    # Only the original command counts: a value that looks like a placeholder is literal.
    present = set().union(*(mentioned(word, names) for word in words))
    for values in itertools.product(*(sweep.values for sweep in sweeps)):
        chosen = dict(zip(names, values, strict=True))
        whole = _with_values(command, chosen, present)
        check_command(whole)
        yield whole, _named(name, " ".join(f"{one}={value}" for one, value in chosen.items()))


def _named(name: str, label: str) -> str:
    """The name of one job of a sweep, truncated to the limit."""
    if not label:
        return name
    whole = "".join(letter if letter.isprintable() else " " for letter in f"{name} {label}".strip())
    return whole if len(whole) <= LONGEST_LABEL else whole[: LONGEST_LABEL - 1] + "…"


def _refuse_taken(name: str) -> None:
    if name in _TAKEN:
        raise BadInputError(f"a sweep cannot be called {name!r}: {{{name}}} stands for {_TAKEN[name]}")


def _values(name: str, part: str) -> Sequence[str]:
    if not part:
        raise BadInputError(f"the sweep of {name!r} has an empty value: write it like {name}=1,2,3")
    if found := re.fullmatch(_RANGE, part):
        return [str(number) for number in _range(part, *found.groups())]
    if re.match(_RANGE_OF_OTHERS, part):
        raise BadInputError(f"{part!r} is not a range of whole numbers: write the values out, as in {name}=0.1,0.2")
    return [part.replace("\\,", ",")]


def _range(part: str, first: str, last: str, step: str | None) -> range:
    try:
        begin, end, by = int(first), int(last), int(step) if step is not None else 0
    except ValueError:
        raise BadInputError(f"{part[:40]!r} is not a range that can be counted") from None
    if step is None:
        by = 1 if begin <= end else -1
    if by == 0 or (end - begin) * by < 0:
        raise BadInputError(f"{part!r} never reaches its end: its step has the wrong sign, or is zero")
    _refuse_too_many((end - begin) // by + 1)
    return range(begin, end + (1 if by > 0 else -1), by)


def _refuse_too_many(jobs: int, most: int = MOST_JOBS) -> None:
    if jobs > most:
        raise BadInputError(f"that would be {jobs:,} jobs: at most {most:,} can be submitted at once")


def _with_values(command: Command, values: dict[str, str], present: set[str]) -> Command:
    if not values:
        return command
    absent = [name for name in values if name not in present]
    if isinstance(command, tuple):
        return (*(filled(word, values) for word in command), *(f"--{name}={values[name]}" for name in absent))
    from shlex import quote

    quoted = {name: quote(value) for name, value in values.items()}
    text = filled(command, quoted)
    return " ".join([text.rstrip(), *(f"--{name}={quoted[name]}" for name in absent)]) if absent else text
