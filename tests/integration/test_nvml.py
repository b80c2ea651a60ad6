"""The `nvml` source on the mock driver: real nvidia-ml-py, real ctypes, real structures."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from stoker.gpus.model import NOT_SUPPORTED, DeviceHealth, Gpu, Look, Pipes, Reading, Unknown, Utilization, known
from stoker.gpus.prober import Prober
from tests.support.mock_nvml import MockMachine, Samples

GIB = 2**30
NOBODY = 2**22 + 1
"""A pid that no process has: the kernel assigns none above 2**22."""


@pytest.fixture(params=["no", "start"], ids=["private", "shared"])
def prober(nvidia: MockMachine, request: pytest.FixtureRequest) -> Iterator[Prober]:
    # Longer than the interactive deadline: the first sample starts an interpreter, which is slow on a busy machine.
    with Prober("nvml", deadline=60, sharing=request.param) as prober:
        yield prober


@pytest.fixture
def other_pid() -> Iterator[int]:
    """A real process that a mock GPU may list."""
    process = subprocess.Popen(["sleep", "300"])
    yield process.pid
    process.kill()
    process.wait()


def test_devices_are_described(nvidia: MockMachine, prober: Prober) -> None:
    first, second = prober.look().gpus
    mock = nvidia.gpus[0]
    assert first == Gpu(
        uuid=mock.uuid,
        index=0,
        name=mock.name,
        vendor="nvidia",
        minor=mock.minor,
        memory=mock.memory_total,
        bus=mock.pci_bus_id[-12:].lower(),
        links=((nvidia.gpus[1].uuid, "system"),),
    )
    assert second.index == 1
    assert mock.minor != 0


@pytest.mark.parametrize(
    ("level", "link"),
    [(None, "nvlink"), (20, "switch"), (40, "node"), (60, None)],
)
def test_links_are_read_once(nvidia: MockMachine, prober: Prober, level: int | None, link: str | None) -> None:
    if level is None:
        nvidia.link(0, 1)
    else:
        nvidia.link(0, 1, level)
    for _ in range(3):
        first, second = prober.look().gpus
        assert first.links == (() if link is None else ((second.uuid, link),))
        assert second.links == (() if link is None else ((first.uuid, link),))
    assert nvidia.calls("nvmlDeviceGetP2PStatus") == 1
    assert nvidia.calls("nvmlDeviceGetTopologyCommonAncestor") == (0 if level is None else 1)


def test_gpus_whose_links_cannot_be_read_are_listed_without(nvidia: MockMachine, prober: Prober) -> None:
    nvidia.link(0, 1)
    nvidia.fault("nvmlDeviceGetP2PStatus", code=13)
    nvidia.fault("nvmlDeviceGetTopologyCommonAncestor", code=3)
    look = prober.look()
    assert [gpu.links for gpu in look.gpus] == [(), ()]
    assert all(known(reading.utilization) for reading in look.readings)


def test_mig_slices_are_not_connected(nvidia: MockMachine, prober: Prober) -> None:
    nvidia.link(0, 1)
    nvidia.gpus[0].add_mig()
    nvidia.gpus[0].add_mig()
    assert [gpu.links for gpu in prober.look().gpus] == [(), (), ()]


def test_reading_has_the_values_of_the_driver(nvidia: MockMachine, prober: Prober, other_pid: int) -> None:
    gpu = nvidia.gpus[1]
    gpu.utilization = 37
    gpu.memory_used = 20 * GIB
    gpu.temperature = 61
    gpu.power_mw = 351_000
    gpu.add_process(other_pid, memory=8 * GIB, sm=33)
    reading = prober.look().readings[1]
    assert known(reading.utilization)
    assert reading.utilization.peak == 0.37
    assert reading.utilization.mean == pytest.approx(0.37)
    assert reading.memory_used == 20 * GIB
    assert reading.memory_total == gpu.memory_total
    assert reading.temperature == 61
    assert reading.power == 351
    assert reading.power_limit == gpu.enforced_limit_mw / 1000
    assert known(reading.processes)
    (process,) = reading.processes
    assert (process.pid, process.name, process.memory) == (other_pid, "sleep", 8 * GIB)
    assert process.utilization == pytest.approx(0.33)
    with open(f"/proc/{other_pid}/stat") as stat:  # noqa: PTH123 - a file of /proc
        assert process.started == int(stat.read().rpartition(")")[2].split()[19])


def test_reading_has_memory_activity_clock_and_throttling(nvidia: MockMachine, prober: Prober, other_pid: int) -> None:
    gpu = nvidia.gpus[1]
    gpu.utilization = 100
    gpu.memory_utilization = 31
    gpu.sm_clock = 1755
    gpu.throttling = 0x4 | 0x40 | 0x8000
    gpu.add_process(other_pid)
    gpu.set_process_utilization(other_pid, sm=97, memory=29)
    idle, busy = _readings(prober.look())
    assert known(busy.memory_activity)
    assert busy.memory_activity.peak == 0.31
    assert busy.memory_activity.mean == pytest.approx(0.31)
    assert (busy.sm_clock, busy.throttling) == (1755, ("power cap", "hardware thermal", "another reason"))
    assert known(busy.processes)
    assert busy.processes[0].memory_activity == pytest.approx(0.29)
    assert (idle.sm_clock, idle.throttling) == (345, ("idle",))


def test_memory_burst_between_two_samples_is_seen(nvidia: MockMachine, prober: Prober) -> None:
    gpu = nvidia.gpus[0]
    gpu.set_samples([])
    prober.look()
    gpu.set_samples([(0.01, 100), (0.02, 100)])
    gpu.set_memory_samples([(0.01, 0), (0.02, 44)])
    reading = prober.look().readings[0]
    assert reading.utilization == Utilization(1.0, 1.0, 2)
    assert reading.memory_activity == Utilization(0.44, 0.22, 2)


def test_empty_buffers_cost_one_call_for_both_rates(nvidia: MockMachine, prober: Prober) -> None:
    for gpu in nvidia.gpus:
        gpu.samples_mode = Samples.EMPTY
        gpu.utilization, gpu.memory_utilization = 42, 7
    reading = prober.look().readings[0]
    assert reading.utilization == Utilization(0.42, 0.42, 1)
    assert reading.memory_activity == Utilization(0.07, 0.07, 1)
    assert nvidia.calls("nvmlDeviceGetUtilizationRates") == 2  # one for each GPU


def test_driver_without_memory_samples_is_asked_for_them_once(nvidia: MockMachine, prober: Prober) -> None:
    nvidia.fault("nvmlDeviceGetSamples", code=3, after_calls=1, times=1)  # the second call of the first GPU
    nvidia.gpus[0].utilization, nvidia.gpus[0].memory_utilization = 90, 20
    for _ in range(2):
        reading = prober.look().readings[0]
        assert known(reading.utilization)
        assert reading.utilization.peak == 0.9
        assert reading.memory_activity == Utilization(0.2, 0.2, 1)


def test_xid_is_reported_by_the_gpu_it_happened_on(nvidia: MockMachine, prober: Prober) -> None:
    healthy = DeviceHealth((), 0, needs_reset=False, remapping_failed=False)
    nvidia.gpus[1].report_xid(13)  # before anybody has registered
    assert [reading.health for reading in prober.look().readings] == [healthy, healthy]
    nvidia.gpus[1].report_xid(31)
    nvidia.gpus[1].report_xid(31)
    nvidia.gpus[1].report_xid(48)
    first, second = _readings(prober.look())
    assert first.health == healthy
    assert second.health == healthy._replace(xids=(31, 31, 48))
    assert prober.look().readings[1].health == second.health


def test_storm_of_xids_is_bounded(nvidia: MockMachine, prober: Prober) -> None:
    prober.look()
    for number in range(50):
        nvidia.gpus[0].report_xid(number)
    health = prober.look().readings[0].health
    assert known(health)
    assert health.xids == tuple(range(18, 50))


def test_xid_of_a_mig_slice_stays_its_own_and_one_of_the_gpu_is_of_all(nvidia: MockMachine, prober: Prober) -> None:
    parent = nvidia.gpus[0]
    parts = [parent.add_mig(), parent.add_mig()]
    assert known(prober.look().readings[0].sm_clock)  # the board's
    parts[1].report_xid(31)
    parent.report_xid(48)
    xids = [reading.health.xids for reading in prober.look().readings if known(reading.health)]
    assert xids == [(48,), (31, 48), ()]


def test_lost_gpu_has_its_xid(nvidia: MockMachine, prober: Prober) -> None:
    prober.look()
    nvidia.gpus[0].report_xid(79)
    nvidia.fault("*", code=15, gpu=0)
    lost, other = _readings(prober.look())
    assert isinstance(lost.utilization, Unknown)
    assert known(lost.health)
    assert lost.health.xids == (79,)
    assert isinstance(lost.health.uncorrected, Unknown)
    assert known(other.health)
    assert other.health.xids == ()


def test_memory_errors_are_counted_once_a_minute_and_after_an_xid(nvidia: MockMachine, prober: Prober) -> None:
    gpu = nvidia.gpus[0]
    prober.look()
    gpu.uncorrected_errors, gpu.rows_pending, gpu.rows_failed = 3, 1, 1
    for _ in range(3):
        assert prober.look().readings[0].health == DeviceHealth((), 0, needs_reset=False, remapping_failed=False)
    assert nvidia.calls("nvmlDeviceGetTotalEccErrors") == 2  # one for each GPU
    gpu.report_xid(48)
    assert prober.look().readings[0].health == DeviceHealth((48,), 3, needs_reset=True, remapping_failed=True)


def test_board_without_row_remapping_needs_a_reset_for_its_pages(nvidia: MockMachine, prober: Prober) -> None:
    nvidia.fault("nvmlDeviceGetRemappedRows", code=3)
    nvidia.fault("nvmlDeviceGetTotalEccErrors", code=3, gpu=1)
    nvidia.gpus[0].pages_pending = 1
    why = Unknown(NOT_SUPPORTED)
    first, second = _readings(prober.look())
    assert first.health == DeviceHealth((), 0, needs_reset=True, remapping_failed=why)
    assert second.health == DeviceHealth((), why, needs_reset=False, remapping_failed=why)


def test_slow_throughput_call_is_never_made(nvidia: MockMachine, prober: Prober) -> None:
    for gpu in nvidia.gpus:
        gpu.set_traffic(nvlink_in=100, nvlink_out=200)
    first = prober.look()
    time.sleep(max(0.0, first.at + 0.15 - time.monotonic()))
    pipes = prober.look().readings[0].pipes
    assert known(pipes)
    assert pipes.nvlink == 300 * 2**20
    assert nvidia.calls("nvmlDeviceGetPcieThroughput") == 0


def test_burst_between_two_samples_is_seen_where_current_rates_miss_it(nvidia: MockMachine, prober: Prober) -> None:
    gpu = nvidia.gpus[0]
    gpu.utilization = 0
    gpu.set_samples([])
    prober.look()
    rates_before = _plain_rate()
    # The burst: three samples of work, long over when anybody looks again.
    gpu.set_samples([(0.005, 0), (0.02, 97), (0.03, 95), (0.04, 96), (0.06, 0)])
    utilization = prober.look().readings[0].utilization
    assert known(utilization)
    assert utilization.peak == 0.97
    assert utilization.samples >= 4
    assert (rates_before, _plain_rate()) == (0, 0)


def _plain_rate() -> int:
    """What a reader of utilization rates sees at this moment."""
    program = (
        "import pynvml; pynvml.nvmlInit();"
        "print(pynvml.nvmlDeviceGetUtilizationRates(pynvml.nvmlDeviceGetHandleByIndex(0)).gpu)"
    )
    return int(subprocess.check_output([sys.executable, "-c", program]))


def test_each_sample_is_counted_once(nvidia: MockMachine, prober: Prober) -> None:
    gpu = nvidia.gpus[0]
    gpu.set_samples([])
    prober.look()  # which the next one looks back to, however long the start of the helper took
    gpu.set_samples([(0.1, 80)])
    first = prober.look().readings[0].utilization
    gpu.utilization = 0
    second = prober.look().readings[0].utilization
    assert first == Utilization(0.8, 0.8, 1)
    assert second == Utilization(0.0, 0.0, 1)  # the ring has nothing new: asked the other way


def test_empty_sample_buffer_falls_back_to_the_current_rate(nvidia: MockMachine, prober: Prober) -> None:
    nvidia.gpus[0].samples_mode = Samples.EMPTY
    nvidia.gpus[0].utilization = 42
    assert prober.look().readings[0].utilization == Utilization(0.42, 0.42, 1)


def test_samples_are_read_again_after_the_clock_was_set_back(nvidia: MockMachine, prober: Prober) -> None:
    gpu = nvidia.gpus[0]
    gpu.set_samples([(-3600.0, 10)])  # a sample stamped an hour ahead, as before the clock was corrected
    prober.look()
    gpu.set_samples([(0.1, 66)])
    prober.look()
    gpu.set_samples([(0.05, 77)])
    utilization = prober.look().readings[0].utilization
    assert known(utilization)
    assert utilization.peak == 0.77


def test_power_is_the_energy_used_since_the_previous_sample(nvidia: MockMachine, prober: Prober) -> None:
    gpu = nvidia.gpus[0]
    gpu.energy_integrates = False
    gpu.energy_mj = 1_000_000
    gpu.power_mw = 999_000  # what the driver says of this instant is not what it used meanwhile
    first = prober.look()
    time.sleep(max(0.0, first.at + 0.6 - time.monotonic()))  # the energy counter needs half a second to mean something
    gpu.energy_mj = 1_000_000 + 120_000
    second = prober.look()
    reading = second.readings[0]
    assert reading.energy == 1120
    assert reading.power == pytest.approx(120 / (second.at - first.at))


def test_mig_gpu_is_listed_as_slices_with_unsupported_values_unknown(nvidia: MockMachine, prober: Prober) -> None:
    parent = nvidia.gpus[0]
    parts = [parent.add_mig(), parent.add_mig()]
    look = prober.look()
    assert [gpu.uuid for gpu in look.gpus] == [parts[0].uuid, parts[1].uuid, nvidia.gpus[1].uuid]
    assert [gpu.index for gpu in look.gpus] == [0, 1, 2]
    assert look.gpus[0].parent == parent.uuid
    assert look.gpus[0].memory == parts[0].memory_total
    assert isinstance(look.readings[0].utilization, Unknown)
    assert known(look.readings[0].memory_used)
    assert known(look.readings[2].utilization)


def test_utilization_of_a_mig_slice_comes_from_gpm(nvidia: MockMachine, prober: Prober) -> None:
    parent = nvidia.gpus[0]
    part = parent.add_mig()
    parent.gpm_supported = part.gpm_supported = 1
    for device in (parent, part):
        device.set_gpm(graphics=64, sm=50, tensor=25, dram=12)
        device.set_traffic(pcie_out=3, pcie_in=1)
    first = prober.look()
    assert isinstance(first.readings[0].utilization, Unknown)  # GPM needs two looks
    time.sleep(max(0.0, first.at + 0.15 - time.monotonic()))  # and a tenth of a second between them
    reading = prober.look().readings[0]
    assert reading.utilization == Utilization(0.64, 0.64, 0)
    assert reading.pipes == Pipes(0.64, 0.5, 0.25, 0.12, pcie=4 * 2**20, nvlink=Unknown(NOT_SUPPORTED))


def test_nvml_is_initialized_once_for_all_samples(nvidia: MockMachine, prober: Prober) -> None:
    for _ in range(5):
        prober.look()
    assert nvidia.calls("nvmlInitWithFlags") == 1
    assert nvidia.calls("nvmlDeviceGetUUID") == 2


def test_unsupported_value_is_queried_once(nvidia: MockMachine, prober: Prober) -> None:
    nvidia.fault("nvmlDeviceGetTotalEnergyConsumption", code=3)
    for _ in range(4):
        assert isinstance(prober.look().readings[0].energy, Unknown)
    assert nvidia.calls("nvmlDeviceGetTotalEnergyConsumption") == 2  # one for each GPU


def test_older_driver_without_newer_calls_is_read(nvidia: MockMachine, prober: Prober, other_pid: int) -> None:
    for function in (
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetSamples",
        "nvmlDeviceGetTotalEnergyConsumption",
        "nvmlDeviceGetProcessUtilization",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlEventSetCreate",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetRetiredPagesPendingStatus",
    ):
        nvidia.fault(function, code=13)
    gpu = nvidia.gpus[0]
    gpu.utilization = 12
    gpu.memory_used = GIB
    gpu.add_process(other_pid, memory=GIB)
    reading = prober.look().readings[0]
    assert reading.utilization == Utilization(0.12, 0.12, 1)
    assert reading.memory_used == GIB + gpu.memory_reserved  # the older call counts what the driver reserves
    assert known(reading.power)
    assert known(reading.processes)
    assert isinstance(reading.processes[0].utilization, Unknown)
    assert reading.memory_activity == Utilization(0.0, 0.0, 1)
    assert isinstance(reading.throttling, Unknown)
    assert known(reading.health)
    assert isinstance(reading.health.needs_reset, Unknown)


def test_compute_and_graphics_processes_form_one_list(nvidia: MockMachine, prober: Prober, other_pid: int) -> None:
    gpu = nvidia.gpus[0]
    gpu.add_process(other_pid, memory=GIB, kind="compute")
    gpu.add_process(other_pid, memory=2 * GIB, kind="graphics")
    gpu.add_process(os.getpid(), memory=None, kind="graphics")
    processes = prober.look().readings[0].processes
    assert known(processes)
    assert [(p.pid, known(p.memory)) for p in processes] == [(other_pid, True), (os.getpid(), False)]
    assert processes[0].memory == 2 * GIB


def test_process_list_longer_than_the_buffer_is_read(nvidia: MockMachine, prober: Prober) -> None:
    nvidia.fault("nvmlDeviceGetComputeRunningProcesses_v3", code=7, times=2)
    nvidia.gpus[0].add_process(os.getpid())
    processes = prober.look().readings[0].processes
    assert known(processes)
    assert [p.pid for p in processes] == [os.getpid()]


def test_ended_process_is_listed_without_a_name(nvidia: MockMachine, prober: Prober) -> None:
    nvidia.gpus[0].add_process(NOBODY)
    processes = prober.look().readings[0].processes
    assert known(processes)
    assert isinstance(processes[0].name, Unknown)


def test_invalid_utilization_of_one_process_affects_no_other(
    nvidia: MockMachine, prober: Prober, other_pid: int
) -> None:
    gpu = nvidia.gpus[0]
    gpu.add_process(other_pid, sm=40)
    gpu.add_process(os.getpid(), sm=4_000_000)
    processes = prober.look().readings[0].processes
    assert known(processes)
    by_pid = {p.pid: p.utilization for p in processes}
    assert by_pid[other_pid] == pytest.approx(0.4)
    assert isinstance(by_pid[os.getpid()], Unknown)


def test_recovered_gpu_starts_with_empty_history(nvidia: MockMachine, prober: Prober) -> None:
    prober.look()
    nvidia.fault("*", code=16, gpu=0)
    lost, other = _readings(prober.look())
    assert isinstance(lost.utilization, Unknown)
    assert known(other.utilization)
    nvidia.clear_faults()
    back, _ = _readings(prober.look())
    assert known(back.utilization)


def test_gpu_lost_at_startup_is_read_after_its_reset(nvidia: MockMachine) -> None:
    nvidia.fault("nvmlDeviceGetHandleByIndex_v2", code=15, gpu=1)
    program = """
import sys
from pathlib import Path
from stoker.gpus.nvml.source import NvmlSource
clock = [100.0]
source = NvmlSource(Path("/"), lambda: clock[0])
for later in (1, 20, 20):
    look = source.look()
    print([type(reading.utilization).__name__ for reading in look.readings], flush=True)
    sys.stdin.readline()
    clock[0] += later
"""
    reader = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert reader.stdin is not None
    assert reader.stdout is not None
    assert reader.stdout.readline() == "['Utilization', 'Unknown']\n"
    reader.stdin.write("\n")
    reader.stdin.flush()
    assert reader.stdout.readline() == "['Utilization', 'Unknown']\n"
    nvidia.clear_faults()
    out, _ = reader.communicate("\n\n")
    assert out == "['Utilization', 'Utilization']\n"


def _readings(look: Look) -> tuple[Reading, Reading]:
    first, second = look.readings
    return first, second
