"""The mock NVML itself, read as everybody reads NVML: by nvidia-ml-py, nvitop and gpustat in other processes."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.mock_nvml import MockMachine, Samples, build
from tests.support.mock_nvml.library import plan
from tests.support.waiting import wait_for

GIB = 1024**3
INVALID_ARGUMENT, NOT_SUPPORTED, NOT_FOUND, INSUFFICIENT_SIZE = 2, 3, 6, 7
UNINITIALIZED, DRIVER_NOT_LOADED, GPU_IS_LOST, LIB_RM_VERSION_MISMATCH = 1, 9, 15, 18
ARGUMENT_VERSION_MISMATCH = 25

# Answers each expression that it is sent, so that one process can look again after the machine has changed.
READER = """
import ctypes, json, sys, time
import pynvml as N

def gpu(index):
    return N.nvmlDeviceGetHandleByIndex(index)

def mig(index, part):
    return N.nvmlDeviceGetMigDeviceHandleByIndex(gpu(index), part)

def now():
    return time.time_ns() // 1000

def samples(device, since=0, kind=N.NVML_GPU_UTILIZATION_SAMPLES):
    value_type, found = N.nvmlDeviceGetSamples(device, kind, since)
    assert value_type == N.NVML_VALUE_TYPE_UNSIGNED_INT
    return [[sample.timeStamp, sample.sampleValue.uiVal] for sample in found]

def processes(device, kind="Compute", version=""):
    list_them = getattr(N, f"nvmlDeviceGet{kind}RunningProcesses{version}")
    return [[p.pid, p.usedGpuMemory, p.gpuInstanceId, p.computeInstanceId] for p in list_them(device)]

def utilizations(device, since=0):
    found = N.nvmlDeviceGetProcessUtilization(device, since)
    return [[s.pid, s.timeStamp, s.smUtil, s.memUtil, s.encUtil, s.decUtil] for s in found]

def gpm(take, ids):
    first, second = N.nvmlGpmSampleAlloc(), N.nvmlGpmSampleAlloc()
    take(first), take(second)
    wanted = N.c_nvmlGpmMetricsGet_t(N.NVML_GPM_METRICS_GET_VERSION, len(ids), first, second)
    for metric, number in zip(wanted.metrics, ids):
        metric.metricId = number
    N.nvmlGpmMetricsGet(wanted)
    N.nvmlGpmSampleFree(first), N.nvmlGpmSampleFree(second)
    return [[m.nvmlReturn, m.value] for m in wanted.metrics[:len(ids)]]

for line in sys.stdin:
    try:
        answer = eval(line)
    except N.NVMLError as error:
        answer = {"error": error.value}
    print(json.dumps(answer), flush=True)
"""


class Reader:
    """A process that reads the machine through nvidia-ml-py."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", READER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    def ask(self, expression: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def answer(self, *, deadline: float = 60.0) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], deadline)
        assert ready, f"the reader did not answer within {deadline:g} s"
        return json.loads(self.process.stdout.readline())

    def __call__(self, expression: str) -> Any:
        self.ask(expression)
        return self.answer()

    def close(self) -> None:
        self.process.kill()
        with self.process:
            pass


StartReader = Callable[[dict[str, str]], Reader]


@pytest.fixture
def start_reader() -> Iterator[StartReader]:
    readers: list[Reader] = []

    def start(environment: dict[str, str]) -> Reader:
        readers.append(Reader(environment))
        return readers[-1]

    yield start
    for reader in readers:
        reader.close()


@pytest.fixture
def machine(tmp_path: Path) -> MockMachine:
    return MockMachine.create(tmp_path / "state", gpus=2)


@pytest.fixture
def read(machine: MockMachine, start_reader: StartReader) -> Reader:
    reader = start_reader(machine.environment())
    assert reader("N.nvmlInit()") is None
    return reader


@pytest.fixture
def busy() -> Iterator[int]:
    """The pid of a process that is really there, as nvitop and gpustat look it up."""
    with subprocess.Popen(["sleep", "300"]) as process:
        yield process.pid
        process.kill()


