"""The words of this room: what is asked for, what one probe showed, and what was found."""

from typing import Literal, NamedTuple

import msgspec

from stoker.errors import BadInputError, StokerError


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a batch size must be. The defaults are those of the script that this replaces."""

    base: int = 8
    """The size that is tried first; the training's own default."""
    multiple: int = 8
    """The answer is a multiple of it, or a power of two below it when not even it fits."""
    most: int = 4096
    margin: float = 0.10
    """The share of the memory that stays free."""
    per_gpu: int = 1
    """So many such runs share one GPU."""
    effective: int | None = None
    """The batch that the experiment wants in all, by gradient accumulation."""
    prefer: Literal["largest", "fastest"] = "largest"

    def check(self) -> None:
        for what, number in (("--base", self.base), ("--multiple", self.multiple), ("--max", self.most)):
            if not 1 <= number < 2**31:
                raise BadInputError(f"{what} of {number} cannot be: one or more is meant")
        if self.base > self.most:
            raise BadInputError(f"--base {self.base} is above --max {self.most}: nothing could be tried")
        if not 0 <= self.margin < 1:
            raise BadInputError("--margin must be at least 0% and below 100%")
        if self.per_gpu < 1:
            raise BadInputError("--per-gpu must be one or more")
        if self.effective is not None and self.effective < 1:
            raise BadInputError("--effective must be one or more")


class Capacity(NamedTuple):
    """Bytes of memory that there are for all runs on a GPU."""

    free: int
    """What others have left."""
    card: int
    """All that there is. Of several runs each has its share of this, as the first has taken from what is free."""

    def share(self, terms: SearchOptions) -> float:
        """What one run may have of it, without a margin."""
        return min(self.free, self.card / terms.per_gpu)

    def limit(self, terms: SearchOptions) -> int:
        return int(self.share(terms) * (1 - terms.margin))


class ProbeOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one run at one size showed."""

    size: int
    outcome: Literal["fits", "oom"]
    peak: int | None = None
    """Bytes of the run's own processes, on the GPU where they used most; None when it could not be seen."""
    seconds: float = 0.0
    rate: float | None = None
    """Examples per second, where the output told."""
    settled: bool = True
    """Whether the memory was seen to stay, or the program ended by itself."""
    verification: bool = False
    suspected: bool = False
    """It failed, and nothing but circumstances say that it was for want of memory."""


class NextProbe(NamedTuple):
    """Run the program at this size next."""

    size: int
    verification: bool
    """It is the answer already, unless this run shows otherwise."""


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """The answer, and what it rests on."""

    size: int
    accumulate: int | None = None
    """Steps of gradient accumulation that make up the effective batch."""
    fixed: float
    slope: float
    """memory = fixed + slope × size, in bytes."""
    predicted: int
    limit: int
    """The bytes that it had to stay below."""
    observations: tuple[ProbeOutcome, ...] = ()
    note: str = ""
    """What a person should know about it: a size that is not faster, a flag that is ignored."""


class NothingFitsError(StokerError):
    """Not even a batch of one."""


class ProbeFailedError(StokerError):
    """A probe ended for a reason that says nothing of memory."""
