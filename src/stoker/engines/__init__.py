"""Engines: where and how attempts run. Each is a package with `OPTIONS`, `create` and `check`, named in `ENGINES`."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from stoker.errors import BadInputError

if TYPE_CHECKING:
    from stoker.engines.engine import EngineModule

LOCAL: Final = "local"
ENGINES: Final = {
    LOCAL: "stoker.engines.local",
    "slurm": "stoker.engines.slurm",
}


class EngineOption(NamedTuple):
    """An option of `stoker work` that belongs to one engine."""

    name: str
    """As typed: `--slots-per-gpu`; the engine gets it as `slots_per_gpu`."""
    metavar: str
    help: str
    default: str | None = None
    """As typed on the command line."""
    parse: Callable[[str], Any] = str
    """Raises BadInputError."""
    bare: str | None = None
    """The value if the option is given without one; None if a value is required."""


def engine_module(name: str) -> "EngineModule":
    """Raises BadInputError when there is no such engine."""
    if name not in ENGINES:
        raise BadInputError(f"there is no engine {name!r}: choose {' or '.join(ENGINES)}")
    return cast("EngineModule", importlib.import_module(ENGINES[name]))


def integer(low: int, high: int) -> Callable[[str], int]:
    """A parser of integers in this range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise BadInputError(f"{text!r} is not an integer") from None
        if not low <= value <= high:
            raise BadInputError(f"{value} is not between {low} and {high}")
        return value

    return parse