def error(code: int) -> dict[str, int]:
    return {"error": code}


# What the machine is


def test_gpus_are_found_by_identity(machine: MockMachine, read: Reader) -> None:
    second = machine.gpus[1]

    assert read("N.nvmlDeviceGetCount()") == 2
    assert read("N.nvmlDeviceGetUUID(gpu(1))") == second.uuid
    assert read("N.nvmlDeviceGetName(gpu(1))") == "NVIDIA H100 80GB HBM3"
    assert read(f"N.nvmlDeviceGetIndex(N.nvmlDeviceGetHandleByUUID(b'{second.uuid}'))") == 1
    assert read("N.nvmlDeviceGetIndex(N.nvmlDeviceGetHandleByPciBusId(b'0000:21:00.0'))") == 1
    pci = "N.nvmlDeviceGetPciInfo(gpu(1))"
    assert read(f"[{pci}.busId, {pci}.busIdLegacy, {pci}.bus]") == ["00000000:21:00.0", "0000:21:00.0", 0x21]
    assert second.uuid.startswith("GPU-")
    assert second.uuid != machine.gpus[0].uuid


def test_minor_number_differs_from_the_index(machine: MockMachine, read: Reader) -> None:
    minors = read("[N.nvmlDeviceGetMinorNumber(gpu(i)) for i in range(2)]")

    assert minors == [gpu.minor for gpu in machine.gpus]
    assert all(minor != index for index, minor in enumerate(minors))


def test_missing_gpu_is_not_found(read: Reader) -> None:
    assert read("gpu(2)") == error(INVALID_ARGUMENT)
    assert read("N.nvmlDeviceGetHandleByUUID(b'GPU-0')") == error(NOT_FOUND)
    assert read("N.nvmlDeviceGetHandleByPciBusId(b'0000:FF:00.0')") == error(NOT_FOUND)


def test_versions_are_those_of_the_machine(machine: MockMachine, read: Reader) -> None:
    machine.driver_version = "535.54.03"
    machine.cuda_version = 12020

    assert read("N.nvmlSystemGetDriverVersion()") == "535.54.03"
    assert read("N.nvmlSystemGetCudaDriverVersion()") == 12020
    assert read("N.nvmlSystemGetCudaDriverVersion_v2()") == 12020
    assert read("N.nvmlDeviceGetCudaComputeCapability(gpu(0))") == [9, 0]


def test_library_has_every_function_of_the_bindings(read: Reader) -> None:
    names = sorted(plan().functions)

    assert len(names) > 400
    assert read(f"[name for name in {names} if not hasattr(N.nvmlLib, name)]") == []
    assert read("N.nvmlDeviceGetFanSpeed(gpu(0))") == error(NOT_SUPPORTED)


def test_invalid_handle_is_refused(read: Reader) -> None:
    assert read("N.nvmlDeviceGetName(N.c_nvmlDevice_t())") == error(INVALID_ARGUMENT)


# What the GPUs do


def test_reader_sees_every_change(machine: MockMachine, read: Reader) -> None:
    look = (
        "[[u.gpu, u.memory, m.used, t, p] for u, m, t, p in [("
        "N.nvmlDeviceGetUtilizationRates(gpu(1)), N.nvmlDeviceGetMemoryInfo(gpu(1), version=N.nvmlMemory_v2),"
        "N.nvmlDeviceGetTemperatureV(gpu(1), 0), N.nvmlDeviceGetPowerUsage(gpu(1)))]][0]"
    )
    assert read(look) == [0, 0, 0, 34, 70_000]

    gpu = machine.gpus[1]
    gpu.utilization, gpu.memory_utilization, gpu.memory_used = 37, 12, 5 * GIB
    gpu.temperature, gpu.power_mw = 61, 512_345

    assert read(look) == [37, 12, 5 * GIB, 61, 512_345]
    assert read("N.nvmlDeviceGetUtilizationRates(gpu(0)).gpu") == 0
    assert read("N.nvmlDeviceGetTemperature(gpu(1), 0)") == 61


