"""The drm source on machines made of plain files: per-process usage."""

import errno
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.gpus.fdinfo import SURELY_BUSY, Client, EngineCounter, EngineCounters, EngineUse, busiest, parse
from stoker.gpus.model import Unknown, Utilization, known
from tests.support.fake_drm import (
    Clock,
    FakeMachine,
    Refusals,
    close_to,
    fdinfo,
    first_reading,
    next_reading,
    peak,
    processes,
    reason,
    source_of,
    watching_opens,
)

SECOND = 10**9
OTHER_USERS = "processes of other users cannot be seen without root"


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> Refusals:
    return Refusals(monkeypatch)


# Intel: engine time


def test_intel_needs_two_looks(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    machine.client(50, card, 7, engine_render=f"{5 * SECOND} ns")
    source = source_of(machine, clock)
    reading = source.look().readings[0]
    assert reason(reading.utilization) == "needs two looks"
    assert reason(processes(reading)[50].utilization) == "needs two looks"
    machine.client(50, card, 7, engine_render=f"{9 * SECOND} ns")
    assert peak(next_reading(source, clock)) == pytest.approx(0.4)


def test_intel_gpu_without_clients_is_idle_once_there_are_two_looks(machine: FakeMachine, clock: Clock) -> None:
    machine.intel()
    machine.on_the_host()
    source = source_of(machine, clock)
    assert reason(source.look().readings[0].utilization) == "needs two looks"
    reading = next_reading(source, clock)
    assert reading.utilization == Utilization(0.0, 0.0, 0)
    assert reading.processes == ()


def test_two_looks_at_the_same_instant_are_unknown(machine: FakeMachine, clock: Clock) -> None:
    machine.intel()
    source = source_of(machine, clock)
    source.look()
    assert reason(source.look().readings[0].utilization) == "needs two looks"


def test_utilization_is_that_of_the_busiest_engine_class(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    machine.client(50, card, 7, engine_render="0 ns", engine_copy="0 ns")
    machine.client(51, card, 8, engine_render="0 ns", engine_copy="0 ns")
    source = source_of(machine, clock)
    source.look()
    machine.client(50, card, 7, engine_render=f"{2 * SECOND} ns", engine_copy=f"{4 * SECOND} ns")
    machine.client(51, card, 8, engine_render=f"{3 * SECOND} ns", engine_copy="0 ns")
    reading = next_reading(source, clock)
    assert peak(reading) == pytest.approx(0.5)
    assert close_to(processes(reading)[50].utilization, 0.4)
    assert close_to(processes(reading)[51].utilization, 0.3)


def test_class_of_several_engines_is_full_only_when_all_are_busy(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    machine.client(50, card, 7, engine_video="0 ns", engine_capacity_video=2)
    source = source_of(machine, clock)
    source.look()
    machine.client(50, card, 7, engine_video=f"{10 * SECOND} ns", engine_capacity_video=2)
    assert peak(next_reading(source, clock)) == pytest.approx(0.5)


def test_xe_engines_are_counted_in_gpu_cycles(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    machine.client(50, card, 7, driver="xe", cycles_rcs=100, total_cycles_rcs=1_000)
    source = source_of(machine, clock)
    source.look()
    machine.client(50, card, 7, driver="xe", cycles_rcs=350, total_cycles_rcs=2_000)
    assert peak(next_reading(source, clock)) == pytest.approx(0.25)


def test_xe_cycles_of_a_class_of_several_engines_are_shared_among_them(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    machine.client(50, card, 7, cycles_ccs=100, total_cycles_ccs=1_000, engine_capacity_ccs=4)
    source = source_of(machine, clock)
    source.look()
    machine.client(50, card, 7, cycles_ccs=2_100, total_cycles_ccs=2_000, engine_capacity_ccs=4)
    assert peak(next_reading(source, clock)) == pytest.approx(0.5)


def test_new_xe_client_is_measured_by_the_clock_of_other_clients(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    machine.client(50, card, 7, cycles_rcs=0, total_cycles_rcs=1_000)
    source = source_of(machine, clock)
    source.look()
    machine.client(50, card, 7, cycles_rcs=0, total_cycles_rcs=2_000)
    machine.client(51, card, 8, cycles_rcs=600, total_cycles_rcs=2_000)
    assert peak(next_reading(source, clock)) == pytest.approx(0.6)


def test_new_xe_client_alone_is_not_idle_but_unknown(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    source = source_of(machine, clock)
    source.look()
    machine.client(51, card, 8, cycles_rcs=600, total_cycles_rcs=2_000)
    assert reason(next_reading(source, clock).utilization) == "needs two looks"


def test_reset_clock_leaves_one_look_unknown(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    machine.client(50, card, 7, cycles_rcs=500, total_cycles_rcs=9_000)
    source = source_of(machine, clock)
    source.look()
    machine.client(50, card, 7, cycles_rcs=500, total_cycles_rcs=100)
    assert "clock did not advance" in reason(next_reading(source, clock).utilization)
    machine.client(50, card, 7, cycles_rcs=900, total_cycles_rcs=1_100)
    assert peak(next_reading(source, clock)) == pytest.approx(0.4)


def test_new_client_counts_from_its_start(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    source = source_of(machine, clock)
    source.look()
    machine.client(50, card, 7, engine_render=f"{7 * SECOND} ns")
    assert peak(next_reading(source, clock)) == pytest.approx(0.7)


def test_vanished_client_does_not_reduce_the_others(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    machine.client(50, card, 7, engine_render=f"{100 * SECOND} ns")
    machine.client(51, card, 8, engine_render="0 ns")
    source = source_of(machine, clock)
    source.look()
    machine.end(50)
    machine.client(51, card, 8, engine_render=f"{3 * SECOND} ns")
    reading = next_reading(source, clock)
    assert peak(reading) == pytest.approx(0.3)
    assert list(processes(reading)) == [51]


def test_decreasing_counter_continues_from_its_maximum(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    source = source_of(machine, clock)
    shares = []
    for seconds in (20, 24, 21, 23, 27):
        machine.client(50, card, 7, engine_render=f"{seconds * SECOND} ns")
        clock.advance(10)
        reading = source.look().readings[0]
        shares.append(round(peak(reading), 3) if known(reading.utilization) else None)
    assert shares == [None, 0.4, 0.0, 0.0, 0.3]


def test_utilization_above_100_percent_is_capped(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    machine.client(50, card, 7, engine_render="0 ns")
    source = source_of(machine, clock)
    source.look()
    machine.client(50, card, 7, engine_render=f"{int(10.4 * SECOND)} ns")
    assert peak(next_reading(source, clock)) == 1.0


def test_count_beyond_all_engines_is_unknown(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    machine.client(50, card, 7, engine_render="0 ns")
    source = source_of(machine, clock)
    source.look()
    machine.client(50, card, 7, engine_render="18446744073709551615 ns")
    assert "more engine time than there can have been" in reason(next_reading(source, clock).utilization)


@pytest.mark.parametrize(
    "keys",
    [
        {},  # i915 where the firmware schedules, or an old kernel.
        {"engine_render": "lots"},
        {"engine_render": "5 fortnights"},
        {"engine_render": "0 ns", "engine_copy": "-3 ns"},
        {"cycles_rcs": "5"},  # Without the clock beside it.
    ],
)
def test_gpu_with_an_uncounted_client_is_not_idle(machine: FakeMachine, clock: Clock, keys: dict[str, object]) -> None:
    card = machine.intel()
    machine.client(50, card, 7, **keys)
    source = source_of(machine, clock)
    source.look()
    reading = next_reading(source, clock)
    assert reason(reading.utilization) == "the driver does not count engine time per process"
    assert not known(processes(reading)[50].utilization)


def test_new_client_with_a_truncated_file_is_not_idle(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    source = source_of(machine, clock)
    source.look()
    info = machine.client(50, card, 7, engine_copy="0 ns", engine_render=f"{9 * SECOND} ns")
    info.write_text(info.read_text()[:-6])
    assert not known(next_reading(source, clock).utilization)


def test_truncated_file_is_not_idle(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    info = machine.client(50, card, 7, engine_copy="0 ns", engine_render="0 ns")
    source = source_of(machine, clock)
    source.look()
    whole = fdinfo(card, 7, engine_copy="0 ns", engine_render=f"{9 * SECOND} ns")
    info.write_text(whole[:-6])
    assert not known(next_reading(source, clock).utilization)
    info.write_text(fdinfo(card, 7, engine_copy="0 ns"))
    assert not known(next_reading(source, clock).utilization)
    info.write_text(whole)
    assert peak(next_reading(source, clock)) == pytest.approx(0.9)


# Hidden processes


def test_idle_intel_gpu_is_unknown_while_other_users_are_hidden(
    machine: FakeMachine, clock: Clock, refusals: Refusals
) -> None:
    card = machine.intel()
    machine.client(50, card, 7, engine_render="0 ns")
    machine.process(60, "secret")
    refusals.refuse(machine.root / "proc/60/fd", errno.EACCES)
    source = source_of(machine, clock)
    source.look()
    reading = next_reading(source, clock)
    assert reason(reading.utilization) == OTHER_USERS
    # A little work of ours does not prove that others are idle.
    machine.client(50, card, 7, engine_render=f"{SECOND // 2} ns")
    reading = next_reading(source, clock)
    assert reason(reading.utilization) == OTHER_USERS
    assert close_to(processes(reading)[50].utilization, 0.05)


def test_busy_intel_gpu_is_busy_even_with_hidden_users(machine: FakeMachine, clock: Clock, refusals: Refusals) -> None:
    card = machine.intel()
    machine.client(50, card, 7, engine_render="0 ns")
    machine.process(60, "secret")
    refusals.refuse(machine.root / "proc/60/fd", errno.EACCES)
    source = source_of(machine, clock)
    source.look()
    machine.client(50, card, 7, engine_render=f"{9 * SECOND} ns")
    assert peak(next_reading(source, clock)) == pytest.approx(0.9)


def test_amd_utilization_covers_the_whole_gpu_even_with_hidden_users(
    machine: FakeMachine, clock: Clock, refusals: Refusals
) -> None:
    machine.amd(gpu_busy_percent=3)
    machine.process(60, "secret")
    refusals.refuse(machine.root / "proc/60/fd", errno.EACCES)
    look = source_of(machine, clock).look()
    assert peak(look.readings[0]) == 0.03
    assert reason(look.readings[0].processes) == OTHER_USERS
    assert look.note is not None
    assert OTHER_USERS in look.note


def test_visible_processes_are_listed_with_a_note_on_hidden_ones(
    machine: FakeMachine, clock: Clock, refusals: Refusals
) -> None:
    card = machine.amd()
    machine.client(50, card, 7, driver="amdgpu")
    machine.process(60, "secret")
    refusals.refuse(machine.root / "proc/60/fd", errno.EACCES)
    look = source_of(machine, clock).look()
    assert list(processes(look.readings[0])) == [50]
    assert look.note is not None


def test_fully_visible_machine_has_no_note(machine: FakeMachine, clock: Clock) -> None:
    machine.amd()
    machine.on_the_host()
    assert source_of(machine, clock).look().note is None


def test_hidepid_is_detected_by_the_missing_first_process(machine: FakeMachine, clock: Clock) -> None:
    machine.intel()
    machine.end(1)
    machine.process(50)
    source = source_of(machine, clock)
    source.look()
    assert reason(next_reading(source, clock).utilization) == OTHER_USERS


def test_idle_intel_gpu_in_a_container_is_unknown(machine: FakeMachine, clock: Clock) -> None:
    machine.intel()
    machine.in_container()
    source = source_of(machine, clock)
    source.look()
    reading = next_reading(source, clock)
    assert reason(reading.utilization) == "processes outside this container cannot be seen"
    assert reason(reading.processes) == "processes outside this container cannot be seen"


def test_missing_proc_makes_only_processes_unknown(machine: FakeMachine, clock: Clock, refusals: Refusals) -> None:
    machine.amd(gpu_busy_percent=8)
    machine.intel(1, "0000:04:00.0")
    refusals.refuse(machine.root / "proc", errno.EACCES)
    source = source_of(machine, clock)
    source.look()
    clock.advance(1)
    amd, intel = source.look().readings
    assert peak(amd) == 0.08
    for value in (amd.processes, intel.processes, intel.utilization):
        assert reason(value) == "/proc cannot be read: permission denied"


def test_shortage_of_file_descriptors_is_not_idle(machine: FakeMachine, clock: Clock, refusals: Refusals) -> None:
    machine.intel()
    machine.process(60)
    refusals.refuse(machine.root / "proc/60/fd", errno.EMFILE)
    source = source_of(machine, clock)
    source.look()
    reading = next_reading(source, clock)
    assert "process 60 cannot be read: too many open files" in reason(reading.utilization)


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO])
def test_process_with_unreadable_fdinfo_is_listed_without_values(
    machine: FakeMachine, clock: Clock, refusals: Refusals, error: int
) -> None:
    card = machine.intel()
    info = machine.client(50, card, 7, engine_render="0 ns")
    refusals.refuse(info, error)
    source = source_of(machine, clock)
    source.look()
    reading = next_reading(source, clock)
    assert not known(reading.utilization)
    assert not known(processes(reading)[50].memory)


@pytest.mark.parametrize("gone", ["fd", "fdinfo"])
@pytest.mark.parametrize("error", [errno.ENOENT, errno.ESRCH])
def test_process_that_ends_during_the_scan_is_not_a_problem(
    machine: FakeMachine, clock: Clock, refusals: Refusals, gone: str, error: int
) -> None:
    card = machine.intel()
    info = machine.client(50, card, 7, engine_render="0 ns")
    refusals.refuse(info if gone == "fdinfo" else info.parent.parent / "fd", error)
    source = source_of(machine, clock)
    source.look()
    reading = next_reading(source, clock)
    assert reading.processes == ()
    assert reading.utilization == Utilization(0.0, 0.0, 0)


# Processes


def test_process_has_its_name_start_and_memory(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd()
    machine.process(50, "train me")
    machine.client(50, card, 7, driver="amdgpu", memory_vram="2048 KiB", memory_gtt="4 MiB")
    process = processes(first_reading(machine, clock))[50]
    assert (process.name, process.started, process.memory) == ("train me", 500, 2 * 2**20)


def test_files_of_other_devices_are_not_opened(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd()
    ours = machine.client(50, card, 7, driver="amdgpu")
    plain = machine.hold(50, 4, "/home/me/data.bin")
    socket = machine.hold(50, 5, "socket:[4711]")
    source = source_of(machine, clock)
    with watching_opens(ours, plain, socket) as opened:
        source.look()
        assert opened.names() == {"3"}


def test_client_with_several_descriptors_is_counted_once(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    for descriptor in (3, 4, 5):
        machine.client(50, card, 7, descriptor, engine_render="0 ns", resident_local0="6 MiB")
    source = source_of(machine, clock)
    source.look()
    for descriptor in (3, 4, 5):
        keys = {"engine_render": f"{3 * SECOND} ns", "resident_local0": "6 MiB"}
        machine.client(50, card, 7, descriptor, **keys)
    reading = next_reading(source, clock)
    assert peak(reading) == pytest.approx(0.3)
    assert processes(reading)[50].memory == 6 * 2**20
    assert close_to(processes(reading)[50].utilization, 0.3)


def test_shared_client_is_counted_once_and_both_processes_are_listed(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    for pid in (50, 9):
        machine.client(pid, card, 7, engine_render="0 ns", resident_local0="6 MiB")
    source = source_of(machine, clock)
    source.look()
    for pid in (50, 9):
        machine.client(pid, card, 7, engine_render=f"{3 * SECOND} ns", resident_local0="6 MiB")
    reading = next_reading(source, clock)
    found = processes(reading)
    assert peak(reading) == pytest.approx(0.3)
    assert found[9].memory == 6 * 2**20
    assert reason(found[50].memory) == "counted with process 9, which shares it"
    assert not known(found[50].utilization)


def test_same_client_number_on_two_cards_is_two_clients(machine: FakeMachine, clock: Clock) -> None:
    cards = [machine.intel(0, "0000:03:00.0"), machine.intel(1, "0000:04:00.0")]
    for number, card in enumerate(cards):
        machine.client(50, card, 7, 3 + number, engine_render="0 ns", resident_local0=f"{number + 1} MiB")
    source = source_of(machine, clock)
    source.look()
    for number, card in enumerate(cards):
        keys = {
            "engine_render": f"{(number + 1) * SECOND} ns",
            "resident_local0": f"{number + 1} MiB",
        }
        machine.client(50, card, 7, 3 + number, **keys)
    clock.advance(10)
    readings = source.look().readings
    assert [round(peak(reading), 3) for reading in readings] == [0.1, 0.2]
    assert [processes(reading)[50].memory for reading in readings] == [2**20, 2 * 2**20]


def test_process_with_several_clients_holds_the_sum(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    machine.client(50, card, 7, 3, engine_render="0 ns", resident_local0="1 MiB")
    machine.client(50, card, 8, 4, engine_render="0 ns", resident_local0="512 KiB")
    source = source_of(machine, clock)
    source.look()
    machine.client(50, card, 7, 3, engine_render=f"{SECOND} ns", resident_local0="1 MiB")
    machine.client(50, card, 8, 4, engine_render=f"{2 * SECOND} ns", resident_local0="512 KiB")
    process = processes(next_reading(source, clock))[50]
    assert process.memory == 2**20 + 2**19
    assert close_to(process.utilization, 0.3)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"memory_vram": "12 KiB"}, 12 * 1024),
        ({"memory_vram": "12"}, 12),
        ({"total_vram": "9 MiB", "memory_vram": "12 KiB"}, 9 * 2**20),
        ({"resident_vram0": "5 MiB", "total_vram0": "9 MiB", "resident_system": "70 MiB"}, 5 * 2**20),
        ({"resident_vram0": "5 MiB", "resident_vram1": "6 MiB"}, 11 * 2**20),
        ({"resident_vram0": "junk", "total_vram0": "9 MiB"}, 9 * 2**20),
        ({"resident_vram0": "junk", "resident_vram1": "1 MiB", "total_vram0": "9 MiB"}, 9 * 2**20),
        ({"resident_local0": "2 MiB", "resident_stolen_local0": "1 MiB"}, 2 * 2**20),
        ({"resident_system0": "3 MiB", "total_system0": "4 MiB"}, 3 * 2**20),
        ({"total_system0": "4 MiB"}, 4 * 2**20),
        ({"resident_vram0": "0", "total_vram0": "9 MiB"}, 0),
    ],
)
def test_memory_is_the_resident_device_memory_first(
    machine: FakeMachine, clock: Clock, keys: dict[str, object], expected: int
) -> None:
    machine.client(50, machine.intel(), 7, engine_render="0 ns", **keys)
    assert processes(first_reading(machine, clock))[50].memory == expected


def test_missing_or_impossible_memory_is_unknown(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd(mem_info_vram_total=16 * 2**30)
    machine.client(50, card, 7, driver="amdgpu")
    machine.client(51, card, 8, driver="amdgpu", memory_vram="99999999999 MiB")
    found = processes(first_reading(machine, clock))
    assert reason(found[50].memory) == "the driver does not report memory per process"
    assert "more than the GPU has" in reason(found[51].memory)


def test_process_of_an_old_driver_is_found_by_its_device_node(machine: FakeMachine, clock: Clock) -> None:
    card = machine.intel()
    machine.hold(50, 3, f"/dev/dri/{card.node}", "pos:\t0\nflags:\t02\n")
    machine.hold(51, 3, "/dev/dri/card0", "drm-pdev:\tsomewhere\n")
    machine.hold(52, 3, "/dev/dri/renderD200", "pos:\t0\n")
    assert sorted(processes(first_reading(machine, clock))) == [50, 51]


def test_fdinfo_takes_precedence_over_the_name_of_the_node(machine: FakeMachine, clock: Clock) -> None:
    """A container may have given the node any name."""
    first, second = machine.amd(0, "0000:03:00.0"), machine.amd(1, "0000:04:00.0")
    machine.hold(50, 3, f"/dev/dri/{first.node}", fdinfo(second, 7, driver="amdgpu"))
    readings = source_of(machine, clock).look().readings
    assert [list(processes(reading)) for reading in readings] == [[], [50]]


def test_amd_process_without_work_is_idle(machine: FakeMachine, clock: Clock) -> None:
    """amdgpu lists an engine only after its first use."""
    card = machine.amd()
    machine.client(50, card, 7, driver="amdgpu", memory_vram="1 MiB")
    source = source_of(machine, clock)
    source.look()
    assert processes(next_reading(source, clock))[50].utilization == 0.0


def test_rocm_process_without_counters_is_not_idle(machine: FakeMachine, clock: Clock) -> None:
    card = machine.amd(gpu_busy_percent=99)
    machine.client(50, card, 7, driver="amdgpu", memory_vram="1 MiB")
    machine.hold(50, 4, "/dev/kfd")
    source = source_of(machine, clock)
    source.look()
    process = processes(next_reading(source, clock))[50]
    assert reason(process.utilization) == "work through ROCm is not counted per process"
    assert process.memory == 2**20


# Any file content

KEYS = st.sampled_from(
    [
        "driver",
        "pdev",
        "client-id",
        "engine-render",
        "engine-capacity-render",
        "cycles-rcs",
        "total-cycles-rcs",
        "resident-vram0",
        "total-system0",
        "memory-vram",
        "engine-",
        "cycles-",
        "-",
    ]
)
VALUES = st.sampled_from(["0", "5 ns", "3 KiB", "amdgpu", "-1", "", " ", "9" * 30, "5 ns extra"]) | st.text(max_size=8)


@given(lines=st.lists(st.tuples(KEYS, VALUES)), cut=st.integers(0, 200))
def test_any_fdinfo_is_parsed_into_possible_values(lines: list[tuple[str, str]], cut: int) -> None:
    client = parse("".join(f"drm-{key}:\t{value}\n" for key, value in lines)[:cut])
    assert not known(client.memory) or client.memory >= 0
    for engine in client.engines.values():
        assert engine.busy >= 0
        assert engine.capacity > 0


@given(counts=st.lists(st.integers(0, 10**9), min_size=2, max_size=20))
def test_shares_of_a_wavering_counter_add_up_to_its_rise(counts: list[int]) -> None:
    """A decrease is made up for, never counted twice."""
    counters = EngineCounters()
    total = 0.0
    for count in counts:
        client = Client("p", "1", True, {"render": EngineCounter(count, None, 1)}, 0)
        total += counters.work("card", {"1": client}, span=1.0)["1"].engines.get("render", 0.0)
    assert total == pytest.approx((max(counts) - counts[0]) / 1e9)


@given(share=st.floats(0, 1), gap=st.none() | st.just("why"))
def test_lower_bound_is_reported_only_above_every_idle_threshold(share: float, gap: str | None) -> None:
    seen = EngineUse(share, gap).certain()
    assert seen == share if gap is None or share >= SURELY_BUSY else seen == Unknown("why")


def test_gpu_without_clients_does_no_work() -> None:
    assert busiest([]) == EngineUse(0.0, None)
