"""GPM metrics: activity of the chip's units between two looks (Hopper and newer)."""

import contextlib
from typing import Final

import pynvml

from stoker.gpus.model import Maybe, Pipes, Unknown, plausible_fraction
from stoker.gpus.nvml import library

GRAPHICS: Final = 1
SM: Final = 2
ANY_TENSOR: Final = 5
DRAM: Final = 10
PCIE_OUT: Final = 20
PCIE_IN: Final = 21
NVLINK_IN: Final = 60
NVLINK_OUT: Final = 61
_SHARES: Final = (GRAPHICS, SM, ANY_TENSOR, DRAM)
_METRICS: Final = (*_SHARES, PCIE_OUT, PCIE_IN, NVLINK_IN, NVLINK_OUT)
# NVML requires at least 100 ms between the two samples of a metric.
SHORTEST_SPAN: Final = 0.1
_MIB: Final = 2**20


class GpmMeter:
    """GPM metrics of a device, MIG included, between the samples of two looks."""

    def __init__(self, handle: object, gpu_instance: int | None) -> None:
        self._handle = handle
        self._instance = gpu_instance
        self._before = pynvml.nvmlGpmSampleAlloc()
        self._now = pynvml.nvmlGpmSampleAlloc()
        self._taken_at: float | None = None
        self._question = pynvml.c_nvmlGpmMetricsGet_t()
        self._question.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._question.numMetrics = len(_METRICS)
        self._answers = [self._question.metrics[place] for place in range(len(_METRICS))]
        for metric, answer in zip(_METRICS, self._answers, strict=True):
            answer.metricId = metric

    @classmethod
    def where_offered(cls, device: object, gpu_instance: int | None = None) -> "GpmMeter | None":
        """A meter, if this device has GPM. A MIG device needs its parent's handle and its GPU instance."""
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
            return Unknown("the driver needs 0.1 s between two looks")
        if self._instance is None:
            pynvml.nvmlGpmSampleGet(self._handle, self._now)
        else:
            pynvml.nvmlGpmMigSampleGet(self._handle, self._instance, self._now)
        first = self._taken_at is None
        self._taken_at = at
        self._before, self._now = self._now, self._before
        if first:
            return Unknown("needs two looks")
        self._question.sample1 = self._now
        self._question.sample2 = self._before
        pynvml.nvmlGpmMetricsGet(self._question)
        answers = self._answers
        graphics, sm, tensor, dram = (_share(answer) for answer in answers[: len(_SHARES)])
        out, into, link_in, link_out = (_value(answer) for answer in answers[len(_SHARES) :])
        return Pipes(graphics, sm, tensor, dram, _bytes_per_second(out, into), _bytes_per_second(link_in, link_out))

    def close(self) -> None:
        for sample in (self._before, self._now):
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(sample)


def _value(answer: pynvml.c_nvmlGpmMetric_t) -> Maybe[float]:
    return float(answer.value) if answer.nvmlReturn == library.SUCCESS else library.unknown(answer.nvmlReturn)


def _share(answer: pynvml.c_nvmlGpmMetric_t) -> Maybe[float]:
    value = _value(answer)
    return value if isinstance(value, Unknown) else plausible_fraction(value)


def _bytes_per_second(out: Maybe[float], into: Maybe[float]) -> Maybe[float]:
    """The sum of both directions; the driver counts in MiB."""
    if isinstance(out, Unknown):
        return out
    if isinstance(into, Unknown):
        return into
    total = (out + into) * _MIB
    # Also rejects NaN.
    return total if 0 <= total < float("inf") else Unknown(f"the driver reported {total:g} B/s, which is impossible")