def test_power_limits_are_distinguished(machine: MockMachine, read: Reader) -> None:
    machine.gpus[0].enforced_limit_mw = 500_000

    assert read("N.nvmlDeviceGetEnforcedPowerLimit(gpu(0))") == 500_000
    assert read("N.nvmlDeviceGetPowerManagementLimit(gpu(0))") == 700_000


def test_first_version_of_memory_counts_reserved_memory_as_used(machine: MockMachine, read: Reader) -> None:
    gpu = machine.gpus[0]
    gpu.memory_total, gpu.memory_reserved, gpu.memory_used = 16 * GIB, GIB, 5 * GIB

    first = read("(lambda m: [m.total, m.free, m.used])(N.nvmlDeviceGetMemoryInfo(gpu(0)))")
    second = read(
        "(lambda m: [m.total, m.reserved, m.free, m.used])(N.nvmlDeviceGetMemoryInfo(gpu(0), version=N.nvmlMemory_v2))"
    )

    assert first == [16 * GIB, 10 * GIB, 6 * GIB]
    assert second == [16 * GIB, GIB, 10 * GIB, 5 * GIB]


def test_wrong_version_of_an_argument_is_refused(read: Reader) -> None:
    assert read("N.nvmlDeviceGetMemoryInfo(gpu(0), version=2)") == error(ARGUMENT_VERSION_MISMATCH)


def test_energy_integrates_power(machine: MockMachine, read: Reader) -> None:
    look = "N.nvmlDeviceGetTotalEnergyConsumption(gpu(0))"
    gpu = machine.gpus[0]
    gpu.energy_mj = 5_000
    assert [read(look), read(look)] == [5_000, 5_000]

    began = time.monotonic()
    gpu.energy_integrates = True
    gpu.power_mw = 4_000_000_000
    first = read(look)
    gpu.power_mw = 2_000_000_000
    second = read(look)
    lasted = time.monotonic() - began

    assert 5_000 < first < second <= 5_000 + 4_000_000_000 * lasted
    gpu.power_mw = 0
    assert read(look) == gpu.energy_mj >= second


# Samples


def test_only_samples_newer_than_the_last_seen_are_returned(machine: MockMachine, read: Reader) -> None:
    machine.gpus[0].set_samples([(0.5, 90), (3.0, 10), (1.0, 255)])

    everything = read("samples(gpu(0))")

    assert [value for _, value in everything] == [10, 255, 90]
    assert read(f"samples(gpu(0), {everything[0][0]})") == everything[1:]
    assert read(f"samples(gpu(0), {everything[2][0]})") == error(NOT_FOUND)
    assert everything[2][0] == pytest.approx(time.time() * 1e6 - 0.5e6, abs=20e6)
    assert everything[2][0] - everything[0][0] == 2_500_000


def test_generated_samples_are_six_per_second_and_repeatable(machine: MockMachine, read: Reader) -> None:
    machine.gpus[0].utilization = 73

    everything = read("samples(gpu(0))")
    again = read("samples(gpu(0))")

    assert len(everything) == 100
    assert {value for _, value in everything} == {73}
    assert {after[0] - before[0] for before, after in pairwise(everything)} == {166_666}
    # The clock may have moved on by a few samples in between.
    assert everything[-20:] == [sample for sample in again if sample[0] <= everything[-1][0]][-20:]
    assert [sample[0] for sample in read(f"samples(gpu(0), {everything[-3][0]})")][:2] == [
        everything[-2][0],
        everything[-1][0],
    ]


def test_driver_without_samples_finds_none(machine: MockMachine, read: Reader) -> None:
    machine.gpus[0].samples_mode = Samples.EMPTY

    assert read("samples(gpu(0))") == error(NOT_FOUND)


def test_power_samples_are_not_supported(read: Reader) -> None:
    assert read("samples(gpu(0), kind=N.NVML_TOTAL_POWER_SAMPLES)") == error(NOT_SUPPORTED)


