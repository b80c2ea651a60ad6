"""Reads one NVIDIA device or MIG slice: utilization, memory, power, processes and GPM metrics since the look before."""

import contextlib
import ctypes
import struct
from typing import Final

import pynvml

from stoker.gpus.model import (
    Gpu,
    Maybe,
    Pipes,
    Process,
    Reading,
    Unknown,
    Utilization,
    known,
    plausible_celsius,
    plausible_fraction,
    plausible_memory_total,
    plausible_memory_used,
    plausible_watts,
)
from stoker.gpus.nvml import library
from stoker.gpus.nvml.processes import ProcessLists

# nvmlSample_t: a timestamp in µs and an 8-byte union, of which utilization uses the low four bytes.
_SAMPLE: Final = struct.Struct("=QI4x")
# nvmlMemory_v2_t: version, total, reserved, free, used. nvmlMemory_t: total, free, used.
# nvmlUtilization_t: GPU, memory controller.
_MEMORY_2: Final = struct.Struct("=I4xQQQQ")
_MEMORY_1: Final = struct.Struct("=QQQ")
_RATES: Final = struct.Struct("=II")
# The driver's ring was measured at 100 utilization samples; room for twice that in one call.
_RING: Final = 256
# What the first look covers: the driver's longest averaging period.
FIRST_SPAN: Final = 1.0
# Below this an energy difference is mostly the counter's resolution.
_SHORTEST_POWER_SPAN: Final = 0.5
# A power limit changes when an administrator changes it.
_LIMIT_EVERY: Final = 60.0
_MICRO: Final = 1_000_000


GRAPHICS: Final = 1
SM: Final = 2
ANY_TENSOR: Final = 5
DRAM: Final = 10
_METRICS: Final = (GRAPHICS, SM, ANY_TENSOR, DRAM)
# NVML's header asks for at least 100 ms between the two samples of a metric.
SHORTEST_SPAN: Final = 0.1


class GpmMeter:
    """GPM metrics of a device (Hopper and newer, MIG included) between the samples of two looks."""

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
        ask = pynvml.c_nvmlGpmMetricsGet_t()
        ask.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        ask.numMetrics = len(_METRICS)
        ask.sample1 = self._now
        ask.sample2 = self._before
        for place, metric in enumerate(_METRICS):
            ask.metrics[place].metricId = metric
        pynvml.nvmlGpmMetricsGet(ask)
        answers = [ask.metrics[place] for place in range(len(_METRICS))]
        return Pipes(
            *(plausible_fraction(a.value) if a.nvmlReturn == 0 else library.unknown(a.nvmlReturn) for a in answers)
        )

    def close(self) -> None:
        for sample in (self._before, self._now):
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(sample)


class DeviceFunctions:
    """The driver's functions and the buffers of a look, shared by all devices, which are read one by one."""

    def __init__(self) -> None:
        self.get_samples = library.function("nvmlDeviceGetSamples")
        self.get_rates = library.function("nvmlDeviceGetUtilizationRates")
        self.get_memory_2 = library.function("nvmlDeviceGetMemoryInfo_v2")
        self.get_memory_1 = library.function("nvmlDeviceGetMemoryInfo")
        self.get_energy = library.function("nvmlDeviceGetTotalEnergyConsumption")
        self.get_power = library.function("nvmlDeviceGetPowerUsage")
        self.get_limit = library.function("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit")
        self.get_temperature = library.function("nvmlDeviceGetTemperature")
        self.samples = ctypes.create_string_buffer(_SAMPLE.size * _RING)
        self.samples_view = memoryview(self.samples)
        self.since = ctypes.c_ulonglong()
        self.count = ctypes.c_uint()
        self.number = ctypes.c_uint()
        self.long_number = ctypes.c_ulonglong()
        self.memory = ctypes.create_string_buffer(_MEMORY_2.size)
        self.rates = ctypes.create_string_buffer(_RATES.size)
        # Pointers to the buffers, made once: a look passes dozens of them.
        self.to_count = ctypes.byref(self.count)
        self.to_value_type = ctypes.byref(ctypes.c_uint())
        self.to_number = ctypes.byref(self.number)
        self.to_long_number = ctypes.byref(self.long_number)


