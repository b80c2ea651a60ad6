"""`stoker sim` as typed."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import stoker
from tests.support.waiting import wait_for

GIB = 2**30
GUIDE = Path(__file__).parents[2] / "docs" / "reference" / "simulated-gpus.md"

Load = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_GPUS", "sim:2x24GiB")


@pytest.fixture
def load() -> Iterator[Load]:
    """Starts `stoker sim load` and ends it with the test."""
    started: list[subprocess.Popen[str]] = []

    def begin(*options: str, **environment: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            ["stoker", "sim", "load", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def status() -> Any:
    return json.loads(stoker("sim", "status", "--json").out)


def held() -> list[int]:
    return [gpu["held"] for gpu in status()["gpus"]]


def announced(process: "subprocess.Popen[str]") -> str:
    """The line with which a load says that it is there."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_load_describes_itself_and_is_visible_to_readers(load: Load) -> None:
    process = load("--gpu", "1", "--memory", "8GiB", "--utilization", "70%")
    assert announced(process) == f"pid {process.pid} holds 8.0 GiB on GPU 1: busy 70%"
    idle, busy = json.loads(stoker("gpus", "--json").out)
    assert (idle["memory_used"], idle["processes"]) == (0, [])
    assert busy["memory_used"] == 8 * GIB
    assert [entry["pid"] for entry in busy["processes"]] == [process.pid]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_signal_ends_a_load_at_once_and_frees_its_memory(load: Load, number: signal.Signals) -> None:
    process = load("--memory", "8GiB")
    announced(process)
    assert held() == [8 * GIB, 0]
    process.send_signal(number)
    assert process.wait(timeout=60) == -number
    assert held() == [0, 0]
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_load_ends_after_its_duration(load: Load) -> None:
    process = load("--for", "0.2s")
    assert announced(process).endswith("for 0.2s")
    assert process.wait(timeout=60) == 0
    assert held() == [0, 0]


def test_load_ends_after_its_last_phase(load: Load) -> None:
    process = load("--phase", "busy 90% 0.1s", "--phase", "idle 0.1s")
    assert announced(process).endswith("busy 90% 0.1s, idle 0.1s")
    assert process.wait(timeout=60) == 0


def test_repeated_load_does_not_end_with_its_last_phase(load: Load) -> None:
    process = load("--phase", "busy 90% 0.02s", "--phase", "idle 0.02s", "--repeat")
    announced(process)
    for _ in range(2):
        (there,) = status()["loads"]
        assert there["phase"] in ("busy 90% 0.02s", "idle 0.02s")
        assert there["held"] == GIB


def test_load_can_use_several_gpus(load: Load) -> None:
    announced(load("--gpu", "0", "--gpu", "1", "--memory", "3GiB"))
    assert held() == [3 * GIB, 3 * GIB]


def test_gpus_are_counted_within_cuda_visible_devices(load: Load) -> None:
    announced(load("--gpu", "0", "--memory", "3GiB", CUDA_VISIBLE_DEVICES="1"))
    assert held() == [0, 3 * GIB]
    refused = load("--gpu", "1", CUDA_VISIBLE_DEVICES="1")
    assert refused.wait(timeout=60) == 2


def test_load_that_does_not_fit_fails_like_cuda(load: Load) -> None:
    announced(load("--memory", "20GiB"))
    failed = stoker("sim", "load", "--memory", "8GiB")
    assert (failed.code, failed.out) == (1, "")
    assert failed.err == (
        "stoker: CUDA out of memory. Tried to allocate 8.00 GiB. "
        "GPU 0 has a total capacity of 24.00 GiB of which 4.00 GiB is free.\n"
    )
    assert held() == [20 * GIB, 0]