# Processes


def test_processes_are_listed_by_kind(machine: MockMachine, read: Reader) -> None:
    gpu = machine.gpus[1]
    gpu.add_process(1001, memory=3 * GIB)
    gpu.add_process(1002, memory=None)
    gpu.add_process(1003, memory=1, kind="graphics")
    gpu.add_process(1004, memory=2, kind="mps")
    no_mig = [2**32 - 1] * 2

    assert read("processes(gpu(1))") == [[1001, 3 * GIB, *no_mig], [1002, None, *no_mig]]
    assert read("processes(gpu(1), version='_v2')") == read("processes(gpu(1))")
    assert read("processes(gpu(1), 'Graphics')") == [[1003, 1, *no_mig]]
    assert read("processes(gpu(1), 'MPSCompute')") == [[1004, 2, *no_mig]]
    assert read("processes(gpu(0))") == []


def test_processes_are_added_changed_and_removed(machine: MockMachine, read: Reader) -> None:
    gpu = machine.gpus[0]
    for pid in range(1, 65):
        gpu.add_process(pid, sm=1)
    assert len(read("processes(gpu(0))")) == 64
    with pytest.raises(ValueError, match="at most 64"):
        gpu.add_process(65)

    gpu.add_process(64, memory=7)
    gpu.remove_process(1)
    left = read("processes(gpu(0))")
    assert [process[0] for process in left] == list(range(2, 65))
    assert left[-1][1] == 7
    assert len(read("utilizations(gpu(0))")) == 63

    gpu.clear_processes()
    assert read("processes(gpu(0))") == []


def test_too_small_buffer_gets_the_required_length(machine: MockMachine, read: Reader) -> None:
    for pid in (1, 2, 3):
        machine.gpus[0].add_process(pid)

    answer = read(
        "(lambda room: [N.nvmlLib.nvmlDeviceGetComputeRunningProcesses_v3(gpu(0), ctypes.byref(room),"
        " (N.c_nvmlProcessInfo_t * 2)()), room.value])(ctypes.c_uint(2))"
    )

    assert answer == [INSUFFICIENT_SIZE, 3]


def test_process_utilization_has_the_configured_age(machine: MockMachine, read: Reader) -> None:
    gpu = machine.gpus[0]
    gpu.add_process(1001, sm=33)
    gpu.set_process_utilization(1002, sm=44, memory=5, encoder=6, decoder=7, age=30)

    recent = read("utilizations(gpu(0), now() - 1_000_000)")
    everything = read("utilizations(gpu(0), now() - 120_000_000)")

    assert [[pid, sm] for pid, _, sm, *_ in recent] == [[1001, 33]]
    assert [[pid, *values] for pid, _, *values in everything] == [[1001, 33, 0, 0, 0], [1002, 44, 5, 6, 7]]
    assert everything[0][1] > recent[0][1] > everything[1][1]


def test_missing_newer_process_utilization_is_not_found(machine: MockMachine, read: Reader) -> None:
    assert read("utilizations(gpu(0))") == error(NOT_FOUND)

    machine.gpus[0].set_process_utilization(1001, sm=44, age=30)

    assert read("utilizations(gpu(0), now() - 1_000_000)") == error(NOT_FOUND)


# MIG


