"""GPM metrics of one device: what the parts of the chip did between two looks (Hopper and newer, MIG included)."""

import contextlib
from typing import Final

import pynvml

from stoker.gpus.model import Maybe, Pipes, Unknown
from stoker.gpus.nvml import library
from stoker.gpus.plausible import fraction

GRAPHICS: Final = 1
SM: Final = 2
ANY_TENSOR: Final = 5
DRAM: Final = 10
_METRICS: Final = (GRAPHICS, SM, ANY_TENSOR, DRAM)
# NVML's header asks for at least 100 ms between the two samples of a metric.
SHORTEST_SPAN: Final = 0.1


class GpmMeter:
    """Two samples of a device, swapped at every look; the metrics are of the stretch between them."""

    def __init__(self, handle: object, gpu_instance: int | None) -> None:
        self._handle = handle
        self._instance = gpu_instance
        self._before = pynvml.nvmlGpmSampleAlloc()
        self._now = pynvml.nvmlGpmSampleAlloc()
        self._taken_at: float | None = None

    @classmethod
    def where_offered(cls, device: object, gpu_instance: int | None = None) -> "GpmMeter | None":
        """A meter if this device has GPM. For a MIG device: its parent's handle and its GPU instance."""
        try:
            if not pynvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
                return None
            return cls(device, gpu_instance)
        except pynvml.NVMLError:
            return None

    def read(self, at: float) -> Maybe[Pipes]:
        try:
            return self._read(at)
        except pynvml.NVMLError as error:
            self._taken_at = None
            return library.unknown(error.value)

    def _read(self, at: float) -> Maybe[Pipes]:
        if self._taken_at is not None and at - self._taken_at < SHORTEST_SPAN:
            return Unknown("the driver needs 0.1 s between two looks to tell")
        if self._instance is None:
            pynvml.nvmlGpmSampleGet(self._handle, self._now)
        else:
            pynvml.nvmlGpmMigSampleGet(self._handle, self._instance, self._now)
        first = self._taken_at is None
        self._taken_at = at
        self._before, self._now = self._now, self._before
        if first:
            return Unknown("needs two looks")
        ask = pynvml.c_nvmlGpmMetricsGet_t()
        ask.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        ask.numMetrics = len(_METRICS)
        ask.sample1 = self._now
        ask.sample2 = self._before
        for place, metric in enumerate(_METRICS):
            ask.metrics[place].metricId = metric
        pynvml.nvmlGpmMetricsGet(ask)
        answers = [ask.metrics[place] for place in range(len(_METRICS))]
        return Pipes(*(fraction(a.value) if a.nvmlReturn == 0 else library.unknown(a.nvmlReturn) for a in answers))

    def close(self) -> None:
        for sample in (self._before, self._now):
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(sample)
