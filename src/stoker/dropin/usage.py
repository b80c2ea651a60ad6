"""`get_gpu_usage`: the utilization of GPUs as one number, for programs that watch themselves."""

import atexit
import contextlib
import math
import os
import threading
from collections.abc import Callable, Collection
from typing import Final

from stoker.dropin.common import open_prober
from stoker.gpus.model import Look, Reading, known
from stoker.gpus.prober import Prober
from stoker.gpus.source import AbsentError
from stoker.gpus.spawn import spawned

# Longer than a look, shorter than a person waits for a finished program.
_CLOSING: Final = 0.5


class Devices:
    """The GPUs with these indices, or all if none are given, identified by uuid from the first look on, because the
    driver renumbers GPUs when one falls off the bus. A missing GPU is unknown. An index without a GPU gets one when it
    appears.
    """

    def __init__(self, device_ids: Collection[int] | None = None) -> None:
        self._wanted = frozenset(device_ids or ())
        self._chosen: dict[str, int] = {}
        """The chosen index by uuid."""

    def mean_usage(self, look: Look) -> float:
        """A fraction of 1; NaN if any is unknown."""
        readings = self.readings(look)
        peaks = [used.utilization.peak if used and known(used.utilization) else math.nan for used in readings.values()]
        return math.fsum(peaks) / len(peaks) if peaks else math.nan

    def why_unknown(self, look: Look) -> str | None:
        """Why `mean_usage` is NaN, as part of a sentence; None if it is a number."""
        readings = self.readings(look)
        if look.problem is not None:
            return look.problem.reason
        if not readings:
            return "there is no such GPU here" if look.gpus else "there is no GPU here"
        for uuid, reading in readings.items():
            if reading is None:
                return f"GPU {self._chosen[uuid]} ({uuid}) is no longer there"
            if not known(reading.utilization):
                return reading.utilization.reason
        return None

    def readings(self, look: Look) -> dict[str, Reading | None]:
        """The usage of each GPU; None for one that is not listed."""
        if look.problem is None:
            taken = set(self._chosen.values())
            for gpu in look.gpus:
                is_new = gpu.uuid not in self._chosen and gpu.index not in (taken if self._wanted else ())
                if is_new and (not self._wanted or gpu.index in self._wanted):
                    self._chosen[gpu.uuid] = gpu.index
        there = {reading.uuid: reading for reading in look.readings}
        return {uuid: there.get(uuid) for uuid in self._chosen}


class GpuUsageMeter:
    """A prober for programs that need only the number. Threads may share it; a fork starts its own."""

    def __init__(self, open_prober: Callable[[], Prober]) -> None:
        """`open_prober` is called on first use, and again in a forked process."""
        self._open_prober = open_prober
        self._prober: Prober | None = None
        self._devices: dict[frozenset[int], Devices] = {}
        """By requested indices."""
        self._one_at_a_time = threading.Lock()
        os.register_at_fork(after_in_child=self._forked)

    def usage(self, device_ids: Collection[int] | None = None) -> float:
        """The current `Devices.mean_usage`; NaN without any GPU."""
        with self._one_at_a_time:
            if self._prober is None:
                self._prober = self._open_prober()
            try:
                look = self._prober.look()
            except AbsentError:
                return math.nan
            devices = self._devices.setdefault(frozenset(device_ids or ()), Devices(device_ids))
            return devices.mean_usage(look)

    def close(self) -> None:
        """Closes the helper, unless another thread uses it: it then ends with this process."""
        if self._one_at_a_time.acquire(timeout=_CLOSING):
            try:
                if self._prober is not None:
                    self._prober.close()
            finally:
                self._one_at_a_time.release()

    def _forked(self) -> None:
        """Helper and answers belong to the process that started it."""
        inherited, self._prober = self._prober, None
        nobody_asks = self._one_at_a_time.acquire(blocking=False)
        self._one_at_a_time = threading.Lock()
        if inherited is None or not nobody_asks or inherited.remaining() < inherited.deadline:
            # With an outstanding request, closing would also signal the helper, which belongs to the parent. The pipes
            # then stay open for the lifetime of this process.
            return
        with contextlib.suppress(OSError):
            inherited.leave()


def get_gpu_usage(device_ids: Collection[int] | None = None) -> float:
    """The mean usage of the GPUs with these indices (None: all), between 0 and 1. For each GPU it uses the peak since
    the previous call, so no burst is missed. NaN if any GPU is unknown: NaN is neither above nor below any threshold.
    """
    return _METER.usage(device_ids)


# One helper process for all calls of the program. It starts with the first call and is closed at exit, because callers
# of the function have no object to keep it in. Spawned, not forked: the program may have threads and open CUDA devices.
_METER: Final = GpuUsageMeter(lambda: open_prober(spawned, sharing="join"))
atexit.register(_METER.close)
