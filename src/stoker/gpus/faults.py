"""Faults of a GPU that need a reset or a replacement. Pure."""

from typing import Final

from stoker.gpus.model import DeviceHealth, Unknown
from stoker.gpus.nvidia import RESET_XIDS, describe_xid

_NEEDS_RESET: Final = "its memory waits for a reset"
_NO_SPARE_ROWS: Final = "its memory has no spare rows left"


def standing_faults(health: DeviceHealth) -> tuple[str, ...]:
    """The current faults, each as part of a sentence. An unknown value is no fault."""
    faults = list(dict.fromkeys(describe_xid(xid) for xid in health.xids if xid in RESET_XIDS))
    if health.needs_reset is True:
        faults.append(_NEEDS_RESET)
    if health.remapping_failed is True:
        faults.append(_NO_SPARE_ROWS)
    return tuple(faults)


def new_faults(before: DeviceHealth, health: DeviceHealth) -> tuple[str, ...]:
    """New faults since `before`: XIDs that need a reset, and uncorrectable memory errors."""
    xids = [xid for xid in appended_xids(before.xids, health.xids) if xid in RESET_XIDS]
    faults = list(dict.fromkeys(map(describe_xid, xids)))
    if not isinstance(before.uncorrected, Unknown) and not isinstance(health.uncorrected, Unknown):
        count = health.uncorrected - before.uncorrected
        if count > 0:
            faults.append(f"{count} uncorrectable memory error{'s' if count > 1 else ''}")
    return tuple(faults)


def last_known(before: DeviceHealth, health: DeviceHealth) -> DeviceHealth:
    """The newer health, with the older count of memory errors if the newer one is unknown."""
    if isinstance(health.uncorrected, Unknown):
        return health._replace(uncorrected=before.uncorrected)
    return health


def appended_xids(before: tuple[int, ...], now: tuple[int, ...]) -> tuple[int, ...]:
    """The errors appended since `before`, although the oldest may have been dropped."""
    kept = next(count for count in range(len(before), -1, -1) if now[:count] == before[len(before) - count :])
    return now[kept:]
