"""The mock NVML in a test's hands: everything that it may change, live, while other processes read."""

import ctypes
import math
import mmap
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, Self

from tests.support.mock_nvml import layout
from tests.support.mock_nvml.library import Plan, build_plan, plan

GIB: Final = 1024**3
Kind = Literal["compute", "graphics", "mps"]
KINDS: Final[Sequence[Kind]] = ("compute", "graphics", "mps")
GPM_IDS: Final = {"graphics": 1, "sm": 2, "occupancy": 3, "tensor": 5, "dram": 10}
TRAFFIC_IDS: Final = {"pcie_out": 20, "pcie_in": 21, "nvlink_in": 60, "nvlink_out": 61}
EVERYTHING: Final = "*"


class Samples(IntEnum):
    """Where `nvmlDeviceGetSamples` takes the GPU's past utilization from."""

    RING = 0
    """From what `set_samples` was given."""
    GENERATED = 1
    """Six a second, up to now, all equal to the present utilization."""
    EMPTY = 2
    """From nowhere: it answers NOT_FOUND."""


class _Number:
    """A number in the shared memory, as an attribute of the object whose `_shared` holds it."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __get__(self, owner: "MockGpu | MockMachine", kind: type | None = None) -> int:
        return int(getattr(owner._shared, self._field))

    def __set__(self, owner: "MockGpu | MockMachine", value: int) -> None:
        setattr(owner._shared, self._field, value)


class _Text:
    def __init__(self, field: str) -> None:
        self._field = field

    def __get__(self, owner: "MockGpu | MockMachine", kind: type | None = None) -> str:
        text: bytes = getattr(owner._shared, self._field)
        return text.decode()

    def __set__(self, owner: "MockGpu | MockMachine", value: str) -> None:
        setattr(owner._shared, self._field, value.encode())


class _Memory(_Number):
    """A part of the memory. What is free follows, until a test says otherwise."""

    def __set__(self, owner: "MockGpu | MockMachine", value: int) -> None:
        super().__set__(owner, value)
        shared = owner._shared
        shared.memory_free = max(0, shared.memory_total - shared.memory_used - shared.memory_reserved)


class MockGpu:
    """One GPU, or one MIG device of a GPU. Memory is in bytes, utilization in per cent."""

    uuid = _Text("uuid")
    name = _Text("name")
    pci_bus_id = _Text("pci_bus_id")
    index = _Number("index")
    minor = _Number("minor_number")
    memory_total = _Memory("memory_total")
    memory_used = _Memory("memory_used")
    """As version 2 has it, without `memory_reserved`; version 1 gives the sum. Processes do not change it."""
    memory_reserved = _Memory("memory_reserved")
    memory_free = _Number("memory_free")
    utilization = _Number("utilization")
    memory_utilization = _Number("memory_utilization")
    temperature = _Number("temperature")
    sm_clock = _Number("sm_clock")
    throttling = _Number("throttling")
    """A mask of NVML's reasons."""
    uncorrected_errors = _Number("uncorrected_errors")
    rows_pending = _Number("rows_pending")
    rows_failed = _Number("rows_failed")
    pages_pending = _Number("pages_pending")
    enforced_limit_mw = _Number("enforced_limit_mw")
    management_limit_mw = _Number("management_limit_mw")
    mig_mode = _Number("mig_mode")
    gpu_instance = _Number("gpu_instance")
    compute_instance = _Number("compute_instance")
    samples_mode = _Number("samples_mode")
    """One of `Samples`."""
    gpm_supported = _Number("gpm_supported")

    def __init__(self, machine: "MockMachine", entry: int) -> None:
        self._machine = machine
        self.entry = entry
        self._shared: Any = machine._shared.devices[entry]

    @property
    def mig_devices(self) -> "list[MockGpu]":
        count: int = self._machine._shared.entry_count
        devices = (MockGpu(self._machine, entry) for entry in range(count))
        return [device for device in devices if device._shared.parent == self.entry]

    def add_mig(self, *, memory: int = 10 * GIB, profile: str = "1g.10gb") -> "MockGpu":
        """Puts the GPU into MIG mode and cuts one more device out of it."""
        number = len(self.mig_devices)
        part = self._machine._new_device(number, parent=self.entry)
        part.uuid = f"MIG-{uuid.uuid5(uuid.NAMESPACE_OID, f'{self.uuid} {number}')}"
        part.name = f"{self.name} MIG {profile}"
        part.memory_total = memory
        part.memory_reserved = 16 * 1024**2
        part.memory_used = 0
        # Real ones are neither the index of the MIG device nor in step with each other.
        part.gpu_instance = 7 + number
        part.compute_instance = 0
        self._machine._shared.entry_count = part.entry + 1
        self.mig_mode = 1
        return part

    # Power and energy

    @property
    def power_mw(self) -> int:
        return int(self._meter.power_mw)

    @power_mw.setter
    def power_mw(self, value: int) -> None:
        self._turn_meter(power_mw=value)

    @property
    def energy_mj(self) -> int:
        meter = self._meter
        elapsed_us = _monotonic_us() - meter.since_us
        return int(meter.energy_mj + (elapsed_us * meter.power_mw // 1_000_000 if meter.integrates else 0))

    @energy_mj.setter
    def energy_mj(self, value: int) -> None:
        self._turn_meter(energy_mj=value)

    @property
    def energy_integrates(self) -> bool:
        """Whether the energy counter runs with the power, or stands still."""
        return bool(self._meter.integrates)

    @energy_integrates.setter
    def energy_integrates(self, value: bool) -> None:
        self._turn_meter(integrates=int(value))

    @property
    def _meter(self) -> Any:
        return self._shared.meters[self._shared.meter_in_use]

    def _turn_meter(self, **changes: int) -> None:
        """Writes the meter that is not in use, then switches: no reader sees the counter run backwards."""
        now = {"energy_mj": self.energy_mj, "power_mw": self.power_mw, "integrates": self._meter.integrates}
        other = 1 - self._shared.meter_in_use
        self._shared.meters[other] = layout.Meter(since_us=_monotonic_us(), **(now | changes))
        self._shared.meter_in_use = other

    # Samples

    def set_samples(self, samples: Iterable[tuple[float, int]]) -> None:
        """Has the driver remember these and no others: (how many seconds ago, per cent)."""
        self._set_ring("", samples)

    def set_memory_samples(self, samples: Iterable[tuple[float, int]]) -> None:
        """The same of the memory controller."""
        self._set_ring("memory_", samples)

    def _set_ring(self, prefix: str, samples: Iterable[tuple[float, int]]) -> None:
        now = _wall_us()
        taken = sorted((now - round(age * 1_000_000), percent) for age, percent in samples)
        if len(taken) > layout.RING:
            raise ValueError(f"the mock NVML remembers at most {layout.RING} samples, not {len(taken)}")
        other = 1 - getattr(self._shared, f"{prefix}ring_in_use")
        ring = getattr(self._shared, f"{prefix}rings")[other]
        for slot, (timestamp, percent) in enumerate(taken):
            ring.samples[slot] = layout.Sample(timestamp, percent)
        ring.count = len(taken)
        setattr(self._shared, f"{prefix}ring_in_use", other)
        self.samples_mode = Samples.RING

    # Faults

    def report_xid(self, xid: int) -> None:
        """Reports an error to the processes that have registered for it; of a MIG device, with its GPU instance."""
        self._machine._add_event(self, xid)

    # Processes

    def add_process(
        self,
        pid: int,
        *,
        memory: int | None = GIB // 2,
        sm: int | None = None,
        kind: Kind = "compute",
    ) -> None:
        """Lists the process; a second time changes it. `sm` also gives it a utilization, always fresh."""
        on_mig = self._shared.parent != layout.PHYSICAL
        _fill(
            self._shared.processes,
            lambda slot: slot.pid == pid and slot.kind == KINDS.index(kind),
            layout.Process(
                pid=pid,
                memory=layout.NOT_AVAILABLE if memory is None else memory,
                kind=KINDS.index(kind),
                gpu_instance=self.gpu_instance if on_mig else layout.NO_INSTANCE,
                compute_instance=self.compute_instance if on_mig else layout.NO_INSTANCE,
                slot=layout.FIXED,
            ),
        )
        if sm is not None:
            self.set_process_utilization(pid, sm=sm)

    def set_process_utilization(
        self,
        pid: int,
        *,
        sm: int,
        memory: int = 0,
        encoder: int = 0,
        decoder: int = 0,
        age: float | None = None,
    ) -> None:
        """What `nvmlDeviceGetProcessUtilization` says: of `age` seconds before this call, or always of now.

        It need not be of a listed process: in a container a driver may list one pid and measure another.
        """
        _fill(
            self._shared.utilizations,
            lambda slot: slot.pid == pid,
            layout.ProcessUtilization(
                timestamp=_wall_us() - round((age or 0) * 1_000_000),
                pid=pid,
                sm=sm,
                memory=memory,
                encoder=encoder,
                decoder=decoder,
                slot=layout.FRESH if age is None else layout.FIXED,
            ),
        )

    def remove_process(self, pid: int) -> None:
        """Forgets the process and its utilization."""
        for table in (self._shared.processes, self._shared.utilizations):
            for slot in table:
                if slot.pid == pid:
                    slot.slot = layout.FREE

    def clear_processes(self) -> None:
        for table in (self._shared.processes, self._shared.utilizations):
            for slot in table:
                slot.slot = layout.FREE

    # GPM

    def set_gpm(
        self,
        *,
        graphics: float | None = None,
        sm: float | None = None,
        occupancy: float | None = None,
        tensor: float | None = None,
        dram: float | None = None,
    ) -> None:
        """Gives these metrics their values, in per cent. What is left out becomes not supported."""
        given = {"graphics": graphics, "sm": sm, "occupancy": occupancy, "tensor": tensor, "dram": dram}
        for name, value in given.items():
            self._shared.gpm[GPM_IDS[name]] = math.nan if value is None else value

    def set_traffic(
        self,
        *,
        pcie_out: float | None = None,
        pcie_in: float | None = None,
        nvlink_in: float | None = None,
        nvlink_out: float | None = None,
    ) -> None:
        """The same of traffic, in MiB/s."""
        given = {"pcie_out": pcie_out, "pcie_in": pcie_in, "nvlink_in": nvlink_in, "nvlink_out": nvlink_out}
        for name, value in given.items():
            self._shared.gpm[TRAFFIC_IDS[name]] = math.nan if value is None else value


class MockMachine:
    """A machine with GPUs that other processes read, if started with `environment()`."""

    driver_version = _Text("driver_version")
    nvml_version = _Text("nvml_version")
    cuda_version = _Number("cuda_version")
    init_error = _Number("init_error")
    """The NVML error with which initialising fails; 0 for none."""
    device_count = _Number("device_count")
    """How many of `gpus` are there: the last ones can be taken out."""

    def __init__(self, path: Path, made_by: Plan) -> None:
        self.path = path
        self._functions = made_by.functions
        self._library = build_plan(made_by)
        with path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), 0)
        self._shared: Any = layout.State.from_buffer(self._mapped)

    @classmethod
    def create(cls, path: Path, *, gpus: int = 1) -> Self:
        """A new machine in the file `path`, idle, with as many H100s as asked for."""
        if not 0 <= gpus <= 16:
            raise ValueError(f"the mock NVML has 0 to 16 GPUs, not {gpus}")
        made_by = plan()
        # Never over an old file: processes that still map it would see it change under them.
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            file.truncate(ctypes.sizeof(layout.State))
        machine = cls(path, made_by)
        machine.driver_version = "570.124.06"
        machine.nvml_version = "12.570.124.06"
        machine.cuda_version = 12080
        for index in range(gpus):
            machine._new_device(index)
            machine._shared.entry_count = machine._shared.device_count = index + 1
        machine._shared.size = ctypes.sizeof(layout.State)
        machine._shared.fingerprint = made_by.fingerprint
        machine._shared.magic = layout.MAGIC
        return machine

    @classmethod
    def attach(cls, path: Path) -> Self:
        """A machine that another process created."""
        made_by = plan()
        machine = cls(path, made_by)
        if machine._shared.magic != layout.MAGIC or machine._shared.fingerprint != made_by.fingerprint:
            raise ValueError(f"{path} was not made for this build of the mock NVML")
        return machine

    @property
    def gpus(self) -> list[MockGpu]:
        """The physical GPUs; MIG devices are in their `mig_devices`."""
        devices = (MockGpu(self, entry) for entry in range(self._shared.entry_count))
        return [device for device in devices if device._shared.parent == layout.PHYSICAL]

    def environment(self) -> dict[str, str]:
        """The variables that make a new process read this machine."""
        after = os.environ.get("LD_LIBRARY_PATH")
        # The second names the machine: processes that read different ones must not share a helper.
        libraries = f"{self._library}:{self.path}" + (f":{after}" if after else "")
        return {"MOCK_NVML_STATE": str(self.path), "LD_LIBRARY_PATH": libraries}

    # Links

    def link(self, first: int, second: int, level: int = layout.NVLINK) -> None:
        """Connects two entries: by NVLink, or as close as a level of nvmlGpuTopologyLevel_t says."""
        for row, column in ((first, second), (second, first)):
            self._shared.links[row * layout.DEVICES + column] = level

    # Faults

    def fault(
        self,
        function: str,
        *,
        code: int = 0,
        hang: float = 0.0,
        gpu: MockGpu | int | None = None,
        after_calls: int = 0,
        times: int | None = None,
    ) -> None:
        """From now on `function` fails with `code`, or hangs for that many seconds and then answers, or both.

        `function` is the C name, or "*" for every call; `gpu` confines it to one device (which the generated
        stubs cannot tell). It begins after `after_calls` further calls and ends after `times`, counted in C:
        many functions of the bindings call it twice, first for the size. Code 13 looks like a driver without
        the function. A hanging call takes no signal but SIGKILL, as in an uninterruptible sleep.
        """
        if not code and not hang:
            raise ValueError(f"a fault of {function} must have a code, or hang")
        if function != EVERYTHING and function not in self._functions:
            raise ValueError(f"the mock NVML has no function {function}")
        if isinstance(gpu, MockGpu):
            gpu = gpu.entry
        free = next((slot for slot in self._shared.faults if slot.serial == 0), None)
        if free is None:
            raise ValueError(f"the mock NVML has at most {layout.FAULTS} faults at once")
        free.function = self._functions.get(function, layout.EVERY_FUNCTION)
        free.device = layout.EVERY_DEVICE if gpu is None else gpu
        free.code = code
        free.hang_ms = round(min(hang * 1000, 2**32 - 1))
        free.calls_before = after_calls
        free.calls_left = -1 if times is None else times
        self._shared.fault_serial += 1
        free.serial = self._shared.fault_serial
        self._shared.fault_count += 1

    def clear_faults(self) -> None:
        """The driver recovers: calls that hang go on within 50 ms and answer as they should."""
        for slot in self._shared.faults:
            slot.serial = 0
        self._shared.fault_count = 0

    # What was done to it

    def calls(self, function: str = EVERYTHING) -> int:
        """How often the function was called in C, by any process; without a name, how often all of them."""
        if function == EVERYTHING:
            return sum(self._shared.calls)
        return int(self._shared.calls[self._functions[function]])

    def reset_calls(self) -> None:
        """Resets the counts of calls and `max_in_flight`."""
        ctypes.memset(self._shared.calls, 0, ctypes.sizeof(self._shared.calls))
        self._shared.max_in_flight = 0

    @property
    def in_flight(self) -> int:
        """How many calls hang now. The calls of a process that was killed are not among them."""
        return sum(pid != 0 and _runs(pid) for pid in self._shared.hangs)

    @property
    def max_in_flight(self) -> int:
        """How many calls hung at the same time, at most."""
        return int(self._shared.max_in_flight)

    def wait_until_hanging(self, *, deadline: float = 60.0) -> None:
        """Returns as soon as a call hangs."""
        end = time.monotonic() + deadline
        while not self.in_flight:
            if time.monotonic() > end:
                raise TimeoutError(f"no call into the mock NVML hung within {deadline:g} s")
            time.sleep(0.005)

    def _add_event(self, gpu: MockGpu, xid: int) -> None:
        count: int = self._shared.event_count
        on_mig = gpu._shared.parent != layout.PHYSICAL
        self._shared.events[count % layout.EVENTS] = layout.Event(
            xid=xid,
            device=gpu._shared.parent if on_mig else gpu.entry,
            gpu_instance=gpu.gpu_instance if on_mig else layout.NO_INSTANCE,
        )
        self._shared.event_count = count + 1

    def _new_device(self, number: int, *, parent: int = layout.PHYSICAL) -> MockGpu:
        entry: int = self._shared.entry_count
        if entry >= layout.DEVICES:
            raise ValueError(f"the mock NVML has at most {layout.DEVICES} devices, MIG devices included")
        gpu = MockGpu(self, entry)
        gpu._shared.parent = parent
        gpu.index = number
        gpu.uuid = f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'mock gpu {number}')}"
        gpu.name = "NVIDIA H100 80GB HBM3"
        gpu.pci_bus_id = f"00000000:{0x18 + 9 * number:02X}:00.0"
        # Never the index, so that a test notices when one is taken for the other.
        gpu.minor = number + 3
        gpu.memory_total = 80 * GIB
        gpu.memory_reserved = 640 * 1024**2
        gpu.memory_used = 0
        gpu.temperature = 34
        gpu.sm_clock = 345
        gpu.throttling = 1
        gpu.enforced_limit_mw = gpu.management_limit_mw = 700_000
        gpu.energy_mj = 1_000_000_000
        gpu.power_mw = 70_000
        gpu.samples_mode = Samples.GENERATED
        gpu.gpm_supported = 1
        gpu._shared.gpm[:] = [math.nan] * layout.GPM_METRICS
        gpu.set_gpm(graphics=0, sm=0, occupancy=0, tensor=0, dram=0)
        return gpu


def _fill(table: Any, same: Callable[[Any], bool], record: ctypes.Structure) -> None:
    """Puts a record in place of the same one or into a free slot. Its `slot` word goes in last."""
    old = (slot for slot in table if slot.slot != layout.FREE and same(slot))
    free = (slot for slot in table if slot.slot == layout.FREE)
    place = next(chain(old, free), None)
    if place is None:
        raise ValueError(f"the mock NVML has at most {len(table)} processes on one device")
    for field, *_ in record._fields_:
        setattr(place, field, getattr(record, field))


def _wall_us() -> int:
    return time.time_ns() // 1000


def _monotonic_us() -> int:
    return time.monotonic_ns() // 1000


def _runs(pid: int) -> bool:
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return after_name.split()[0] not in {"Z", "X"}
