"""The seam behind which every kind of GPU reading hides: a `Source` is opened once, looked at often, closed."""

from typing import Protocol

from stoker.errors import StokerError
from stoker.gpus.model import Look


class Source(Protocol):
    """One way of reading this machine's GPUs. Used from one thread; a look may block, the prober guards it.

    `look` never raises for what a driver did: a failure is an unknown with its reason, in a field, in a whole
    reading, or in `Look.problem`. What it reports spans the time since the look before.
    """

    name: str

    def look(self) -> Look: ...

    def close(self) -> None: ...


class AbsentError(StokerError):
    """This source has nothing to read here. The message is the reason, as part of a sentence."""
