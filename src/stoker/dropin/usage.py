"""`get_gpu_usage`: how busy GPUs are, as one number, for a program that watches itself."""

import atexit
from collections.abc import Collection
from typing import Final

from stoker.gpus.prober import Prober
from stoker.gpus.usage import UsageMeter
from stoker.settings import load_settings
from stoker.units import parse_duration


def get_gpu_usage(device_ids: Collection[int] | None = None) -> float:
    """The usage of the GPUs with these indices (None: of all), averaged over them, between 0 and 1.

    Of each GPU it is the peak since the call before, so a burst between two calls is not missed. NaN when it is
    not known of all of them: NaN is neither above nor below any threshold.
    """
    return _METER.usage(device_ids)


def _open_prober() -> Prober:
    settings = load_settings()
    # Spawned, not forked: the program around this may have threads and open CUDA devices.
    return Prober(settings.gpus, deadline=parse_duration(settings.deadline))


# One helper process for as many calls as the program makes. The function has no object that a caller could keep it in,
# so this one lives as long as the program, starts nothing before the first call, and is closed at the end.
_METER: Final = UsageMeter(_open_prober)
atexit.register(_METER.close)
