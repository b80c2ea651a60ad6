"""Faults that the driver reports: XID errors as events, memory errors as counters."""

import contextlib
import ctypes
import struct
from collections import deque
from typing import Any, Final

import pynvml

from stoker.gpus.model import DeviceHealth, Maybe, Unknown, known
from stoker.gpus.nvml import library

# nvmlEventData_t: device, type, data (of this type: the XID), GPU instance, compute instance.
_EVENT: Final = struct.Struct("=QQQII")
_NO_INSTANCE: Final = 2**32 - 1
# A GPU that repeats an error with every kernel must not delay a look or fill the memory.
_MOST_EVENTS: Final = 64
_MOST_XIDS: Final = 32
# Memory error counters only grow, so reading them once a minute misses nothing.
_EVERY: Final = 60.0


class HealthMeter:
    """The faults of one device. Counters are read once a minute, and after an XID."""

    def __init__(self, board: object) -> None:
        self._board = board
        self._xids: deque[int] = deque(maxlen=_MOST_XIDS)
        self._total_errors = library.function("nvmlDeviceGetTotalEccErrors")
        self._remapped_rows = library.function("nvmlDeviceGetRemappedRows")
        self._retired_pages = library.function("nvmlDeviceGetRetiredPagesPendingStatus")
        self._read_at: float | None = None
        self._seen = DeviceHealth()

    def add(self, xid: int) -> None:
        self._xids.append(xid)
        self._read_at = None

    def read(self, at: float) -> DeviceHealth:
        if self._read_at is None or at - self._read_at >= _EVERY:
            rows = self._rows()
            pages = self._pages()
            pending, failed = rows if known(rows) else (rows, rows)
            self._seen = DeviceHealth(tuple(self._xids), self._uncorrected(), _either(pending, pages), failed)
            self._read_at = at
        return self._seen

    def lost(self, reason: str) -> Maybe[DeviceHealth]:
        """The last known health of a GPU that can no longer be read."""
        why = Unknown(reason)
        self._read_at = None
        return DeviceHealth(tuple(self._xids), why, why, why) if self._xids else why

    def _uncorrected(self) -> Maybe[int]:
        count = ctypes.c_ulonglong()
        code = self._total_errors(
            self._board, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC, ctypes.byref(count)
        )
        return count.value if code == library.SUCCESS else library.failed(code)

    def _rows(self) -> Maybe[tuple[bool, bool]]:
        """Pending and failed row remapping (Ampere and newer)."""
        corrected, uncorrected, pending, failed = (ctypes.c_uint() for _ in range(4))
        references = (ctypes.byref(number) for number in (corrected, uncorrected, pending, failed))
        code = self._remapped_rows(self._board, *references)
        return (bool(pending.value), bool(failed.value)) if code == library.SUCCESS else library.failed(code)

    def _pages(self) -> Maybe[bool]:
        """Pending page retirement (before Ampere)."""
        pending = ctypes.c_uint()
        code = self._retired_pages(self._board, ctypes.byref(pending))
        return bool(pending.value) if code == library.SUCCESS else library.failed(code)


def _either(first: Maybe[bool], second: Maybe[bool]) -> Maybe[bool]:
    """True if either is. A board supports one of the two, so an unsupported value is ignored."""
    if isinstance(first, Unknown):
        return second if known(second) else first
    return first or (known(second) and second)


class XidEvents:
    """The XID errors of all devices through one event set. Collecting them never waits."""

    def __init__(self) -> None:
        self._wait = library.function("nvmlEventSetWait_v2", "nvmlEventSetWait")
        self._event = ctypes.create_string_buffer(_EVENT.size)
        self._meters: dict[int, list[tuple[int | None, HealthMeter]]] = {}
        self._set: object | None = None
        with contextlib.suppress(pynvml.NVMLError):
            self._set = pynvml.nvmlEventSetCreate()

    def register(self, board: Any, meter: HealthMeter, gpu_instance: int | None = None) -> None:
        """Sends events of this board, or of one MIG instance, to the meter."""
        address = ctypes.cast(board, ctypes.c_void_p).value or 0
        meters = self._meters.setdefault(address, [])
        if not meters and self._set is not None:
            with contextlib.suppress(pynvml.NVMLError):  # the board does not support events
                pynvml.nvmlDeviceRegisterEvents(board, pynvml.nvmlEventTypeXidCriticalError, self._set)
        meters.append((gpu_instance, meter))

    def collect(self) -> None:
        """Distributes new events."""
        if self._set is None:
            return
        for _ in range(_MOST_EVENTS):
            # Any error also ends the loop: a lost GPU shows when it is read.
            if self._wait(self._set, self._event, 0) != library.SUCCESS:
                return
            device, kind, xid, instance, _compute = _EVENT.unpack(self._event)
            if kind != pynvml.nvmlEventTypeXidCriticalError:
                continue
            for gpu_instance, meter in self._meters.get(device, ()):
                if instance == _NO_INSTANCE or gpu_instance in (None, instance):
                    meter.add(xid)

    def close(self) -> None:
        if self._set is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._set)
