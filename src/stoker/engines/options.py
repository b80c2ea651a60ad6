"""How a person wants a worker to work."""

from typing import Final

import msgspec

from stoker.engines.local.attempt_spec import LONGEST_MARGIN, MARGIN_SHARE
from stoker.engines.local.capacity import PlacementOptions
from stoker.errors import BadInputError
from stoker.gpus.prober import DEFAULT_DEADLINE
from stoker.runs.plan import DEFAULT_GRACE
from stoker.units import format_duration

# A database that is restarted or moved is back within this; a machine that died gives its jobs up after it.
DEFAULT_LEASE: Final = 600.0
# Weeks of a training that talks; a progress bar that runs wild fills no disk.
DEFAULT_LOG_LIMIT: Final = 64 * 2**20
# Below that a single slow transaction, or a machine that swaps, looks like one that is gone.
SHORTEST_LEASE: Final = 5.0


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for on the command line."""

    queue: str | None = None
    """The address of the queue; None for the file in the state directory."""
    gpus: str = "all"
    rules: PlacementOptions = PlacementOptions()
    lease: float = DEFAULT_LEASE
    grace: float = DEFAULT_GRACE
    log_limit: int = DEFAULT_LOG_LIMIT
    source: str = "auto"
    deadline: float = DEFAULT_DEADLINE
    until_empty: bool = False

    def check(self) -> None:
        # Half of it, less the margin, must do for the grace; the margin is a share of the lease, but not of a long one.
        needed = min(2 * self.grace / (1 - 2 * MARGIN_SHARE), 2 * (self.grace + LONGEST_MARGIN))
        needed = max(SHORTEST_LEASE, needed)
        if self.lease < needed:
            raise BadInputError(
                f"a lease of {format_duration(self.lease)} leaves no time to stop a job with a grace of "
                f"{format_duration(self.grace)} before it ends: use at least {format_duration(needed)}"
            )
