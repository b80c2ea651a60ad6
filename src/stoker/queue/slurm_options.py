"""The Slurm options of a job, in the terms of `sbatch`."""

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from stoker.errors import BadInputError, did_you_mean

LONGEST_VALUE: Final = 200
NAMED: Final = ("partition", "account", "qos", "constraint", "reservation")
"""Each is the option of `sbatch` with the same name."""
FURTHER: Final = "sbatch"
"""The key of further options of `sbatch`, a list."""
KEYS: Final = (*NAMED, FURTHER)

# Options that Stoker sets itself to identify attempts and to control their output, order and end.
_SET_BY_STOKER: Final = {
    "--comment": "", "--job-name": "J", "--output": "o", "--error": "e", "--wrap": "", "--parsable": "", "--array": "a",
    "--dependency": "d", "--requeue": "", "--no-requeue": "", "--signal": "", "--export": "", "--chdir": "D",
}  # fmt: skip
# Options with a field of the job.
_HAS_OPTION: Final = {
    **{f"--{name}": f"--{name}" for name in NAMED},
    "--nodes": "--nodes", "--mem": "--ram", "--cpus-per-task": "--cpus", "--time": "--time-limit",
}  # fmt: skip
_SHORT: Final = {short: name for name, short in _SET_BY_STOKER.items() if short} | {
    "p": "--partition", "A": "--account", "q": "--qos", "C": "--constraint", "N": "--nodes", "c": "--cpus-per-task",
    "t": "--time",
}  # fmt: skip
_OPTION: Final = re.compile(r"(?P<long>--[a-z][a-z0-9-]*)(?:=.*)?|-(?P<short>[A-Za-z])(?:\S.*)?")


def read_slurm(value: object) -> dict[str, Any]:
    """The mapping without empty entries. Further options may be one text, as typed in a shell."""
    if not isinstance(value, Mapping):
        raise BadInputError(f"{str(value)[:40]!r} is not a mapping of {', '.join(KEYS)}")
    found = {str(key): entry.strip() if isinstance(entry, str) else entry for key, entry in value.items()}
    if isinstance(further := found.get(FURTHER), str):
        try:
            found[FURTHER] = shlex.split(further)
        except ValueError as error:
            raise BadInputError(f"{further[:40]!r} cannot be split into options: {str(error).lower()}") from None
    elif isinstance(further, Sequence):
        found[FURTHER] = list(further)
    return {key: entry for key, entry in found.items() if entry not in (None, "", [])}


def check_slurm(options: Mapping[str, object]) -> None:
    for key, value in options.items():
        if key not in KEYS:
            raise BadInputError(f"Slurm's options have no {key[:40]!r}: {did_you_mean(key, KEYS)}")
        try:
            if key != FURTHER:
                check_value(value)
            else:
                check_all_further(value)
        except BadInputError as error:
            raise BadInputError(f"{key}: {error}") from None


def check_value(value: object) -> None:
    if not isinstance(value, str) or not value:
        raise BadInputError(f"{str(value)[:40]!r} is not text")
    if len(value) > LONGEST_VALUE or any(ord(letter) < 32 for letter in value):
        raise BadInputError(f"{value[:40]!r} is not one line of at most {LONGEST_VALUE} letters")


def check_all_further(options: object) -> None:
    if not isinstance(options, list | tuple):
        raise BadInputError(f"{str(options)[:40]!r} is not a list of options, like --nice=100")
    for option in options:
        check_further(option)


def check_further(option: object) -> None:
    """Refuses text that is not an option, and options that Stoker sets itself."""
    check_value(option)
    text = str(option)
    if not text.startswith("-"):
        raise BadInputError(f"{text!r} is not an option of sbatch: it must begin with -, like --nice=100")
    if not (found := _OPTION.fullmatch(text)):
        raise BadInputError(f"{text!r} is not one option of sbatch: write its value behind =, like --nice=100")
    name = found["long"] or _SHORT.get(found["short"], "")
    if own := _HAS_OPTION.get(name):
        raise BadInputError(f"{text!r} has an option of its own: use {own}")
    # sbatch accepts abbreviated options.
    if name and (whole := next((whole for whole in _SET_BY_STOKER if whole.startswith(name)), None)):
        raise BadInputError(f"{text!r} cannot be given to sbatch: Stoker sets {whole} itself")
