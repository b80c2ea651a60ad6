"""The processes on one NVIDIA GPU: the driver's lists and per-process utilization, joined by pid."""

import ctypes
import struct
from collections.abc import Iterable
from typing import Final

from stoker.gpus.model import MPS_SERVER, Maybe, Process, Unknown, plausible_fraction
from stoker.gpus.nvml import library
from stoker.gpus.processes import ProcessCache

# nvmlProcessInfo_t: pid, memory, GPU instance, compute instance. Drivers 535.43 to 535.85 had eight bytes more.
_INFO = struct.Struct("=I4xQII")
_INFO_535 = struct.Struct("=I4xQIIQ")
# nvmlProcessUtilizationSample_t: pid, timestamp, SM, memory, encoder, decoder.
_UTILIZATION = struct.Struct("=I4xQIIII")
_NO_MEMORY: Final = 2**64 - 1
_FIRST_CAPACITY: Final = 128


class _Table:
    """A C array for the driver, reused and enlarged on demand."""

    def __init__(self, row: struct.Struct) -> None:
        self.row = row
        self.count = ctypes.c_uint(0)
        self.to_count = ctypes.byref(self.count)
        self._grow(_FIRST_CAPACITY)

    def _grow(self, capacity: int) -> None:
        self.capacity = capacity
        self.buffer = ctypes.create_string_buffer(self.row.size * capacity)
        self.view = memoryview(self.buffer)

    def grow(self) -> None:
        """Enlarges it after INSUFFICIENT_SIZE, with half as much again for processes that appear meanwhile."""
        self._grow(max(self.count.value, self.capacity) * 3 // 2)

    def rows(self) -> Iterable[tuple[int, ...]]:
        return self.row.iter_unpack(self.view[: self.row.size * self.count.value])


def info_layout() -> struct.Struct:
    """The row layout of this driver's process list, inferred from the functions of the library."""
    long_rows = (
        library.has("nvmlDeviceGetComputeRunningProcesses_v3")
        and library.has("nvmlDeviceGetConfComputeMemSizeInfo")
        and not library.has("nvmlDeviceGetRunningProcessDetailList")
    )
    return _INFO_535 if long_rows else _INFO


class ProcessLists:
    """Reads the processes of all GPUs of the machine, one device after another."""

    def __init__(self, process_cache: ProcessCache) -> None:
        self._process_cache = process_cache
        self._compute = library.function(
            "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"
        )
        self._graphics = library.function(
            "nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2"
        )
        self._mps = library.function("nvmlDeviceGetMPSComputeRunningProcesses_v3")
        self._utilization = library.function("nvmlDeviceGetProcessUtilization")
        self._infos = _Table(info_layout())
        self._samples = _Table(_UTILIZATION)
        self._since = ctypes.c_ulonglong()

    def read(self, handle: object, last_seen: int) -> tuple[Maybe[tuple[Process, ...]], int]:
        """The processes on a device, and the newest timestamp of their utilization samples."""
        memory: dict[int, Maybe[int]] = {}
        code = self._list(self._compute, handle, memory)
        if code == library.SUCCESS:
            code = self._list(self._graphics, handle, memory)
            if code in library.NEVER:
                code = library.SUCCESS
        if code != library.SUCCESS:
            return library.unknown(code), last_seen
        if not memory:
            return (), last_seen
        process_cache = self._process_cache
        if any(process_cache.name(pid) == MPS_SERVER for pid in memory):
            # Clients of the MPS server are in a separate list.
            self._list(self._mps, handle, memory)
        used, newest = self._used(handle, last_seen)
        if isinstance(used, Unknown):
            return tuple(process_cache.process(pid, memory[pid], used, used) for pid in memory), newest
        unlisted: tuple[Maybe[float], Maybe[float]] = (0.0, 0.0)
        if process_cache.verifies_pids and not used.keys() <= memory.keys():
            # In a container, newer drivers use its pids in the list, but the host's pids in the samples.
            elsewhere = Unknown("the driver numbers utilization by the host's pids, which cannot be matched here")
            unlisted = (elsewhere, elsewhere)
        return tuple(process_cache.process(pid, memory[pid], *used.get(pid, unlisted)) for pid in memory), newest

    def _list(self, function: library.Function, handle: object, memory: dict[int, Maybe[int]]) -> int:
        table = self._infos
        code = _fill(function, table, handle)
        if code == library.SUCCESS:
            for pid, used, *_ in table.rows():
                amount: Maybe[int] = (
                    used if used != _NO_MEMORY else Unknown("the driver does not report it per process")
                )
                already = memory.get(pid)
                if already is None or isinstance(already, Unknown):
                    memory[pid] = amount
                elif not isinstance(amount, Unknown):
                    memory[pid] = max(already, amount)
        return code

    def _used(self, handle: object, last_seen: int) -> tuple[Maybe[dict[int, tuple[Maybe[float], Maybe[float]]]], int]:
        """Mean SM and memory activity by pid since `last_seen`. The driver lists only active processes."""
        table = self._samples
        self._since.value = last_seen
        code = _fill(lambda device, count, rows: self._utilization(device, rows, count, self._since), table, handle)
        if code == library.NOT_FOUND:
            return {}, last_seen
        if code != library.SUCCESS:
            return library.unknown(code), last_seen
        seen: dict[int, tuple[list[int], list[int]]] = {}
        newest = last_seen
        for pid, stamp, sm, memory, *_ in table.rows():
            sms, memories = seen.setdefault(pid, ([], []))
            sms.append(sm)
            memories.append(memory)
            newest = max(newest, stamp)
        return {pid: (_mean(sms), _mean(memories)) for pid, (sms, memories) in seen.items()}, newest


def _mean(percents: list[int]) -> Maybe[float]:
    """The mean. Drivers have returned garbage for zombies: an absurd sample makes only that process unknown."""
    highest = max(percents)
    return plausible_fraction(highest if highest > 100 else sum(percents) / len(percents))


def _fill(function: library.Function, table: _Table, handle: object) -> int:
    """Fills a process list, and retries if it has grown between two calls."""
    code = library.INSUFFICIENT_SIZE
    for _ in range(4):
        table.count.value = table.capacity
        code = function(handle, table.to_count, table.buffer)
        if code != library.INSUFFICIENT_SIZE:
            return code
        table.grow()
    return code
