"""What a queued job says of how its batch size is to be found, as it is kept with the job."""

from collections.abc import Sequence
from typing import Any

import msgspec

from stoker.errors import BadInputError
from stoker.fit.model import SearchOptions
from stoker.fit.overrides import Command, Overrides
from stoker.fit.probe import ProbeOptions

# A size that ran out of memory late goes down by this share, to the next multiple.
_SMALLER = 0.8


class FitSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `stoker fit` that say something of the training, and what to do when it runs out all the same."""

    terms: SearchOptions = SearchOptions()
    overrides: Overrides = Overrides()
    limits: ProbeOptions = ProbeOptions()
    rate: str | None = None
    reuse: float | None = None
    """Take an answer that is not older than so many seconds."""
    retries_oom: int = 2
    """How often the real run is started again, smaller, when it ran out of memory."""


def check_fittable(batch_size: int | None, gpus: int) -> None:
    """Refuses to fit a job whose size is known, or that has nothing to be fitted to."""
    if batch_size is not None:
        raise BadInputError("--batch-size says how large it is and --fit finds it out: leave one of them out")
    if gpus == 0:
        raise BadInputError("--fit needs a GPU to fit to, and the job wants none")


def kept(wish: FitSpec, commands: Sequence[Command]) -> dict[str, Any]:
    """What is kept with a job. Refuses what would not reach one of the commands."""
    wish.terms.check()
    wish.limits.pattern()
    for command in commands:
        wish.overrides.check(command, wish.terms.effective)
    fields: dict[str, Any] = msgspec.to_builtins(wish)
    return fields


def smaller(size: int, terms: SearchOptions) -> int | None:
    """The size to try after one that ran out of memory; None below one."""
    wanted = int(size * _SMALLER)
    rounded = wanted // terms.multiple * terms.multiple
    if rounded:
        return rounded
    return size // 2 or None