def test_waiting_load_uses_no_cpu(load: Load) -> None:
    process = load("--phase", "busy 90% 0.01s", "--phase", "idle 0.01s", "--repeat")
    announced(process)

    def ticks() -> int:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    wait_for(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S")
    before = ticks()
    status()
    status()
    assert ticks() - before <= 1


def test_faults_are_added_shown_and_removed() -> None:
    made = stoker("sim", "fault", "lost", "--gpu", "1")
    assert (made.code, made.out) == (0, "GPU 1: lost, until 'stoker sim fault --clear'\n")
    fine, lost = json.loads(stoker("gpus", "--json").out)
    assert (fine["state"], lost["state"]) == ("idle", "unknown")
    assert status()["faults"] == [
        {"kind": "lost", "gpu": 1, "field": None, "seconds": None, "number": None, "left": None}
    ]
    assert stoker("sim", "fault", "--clear").out == "removed: GPU 1: lost\n"
    assert [gpu["state"] for gpu in json.loads(stoker("gpus", "--json").out)] == ["idle", "idle"]


def test_fault_can_expire() -> None:
    stoker("sim", "fault", "absent", "--for", "0.5s")
    wait_for(lambda: stoker("gpus").code == 0, named="the end of the fault")
    assert status()["faults"] == []


def test_status_shows_the_machine_as_a_table(load: Load, tmp_path: Path) -> None:
    process = load("--memory", "8GiB")
    announced(process)
    stoker("sim", "fault", "hang", "30s")
    assert stoker("sim", "status").out.splitlines() == [
        f"sim:2x24GiB in {tmp_path}/stoker-home/sim/2x24GiB",
        "GPU 0: 8.0 GiB of 24 GiB held, GPU-51000000-0000-4000-8000-000000000000",
        "GPU 1: 0 B of 24 GiB held, GPU-51000000-0000-4000-8000-000000000001",
        f"load: pid {process.pid} holds 8.0 GiB on GPU 0: busy 90%",
        "fault: every GPU: every look hangs for 30s",
    ]


def test_machine_name_is_optional_and_printed_when_omitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    named = stoker("sim", "--machine", f"sim:3x1GiB@{tmp_path}", "status")
    assert named.out.startswith(f"sim:3x1GiB in {tmp_path}/3x1GiB\n")
    assert named.err == ""
    monkeypatch.delenv("STOKER_GPUS")
    default = stoker("sim", "status")
    assert default.out.startswith("sim:4x24GiB in ")
    assert "sim:4" in default.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--machine", "sim:none", "status"],
        ["--machine", "sim:0", "load"],
        ["load", "--memory", "lots"],
        ["load", "--utilization", "120%"],
        ["load", "--for", "0s"],
        ["load", "--gpu", "7"],
        ["load", "--gpu", "0", "--gpu", "0"],
        ["load", "--phase", "sleep 3s"],
        ["load", "--phase", "busy 90%", "--phase", "idle 3s"],
        ["load", "--phase", "busy 90%", "--repeat"],
        ["load", "--utilization", "50%", "--phase", "busy 90%"],
        ["load", "--repeat"],
        ["fault"],
        ["fault", "smoke"],
        ["fault", "unsupported"],
        ["fault", "unsupported", "smoke"],
        ["fault", "lost", "--gpu", "7"],
        ["fault", "lost", "--for", "soon"],
        ["fault", "lost", "power", "--clear"],
    ],
)
def test_invalid_input_is_refused(arguments: list[str]) -> None:
    refused = stoker("sim", *arguments)
    assert (refused.code, refused.out) == (2, "")
    assert re.fullmatch(r"stoker: [^\n]+\n", refused.err)


def test_training_prints_a_progress_bar_and_a_falling_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_GPUS", "sim:2")
    done = stoker("sim", "train", "--epochs", "2", "--steps", "20", "--step", "1ms")
    assert (done.code, done.err) == (0, "")
    losses = [float(loss) for loss in re.findall(r"val loss\x1b\[0m ([\d.]+)", done.out)]
    assert losses == sorted(losses, reverse=True)
    assert re.search(r"Epoch 2/2: 100%\|█+\| 20/20 \[\d\d:\d\d<00:00, [\d.]+it/s, loss=[\d.]+\]\n", done.out)


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--fail-at", "3"], "RuntimeError: the loss is nan at step 3"), (["--batch-size", "400"], "CUDA out of memory")],
)
def test_training_fails_with_realistic_errors(options: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_GPUS", "sim:1x24GiB")
    done = stoker("sim", "train", "--step", "1ms", *options)
    assert done.code != 0
    assert said in done.err


def commands_of_guide() -> list[str]:
    blocks = re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    return [line.removesuffix(" &") for block in blocks for line in block.splitlines() if "stoker" in line]


@pytest.mark.parametrize("command", commands_of_guide())
def test_every_command_of_the_guide_runs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_GPUS", "sim:4")
    words = shlex.split(command)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        first = announced(process)
        if "load" in words:
            process.terminate()
        _, errors = process.communicate(timeout=60)
    assert first
    assert errors == ""
    assert process.returncode in (0, -signal.SIGTERM)


def test_trainer_of_the_guide_finds_a_fitting_batch_size() -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "training with batches of 32"
    assert done.stdout.startswith("CUDA out of memory. Tried to allocate 32.00 GiB.")
