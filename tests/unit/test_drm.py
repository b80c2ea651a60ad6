"""The drm source on machines made of plain files: GPUs and driver values."""

import errno
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.gpus.drm import open_source
from stoker.gpus.model import NOT_REPORTED, NOT_SUPPORTED, Look, Utilization, known
from stoker.gpus.source import AbsentError
from tests.support.deep import examples
from tests.support.fake_drm import (
    Clock,
    FakeCard,
    FakeMachine,
    Refusals,
    first_reading,
    next_reading,
    peak,
    reason,
    source_of,
    watching_opens,
)

GIB = 2**30
SECOND = 10**9


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Refusals:
    return Refusals(monkeypatch)


# Discovery


def test_machine_without_drm_in_sysfs_reports_no_driver(tmp_path: Path) -> None:
    with pytest.raises(AbsentError, match="no graphics driver is loaded"):
        open_source(tmp_path)


def test_card_of_another_vendor_is_not_a_gpu_of_this_source(machine: FakeMachine) -> None:
    FakeCard(machine, 0, "0000:01:00.0", "0x10de", "0x2684")
    with pytest.raises(AbsentError, match="no AMD or Intel GPU"):
        open_source(machine.root)


def test_unreadable_sysfs_is_absence_with_its_reason(machine: FakeMachine, refusals: Refusals) -> None:
    machine.amd()
    refusals.refuse(machine.root / "sys/class/drm", errno.EACCES)
    with pytest.raises(AbsentError, match="cannot be read: permission denied"):
        open_source(machine.root)


def test_source_is_opened_by_its_public_name(machine: FakeMachine) -> None:
    machine.amd(gpu_busy_percent=42)
    source = open_source(machine.root)
    look = source.look()
    source.close()
    assert (source.name, look.source, look.problem) == ("drm", "drm", None)
    assert look.readings[0].utilization == Utilization(0.42, 0.42, 1)


def test_gpus_are_numbered_by_pci_address_and_keep_their_card_number(machine: FakeMachine, clock: Clock) -> None:
    machine.amd(0, "10000:01:00.0")  # A domain of five digits sorts after all of four.
    machine.amd(2, "2000:0a:00.0")
    machine.intel(10, "0000:00:02.0")
    gpus = source_of(machine, clock).look().gpus
    assert [(gpu.index, gpu.bus, gpu.minor, gpu.vendor) for gpu in gpus] == [
        (0, "0000:00:02.0", 10, "intel"),
        (1, "2000:0a:00.0", 2, "amd"),
        (2, "10000:01:00.0", 0, "amd"),
    ]


def test_readings_are_in_the_order_of_the_gpus(machine: FakeMachine, clock: Clock) -> None:
    machine.amd(0, "0000:0b:00.0", gpu_busy_percent=11)
    machine.amd(1, "0000:0a:00.0", gpu_busy_percent=22)
    look = source_of(machine, clock).look()
    assert [gpu.uuid for gpu in look.gpus] == [reading.uuid for reading in look.readings]
    assert [peak(reading) for reading in look.readings] == [0.22, 0.11]


