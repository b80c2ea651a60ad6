"""Reads one NVIDIA device or MIG slice."""

import ctypes
import struct
from typing import Final

import msgspec
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
    plausible_megahertz,
    plausible_memory_total,
    plausible_memory_used,
    plausible_watts,
)
from stoker.gpus.nvidia import throttle_reasons
from stoker.gpus.nvml import library
from stoker.gpus.nvml.gpm import GpmMeter
from stoker.gpus.nvml.health import HealthMeter
from stoker.gpus.nvml.processes import ProcessLists

# nvmlSample_t: a timestamp in µs and an 8-byte union, whose low four bytes hold utilization.
_SAMPLE: Final = struct.Struct("=QI4x")
# nvmlMemory_v2_t: version, total, reserved, free, used. nvmlMemory_t: total, free, used.
# nvmlUtilization_t: GPU, memory controller.
_MEMORY_2: Final = struct.Struct("=I4xQQQQ")
_MEMORY_1: Final = struct.Struct("=QQQ")
_RATES: Final = struct.Struct("=II")
# Twice the measured size of the driver's ring of utilization samples.
_RING: Final = 256
# The driver's longest averaging period, which the first look covers.
FIRST_SPAN: Final = 1.0
# Below this an energy difference is mostly the counter's resolution.
_SHORTEST_POWER_SPAN: Final = 0.5
# A power limit changes only when an administrator changes it.
_LIMIT_EVERY: Final = 60.0
_MICRO: Final = 1_000_000
# The two kinds of samples, by position in nvmlUtilization_t.
_GPU, _MEMORY = 0, 1
_KINDS: Final = (pynvml.NVML_GPU_UTILIZATION_SAMPLES, pynvml.NVML_MEMORY_UTILIZATION_SAMPLES)
_SAMPLES: Final = ("samples", "memory samples")


class DeviceFunctions:
    """The driver's functions and the buffers of a look. Devices are read one by one and share them."""

    def __init__(self) -> None:
        self.get_samples = library.function("nvmlDeviceGetSamples")
        self.get_rates = library.function("nvmlDeviceGetUtilizationRates")
        self.get_memory_2 = library.function("nvmlDeviceGetMemoryInfo_v2")
        self.get_memory_1 = library.function("nvmlDeviceGetMemoryInfo")
        self.get_energy = library.function("nvmlDeviceGetTotalEnergyConsumption")
        self.get_power = library.function("nvmlDeviceGetPowerUsage")
        self.get_limit = library.function("nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPowerManagementLimit")
        self.get_temperature = library.function("nvmlDeviceGetTemperature")
        self.get_clock = library.function("nvmlDeviceGetClockInfo")
        self.get_throttling = library.function(
            "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"
        )
        self.samples = ctypes.create_string_buffer(_SAMPLE.size * _RING)
        self.samples_view = memoryview(self.samples)
        self.since = ctypes.c_ulonglong()
        self.count = ctypes.c_uint()
        self.number = ctypes.c_uint()
        self.long_number = ctypes.c_ulonglong()
        self.memory = ctypes.create_string_buffer(_MEMORY_2.size)
        self.rates = ctypes.create_string_buffer(_RATES.size)
        # Pointers to the buffers, created once, since a look passes dozens of them.
        self.to_count = ctypes.byref(self.count)
        self.to_value_type = ctypes.byref(ctypes.c_uint())
        self.to_number = ctypes.byref(self.number)
        self.to_long_number = ctypes.byref(self.long_number)