def test_mig_devices_are_found_under_their_gpu(machine: MockMachine, read: Reader) -> None:
    parts = [machine.gpus[0].add_mig(memory=10 * GIB), machine.gpus[0].add_mig(memory=20 * GIB)]
    parts[1].memory_used = 3 * GIB

    assert read("N.nvmlDeviceGetCount()") == 2
    assert read("[N.nvmlDeviceGetMigMode(gpu(i)) for i in range(2)]") == [[1, 1], [0, 0]]
    assert read("N.nvmlDeviceGetMaxMigDeviceCount(gpu(0))") == 7
    assert read("[N.nvmlDeviceGetUUID(mig(0, i)) for i in range(2)]") == [part.uuid for part in parts]
    assert parts[0].uuid.startswith("MIG-")
    assert read("mig(0, 2)") == error(NOT_FOUND)
    assert read("mig(1, 0)") == error(NOT_FOUND)
    assert read("[N.nvmlDeviceIsMigDeviceHandle(d).value for d in (gpu(0), mig(0, 0))]") == [0, 1]
    found = f"N.nvmlDeviceGetHandleByUUID(b'{parts[1].uuid}')"
    assert read(f"N.nvmlDeviceGetMemoryInfo({found}).total") == 20 * GIB
    assert read("N.nvmlDeviceGetMemoryInfo(mig(0, 1), version=N.nvmlMemory_v2).used") == 3 * GIB
    assert read(f"N.nvmlDeviceGetIndex(N.nvmlDeviceGetDeviceHandleFromMigDeviceHandle({found}))") == 0
    assert read(f"[N.nvmlDeviceGetGpuInstanceId({found}), N.nvmlDeviceGetComputeInstanceId({found})]") == [8, 0]


@pytest.mark.parametrize("query", ["N.nvmlDeviceGetUtilizationRates", "samples", "utilizations"])
def test_mig_mode_has_no_utilization(machine: MockMachine, read: Reader, query: str) -> None:
    machine.gpus[0].add_process(1001, sm=50)
    assert read(f"bool({query}(gpu(0)))") is True

    part = machine.gpus[0].add_mig()
    part.add_process(1002, sm=50)

    assert read(f"{query}(gpu(0))") == error(NOT_SUPPORTED)
    assert read(f"{query}(mig(0, 0))") == error(NOT_SUPPORTED)


def test_processes_on_a_mig_device_name_their_instance(machine: MockMachine, read: Reader) -> None:
    parts = [machine.gpus[0].add_mig(), machine.gpus[0].add_mig()]
    parts[0].add_process(1001, memory=1)
    parts[1].add_process(1002, memory=2)

    assert read("processes(mig(0, 1))") == [[1002, 2, 8, 0]]
    assert read("processes(gpu(0))") == [[1001, 1, 7, 0], [1002, 2, 8, 0]]


def test_leaving_mig_mode_removes_the_mig_devices(machine: MockMachine, read: Reader) -> None:
    part = machine.gpus[0].add_mig()
    assert read("N.nvmlDeviceGetUUID(mig(0, 0))") == part.uuid

    machine.gpus[0].mig_mode = 0

    assert read("mig(0, 0)") == error(NOT_FOUND)
    assert read(f"N.nvmlDeviceGetHandleByUUID(b'{part.uuid}')") == error(NOT_FOUND)
    assert read("N.nvmlDeviceGetUtilizationRates(gpu(0)).gpu") == 0


# GPM


def test_gpm_returns_the_configured_metrics(machine: MockMachine, read: Reader) -> None:
    machine.gpus[1].set_gpm(graphics=100, sm=98.5, tensor=0.0, dram=1.25)

    metrics = read("gpm(lambda s: N.nvmlGpmSampleGet(gpu(1), s), [1, 2, 3, 4, 5, 10, 200])")

    unsupported = [NOT_SUPPORTED, 0.0]
    assert metrics == [[0, 100.0], [0, 98.5], unsupported, unsupported, [0, 0.0], [0, 1.25], unsupported]


def test_gpm_of_a_mig_device_covers_only_that_device(machine: MockMachine, read: Reader) -> None:
    part = machine.gpus[0].add_mig()
    part.set_gpm(sm=12.5)
    machine.gpus[0].set_gpm(sm=99)

    assert read("gpm(lambda s: N.nvmlGpmMigSampleGet(gpu(0), 7, s), [2])") == [[0, 12.5]]
    assert read("gpm(lambda s: N.nvmlGpmMigSampleGet(gpu(0), 3, s), [2])") == error(INVALID_ARGUMENT)


