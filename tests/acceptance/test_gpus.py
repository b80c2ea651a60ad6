"""`stoker gpus` as typed: what it shows, how it ends, and every fault it may meet."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from stoker.gpus.model import NOT_SUPPORTED
from stoker.version import __version__
from tests.support.command import stoker, stoker_command
from tests.support.mock_nvml import MockMachine, Samples
from tests.support.waiting import wait_for

Given = Callable[[MockMachine, Path, pytest.MonkeyPatch], None]


def faulty(function: str, **fault: Any) -> Given:
    return lambda machine, _path, _patch: machine.fault(function, **fault)


def no_library(_machine: MockMachine, _path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.delenv("LD_LIBRARY_PATH")


def nvidia_smi(script: str) -> Given:
    """No library, and this for `nvidia-smi`."""

    def given(machine: MockMachine, path: Path, patch: pytest.MonkeyPatch) -> None:
        no_library(machine, path, patch)
        command = path / "bin" / "nvidia-smi"
        command.parent.mkdir()
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
        patch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")

    return given


def absurd(machine: MockMachine, _path: Path, _patch: pytest.MonkeyPatch) -> None:
    gpu = machine.gpus[0]
    gpu.samples_mode = Samples.EMPTY
    gpu.utilization = 2**31
    gpu.memory_used = gpu.memory_total * 3
    gpu.temperature = 100_000
    machine.fault("nvmlDeviceGetTotalEnergyConsumption", code=3)
    gpu.power_mw = 2**32 - 1


class Case(NamedTuple):
    name: str
    given: Given
    code: int
    sentence: str
    """What standard error says; nothing when empty."""
    states: list[str] | None
    """The states in the JSON; None when there is none."""
    unknown: dict[str, str] = {}  # noqa: RUF012 - never changed
    """What of the first GPU is unknown, and why."""
    deadline: str = "60s"
    """Long, so that nothing which only takes its time is called hung."""


ROW = "0, GPU-1, NVIDIA A100, 00000000:07:00.0, 5, 1000, 40960, 60.5, 400.00, 33, 2, 1410, 0x1, 0"
FAULTS = [
    Case("library absent", no_library, 1, "no GPU was found (nvml: the library libnvidia-ml.so.1 is not", None),
    Case("driver not loaded", faulty("nvmlInitWithFlags", code=9), 1, "nvml: the NVIDIA driver is not loaded", None),
    Case(
        "version mismatch", faulty("nvmlInitWithFlags", code=18), 1,
        "the GPUs cannot be read: the NVIDIA library and the loaded kernel driver are of different", ["unknown"],
    ),
    Case(
        "unknown at init", faulty("nvmlInitWithFlags", code=999), 1,
        "the GPUs cannot be read: the NVIDIA driver answered 'unknown error'; in a container", ["unknown"],
    ),
    Case(
        "first GPU lost at init", faulty("nvmlDeviceGetHandleByIndex_v2", code=15, gpu=0), 0, "", ["unknown", "idle"],
        {"utilization": "the GPU is lost: it fell off the bus and needs a reboot of the machine"},
    ),
    Case(
        "first GPU lost midway", faulty("nvmlDeviceGetTemperature", code=15, gpu=0), 0, "", ["unknown", "idle"],
        {"memory_used": "the GPU is lost: it fell off the bus and needs a reboot of the machine"},
    ),
    Case(
        "memory not supported", faulty("nvmlDeviceGetMemoryInfo_v2", code=3), 0, "", ["idle", "idle"],
        {"memory_used": NOT_SUPPORTED, "memory_total": NOT_SUPPORTED},
    ),
    Case(
        "utilization not supported",
        lambda machine, path, patch: (
            faulty("nvmlDeviceGetSamples", code=3)(machine, path, patch),
            faulty("nvmlDeviceGetUtilizationRates", code=3)(machine, path, patch),
        )[0],
        0, "", ["unknown", "unknown"], {"utilization": NOT_SUPPORTED},
    ),
    Case(
        "absurd values", absurd, 0, "", ["unknown", "idle"],
        {
            "utilization": "the driver reported 2.14748e+09 %, which is impossible",
            "memory_used": "the driver reported 257698037760 bytes in use, more than the GPU has",
            "power_watts": "the driver reported 4.29497e+06 W, which is impossible",
            "temperature_celsius": "the driver reported 100000 °C, which is impossible",
        },
    ),
    Case(
        "process list not permitted", faulty("nvmlDeviceGetComputeRunningProcesses_v3", code=4), 0, "",
        ["idle", "idle"],
        {"processes": "the driver does not permit this user to read it"},
    ),
    Case(
        "a call hangs", faulty("nvmlDeviceGetMemoryInfo_v2", hang=600.0), 1,
        "the GPUs cannot be read: the driver did not answer in 1 s", ["unknown"], deadline="1s",
    ),
    Case(
        "the question for links hangs", faulty("nvmlDeviceGetP2PStatus", hang=600.0), 1,
        "the GPUs cannot be read: the driver did not answer in 1 s", ["unknown"], deadline="1s",
    ),
    Case(
        "nvidia-smi killed", nvidia_smi("kill -9 $$"), 1, "nvidia-smi was killed by signal 9", ["unknown"],
    ),
    Case(
        "nvidia-smi prints garbage", nvidia_smi("head -c 4000 /dev/urandom"), 1,
        "the GPUs cannot be read: ", ["unknown"],
    ),
    Case(
        "nvidia-smi of another version",
        nvidia_smi("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18"),
        1, "Driver/library version mismatch", ["unknown"],
    ),
    Case(
        "no value in nvidia-smi", nvidia_smi(f"case $1 in *gpu=*) echo '{ROW.replace(' 5,', ' [N/A],')}';; esac"),
        0, "", ["unknown"], {"utilization": "nvidia-smi said [N/A]"},
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", FAULTS, ids=[case.name for case in FAULTS])
def test_fault_is_reported_as_unknown_and_never_as_idle(
    case: Case, nvidia: MockMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "root").mkdir()
    monkeypatch.setenv("STOKER_ROOT", str(tmp_path / "root"))  # no other vendor's GPU of the machine at hand
    case.given(nvidia, tmp_path, monkeypatch)
    done = stoker("gpus", "--json", "--deadline", case.deadline)
    assert done.code == case.code, done.err
    assert case.sentence in done.err
    assert done.err.count("\n") == (1 if case.sentence else 0)
    if case.states is None:
        assert done.out == ""
        return
    gpus = done.json()
    assert [gpu["state"] for gpu in gpus] == case.states
    for field, reason in case.unknown.items():
        assert gpus[0][field] is None
        assert gpus[0]["unknown"][field] == reason
    for gpu in gpus:
        if gpu["state"] == "unknown":
            assert gpu["utilization"] is None
            assert gpu["reason"]


def test_gpus_unreadable_through_nvml_are_listed_from_the_kernel(
    nvidia: MockMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    information = tmp_path / "root/proc/driver/nvidia/gpus/0000:65:00.0/information"
    information.parent.mkdir(parents=True)
    information.write_text("Model: \t\t NVIDIA H100\nIRQ:   \t\t 46\nGPU UUID: \t GPU-aa-bb\nDevice Minor: \t 3\n")
    monkeypatch.setenv("STOKER_ROOT", str(tmp_path / "root"))
    nvidia.init_error = 18
    done = stoker("gpus", "--json")
    assert done.code == 1
    (gpu,) = done.json()
    assert (gpu["uuid"], gpu["name"], gpu["minor"], gpu["state"]) == ("GPU-aa-bb", "NVIDIA H100", 3, "unknown")


def test_table_shows_state_and_user_of_each_gpu(nvidia: MockMachine) -> None:
    nvidia.gpus[0].utilization = 37
    nvidia.gpus[0].memory_used = 20 * 2**30
    nvidia.gpus[0].add_process(os.getpid(), memory=8 * 2**30)
    nvidia.fault("*", code=15, gpu=1)
    done = stoker("gpus")
    assert done.code == 0
    _head, first, second = done.out.splitlines()
    for word in ("busy", "37%", "20 GiB of 80 GiB", "70 W of 700", f"(pid {os.getpid()}) 8.0 GiB"):
        assert word in first
    assert "unknown" in second
    assert "the GPU is lost" in second


def test_json_has_the_documented_fields(nvidia: MockMachine) -> None:
    nvidia.gpus[0].add_process(os.getpid(), memory=1)
    first, _second = stoker("gpus", "--json").json()
    assert first.keys() >= {
        "index", "uuid", "name", "utilization", "memory_used", "memory_total", "power_watts", "state", "reason",
        "processes",
    }  # fmt: skip
    assert first["processes"][0].keys() >= {"pid", "name", "user", "memory"}


def test_follow_prints_one_json_line_per_sample_until_interrupted(nvidia: MockMachine) -> None:
    process = subprocess.Popen(
        [stoker_command(), "gpus", "--follow", "--every", "50ms"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    first = msgspec.json.decode(process.stdout.readline())
    nvidia.gpus[0].utilization = 88
    wait_for(lambda: msgspec.json.decode(process.stdout.readline())["gpus"][0]["state"] == "busy")  # type: ignore[union-attr]  # stdout is a pipe
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=60)
    assert first["gpus"][0]["state"] == "idle"
    assert (process.returncode, err) == (0, "")


def test_closed_pipe_is_no_error(nvidia: MockMachine) -> None:
    done = subprocess.run(
        f"{stoker_command()} gpus --follow --every 10ms | head -n 2",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2


def test_watch_draws_on_a_terminal_and_restores_it(nvidia: MockMachine) -> None:
    import pty

    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(stoker_command(), ["stoker", "gpus", "--watch", "--every", "50ms"])
    seen = b""
    while b"Ctrl-C ends" not in seen or seen.count(b"H100") < 4:
        seen += os.read(terminal, 65536)
    os.write(terminal, b"\x03")
    try:
        while piece := os.read(terminal, 65536):
            seen += piece
    except OSError:
        pass  # how a terminal says that its last user left
    _pid, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert b"Traceback" not in seen
    assert seen.rstrip().endswith((b"\x1b[?1049l\x1b[?25h", b"\x1b[?25h\x1b[?1049l"))


def test_explain_shows_why_each_source_was_selected_or_rejected(
    nvidia: MockMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(f"case $1 in *gpu=*) echo '{ROW}';; esac")(nvidia, tmp_path, monkeypatch)
    done = stoker("gpus", "--explain")
    assert "nvml: not used: the library libnvidia-ml.so.1 is not installed" in done.err
    assert "nvidia-smi: used: " in done.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--json", "--watch"], "exclude each other"),
        (["--every", "5s"], "--every needs --watch or --follow"),
        (["--follow", "--every", "0s"], "greater than zero"),
        (["--follow", "--every", "often"], "'often' is not a duration"),
        (["--source", "cuda"], "'cuda' is not a source of GPU readings"),
        (["--source", "sim:zero"], "sim:4"),
        (["--gpus", "7"], "7"),
        (["--deadline", "-1s"], "not a duration"),
        (["--sauce"], "No such option"),
    ],
)
def test_invalid_input_is_reported_with_code_2(nvidia: MockMachine, arguments: list[str], sentence: str) -> None:
    done = stoker("gpus", *arguments)
    assert (done.code, done.out) == (2, "")
    assert sentence in done.err
    assert done.err.count("\n") == 1


def test_settings_come_from_option_then_variable_then_file(nvidia: MockMachine, tmp_path: Path) -> None:
    config = tmp_path / "config/stoker/stoker.toml"
    config.parent.mkdir(parents=True)
    config.write_text('gpus = "sim:3"\n')
    assert len(stoker("gpus", "--json").json()) == 3
    assert len(stoker("gpus", "--json", environment={"STOKER_GPUS": "sim:5"}).json()) == 5
    assert len(stoker("gpus", "--json", "--source", "nvml", environment={"STOKER_GPUS": "sim:5"}).json()) == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("gpus = 4", "gpus"), ("gpu = 'sim:4'", "gpu"), ("gpus = \n", "line 1"), ('gpus = "cuda"', "is not a source")],
)
def test_configuration_error_is_reported(nvidia: MockMachine, tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "my.toml").write_text(text)
    done = stoker("--config", str(tmp_path / "my.toml"), "gpus")
    assert done.code == 2
    assert sentence in done.err


def test_explicit_configuration_file_must_exist(tmp_path: Path) -> None:
    done = stoker("--config", str(tmp_path / "none.toml"), "gpus")
    assert (done.code, "does not exist" in done.err) == (2, True)


def test_pids_of_another_namespace_are_not_matched_to_local_processes(nvidia: MockMachine) -> None:
    if os.geteuid() != 0 and not os.environ.get("CI"):
        pytest.skip("needs root for a pid namespace")
    # Inside the new namespace, pid 1 is `sh`: the driver's pid 1 is the machine's.
    nvidia.gpus[0].add_process(1, memory=2**30)
    inside = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-m", "stoker.cli", "gpus", "--json"]
    done = subprocess.run(inside, capture_output=True, text=True, check=False)
    (process,) = msgspec.json.decode(done.stdout)[0]["processes"]
    assert (process["pid"], process["name"], process["user"]) == (1, None, None)
    assert "outside this container" in done.stderr
    assert stoker("gpus", "--json").json()[0]["processes"][0]["name"] is not None


def test_version_and_help_are_printed() -> None:
    assert stoker("--version").out == f"stoker {__version__}\n"
    assert "record" in stoker("--help").out
    assert stoker("frobnicate").code == 2


@pytest.mark.parametrize("module", ["stoker.streams", "stoker.cli.startup", "stoker.cli.app", "click"])
def test_ctrl_c_while_the_command_loads_ends_it_without_a_traceback(module: str, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "class CtrlC:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, CtrlC())\n"
        "from stoker.cli import main\n"
        "sys.argv[1:] = ['gpus']\n"
        "main()\n"
    )
    environment = {**os.environ, "STOKER_GPUS": "sim", "STOKER_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
