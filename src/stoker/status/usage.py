"""What the GPUs did over a week, in hours, and what stopping the idle ones saved.

What was saved is an estimate: nobody knows how long a job that hangs would have held its GPUs. Here it is taken that
somebody would have looked the next morning, so each idle stop saved the time from the stop until now, and no more than
`UNTIL_SOMEBODY_LOOKS`, on each GPU that the job held.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from stoker.queue.model import GpuUse
from stoker.status.model import Hours

STRETCH: Final = 7 * 86400.0
# From an evening to the next morning.
UNTIL_SOMEBODY_LOOKS: Final = 12 * 3600.0


def tally(totals: Mapping[GpuUse, float], stops: Iterable[tuple[float, int]], now: float) -> Hours:
    """`totals` are seconds of one GPU since `now - STRETCH`; `stops` say when each idle stop was and what it freed."""
    since = now - STRETCH
    saved = sum(_saved(now - ended) * gpus for ended, gpus in stops if ended >= since)
    return Hours(
        since=since,
        jobs=_hours(totals.get("job", 0.0)),
        background=_hours(totals.get("background", 0.0)),
        others=_hours(totals.get("somebody", 0.0)),
        idle=_hours(totals.get("free", 0.0)),
        unknown=_hours(totals.get("unknown", 0.0)),
        saved=_hours(saved),
    )


def _saved(ago: float) -> float:
    # The clocks of two machines may differ a little: what ended in the future saved nothing yet.
    return min(max(0.0, ago), UNTIL_SOMEBODY_LOOKS)


def _hours(seconds: float) -> float:
    return seconds / 3600.0