def test_gpu_without_gpm_reports_not_supported(machine: MockMachine, read: Reader) -> None:
    machine.gpus[0].gpm_supported = 0

    supported = read("[N.nvmlGpmQueryDeviceSupport(gpu(i)).isSupportedDevice for i in range(2)]")

    assert supported == [0, 1]
    assert read("gpm(lambda s: N.nvmlGpmSampleGet(gpu(0), s), [2])") == error(NOT_SUPPORTED)


def test_gpm_metrics_of_two_different_gpus_are_refused(read: Reader) -> None:
    alternate = "gpm(lambda s, devices=[0, 1]: N.nvmlGpmSampleGet(gpu(devices.pop()), s), [2])"

    assert read(alternate) == error(INVALID_ARGUMENT)


# Faults


def test_fault_fails_one_function_on_one_gpu(machine: MockMachine, read: Reader) -> None:
    look = "N.nvmlDeviceGetMemoryInfo(gpu({}), version=N.nvmlMemory_v2).used"
    machine.fault("nvmlDeviceGetMemoryInfo_v2", code=NOT_SUPPORTED, gpu=1)

    assert read(look.format(1)) == error(NOT_SUPPORTED)
    assert read(look.format(0)) == 0
    assert read("N.nvmlDeviceGetName(gpu(1))") == machine.gpus[1].name

    machine.clear_faults()
    assert read(look.format(1)) == 0


def test_lost_gpu_fails_every_call_on_it(machine: MockMachine, read: Reader) -> None:
    machine.fault("*", code=GPU_IS_LOST, gpu=machine.gpus[1])

    assert read("gpu(1)") == error(GPU_IS_LOST)
    assert read(f"N.nvmlDeviceGetHandleByUUID(b'{machine.gpus[1].uuid}')") == error(GPU_IS_LOST)
    assert read("N.nvmlDeviceGetUtilizationRates(gpu(0)).gpu") == 0
    assert read("N.nvmlDeviceGetCount()") == 2


def test_handle_fails_once_its_gpu_is_lost(machine: MockMachine, read: Reader) -> None:
    read("globals().update(held=gpu(1))")
    machine.fault("*", code=GPU_IS_LOST, gpu=1)

    assert read("N.nvmlDeviceGetName(held)") == error(GPU_IS_LOST)


def test_fault_begins_and_ends_after_a_number_of_calls(machine: MockMachine, read: Reader) -> None:
    machine.fault("nvmlDeviceGetPowerUsage", code=999, after_calls=2, times=1)

    answers = [read("N.nvmlDeviceGetPowerUsage(gpu(0))") for _ in range(4)]

    assert answers == [70_000, 70_000, error(999), 70_000]


def test_stub_can_fail(machine: MockMachine, read: Reader) -> None:
    machine.fault("nvmlDeviceGetFanSpeed", code=13)

    assert read("N.nvmlDeviceGetFanSpeed(gpu(0))") == error(13)


def test_impossible_fault_is_refused(machine: MockMachine) -> None:
    with pytest.raises(ValueError, match="no function nvmlDeviceGetMemory"):
        machine.fault("nvmlDeviceGetMemory", code=3)
    with pytest.raises(ValueError, match="must have a code"):
        machine.fault("nvmlDeviceGetMemoryInfo")


def test_hanging_call_continues_when_the_driver_recovers(machine: MockMachine, read: Reader) -> None:
    machine.fault("nvmlDeviceGetSamples", hang=600.0)
    read.ask("len(samples(gpu(0)))")
    machine.wait_until_hanging()
    assert machine.in_flight == 1

    machine.clear_faults()

    assert read.answer() == 100
    assert machine.in_flight == 0


def test_limited_hang_returns_its_code(machine: MockMachine, read: Reader) -> None:
    machine.fault("nvmlDeviceGetName", hang=0.05, code=999, gpu=0)
    machine.fault("nvmlDeviceGetName", hang=0.05, gpu=1)

    began = time.monotonic()
    answers = [read("N.nvmlDeviceGetName(gpu(0))"), read("N.nvmlDeviceGetName(gpu(1))")]

    assert answers == [error(999), machine.gpus[1].name]
    assert time.monotonic() - began >= 0.1