def test_connectors_and_render_nodes_are_not_gpus(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd(0)
    for name in ("card0-DP-1", "card0-HDMI-A-1", "renderD128", "version", "cardboard"):
        entry = machine.root / "sys/class/drm" / name
        entry.mkdir()
        (entry / "device").symlink_to(card.device)
    assert len(source_of(machine, clock).look().gpus) == 1


def test_pci_address_comes_from_uevent_when_the_device_is_not_a_link(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd(0, "0000:03:00.0")
    (card.entry / "device").unlink()
    card.device.rename(card.entry / "device")
    gpu = source_of(machine, clock).look().gpus[0]
    assert (gpu.bus, gpu.uuid) == ("0000:03:00.0", "PCI-0000:03:00.0")


def test_gpu_with_a_unique_id_is_identified_as_in_rocm(machine: FakeMachine, clock: Clock) -> None:
    machine.amd(0, unique_id="8d4f3ab1c0ffee00")
    assert source_of(machine, clock).look().gpus[0].uuid == "GPU-8d4f3ab1c0ffee00"


@pytest.mark.parametrize("number", ["", "0000000000000000", "not a number", "../../etc"])
def test_gpu_without_a_valid_unique_id_is_identified_by_pci_slot(
    machine: FakeMachine, clock: Clock, number: str
) -> None:
    machine.amd(0, "0000:03:00.0", unique_id=number)
    assert source_of(machine, clock).look().gpus[0].uuid == "PCI-0000:03:00.0"


def test_two_gpus_with_the_same_unique_id_stay_distinct(machine: FakeMachine, clock: Clock) -> None:
    machine.amd(0, "0000:03:00.0", unique_id="aa")
    machine.amd(1, "0000:04:00.0", unique_id="aa")
    uuids = [gpu.uuid for gpu in source_of(machine, clock).look().gpus]
    assert uuids == ["PCI-0000:03:00.0", "PCI-0000:04:00.0"]


def test_name_is_the_product_or_the_pci_ids(machine: FakeMachine, clock: Clock) -> None:
    machine.amd(0, "0000:03:00.0", product_name="Radeon Pro W7900")
    machine.amd(1, "0000:04:00.0", product_name="")
    machine.intel(2, "0000:05:00.0")
    names = [gpu.name for gpu in source_of(machine, clock).look().gpus]
    assert names == ["Radeon Pro W7900", "AMD GPU 1002:744c", "Intel GPU 8086:56a0"]


# Time


def test_first_look_has_no_span_and_the_next_spans_the_time_between(machine: FakeMachine, clock: Clock) -> None:
    machine.amd()
    source = source_of(machine, clock)
    first = source.look()
    clock.advance(2.5)
    second = source.look()
    assert (first.at, first.readings[0].span) == (1000.0, 0.0)
    assert (second.at, second.readings[0].span) == (1002.5, 2.5)


# AMD: driver values


def test_amd_values_are_read_in_driver_units(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd(gpu_busy_percent=37, mem_info_vram_used=5 * GIB, mem_info_vram_total=24 * GIB)
    card.write("hwmon/hwmon4/power1_average", 215_500_000)
    card.write("hwmon/hwmon4/power1_cap", 339_000_000)
    card.write("hwmon/hwmon4/temp1_input", 61_250)
    card.write("hwmon/hwmon4/freq1_input", 2_105_000_000)
    card.write("mem_busy_percent", 12)
    look = source_of(machine, clock).look()
    reading = look.readings[0]
    assert reading.utilization == Utilization(0.37, 0.37, 1)
    assert (reading.memory_used, reading.memory_total, look.gpus[0].memory) == (5 * GIB, 24 * GIB, 24 * GIB)
    assert (reading.power, reading.power_limit, reading.temperature) == (215.5, 339.0, 61.25)
    assert (reading.memory_activity, reading.sm_clock) == (Utilization(0.12, 0.12, 1), 2105.0)
    assert reason(reading.energy) == NOT_SUPPORTED
    assert reason(reading.pipes) == NOT_SUPPORTED
    assert reason(reading.health) == NOT_REPORTED.reason


def test_unused_gpu_reads_zero_not_unknown(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd(gpu_busy_percent=0, mem_info_vram_used=0)
    card.write("hwmon/hwmon0/power1_average", 0)
    card.write("hwmon/hwmon0/temp1_input", 0)
    reading = first_reading(machine, clock)
    assert reading.utilization == Utilization(0.0, 0.0, 1)
    assert (reading.memory_used, reading.power, reading.temperature) == (0, 0.0, 0.0)
    assert reading.processes == ()


@pytest.mark.parametrize("error", [errno.EBUSY, errno.EPERM, errno.EACCES, errno.EIO, errno.EOPNOTSUPP])
def test_value_refused_by_the_driver_is_unknown_with_its_reason(
    machine: FakeMachine, clock: Clock, refusals: Refusals, error: int
) -> None:
    card = machine.amd(gpu_busy_percent=37)
    # The source resolves no link in the path it opens.
    refusals.refuse(card.entry / "device/gpu_busy_percent", error)
    reading = first_reading(machine, clock)
    assert reason(reading.utilization) == f"gpu_busy_percent cannot be read: {os.strerror(error).lower()}"
    assert reading.memory_used == GIB


@pytest.mark.parametrize("said", ["", "\n\n", "busy", "3 7", "0x25", "1_0", "٣", "nan", "9" * 5000])
def test_non_numeric_value_is_unknown_not_idle(machine: FakeMachine, clock: Clock, said: str) -> None:
    machine.amd(gpu_busy_percent=said)
    assert "gpu_busy_percent" in reason(first_reading(machine, clock).utilization)


@pytest.mark.parametrize("percent", [-1, 101, 655, 65535])
def test_impossible_percentage_is_unknown(machine: FakeMachine, clock: Clock, percent: int) -> None:
    machine.amd(gpu_busy_percent=percent)
    assert "impossible" in reason(first_reading(machine, clock).utilization)


def test_impossible_values_are_unknown(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd(mem_info_vram_used=40 * GIB, mem_info_vram_total=24 * GIB)
    card.write("hwmon/hwmon0/power1_average", (2**32 - 1) * 1000)
    card.write("hwmon/hwmon0/power1_cap", -1)
    card.write("hwmon/hwmon0/temp1_input", 511_000)
    card.write("hwmon/hwmon0/energy1_input", -5)
    reading = first_reading(machine, clock)
    assert "more than the GPU has" in reason(reading.memory_used)
    for value in (reading.power, reading.power_limit, reading.temperature, reading.energy):
        assert "impossible" in reason(value)


def test_missing_driver_files_leave_only_their_fields_unknown(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd(gpu_busy_percent=5)
    card.remove("mem_info_vram_used")
    card.remove("mem_info_vram_total")
    reading = first_reading(machine, clock)
    assert peak(reading) == 0.05
    assert reason(reading.memory_used) == reason(reading.memory_total) == NOT_SUPPORTED
    assert reason(reading.power) == reason(reading.temperature) == NOT_SUPPORTED


@pytest.mark.parametrize("total", [0, -1, 2**63])
def test_impossible_memory_size_is_unknown(machine: FakeMachine, clock: Clock, total: int) -> None:
    machine.amd(mem_info_vram_total=total)
    look = source_of(machine, clock).look()
    assert "impossible" in reason(look.readings[0].memory_total)
    assert "impossible" in reason(look.gpus[0].memory)


def test_failing_sensor_is_distinguished_from_a_missing_one(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd()
    card.write("hwmon/hwmon0/power1_average", "n/a")
    assert reason(first_reading(machine, clock).power) == "power1_average contains 'n/a', which is not a number"


def test_power_falls_back_to_the_instantaneous_value(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd()
    card.write("hwmon/hwmon0/power1_average", "n/a")
    card.write("hwmon/hwmon0/power1_input", 40_000_000)
    assert first_reading(machine, clock).power == 40.0


def test_sensor_of_the_whole_card_takes_precedence(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd()
    card.write("hwmon/hwmon10/power1_input", 10_000_000)
    card.write("hwmon/hwmon9/power1_input", 90_000_000)
    card.write("hwmon/hwmon/power1_input", 1)
    assert first_reading(machine, clock).power == 90.0


# AMD: bursts between looks


def test_burst_between_looks_is_seen_in_the_engine_counters(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd(gpu_busy_percent=0)
    machine.client(50, card, 7, driver="amdgpu", engine_gfx="0 ns")
    source = source_of(machine, clock)
    source.look()
    clock.advance(10)
    machine.client(50, card, 7, driver="amdgpu", engine_gfx=f"{6 * SECOND} ns")
    assert peak(source.look().readings[0]) == pytest.approx(0.6)


def test_driver_utilization_is_kept_when_counters_are_lower(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd(gpu_busy_percent=75)
    machine.client(50, card, 7, driver="amdgpu", engine_gfx="0 ns")
    source = source_of(machine, clock)
    source.look()
    clock.advance(10)
    machine.client(50, card, 7, driver="amdgpu", engine_gfx=f"{2 * SECOND} ns")
    assert source.look().readings[0].utilization == Utilization(0.75, 0.75, 1)


def test_counters_alone_report_only_certain_activity(machine: FakeMachine, clock: Clock, refusals: Refusals) -> None:
    """The counters do not include ROCm's work, so a low count is inconclusive."""
    card = machine.amd()
    refusals.refuse(card.entry / "device/gpu_busy_percent", errno.EBUSY)
    machine.client(50, card, 7, driver="amdgpu", engine_gfx="0 ns")
    source = source_of(machine, clock)
    source.look()
    clock.advance(10)
    machine.client(50, card, 7, driver="amdgpu", engine_gfx=f"{9 * SECOND} ns")
    assert peak(source.look().readings[0]) == pytest.approx(0.9)
    clock.advance(10)
    machine.client(50, card, 7, driver="amdgpu", engine_gfx=f"{10 * SECOND} ns")
    assert "gpu_busy_percent cannot be read" in reason(source.look().readings[0].utilization)


# Intel: driver values


def test_intel_memory_of_the_whole_gpu_is_unknown(machine: FakeMachine, clock: Clock) -> None:
    machine.intel()
    look = source_of(machine, clock).look()
    reading = look.readings[0]
    for value in (reading.memory_used, reading.memory_total, look.gpus[0].memory):
        assert reason(value) == "not reported by the i915/xe driver"


def test_intel_power_is_the_mean_from_the_energy_counter(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    card.write("hwmon/hwmon2/energy1_input", 1_000_000_000)
    card.write("hwmon/hwmon2/power1_max", 190_000_000)
    card.write("hwmon/hwmon2/temp2_input", 48_000)
    source = source_of(machine, clock)
    first = source.look().readings[0]
    assert (reason(first.power), first.energy) == ("needs two looks", 1000.0)
    assert (first.power_limit, first.temperature) == (190.0, 48.0)
    card.write("hwmon/hwmon2/energy1_input", 2_200_000_000)
    second = next_reading(source, clock)
    assert (second.power, second.energy) == (120.0, 2200.0)


def test_reset_energy_counter_gives_no_power_for_one_look(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    card.write("hwmon/hwmon2/energy1_input", 9_000_000_000)
    source = source_of(machine, clock)
    source.look()
    card.write("hwmon/hwmon2/energy1_input", 1_000_000)
    assert reason(next_reading(source, clock).power) == "the energy counter went backwards"
    card.write("hwmon/hwmon2/energy1_input", 501_000_000)
    assert next_reading(source, clock).power == 50.0


def test_mean_power_takes_precedence_over_the_instantaneous_value(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    card.write("hwmon/hwmon2/energy1_input", 0)
    card.write("hwmon/hwmon2/power1_input", 5_000_000)
    source = source_of(machine, clock)
    assert source.look().readings[0].power == 5.0
    card.write("hwmon/hwmon2/energy1_input", 800_000_000)
    assert next_reading(source, clock).power == 80.0


def test_jump_of_the_energy_counter_is_unknown(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    card.write("hwmon/hwmon2/energy1_input", 0)
    source = source_of(machine, clock)
    source.look()
    card.write("hwmon/hwmon2/energy1_input", 10**15)
    assert "impossible" in reason(next_reading(source, clock).power)


# Sleep


def test_sleeping_gpu_is_idle_and_is_not_woken(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd(gpu_busy_percent=37, mem_info_vram_used=0)
    card.write("hwmon/hwmon0/power1_average", 5_000_000)
    card.write("hwmon/hwmon0/power1_cap", 5_000_000)
    card.write("hwmon/hwmon0/temp1_input", 30_000)
    card.write("hwmon/hwmon0/energy1_input", 30_000)
    info = machine.client(50, card, 7, driver="amdgpu", engine_gfx="0 ns")
    source = source_of(machine, clock)
    card.write("power/runtime_status", "suspended")
    wakers = [card.device / "gpu_busy_percent", info, *(card.device / "hwmon/hwmon0").iterdir()]
    with watching_opens(*wakers) as opened:
        reading = source.look().readings[0]
        assert opened.names() == set()
        card.write("power/runtime_status", "active")
        source.look()
        assert len(opened.names()) == len(wakers), "the watch itself does not work"
    assert reading.utilization == Utilization(0.0, 0.0, 1)
    assert reading.processes == ()
    assert (reading.memory_used, reading.memory_total) == (0, 16 * GIB)
    for value in (reading.power, reading.power_limit, reading.energy, reading.temperature):
        assert reason(value) == "the GPU is asleep"


def test_processes_are_not_scanned_while_all_gpus_sleep(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd()
    source = source_of(machine, clock)
    card.write("power/runtime_status", "suspended")
    with watching_opens(machine.root / "proc") as opened:
        source.look()
        assert opened.names() == set()


def test_sleeping_gpu_does_not_hide_the_work_of_another(machine: FakeMachine, clock: Clock) -> None:
    sleeper, worker = machine.amd(0, "0000:03:00.0"), machine.intel(1, "0000:04:00.0")
    sleeper.write("power/runtime_status", "suspended")
    asleep = machine.client(50, sleeper, 1, 3, driver="amdgpu", engine_gfx="0 ns")
    machine.client(50, worker, 1, 4, engine_render="0 ns")
    source = source_of(machine, clock)
    source.look()
    machine.client(50, worker, 1, 4, engine_render=f"{4 * SECOND} ns")
    clock.advance(10)
    with watching_opens(asleep) as opened:
        first, second = source.look().readings
        assert opened.names() == set()
    assert (peak(first), first.processes) == (0.0, ())
    assert peak(second) == pytest.approx(0.4)


def test_work_just_before_sleep_is_seen_after_waking(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    machine.client(50, card, 7, engine_render="0 ns")
    source = source_of(machine, clock)
    source.look()
    card.write("power/runtime_status", "suspended")
    machine.client(50, card, 7, engine_render=f"{3 * SECOND} ns")
    assert peak(next_reading(source, clock)) == 0.0
    card.write("power/runtime_status", "active")
    assert peak(next_reading(source, clock)) == pytest.approx(0.3)


def test_old_work_of_a_client_first_seen_at_waking_is_not_new_work(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    machine.client(50, card, 7, engine_render=f"{9 * SECOND} ns")
    card.write("power/runtime_status", "suspended")
    source = source_of(machine, clock)
    source.look()
    card.write("power/runtime_status", "active")
    assert reason(next_reading(source, clock).utilization) == "needs two looks"
    assert peak(next_reading(source, clock)) == 0.0


def test_power_after_sleep_is_not_averaged_over_the_sleep(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    card.write("hwmon/hwmon0/energy1_input", 0)
    source = source_of(machine, clock)
    source.look()
    card.write("power/runtime_status", "suspended")
    next_reading(source, clock, seconds=36_000)
    card.write("power/runtime_status", "active")
    card.write("hwmon/hwmon0/energy1_input", 100_000_000)
    assert reason(next_reading(source, clock).power) == "needs two looks"


# Hotplug


def test_unplugged_card_is_unknown_and_the_others_are_read(machine: FakeMachine, clock: Clock) -> None:
    lost = machine.amd(0, "0000:03:00.0", unique_id="aa")
    machine.amd(1, "0000:04:00.0", gpu_busy_percent=12)
    source = source_of(machine, clock)
    source.look()
    lost.unplug()
    clock.advance(5)
    look = source.look()
    first, second = look.readings
    assert [gpu.uuid for gpu in look.gpus] == ["GPU-aa", "PCI-0000:04:00.0"]
    assert (first.uuid, first.span) == ("GPU-aa", 5.0)
    for value in (first.utilization, first.memory_used, first.power, first.processes):
        assert reason(value) == "the GPU is no longer there"
    assert peak(second) == 0.12


def test_another_gpu_under_the_same_card_number_is_not_the_old_one(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd(0, "0000:03:00.0")
    source = source_of(machine, clock)
    card.unplug()
    machine.amd(0, "0000:05:00.0", gpu_busy_percent=50)
    assert reason(source.look().readings[0].utilization) == "the GPU is no longer there"


def test_returned_card_starts_with_new_counters(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    machine.client(50, card, 7, engine_render="0 ns")
    source = source_of(machine, clock)
    source.look()
    card.unplug()
    next_reading(source, clock)
    card = machine.intel()
    machine.client(50, card, 7, engine_render=f"{5 * SECOND} ns")
    assert reason(next_reading(source, clock).utilization) == "needs two looks"
    machine.client(50, card, 7, engine_render=f"{6 * SECOND} ns")
    assert peak(next_reading(source, clock)) == pytest.approx(0.1)


# Any file content

NO_FIXTURE_RESET = settings(
    max_examples=examples(40),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def believable(look: Look) -> bool:
    for reading in look.readings:
        if isinstance(reading.utilization, Utilization) and not 0 <= reading.utilization.peak <= 1:
            return False
        for process in reading.processes if known(reading.processes) else ():
            if known(process.utilization) and not 0 <= process.utilization <= 1:
                return False
    return True


@NO_FIXTURE_RESET
@given(data=st.data())
def test_look_survives_any_file_content(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    machine, clock = FakeMachine(tmp_path_factory.mktemp("machine")), Clock()
    amd, intel = machine.amd(0, "0000:03:00.0"), machine.intel(1, "0000:04:00.0")
    for card in (amd, intel):
        card.write("hwmon/hwmon0/power1_average", 1)
        card.write("hwmon/hwmon0/energy1_input", 1)
        card.write("hwmon/hwmon0/temp1_input", 1)
        machine.client(50 + card.number, card, 7, engine_render="5 ns", memory_vram="1 KiB")
    source = source_of(machine, clock)
    files = sorted(
        path
        for directory in (machine.root / "sys/devices", machine.root / "proc")
        for path in directory.rglob("*")
        if path.is_file()
    )
    content = st.binary(max_size=60) | st.integers().map(lambda number: str(number).encode())
    for _ in range(3):
        for path in data.draw(st.lists(st.sampled_from(files), max_size=4)):
            path.write_bytes(data.draw(content))
        clock.advance(data.draw(st.sampled_from([0.0, 0.001, 1.0, 1e6])))
        assert believable(source.look())
    source.close()