class _GoneError(Exception):
    """The GPU is lost or needs a reset: its values do not count."""

    def __init__(self, code: int) -> None:
        super().__init__(library.reason(code))


class Device:
    """A handle and the state between two looks."""

    def __init__(
        self,
        gpu: Gpu,
        handle: object,
        functions: DeviceFunctions,
        processes: ProcessLists,
        meter: GpmMeter | None,
    ) -> None:
        self.gpu = gpu
        self._handle = handle
        self._functions = functions
        self._lists = processes
        self._meter = meter
        self._never: dict[str, Unknown] = {}
        self._samples_seen = 0
        self._processes_seen = 0
        self._read_at: float | None = None
        self._energy: tuple[float, float] | None = None
        self._limit: Maybe[float] = Unknown("not asked yet")
        self._limit_at: float | None = None

    def read(self, at: float, wall: float) -> Reading:
        span = FIRST_SPAN if self._read_at is None else at - self._read_at
        if self._read_at is None:
            self._samples_seen = self._processes_seen = int((wall - FIRST_SPAN) * _MICRO)
        self._read_at = at
        try:
            return self._read(at, wall, span)
        except _GoneError as gone:
            # The next good reading starts a new span: what happened meanwhile is unknown.
            self._read_at = self._energy = None
            return Reading.unknown(self.gpu.uuid, str(gone), span=span)

    def _read(self, at: float, wall: float, span: float) -> Reading:
        pipes: Maybe[Pipes] = self._meter.read(at) if self._meter else _NO_GPM
        used, total = self._memory()
        energy, power = self._power(at)
        return Reading(
            uuid=self.gpu.uuid,
            span=span,
            utilization=self._utilization(wall, pipes),
            memory_used=used,
            memory_total=total,
            power=power,
            power_limit=self._power_limit(at),
            energy=energy,
            temperature=self._temperature(),
            processes=self._processes(),
            pipes=pipes,
        )

    def _utilization(self, wall: float, pipes: Maybe[Pipes]) -> Maybe[Utilization]:
        seen = self._buffered(wall)
        if seen is None:
            seen = self._rate()
        if isinstance(seen, Unknown) and known(pipes) and known(pipes.graphics):
            # On MIG only GPM reports it: the exact mean since the look before, which includes bursts.
            return Utilization(pipes.graphics, pipes.graphics, 0)
        return seen

    def _buffered(self, wall: float) -> Maybe[Utilization] | None:
        """All samples that the driver took since the look before; None when there are none."""
        if "samples" in self._never:
            return None
        functions = self._functions
        functions.count.value = _RING
        functions.since.value = self._samples_seen
        code = functions.get_samples(
            self._handle,
            pynvml.NVML_GPU_UTILIZATION_SAMPLES,
            functions.since,
            functions.to_value_type,
            functions.to_count,
            functions.samples,
        )
        if code != library.SUCCESS:
            self._remember("samples", code)
            self._check_clock(wall)
            return None
        count = functions.count.value
        if not count:
            # The ring of an idle GPU runs empty, which is neither zero nor unknown: use the current rate.
            self._check_clock(wall)
            return None
        stamps, values = zip(*_SAMPLE.iter_unpack(functions.samples_view[: _SAMPLE.size * count]), strict=True)
        self._samples_seen = max(stamps)
        peak = plausible_fraction(max(values))
        if isinstance(peak, Unknown):
            return peak
        return Utilization(peak, sum(values) / (100 * count), count)

    def _check_clock(self, wall: float) -> None:
        """Samples carry wall-clock times: after the clock was set back, none would be newer than the last."""
        now = int(wall * _MICRO)
        if self._samples_seen > now + _MICRO:
            self._samples_seen = self._processes_seen = now - _MICRO

    def _rate(self) -> Maybe[Utilization]:
        if never := self._never.get("rates"):
            return never
        rates = self._functions.rates
        code = self._functions.get_rates(self._handle, rates)
        if code != library.SUCCESS:
            return self._remember("rates", code)
        value = plausible_fraction(_RATES.unpack(rates)[0])
        return Utilization(value, value, 1) if known(value) else value

    def _memory(self) -> tuple[Maybe[int], Maybe[int]]:
        """Used and total. The second form of the call does not count what the driver reserves as used."""
        functions = self._functions
        total = used = 0
        code = library.FUNCTION_NOT_FOUND
        if "memory 2" not in self._never:
            _MEMORY_2.pack_into(functions.memory, 0, pynvml.nvmlMemory_v2, 0, 0, 0, 0)
            code = functions.get_memory_2(self._handle, functions.memory)
            _version, total, _reserved, _free, used = _MEMORY_2.unpack(functions.memory)
        if code in {library.FUNCTION_NOT_FOUND, library.ARGUMENT_VERSION_MISMATCH}:
            self._remember("memory 2", code)
            code = functions.get_memory_1(self._handle, functions.memory)
            total, _free, used = _MEMORY_1.unpack_from(functions.memory)
        if code != library.SUCCESS:
            failed = self._failed(code)
            return failed, failed
        if not total:
            shared = Unknown("this GPU uses the machine's memory")
            return shared, shared
        plausible_total = plausible_memory_total(total)
        return plausible_memory_used(used, plausible_total), plausible_total

    def _power(self, at: float) -> tuple[Maybe[float], Maybe[float]]:
        """The energy counter in joules, and the mean power since the look before."""
        functions = self._functions
        energy: Maybe[float]
        if never := self._never.get("energy"):
            energy = never
        else:
            code = functions.get_energy(self._handle, functions.to_long_number)
            energy = functions.long_number.value / 1000 if code == library.SUCCESS else self._remember("energy", code)
        before = self._energy
        if known(energy):
            if before is None or energy < before[1]:
                self._energy = (at, energy)
            elif at - before[0] >= _SHORTEST_POWER_SPAN:
                self._energy = (at, energy)
                return energy, plausible_watts((energy - before[1]) / (at - before[0]))
        return energy, self._power_now()

    def _power_now(self) -> Maybe[float]:
        if never := self._never.get("power"):
            return never
        number = self._functions.number
        code = self._functions.get_power(self._handle, self._functions.to_number)
        if code != library.SUCCESS:
            return self._remember("power", code)
        return plausible_watts(number.value / 1000)

    def _power_limit(self, at: float) -> Maybe[float]:
        if self._limit_at is None or at - self._limit_at >= _LIMIT_EVERY:
            number = self._functions.number
            code = self._functions.get_limit(self._handle, self._functions.to_number)
            self._limit = plausible_watts(number.value / 1000) if code == library.SUCCESS else self._failed(code)
            self._limit_at = at
        return self._limit

    def _temperature(self) -> Maybe[float]:
        if never := self._never.get("temperature"):
            return never
        number = self._functions.number
        code = self._functions.get_temperature(self._handle, 0, self._functions.to_number)
        if code != library.SUCCESS:
            return self._remember("temperature", code)
        return plausible_celsius(number.value)

    def _processes(self) -> Maybe[tuple[Process, ...]]:
        processes, self._processes_seen = self._lists.read(self._handle, self._processes_seen)
        return processes

    def _remember(self, what: str, code: int) -> Unknown:
        """A value that is not supported is asked for once."""
        failed = self._failed(code)
        if code in library.NEVER:
            self._never[what] = failed
        return failed

    def _failed(self, code: int) -> Unknown:
        if code in library.GONE:
            raise _GoneError(code)
        return library.unknown(code)

    def close(self) -> None:
        if self._meter:
            self._meter.close()


_NO_GPM: Final = Unknown("only reported by Hopper and newer GPUs")