def test_calls_in_flight_are_counted_across_processes(
    machine: MockMachine, read: Reader, start_reader: StartReader
) -> None:
    machine.fault("nvmlDeviceGetCount_v2", hang=600.0)
    other = start_reader(machine.environment())
    read.ask("N.nvmlDeviceGetCount()")
    # It is counted a moment after it is seen to hang.
    assert wait_for(lambda: machine.max_in_flight, named="the first call") == 1

    other("N.nvmlInit()")
    other.ask("N.nvmlDeviceGetCount()")
    wait_for(lambda: machine.max_in_flight == 2, named="the second call")

    assert machine.in_flight == 2
    machine.clear_faults()
    assert [read.answer(), other.answer()] == [2, 2]


def test_hanging_process_reacts_only_to_sigkill(machine: MockMachine, read: Reader, start_reader: StartReader) -> None:
    machine.fault("nvmlDeviceGetCount_v2", hang=600.0)
    read.ask("N.nvmlDeviceGetCount()")
    wait_for(lambda: machine.max_in_flight, named="the call that hangs")

    read.process.send_signal(signal.SIGTERM)
    pending = f"/proc/{read.process.pid}/status"
    wait_for(lambda: int(_field(Path(pending).read_text(), "ShdPnd:"), 16) & 1 << signal.SIGTERM - 1 != 0)
    assert machine.in_flight == 1

    read.process.kill()
    # Not yet waited for: a zombie does not hang.
    wait_for(lambda: machine.in_flight == 0)
    machine.reset_calls()
    other = start_reader(machine.environment())
    other("N.nvmlInit()")
    other.ask("N.nvmlDeviceGetCount()")
    assert wait_for(lambda: machine.max_in_flight, named="the other's call") == 1


# Initialising


@pytest.mark.parametrize("code", [DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH, 999])
def test_initialization_fails_as_configured(machine: MockMachine, start_reader: StartReader, code: int) -> None:
    machine.init_error = code
    read = start_reader(machine.environment())

    assert read("N.nvmlInit()") == error(code)
    assert read("N.nvmlDeviceGetCount()") == error(UNINITIALIZED)

    machine.init_error = 0
    assert read("N.nvmlInit()") is None
    assert read("N.nvmlDeviceGetCount()") == 2


def test_driver_is_not_loaded_without_a_machine(machine: MockMachine, start_reader: StartReader) -> None:
    missing = machine.environment() | {"MOCK_NVML_STATE": str(machine.path.with_name("missing"))}

    assert start_reader(missing)("N.nvmlInit()") == error(DRIVER_NOT_LOADED)


def test_state_of_another_build_is_refused(machine: MockMachine, start_reader: StartReader) -> None:
    machine._shared.fingerprint += 1

    assert start_reader(machine.environment())("N.nvmlInit()") == error(LIB_RM_VERSION_MISMATCH)
    with pytest.raises(ValueError, match="not made for this build"):
        MockMachine.attach(machine.path)


def test_calls_are_counted(machine: MockMachine, read: Reader) -> None:
    assert machine.calls("nvmlInitWithFlags") == 1
    machine.reset_calls()

    read("[N.nvmlDeviceGetCount() for _ in range(3)]")
    read("N.nvmlShutdown()")

    assert machine.calls("nvmlInitWithFlags") == 0
    assert machine.calls("nvmlDeviceGetCount_v2") == 3
    assert machine.calls("nvmlShutdown") == 1
    assert machine.calls() == 4
    assert read("N.nvmlDeviceGetCount()") == error(UNINITIALIZED)


def test_gpu_can_be_removed(machine: MockMachine, read: Reader) -> None:
    machine.device_count = 1

    assert read("N.nvmlDeviceGetCount()") == 1
    assert read("gpu(1)") == error(INVALID_ARGUMENT)