class Device:
    """A device handle with its state between looks."""

    def __init__(
        self,
        gpu: Gpu,
        handle: object,
        board: object,
        functions: DeviceFunctions,
        processes: ProcessLists,
        meter: GpmMeter | None,
    ) -> None:
        """`board`: the handle of the whole GPU, which is needed for the clocks and faults of a MIG slice."""
        self.gpu = gpu
        self.health = HealthMeter(board)
        self._handle = handle
        self.board = board
        self._functions = functions
        self._lists = processes
        self._meter = meter
        self._never: dict[str, Unknown] = {}
        self._samples_seen = [0, 0]
        self._rates: Maybe[tuple[int, int]] | None = None
        self._processes_seen = 0
        self._read_at: float | None = None
        self._energy: tuple[float, float] | None = None
        self._limit: Maybe[float] = Unknown("not asked yet")
        self._limit_at: float | None = None

    def read(self, at: float, wall: float) -> Reading:
        span = FIRST_SPAN if self._read_at is None else at - self._read_at
        if self._read_at is None:
            self._look_back_to(int((wall - FIRST_SPAN) * _MICRO))
        self._read_at = at
        try:
            return self._read(at, wall, span)
        except library.GoneError as gone:
            # The time until the next good reading is unknown, which starts a new span.
            self._read_at = self._energy = None
            unknown = Reading.unknown(self.gpu.uuid, str(gone), span=span)
            return msgspec.structs.replace(unknown, health=self.health.lost(str(gone)))

    def _read(self, at: float, wall: float, span: float) -> Reading:
        pipes: Maybe[Pipes] = self._meter.read(at) if self._meter else _NO_GPM
        used, total = self._memory()
        energy, power = self._power(at)
        self._rates = None
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
            memory_activity=self._activity(_MEMORY, wall),
            sm_clock=self._sm_clock(),
            throttling=self._throttling(),
            health=self.health.read(at),
        )

    def _utilization(self, wall: float, pipes: Maybe[Pipes]) -> Maybe[Utilization]:
        seen = self._activity(_GPU, wall)
        if isinstance(seen, Unknown) and known(pipes) and known(pipes.graphics):
            # On MIG only GPM reports it, as an exact mean since the previous look that includes bursts.
            return Utilization(pipes.graphics, pipes.graphics, 0)
        return seen

    def _activity(self, kind: int, wall: float) -> Maybe[Utilization]:
        """The activity of one kind since the previous look, or the current rate without samples."""
        seen = self._buffered(kind, wall)
        return self._rate(kind) if seen is None else seen

    def _buffered(self, kind: int, wall: float) -> Maybe[Utilization] | None:
        """All driver samples since the previous look; None if there are none."""
        if _SAMPLES[kind] in self._never:
            return None
        functions = self._functions
        functions.count.value = _RING
        functions.since.value = self._samples_seen[kind]
        code = functions.get_samples(
            self._handle,
            _KINDS[kind],
            functions.since,
            functions.to_value_type,
            functions.to_count,
            functions.samples,
        )
        if code != library.SUCCESS:
            self._remember(_SAMPLES[kind], code)
            self._check_clock(wall)
            return None
        count = functions.count.value
        if not count:
            # The ring of an idle GPU runs empty, which is neither zero nor unknown, so the current rate is used.
            self._check_clock(wall)
            return None
        stamps, values = zip(*_SAMPLE.iter_unpack(functions.samples_view[: _SAMPLE.size * count]), strict=True)
        self._samples_seen[kind] = max(stamps)
        peak = plausible_fraction(max(values))
        if isinstance(peak, Unknown):
            return peak
        return Utilization(peak, sum(values) / (100 * count), count)

    def _check_clock(self, wall: float) -> None:
        """Resets the sample position after a step back of the wall clock, which would hide newer samples."""
        now = int(wall * _MICRO)
        if max(self._samples_seen) > now + _MICRO:
            self._look_back_to(now - _MICRO)

    def _look_back_to(self, stamp: int) -> None:
        self._samples_seen = [stamp, stamp]
        self._processes_seen = stamp

    def _rate(self, kind: int) -> Maybe[Utilization]:
        if self._rates is None:
            self._rates = self._current_rates()
        if isinstance(self._rates, Unknown):
            return self._rates
        value = plausible_fraction(self._rates[kind])
        return Utilization(value, value, 1) if known(value) else value

    def _current_rates(self) -> Maybe[tuple[int, int]]:
        if never := self._never.get("rates"):
            return never
        rates = self._functions.rates
        code = self._functions.get_rates(self._handle, rates)
        if code != library.SUCCESS:
            return self._remember("rates", code)
        gpu, memory = _RATES.unpack(rates)
        return gpu, memory

    def _memory(self) -> tuple[Maybe[int], Maybe[int]]:
        """Used and total memory. The second version of the call excludes memory reserved by the driver."""
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
            failed = library.failed(code)
            return failed, failed
        if not total:
            shared = Unknown("this GPU uses the machine's memory")
            return shared, shared
        plausible_total = plausible_memory_total(total)
        return plausible_memory_used(used, plausible_total), plausible_total

    def _power(self, at: float) -> tuple[Maybe[float], Maybe[float]]:
        """The energy counter in joules, and the mean power since the previous look."""
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
            self._limit = plausible_watts(number.value / 1000) if code == library.SUCCESS else library.failed(code)
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

    def _sm_clock(self) -> Maybe[float]:
        if never := self._never.get("clock"):
            return never
        number = self._functions.number
        code = self._functions.get_clock(self.board, pynvml.NVML_CLOCK_SM, self._functions.to_number)
        return plausible_megahertz(number.value) if code == library.SUCCESS else self._remember("clock", code)

    def _throttling(self) -> Maybe[tuple[str, ...]]:
        if never := self._never.get("throttling"):
            return never
        mask = self._functions.long_number
        code = self._functions.get_throttling(self.board, self._functions.to_long_number)
        return throttle_reasons(mask.value) if code == library.SUCCESS else self._remember("throttling", code)

    def _processes(self) -> Maybe[tuple[Process, ...]]:
        processes, self._processes_seen = self._lists.read(self._handle, self._processes_seen)
        return processes

    def _remember(self, what: str, code: int) -> Unknown:
        """Notes an unsupported value, which is not queried again."""
        failed = library.failed(code)
        if code in library.NEVER:
            self._never[what] = failed
        return failed

    def close(self) -> None:
        if self._meter:
            self._meter.close()


_NO_GPM: Final = Unknown("only reported by Hopper and newer GPUs")
