"""The nvidia-smi source: parsing of all known outputs, and running of the command."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.gpus import nvidia_smi
from stoker.gpus.model import Look, Process, Reading, Unknown, Utilization, known
from stoker.gpus.nvidia_smi import open_source
from stoker.gpus.source import AbsentError, Source
from tests.support.fake_nvidia_smi import FakeNvidiaSmi, gpu_line, uuid

MIB = 2**20
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n"
)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.54\n"
LOST = (
    "Unable to determine the device handle for GPU0000:02:00.0: GPU is lost.  Reboot the system to recover this GPU\n"
)


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvidiaSmi]:
    fake = FakeNvidiaSmi(tmp_path / "bin")
    monkeypatch.setenv("PATH", fake.path)
    yield fake
    fake.recovers()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], Source]]:
    """Opens the source on an empty machine (which has no /proc either) and closes it in the end."""
    sources: list[Source] = []

    def open_one() -> Source:
        sources.append(open_source(tmp_path))
        return sources[-1]

    yield open_one
    for source in sources:
        source.close()


def reason(value: object) -> str:
    assert isinstance(value, Unknown), f"{value!r} should be unknown"
    return value.reason


def only_reading(look: Look) -> Reading:
    (reading,) = look.readings
    return reading


def assert_all_unknown(reading: Reading, *words: str) -> None:
    for field in Reading.__struct_fields__[2:]:
        for word in words:
            assert word in reason(getattr(reading, field))


@pytest.mark.usefixtures("smi")
class TestHealthyMachine:
    def test_every_value_is_read(self, opened: Callable[[], Source]) -> None:
        source = opened()
        before = time.monotonic()
        look = source.look()
        assert source.name == look.source == "nvidia-smi"
        assert before <= look.at <= time.monotonic()
        assert look.problem is None
        assert look.note is None
        gpu, reading = look.gpus[1], look.readings[1]
        assert (gpu.uuid, gpu.index, gpu.vendor) == (uuid(1), 1, "nvidia")
        assert (gpu.name, gpu.bus, gpu.memory) == ("NVIDIA A100-SXM4-80GB", "0000:02:00.0", 81920 * MIB)
        assert reading.uuid == uuid(1)
        assert reading.utilization == Utilization(peak=0.37, mean=0.37, samples=1)
        assert (reading.memory_used, reading.memory_total) == (1024 * MIB, 81920 * MIB)
        assert (reading.power, reading.power_limit, reading.temperature) == (250.5, 400.0, 45.0)
        assert reading.processes == ()
        assert reading.memory_activity == Utilization(0.21, 0.21, 1)
        assert (reading.sm_clock, reading.throttling) == (1410.0, ("power cap",))
        assert known(reading.health)
        assert (reading.health.xids, reading.health.uncorrected) == ((), 0)
        assert not known(reading.health.needs_reset)
        assert not known(reading.energy)
        assert not known(reading.pipes)

    def test_zero_is_not_unknown(self, smi: FakeNvidiaSmi, opened: Callable[[], Source]) -> None:
        smi.lists_gpus(gpu_line(0, utilization="0", memory="0, 81920", power="0.00, 400.00", temperature="0"))
        reading = only_reading(opened().look())
        assert reading.utilization == Utilization(0.0, 0.0, 1)
        assert (reading.memory_used, reading.power, reading.temperature) == (0, 0.0, 0.0)

    def test_unsupported_clocks_and_errors_are_unknown(self, smi: FakeNvidiaSmi, opened: Callable[[], Source]) -> None:
        smi.lists_gpus(gpu_line(0, more="[N/A], [N/A], [N/A], [N/A]"), gpu_line(1, more="101, 99999, Active, -1"))
        for reading in opened().look().readings:
            assert known(reading.utilization)
            assert not known(reading.memory_activity)
            assert not known(reading.sm_clock)
            assert not known(reading.throttling)
            assert known(reading.health)
            assert not known(reading.health.uncorrected)

    def test_newer_name_of_the_throttle_reasons_is_tried(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source]
    ) -> None:
        smi.does_not_know("clocks_throttle_reasons")
        source = opened()
        assert source.look().readings[0].throttling == ("power cap",)
        assert len(smi.calls()) == 5
        assert "clocks_event_reasons.active" in smi.calls()[3]

    def test_version_without_the_later_fields_is_read_without_them(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source]
    ) -> None:
        smi.does_not_know("clocks_throttle_reasons", "clocks_event_reasons")
        smi.lists_gpus(gpu_line(0, name="Quadro, Special", more=None))
        look = opened().look()
        assert look.gpus[0].name == "Quadro, Special"
        reading = only_reading(look)
        assert reading.utilization == Utilization(0.37, 0.37, 1)
        assert reason(reading.memory_activity) == reason(reading.health) == "nvidia-smi does not report it"

    def test_each_reading_spans_the_time_since_the_previous_look(self, opened: Callable[[], Source]) -> None:
        source = opened()
        first, second = source.look(), source.look()
        assert second.readings[0].span == pytest.approx(second.at - first.at)
        assert first.readings[0].span > 0

    def test_look_queries_gpus_once_and_processes_once_in_the_c_locale(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
        source = opened()
        assert len(smi.calls()) == 2
        assert smi.calls()[1] == "C topo -m"
        source.look()
        gpus, processes = smi.calls()[2:]
        assert gpus.startswith("C --query-gpu=index,uuid,name,")
        assert processes == "C --query-compute-apps=gpu_uuid,pid,used_memory --format=csv,noheader,nounits"

    def test_links_are_read_once_from_the_matrix(self, smi: FakeNvidiaSmi, opened: Callable[[], Source]) -> None:
        smi.lists_gpus(*(gpu_line(number) for number in range(4)))
        smi.connects(
            "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
            "GPU0\t X \tNV12\tPXB\tSYS\tPIX\t0-31\t0\t\tN/A\n"
            "GPU1\tNV12\t X \tPHB\tSYS\tPIX\t0-31\t0\t\tN/A\n"
            "GPU2\tPXB\tPHB\t X \tNEW\tPIX\t0-31\t0\t\tN/A\n"
            "GPU3\tSYS\tSYS\tNEW\t X \tSYS\t32-63\t1\t\tN/A\n"
            "NIC0\tPIX\tPIX\tPIX\tSYS\t X \n"
            "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
        )
        source = opened()
        source.look()
        assert [dict(gpu.links) for gpu in source.look().gpus] == [
            {uuid(1): "nvlink", uuid(2): "switch", uuid(3): "system"},
            {uuid(0): "nvlink", uuid(2): "node", uuid(3): "system"},
            {uuid(0): "switch", uuid(1): "node"},
            {uuid(0): "system", uuid(1): "system"},
        ]
        assert sum("topo" in call for call in smi.calls()) == 1

    def test_gpus_are_in_the_order_of_their_indices(self, smi: FakeNvidiaSmi, opened: Callable[[], Source]) -> None:
        smi.lists_gpus(gpu_line(2), gpu_line(10), gpu_line(0))
        look = opened().look()
        assert [gpu.index for gpu in look.gpus] == [0, 2, 10]
        assert [reading.uuid for reading in look.readings] == [uuid(0), uuid(2), uuid(10)]

    @pytest.mark.parametrize("name", ["Quadro, Special, Edition", "A,B", "Tesla  T4 "])
    def test_name_may_contain_commas_and_spaces(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source], name: str
    ) -> None:
        smi.lists_gpus(gpu_line(0, name=name))
        look = opened().look()
        assert look.gpus[0].name == " ".join(name.split())
        assert known(only_reading(look).utilization)

    def test_extra_spaces_do_not_matter(self, smi: FakeNvidiaSmi, opened: Callable[[], Source]) -> None:
        smi.lists_gpus("  " + gpu_line(0).replace(", ", "  ,   "))
        look = opened().look()
        assert look.gpus[0].uuid == uuid(0)
        assert only_reading(look).utilization == Utilization(0.37, 0.37, 1)

    def test_device_number_comes_from_the_drivers_files(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source], tmp_path: Path
    ) -> None:
        folder = tmp_path / "proc/driver/nvidia/gpus/0000:ab:00.0"
        folder.mkdir(parents=True)
        text = "Model: \t\t NVIDIA A100\nIRQ:   \t\t 42\nDevice Minor: \t 7\nGPU Excluded:\t No\n"
        (folder / "information").write_text(text)
        smi.lists_gpus(gpu_line(0, bus="00000000:AB:00.0"), gpu_line(1))
        look = opened().look()
        assert look.gpus[0].minor == 7
        assert "device number" in reason(look.gpus[1].minor)

    def test_wide_pci_domain_keeps_its_digits(self, smi: FakeNvidiaSmi, opened: Callable[[], Source]) -> None:
        smi.lists_gpus(gpu_line(0, bus="00010000:3B:00.0"))
        assert opened().look().gpus[0].bus == "10000:3b:00.0"


class TestMissingFields:
    @pytest.mark.parametrize(
        "said",
        [
            "[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", "[GPU requires reset]",
            "[Insufficient Permissions]", "ERR!", "[Not Found]", "nan", "inf", "-", "0x10", "1_000", "٣",
        ],
    )  # fmt: skip
    def test_unreadable_value_is_unknown_with_the_output_as_reason(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source], said: str
    ) -> None:
        smi.lists_gpus(
            gpu_line(0, utilization=said, memory=f"{said}, {said}", power=f"{said}, {said}", temperature=said),
            gpu_line(1),
        )
        sick, well = opened().look().readings
        fields = ("utilization", "memory_used", "memory_total", "power", "power_limit", "temperature")
        for field in fields:
            assert reason(getattr(sick, field)) == f"nvidia-smi said {said}"
            assert known(getattr(well, field))
        assert sick.processes == ()

    def test_empty_field_is_unknown(self, smi: FakeNvidiaSmi, opened: Callable[[], Source]) -> None:
        smi.lists_gpus(gpu_line(0, utilization=""))
        assert reason(only_reading(opened().look()).utilization) == "nvidia-smi said nothing"

    @pytest.mark.parametrize(
        ("field", "line"),
        [
            ("utilization", gpu_line(0, utilization="101")),
            ("utilization", gpu_line(0, utilization="-1")),
            ("utilization", gpu_line(0, utilization="9223372036854775792")),
            ("memory_used", gpu_line(0, memory="90000, 81920")),
            ("memory_used", gpu_line(0, memory="17592186044415, [N/A]")),
            ("memory_total", gpu_line(0, memory="10, 17592186044415")),
            ("memory_total", gpu_line(0, memory="10, 0")),
            ("power", gpu_line(0, power="4294967.29, 400.00")),
            ("power_limit", gpu_line(0, power="100.00, 4294967.29")),
            ("temperature", gpu_line(0, temperature="4294967295")),
            ("sm_clock", gpu_line(0, more="0, 4294967295, 0x1, 0")),
        ],
    )
    def test_impossible_number_is_unknown(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source], field: str, line: str
    ) -> None:
        smi.lists_gpus(line)
        assert "the driver reported" in reason(getattr(only_reading(opened().look()), field))

    def test_used_memory_is_known_without_the_total(self, smi: FakeNvidiaSmi, opened: Callable[[], Source]) -> None:
        smi.lists_gpus(gpu_line(0, memory="512, [N/A]"))
        assert only_reading(opened().look()).memory_used == 512 * MIB

    def test_gpu_without_a_name_or_address_is_still_a_gpu(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source]
    ) -> None:
        smi.lists_gpus(gpu_line(0, name="[Unknown Error]", bus="[N/A]"))
        look = opened().look()
        assert reason(look.gpus[0].name) == "nvidia-smi said [Unknown Error]"
        assert reason(look.gpus[0].bus) == reason(look.gpus[0].minor) == "nvidia-smi said [N/A]"
        assert known(only_reading(look).utilization)

    def test_identity_of_a_gpu_stays_known_while_it_is_unreadable(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source]
    ) -> None:
        smi.lists_gpus(gpu_line(0, name="[Unknown Error]"))
        source = opened()
        smi.lists_gpus(gpu_line(0))
        assert source.look().gpus[0].name == "NVIDIA A100-SXM4-80GB"
        smi.lists_gpus(gpu_line(0, name="[GPU requires reset]", memory="[N/A], [N/A]", bus="[N/A]"))
        gpu = source.look().gpus[0]
        assert (gpu.name, gpu.memory, gpu.bus) == ("NVIDIA A100-SXM4-80GB", 81920 * MIB, "0000:01:00.0")


class TestProcesses:
    def test_processes_are_listed_under_their_gpu(self, smi: FakeNvidiaSmi) -> None:
        me = os.getpid()
        smi.lists_processes(f"{uuid(1)}, {me}, 500\n", f"{uuid(1)}, {2**22 + 1}, [N/A]\n")
        source = open_source()
        look = source.look()
        source.close()
        assert look.readings[0].processes == ()
        mine, gone = known_processes(look.readings[1])
        assert (mine.pid, mine.memory) == (me, 500 * MIB)
        assert mine.name == Path("/proc/self/comm").read_text().strip()
        assert reason(gone.name) == "no process with this pid is visible here"
        assert reason(gone.memory) == "nvidia-smi said [N/A]"
        assert reason(gone.utilization) == "nvidia-smi does not report it"

    @pytest.mark.parametrize("text", ["No running processes found\n", "\n", ""])
    def test_machine_without_processes_has_none(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source], text: str
    ) -> None:
        smi.lists_processes(text)
        assert [reading.processes for reading in opened().look().readings] == [(), ()]

    def test_failed_query_makes_only_the_processes_unknown(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source]
    ) -> None:
        smi.lists_processes("Failed to query\n", code=4)
        look = opened().look()
        assert look.problem is None
        for reading in look.readings:
            assert reason(reading.processes) == ("nvidia-smi failed with exit code 4 and said: Failed to query")
            assert known(reading.utilization)

    def test_query_killed_by_a_signal_makes_only_the_processes_unknown(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source]
    ) -> None:
        smi.lists_processes(f"{uuid(0)}, 1, 5\n", signal="KILL")
        reading = opened().look().readings[0]
        assert reason(reading.processes) == "nvidia-smi was killed by signal 9"
        assert known(reading.utilization)

    @pytest.mark.parametrize(
        "line", ["[Not Supported]\n", "garbage\n", f"{uuid(7)}, 10, 5\n", f"{uuid(0)}, 10\n", "GPU-0000\n"]
    )
    def test_line_without_a_known_gpu_makes_all_processes_unknown(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source], line: str
    ) -> None:
        smi.lists_processes(f"{uuid(0)}, 10, 5\n", line)
        for reading in opened().look().readings:
            assert reason(reading.processes) == f"nvidia-smi said: {line.strip()}"

    @pytest.mark.parametrize("pid", ["[N/A]", "", "-1", "0", "1.5"])
    def test_line_without_a_pid_makes_the_processes_of_its_gpu_unknown(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source], pid: str
    ) -> None:
        smi.lists_processes(f"{uuid(0)}, 10, 5\n", f"{uuid(0)}, {pid}, 5\n", f"{uuid(0)}, 11, 5\n")
        sick, well = opened().look().readings
        assert "nvidia-smi said: " in reason(sick.processes)
        assert well.processes == ()


def known_processes(reading: Reading) -> tuple[Process, ...]:
    assert not isinstance(reading.processes, Unknown)
    return reading.processes


class TestFailingDriver:
    @pytest.mark.parametrize(
        ("text", "code", "expected"),
        [
            (MISMATCH, 18, "Failed to initialize NVML: Driver/library version mismatch"),
            (NO_DRIVER, 9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"),
            (LOST, 15, "Unable to determine the device handle for GPU0000:02:00.0: GPU is lost"),
            ("No devices were found\n", 6, "No devices were found"),
            ("Failed to initialize NVML: Unknown Error\n", 255, "Failed to initialize NVML: Unknown Error"),
            ("\n\n  Segfault\x1b[31m \n", 1, "Segfault [31m"),
            ("", 3, "and said nothing"),
        ],
    )
    def test_failure_makes_all_readings_unknown_and_says_why(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source], text: str, code: int, expected: str
    ) -> None:
        source = opened()
        smi.lists_gpus(text, code=code)
        look = source.look()
        assert expected in reason(look.problem)
        assert [gpu.uuid for gpu in look.gpus] == [uuid(0), uuid(1)]
        for reading in look.readings:
            assert_all_unknown(reading, expected, f"exit code {code}")

    @pytest.mark.parametrize("text", [MISMATCH, "<html>502 Bad Gateway</html>\n", "0, 1, 2\n", ",,,,,,,,,\n"])
    def test_error_with_exit_code_zero_is_still_an_error(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source], text: str
    ) -> None:
        source = opened()
        smi.lists_gpus(text)
        look = source.look()
        assert reason(look.problem) == f"nvidia-smi said: {text.splitlines()[0]}"
        assert len(look.gpus) == 2
        assert_all_unknown(look.readings[0])

    def test_silence_with_exit_code_zero_is_an_error(self, smi: FakeNvidiaSmi, opened: Callable[[], Source]) -> None:
        source = opened()
        smi.lists_gpus("")
        assert reason(source.look().problem) == "nvidia-smi said nothing"

    def test_error_on_standard_error_is_quoted(self, smi: FakeNvidiaSmi, opened: Callable[[], Source]) -> None:
        source = opened()
        smi.lists_gpus(errors="error while loading shared libraries: libfoo.so\n", code=127)
        assert "exit code 127 and said: error while loading" in reason(source.look().problem)

    def test_long_error_is_quoted_in_part(self, smi: FakeNvidiaSmi, opened: Callable[[], Source]) -> None:
        source = opened()
        smi.lists_gpus("word " * 10_000 + "\n", code=1)
        assert len(reason(source.look().problem)) < 300

    def test_command_killed_by_a_signal_is_reported(self, smi: FakeNvidiaSmi, opened: Callable[[], Source]) -> None:
        source = opened()
        smi.lists_gpus(gpu_line(0), signal="KILL")
        look = source.look()
        assert reason(look.problem) == "nvidia-smi was killed by signal 9"
        assert [gpu.index for gpu in look.gpus] == [0, 1]
        assert_all_unknown(look.readings[0], "signal 9")

    def test_removed_command_is_reported(self, smi: FakeNvidiaSmi, opened: Callable[[], Source]) -> None:
        source = opened()
        (smi.folder / "nvidia-smi").unlink()
        look = source.look()
        assert reason(look.problem) == "nvidia-smi cannot be started: No such file or directory"
        assert len(look.readings) == 2

    def test_reading_resumes_when_the_driver_recovers(self, smi: FakeNvidiaSmi, opened: Callable[[], Source]) -> None:
        source = opened()
        smi.lists_gpus(MISMATCH, code=18)
        assert source.look().problem
        smi.lists_gpus(gpu_line(0), gpu_line(1))
        look = source.look()
        assert look.problem is None
        assert known(look.readings[1].utilization)

    def test_vanished_gpu_is_unknown_and_the_others_are_read(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source]
    ) -> None:
        source = opened()
        smi.lists_gpus(gpu_line(1))
        look = source.look()
        assert [gpu.index for gpu in look.gpus] == [0, 1]
        assert_all_unknown(look.readings[0], "missing from nvidia-smi's list")
        assert known(look.readings[1].utilization)

    def test_gpus_keep_their_index_when_one_falls_off_and_the_rest_are_renumbered(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source]
    ) -> None:
        source = opened()
        smi.lists_gpus(gpu_line(0, identity=uuid(1), bus="00000000:02:00.0"))
        look = source.look()
        assert [(gpu.uuid, gpu.index) for gpu in look.gpus] == [(uuid(0), 0), (uuid(1), 1)]
        assert not known(look.readings[0].utilization)
        assert known(look.readings[1].utilization)

    def test_loss_of_one_gpu_is_its_reason_and_the_others_are_read(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source]
    ) -> None:
        source = opened()
        smi.lists_gpus(gpu_line(0), LOST, code=15)
        look = source.look()
        assert look.problem is None
        assert known(look.readings[0].utilization)
        assert_all_unknown(look.readings[1], "missing from nvidia-smi's list", "GPU is lost", "exit code 15")

    @pytest.mark.parametrize(
        ("strays", "code", "expected"),
        [
            ("", 14, "nvidia-smi ended with exit code 14."),
            ("WARNING: infoROM is corrupted at gpu 0000:01:00.0\n", 14,
             "nvidia-smi also said: WARNING: infoROM is corrupted at gpu 0000:01:00.0 (exit code 14)."),
        ],
    )  # fmt: skip
    def test_warning_does_not_spoil_the_readings_and_is_noted(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source], strays: str, code: int, expected: str
    ) -> None:
        smi.lists_gpus(gpu_line(0), gpu_line(1), code=code, errors=strays)
        look = opened().look()
        assert look.problem is None
        assert look.note == expected
        assert known(look.readings[0].utilization)

    def test_gpu_without_a_uuid_is_identified_by_pci_slot(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source]
    ) -> None:
        source = opened()
        smi.lists_gpus(gpu_line(0), gpu_line(1, identity="[Unknown Error]"))
        look = source.look()
        assert [gpu.uuid for gpu in look.gpus] == [uuid(0), uuid(1)]
        assert_all_unknown(look.readings[1], "nvidia-smi said [Unknown Error] for its uuid")

    @pytest.mark.parametrize(
        "line",
        [
            gpu_line(1)[:-4],  # The end of the last number and of the line.
            f"1, {uuid(1)}, NVIDIA A1\n",
            f"1, {uuid(1)}\n",
            f"1, {uuid(1)}, Quadro, Special, Edition, 00000000:02:00.0, 37, 1024, 81920, 250.50\n",
        ],
    )
    def test_truncated_line_makes_only_its_gpu_unknown(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source], line: str
    ) -> None:
        smi.lists_gpus(gpu_line(0), line)
        look = opened().look()
        assert [gpu.uuid for gpu in look.gpus] == [uuid(0), uuid(1)]
        assert known(look.readings[0].utilization)
        assert_all_unknown(look.readings[1], "makes no sense", uuid(1))


class TestOpening:
    def test_source_without_the_command_is_absent(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(AbsentError, match=r"^nvidia-smi is not on PATH$"):
            open_source(tmp_path)

    def test_source_with_a_non_executable_file_is_absent(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "nvidia-smi").write_bytes(b"\x7fELF")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(AbsentError, match=r"^nvidia-smi cannot be started: Exec format error$"):
            open_source(tmp_path)

    def test_path_of_the_command_can_be_configured(self, smi: FakeNvidiaSmi, tmp_path: Path) -> None:
        source = open_source(tmp_path, command=str(smi.folder / "nvidia-smi"))
        assert len(source.look().gpus) == 2
        source.close()

    @pytest.mark.parametrize(
        ("text", "code", "expected"),
        [
            ("No devices were found\n", 6, "nvidia-smi found no GPU"),
            ("No devices were found\n", 0, "nvidia-smi found no GPU"),
            (NO_DRIVER, 9, "there is no NVIDIA driver at work here: .*couldn't communicate"),
            (NO_DRIVER, 0, "there is no NVIDIA driver at work here: .*couldn't communicate"),
            ("Failed to initialize NVML: Driver Not Loaded\n", 9, "there is no NVIDIA driver"),
            ("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.\n", 12, "no NVIDIA driver"),
        ],
    )
    def test_machine_without_a_gpu_or_driver_is_absent(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source], text: str, code: int, expected: str
    ) -> None:
        smi.lists_gpus(text, code=code)
        with pytest.raises(AbsentError, match=expected):
            opened()

    @pytest.mark.parametrize(
        ("text", "code"),
        [(MISMATCH, 18), (LOST, 15), ("Failed to initialize NVML: Unknown Error\n", 255), ("", 0)],
    )
    def test_failing_driver_is_not_absent(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source], text: str, code: int
    ) -> None:
        smi.lists_gpus(text, code=code)
        look = opened().look()
        assert look.gpus == ()
        assert "nvidia-smi" in reason(look.problem)


class InterruptedLookError(Exception):
    pass


@contextmanager
def interrupted_while_stuck(smi: FakeNvidiaSmi) -> Iterator[None]:
    """Interrupts the block, as a signal does, while it waits for nvidia-smi."""
    started = smi.folder / "gpus.pid"
    started.unlink()
    broken_off = False

    def break_off(signum: int, frame: object) -> None:
        nonlocal broken_off
        if not broken_off:
            broken_off = True
            raise InterruptedLookError

    def waited_for() -> bool:
        frame = sys._current_frames().get(main)
        reads = frame is not None and frame.f_code is nvidia_smi._read_to_end.__code__
        return reads and started.exists() and started.read_text() != ""

    def send() -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not waited_for():
            time.sleep(0.002)
        # A signal just before the blocking call does not wake it.
        while not broken_off:
            signal.pthread_kill(main, signal.SIGUSR1)
            time.sleep(0.01)

    main = threading.get_ident()
    before = signal.signal(signal.SIGUSR1, break_off)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with pytest.raises(InterruptedLookError):
            yield
    finally:
        sender.join()
        signal.signal(signal.SIGUSR1, before)


class TestHangingCommand:
    @pytest.fixture(autouse=True)
    def _patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The command ends on request, but late."""
        monkeypatch.setattr(nvidia_smi, "_SECONDS_TO_LEAVE", 60.0)

    def test_hanging_command_is_ended_when_the_source_is_closed(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source]
    ) -> None:
        source = opened()
        smi.gets_stuck()
        with interrupted_while_stuck(smi):
            source.look()
        pid = int((smi.folder / "gpus.pid").read_text())
        os.kill(pid, 0)
        source.close()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    def test_hanging_command_is_ended_though_the_caller_ignores_signals(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source]
    ) -> None:
        source = opened()
        smi.gets_stuck()
        handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        try:
            with interrupted_while_stuck(smi):
                source.look()
            source.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            signal.signal(signal.SIGTERM, handler)
        with pytest.raises(ProcessLookupError):
            os.kill(int((smi.folder / "gpus.pid").read_text()), 0)

    def test_no_second_command_is_started_beside_a_hanging_one(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source]
    ) -> None:
        source = opened()
        smi.gets_stuck()
        with interrupted_while_stuck(smi):
            source.look()
        calls = len(smi.calls())
        look = source.look()
        assert reason(look.problem) == "an earlier nvidia-smi has not ended yet"
        assert_all_unknown(look.readings[1], "has not ended yet")
        assert len(smi.calls()) == calls

    def test_reading_resumes_once_the_hanging_command_has_ended(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source]
    ) -> None:
        source = opened()
        smi.gets_stuck()
        with interrupted_while_stuck(smi):
            source.look()
        pidfd = os.pidfd_open(int((smi.folder / "gpus.pid").read_text()))
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
        os.close(pidfd)
        smi.recovers()
        assert source.look().problem is None

    def test_close_does_not_wait_for_an_unkillable_command(
        self, smi: FakeNvidiaSmi, opened: Callable[[], Source], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nvidia_smi, "_SECONDS_TO_LEAVE", 0.02)
        source = opened()
        script = smi.folder / "nvidia-smi"
        script.write_text(script.read_text().replace("#!/bin/sh", "#!/bin/sh\ntrap '' TERM"))
        smi.gets_stuck()
        with interrupted_while_stuck(smi):
            source.look()
        source.close()
        pid = int((smi.folder / "gpus.pid").read_text())
        os.kill(pid, signal.SIGKILL)  # Still there, and it was not killed by force.
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL

    def test_no_descriptor_is_left_open(self, smi: FakeNvidiaSmi, opened: Callable[[], Source]) -> None:
        source = opened()
        before = len(list(Path("/proc/self/fd").iterdir()))
        source.look()
        smi.gets_stuck()
        with interrupted_while_stuck(smi):
            source.look()
        source.close()
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_ignored_sigchld_does_not_spoil_the_look(smi: FakeNvidiaSmi, opened: Callable[[], Source]) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        look = opened().look()
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert look.problem is None
    assert known(look.readings[0].utilization)