def test_machine_can_be_changed_from_another_process(machine: MockMachine, read: Reader) -> None:
    machine.gpus[0].add_mig()
    elsewhere = MockMachine.attach(machine.path)

    elsewhere.gpus[1].utilization = 55

    assert read("N.nvmlDeviceGetUtilizationRates(gpu(1)).gpu") == machine.gpus[1].utilization == 55
    assert [gpu.uuid for gpu in elsewhere.gpus] == [gpu.uuid for gpu in machine.gpus]


# Building


def test_concurrent_builds_share_one_library(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "import sys, pathlib; from tests.support.mock_nvml import build; print(build(pathlib.Path(sys.argv[1])))",
        str(tmp_path / "cache"),
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    answers = {builder.communicate()[0].strip() for builder in builders}

    assert answers == {str(build(tmp_path / "cache"))}
    built = Path(answers.pop())
    assert (built / "libnvidia-ml.so").samefile(built / "libnvidia-ml.so.1")
    assert sorted(entry.name for entry in (tmp_path / "cache").iterdir()) == sorted(["lock", built.name])


# The peers

NVITOP = """
import json
from nvitop import Device
print(json.dumps([
    [s.name, s.gpu_utilization, s.memory_used, s.power_usage, s.temperature,
     [[p.pid, p.gpu_memory(), p.gpu_sm_utilization(), p.type] for p in device.processes().values()]]
    for device in Device.all() for s in [device.as_snapshot()]
]))
"""

NVITOP_MIG = """
import json
from nvitop import Device, MigDevice
print(json.dumps([
    [d.uuid(), d.memory_total(), d.parent.index, d.gpu_instance_id(), list(d.processes())] for d in MigDevice.all()
]))
"""

GPUSTAT = """
import json
import gpustat
print(json.dumps([
    [g.uuid, g.utilization, g.memory_used, g.memory_total, g.power_draw, g.power_limit, g.temperature,
     [[p["pid"], p["gpu_memory_usage"], p["command"]] for p in g.processes]]
    for g in gpustat.new_query()
]))
"""


def run_peer(machine: MockMachine, script: str) -> Any:
    outcome = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | machine.environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert outcome.stderr == ""
    return json.loads(outcome.stdout)


@pytest.fixture
def training(machine: MockMachine, busy: int) -> int:
    """The pid of what runs on the second GPU."""
    gpu = machine.gpus[1]
    gpu.utilization, gpu.memory_used, gpu.power_mw, gpu.temperature = 91, 6 * GIB, 450_000, 66
    gpu.add_process(busy, memory=5 * GIB, sm=88)
    return busy


def test_nvitop_reads_the_machine(machine: MockMachine, training: int) -> None:
    assert run_peer(machine, NVITOP) == [
        ["NVIDIA H100 80GB HBM3", 0, 0, 70_000, 34, []],
        ["NVIDIA H100 80GB HBM3", 91, 6 * GIB, 450_000, 66, [[training, 5 * GIB, 88, "C"]]],
    ]


def test_nvitop_reads_mig_devices(machine: MockMachine, busy: int) -> None:
    part = machine.gpus[1].add_mig(memory=20 * GIB)
    part.add_process(busy)

    assert run_peer(machine, NVITOP_MIG) == [[part.uuid, 20 * GIB, 1, 7, [busy]]]


def test_gpustat_reads_the_machine(machine: MockMachine, training: int) -> None:
    total = 80 * 1024
    assert run_peer(machine, GPUSTAT) == [
        [machine.gpus[0].uuid, 0, 0, total, 70, 700, 34, []],
        [machine.gpus[1].uuid, 91, 6 * 1024, total, 450, 700, 66, [[training, 5 * 1024, "sleep"]]],
    ]
    assert machine.calls("nvmlInitWithFlags") == machine.calls("nvmlShutdown") == 1


def _field(status: str, name: str) -> str:
    return next(line.split()[1] for line in status.splitlines() if line.startswith(name))
