"""What a queued job says of how its batch size is to be found, as it is kept with the job."""

import msgspec

from stoker.fit.overrides import Overrides
from stoker.fit.probe import Limits
from stoker.fit.terms import Terms

# A size that ran out of memory late goes down by this share, to the next multiple.
_SMALLER = 0.8


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `stoker fit` that say something of the training, and what to do when it runs out all the same."""

    terms: Terms = Terms()
    overrides: Overrides = Overrides()
    limits: Limits = Limits()
    rate: str | None = None
    reuse: float | None = None
    """Take an answer that is not older than so many seconds."""
    retries_oom: int = 2
    """How often the real run is started again, smaller, when it ran out of memory."""


def smaller(size: int, terms: Terms) -> int | None:
    """The size to try after one that ran out of memory; None below one."""
    wanted = int(size * _SMALLER)
    rounded = wanted // terms.multiple * terms.multiple
    if rounded:
        return rounded
    return size // 2 or None