class Canned(nvidia_smi._Asker):
    """Returns the given output without running a command."""

    def __init__(self, gpus: str, processes: str, topology: str, code: int) -> None:
        super().__init__("nvidia-smi")
        self.answers = {"--query-gpu": gpus, "--query-compute-apps": processes, "topo": topology}
        self.code = code

    def ask(self, *arguments: str) -> nvidia_smi._Answer:
        return nvidia_smi._Answer(self.answers[arguments[0].partition("=")[0]], self.code)


SCRAPS = st.sampled_from(
    [
        *(gpu_line(0), gpu_line(1), gpu_line(1, utilization="[N/A]"), f"{uuid(0)}, 1, 5\n", uuid(1)),
        *("\tGPU0\tGPU1\tCPU Affinity\n", "GPU0\t X \tNV2\n", "GPU1\tPIX", "GPU7", "NODE", "\x1b[4m", "\t"),
        *(",", "\n", " ", "[N/A]", "0", "9" * 25, "1" * 5000, "-1", "0000:01:00.0", LOST, "\x00", "\udcff"),
    ]
)
OUTPUT = st.lists(SCRAPS | st.text(max_size=5), max_size=15).map("".join)


@given(gpus=OUTPUT, processes=OUTPUT, topology=OUTPUT, code=st.sampled_from([0, 1, 15, -9]))
def test_any_output_leaves_a_valid_look_with_all_gpus(gpus: str, processes: str, topology: str, code: int) -> None:
    query = nvidia_smi._QUERIES[0]
    rows, _ = nvidia_smi._parse(gpu_line(0) + gpu_line(1), query)
    source = nvidia_smi.NvidiaSmiSource(Path("/nonexistent"), Canned(gpus, processes, topology, code), query, rows)
    source.read_links()
    look = source.look()
    assert {uuid(0), uuid(1)} <= {gpu.uuid for gpu in look.gpus}
    assert [gpu.uuid for gpu in look.gpus] == [reading.uuid for reading in look.readings]
    if code < 0:
        assert not any(known(reading.utilization) for reading in look.readings)
    for reading in look.readings:
        if known(reading.utilization):
            assert 0 <= reading.utilization.peak <= 1


def test_source_imports_no_heavy_modules() -> None:
    code = (
        "import sys, stoker.gpus.nvidia_smi\n"
        "print(*{'subprocess', 'asyncio', 'psutil', 'rich', 'click', 'shutil'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "\n"
