"""`get_gpu_usage`: how busy GPUs are, as one number, for a program that watches itself."""

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

# Longer than a look takes, shorter than a person waits for a program that is done.
_CLOSING: Final = 0.5


class Devices:
    """The GPUs with these indices, or all when none is named, by their uuids from the first look on.

    When a GPU falls off the bus, the driver renumbers the others. A chosen GPU stays chosen, and one that is gone is
    unknown. An index without a GPU gets one when it appears.
    """

    def __init__(self, device_ids: Collection[int] | None = None) -> None:
        self._wanted = frozenset(device_ids or ())
        self._chosen: dict[str, int] = {}
        """By uuid, the index that it was chosen by."""

    def mean_usage(self, look: Look) -> float:
        """A fraction of 1. NaN when it is not known of all of them."""
        readings = self.readings(look)
        peaks = [used.utilization.peak if used and known(used.utilization) else math.nan for used in readings.values()]
        return math.fsum(peaks) / len(peaks) if peaks else math.nan

    def why_unknown(self, look: Look) -> str | None:
        """Why `mean_usage` is NaN, as part of a sentence; None when it is not."""
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
    """A prober for programs that only want the number. It may be shared by threads, and a fork starts its own."""

    def __init__(self, open_prober: Callable[[], Prober]) -> None:
        """`open_prober` is called when the number is wanted for the first time, and again in a forked process."""
        self._open_prober = open_prober
        self._prober: Prober | None = None
        self._devices: dict[frozenset[int], Devices] = {}
        """By the indices that were asked for."""
        self._one_at_a_time = threading.Lock()
        os.register_at_fork(after_in_child=self._forked)

    def usage(self, device_ids: Collection[int] | None = None) -> float:
        """What `Devices.mean_usage` says now, and NaN where there is no GPU at all."""
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
        """Closes the helper, unless another thread is asking it: it then ends with this process."""
        if self._one_at_a_time.acquire(timeout=_CLOSING):
            try:
                if self._prober is not None:
                    self._prober.close()
            finally:
                self._one_at_a_time.release()

    def _forked(self) -> None:
        """The helper belongs to the process that started it, and so do its answers."""
        inherited, self._prober = self._prober, None
        nobody_asks = self._one_at_a_time.acquire(blocking=False)
        self._one_at_a_time = threading.Lock()
        if inherited is None or not nobody_asks or inherited.remaining() < inherited.deadline:
            # With a question outstanding, leaving would also signal the helper, which belongs to the parent. The pipes
            # to it then stay open as long as this process lives.
            return
        with contextlib.suppress(OSError):
            inherited.leave()


def get_gpu_usage(device_ids: Collection[int] | None = None) -> float:
    """The usage of the GPUs with these indices (None: of all), averaged over them, between 0 and 1.

    Of each GPU it is the peak since the call before, so a burst between two calls is not missed. NaN when it is
    not known of all of them: NaN is neither above nor below any threshold.
    """
    return _METER.usage(device_ids)


# One helper process for as many calls as the program makes. The function has no object that a caller could keep it in,
# so this one lives as long as the program, starts nothing before the first call, and is closed at the end.
# Spawned, not forked: the program around this may have threads and open CUDA devices.
_METER: Final = GpuUsageMeter(lambda: open_prober(spawned, sharing="join"))
atexit.register(_METER.close)
