"""`gpu_sentinel` as typed, and the Python names that go with it."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.command import Finished
from tests.support.mock_nvml import MockMachine
from tests.support.waiting import wait_for

COMMAND = (sys.executable, "-m", "stoker.dropin.gpu_sentinel")
QUICK = ("--arm_duration", "1", "--kill_duration", "1")
N_A = 3  # NVML_ERROR_NOT_SUPPORTED


class Running:
    """A program whose output is kept in files, so that a test can read it while it runs."""

    def __init__(self, folder: Path, command: tuple[str, ...]) -> None:
        self._out, self._err = folder / "out", folder / "err"
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait_for_words(self, words: str) -> None:
        wait_for(lambda: words in self.out + self.err or self.process.poll() is not None, named=words)
        assert words in self.out + self.err

    def wait(self) -> int:
        return self.process.wait(timeout=60)


Run = Callable[..., Running]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    started: list[Running] = []

    def start(*command: str) -> Running:
        folder = tmp_path / f"run-{len(started)}"
        folder.mkdir()
        started.append(Running(folder, command))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()
        assert "Traceback" not in each.err


def refused(*arguments: str) -> Finished:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr
    return Finished(done.returncode, done.stdout, done.stderr, 0.0)


def busy(machine: MockMachine, percent: int) -> None:
    for gpu in machine.gpus:
        gpu.utilization = percent


def test_sentinel_arms_on_activity_and_ends_on_idleness(nvidia: MockMachine, run: Run) -> None:
    sentinel = run(*COMMAND, *QUICK)
    sentinel.wait_for_words("Monitoring all GPUs")
    busy(nvidia, 90)
    sentinel.wait_for_words("armed: end_process follows when GPU usage is below 70% for 1 seconds")
    assert sentinel.process.poll() is None
    busy(nvidia, 10)
    assert sentinel.wait() == 0
    assert sentinel.out.splitlines()[-1] == "GPU usage was below 70% for 1 seconds: end_process"
    assert sentinel.err == ""


def test_gpus_that_never_worked_do_not_trigger(nvidia: MockMachine, run: Run) -> None:
    sentinel = run(*COMMAND, *QUICK)
    sentinel.wait_for_words("Monitoring all GPUs")
    nvidia.reset_calls()
    wait_for(lambda: nvidia.calls("nvmlDeviceGetSamples") >= 4, named="two looks at two GPUs")
    assert sentinel.process.poll() is None
    assert "is armed" not in sentinel.out


def test_mean_utilization_of_the_chosen_devices_counts(nvidia: MockMachine, run: Run) -> None:
    nvidia.gpus[0].utilization = 100
    both = run(*COMMAND, *QUICK)
    one = run(*COMMAND, *QUICK, "--gpu_devices", "0")
    one.wait_for_words("GPU Sentinel is armed")
    assert "Monitoring GPUs 0\n" in one.out
    assert "is armed" not in both.out  # on average they are at 50 %
    nvidia.gpus[1].utilization = 100
    both.wait_for_words("GPU Sentinel is armed")


def test_options_with_dashes_and_underscores_are_equivalent(nvidia: MockMachine, run: Run) -> None:
    busy(nvidia, 30)
    words = ("--arm-duration", "1", "--arm-threshold", "0.2", "--kill-duration", "1", "--kill-threshold", "0.1")
    sentinel = run(*COMMAND, *words, "--kill-action", "end_process", "--gpu-devices", "0", "1")
    sentinel.wait_for_words("below 10% for 1 seconds")
    busy(nvidia, 0)
    assert sentinel.wait() == 0


@pytest.mark.parametrize(("action", "words"), [("shutdown", "-h now"), ("reboot", "-r now")])
def test_shutdown_and_reboot_are_called_once_with_the_right_arguments(
    nvidia: MockMachine, run: Run, a_machine_that_can_be_shut_down: Path, action: str, words: str
) -> None:
    busy(nvidia, 90)
    sentinel = run(*COMMAND, *QUICK, "--kill_action", action)
    sentinel.wait_for_words("GPU Sentinel is armed")
    assert not a_machine_that_can_be_shut_down.exists()
    busy(nvidia, 0)
    assert sentinel.wait() == 0
    assert a_machine_that_can_be_shut_down.read_text() == f"{words}\n"


@pytest.mark.parametrize("redirection", [">/dev/full 2>/dev/full", ">&- 2>&-"])
def test_unwritable_log_does_not_prevent_the_action(
    nvidia: MockMachine, a_machine_that_can_be_shut_down: Path, redirection: str
) -> None:
    words = ("--arm_duration", "0", "--kill_duration", "1", "--kill_action", "shutdown")
    line = f'exec "$@" {redirection}'
    done = subprocess.run(["/bin/sh", "-c", line, "sh", *COMMAND, *words], timeout=60, check=False)
    assert done.returncode == 0
    assert a_machine_that_can_be_shut_down.read_text() == "-h now\n"


def test_failed_shutdown_is_reported_and_retried(
    nvidia: MockMachine, run: Run, a_machine_that_can_be_shut_down: Path
) -> None:
    refusal = a_machine_that_can_be_shut_down.with_name("refuse")
    refusal.touch()
    busy(nvidia, 90)
    sentinel = run(*COMMAND, *QUICK, "--kill_action", "shutdown")
    sentinel.wait_for_words("GPU Sentinel is armed")
    busy(nvidia, 0)
    sentinel.wait_for_words("gpu_sentinel: shutdown failed: ")
    assert "somebody is still logged in" in sentinel.err
    refusal.unlink()
    assert sentinel.wait() == 0


@pytest.fixture
def a_machine_that_can_be_shut_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a stand-in for `shutdown` writes how it was called; nothing else is on PATH."""
    if os.geteuid() != 0:
        pytest.skip("only root may shut down without being asked for a password")
    commands, called = tmp_path / "commands", tmp_path / "called"
    commands.mkdir()
    shutdown = commands / "shutdown"
    shutdown.write_text(
        f"#!/bin/sh\n[ -e '{tmp_path}/refuse' ] && echo 'somebody is still logged in' >&2 && exit 1\n"
        f"echo \"$@\" >> '{called}'\n"
    )
    shutdown.chmod(0o755)
    monkeypatch.setenv("PATH", str(commands))
    monkeypatch.setenv("STOKER_ROOT", str(tmp_path))
    return called


def test_missing_shutdown_permission_is_an_error_at_startup(
    nvidia: MockMachine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("STOKER_ROOT", str(tmp_path))
    done = refused("--kill_action", "shutdown")
    assert done.code == 1
    assert done.err.startswith("gpu_sentinel: nothing here can shut this machine down: ")
    assert done.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arm_duration", "-1"], "must be greater than -1, not -1"),
        (["--kill_duration", "0"], "must be greater than 0, not 0"),
        (["--kill_duration", "1.5"], "'1.5' is not a whole number"),
        (["--kill_threshold", "70"], "70 is not a fraction of 1: write 0.7 for 70%"),
        (["--kill_threshold", "0"], "must be greater than 0: no GPU can be below that"),
        (["--arm_threshold", "1"], "must be less than 1: no GPU can be above that"),
        (["--arm_threshold", "-0.5"], "must be between 0 and 1, not -0.5"),
        (["--arm_threshold", "nan"], "must be between 0 and 1, not nan"),
        (["--arm_threshold", "much"], "'much' is not a number"),
        (["--kill_action", "explode"], "invalid choice: 'explode'"),
        (["--gpu_devices", "first"], "'first' is not a whole number"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], words: str) -> None:
    done = refused(*arguments)
    assert done.code == 2
    assert words in done.err.splitlines()[-1]


def test_missing_gpu_is_refused_alone_and_reported_among_others(nvidia: MockMachine, run: Run) -> None:
    done = refused("--gpu_devices", "7")
    assert (done.code, done.err) == (2, "gpu_sentinel: there is no GPU 7 here: this machine has 0, 1\n")
    busy(nvidia, 90)
    sentinel = run(*COMMAND, *QUICK, "--gpu_devices", "0", "1", "2", "3")
    sentinel.wait_for_words("there is no GPU 2, 3 here: this machine has 0, 1; the others are watched")
    sentinel.wait_for_words("GPU Sentinel is armed")


def test_missing_gpus_are_reported_once_and_awaited(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_ROOT", str(tmp_path))
    sentinel = run(*COMMAND, "--arm_duration", "0", "--kill_duration", "1")
    sentinel.wait_for_words("gpu_sentinel: GPU usage is unknown: no GPU was found")
    with pytest.raises(subprocess.TimeoutExpired):
        sentinel.process.wait(timeout=1.5)
    assert sentinel.err.count("unknown") == 1


def test_unknown_readings_never_trigger(nvidia: MockMachine, run: Run) -> None:
    busy(nvidia, 90)
    sentinel = run(*COMMAND, *QUICK)
    sentinel.wait_for_words("GPU Sentinel is armed")
    for function in ("nvmlDeviceGetSamples", "nvmlDeviceGetUtilizationRates"):
        nvidia.fault(function, code=N_A, gpu=1)
    nvidia.gpus[1].gpm_supported = 0
    busy(nvidia, 0)
    sentinel.wait_for_words("gpu_sentinel: GPU usage is unknown: ")
    nvidia.reset_calls()
    wait_for(lambda: nvidia.calls("nvmlDeviceGetSamples") >= 2, named="two looks at the other GPU")
    assert sentinel.process.poll() is None


def test_ctrl_c_ends_the_sentinel_silently(nvidia: MockMachine, run: Run) -> None:
    sentinel = run(*COMMAND)
    wait_for(lambda: nvidia.calls("nvmlDeviceGetSamples") > 0, named="the first look")
    sentinel.process.send_signal(signal.SIGINT)
    assert sentinel.wait() == 130
    assert sentinel.err == ""


# From Python

EXAMPLE = """
import time
from stoker import Sentinel, get_gpu_usage

def my_callback_fn():
    print("Triggered!")
    exit()

# Create the sentinel that watches the values.
sentinel = Sentinel(
    arm_duration=10,
    arm_threshold=0.7,
    kill_duration=60,
    kill_threshold=0.7,
    kill_fn=my_callback_fn,
)

while True:
    # This is the averaged GPU usage of the devices.
    gpu_usage = get_gpu_usage(device_ids=[0, 1, 2, 3])
    # Add the GPU usage to the sentinel's next state.
    sentinel.tick(gpu_usage)
    # The sentinel operates on ticks, not seconds, so if we want to check every second
    # we must do the timer ourselves.
    time.sleep(1)
"""


def test_example_of_the_original_runs_as_written(nvidia: MockMachine, run: Run) -> None:
    quicker = EXAMPLE.replace("time.sleep(1)", "time.sleep(0.01); print(sentinel.state.name, flush=True)")
    assert quicker != EXAMPLE
    busy(nvidia, 90)
    program = run(sys.executable, "-c", quicker)
    program.wait_for_words("ARMED")
    assert "Triggered!" not in program.out
    busy(nvidia, 10)
    assert program.wait() == 0
    lines = program.out.splitlines()
    assert lines[-1] == "Triggered!"
    assert lines.count("IDLE") == 9
    assert lines.count("ARMED") >= 59
    assert program.err == ""


def test_usage_is_a_fraction_from_one_helper_for_all_calls(nvidia: MockMachine) -> None:
    nvidia.gpus[0].utilization = 50
    nvidia.gpus[1].utilization = 100
    printed = python(
        "from stoker import get_gpu_usage as usage",
        "print(usage(), usage([0]), usage(device_ids=[1]), usage([]), usage([5]))",
    )
    assert printed == "0.75 0.5 1.0 0.75 nan"
    assert nvidia.calls("nvmlInitWithFlags") == 1
    wait_for(lambda: nvidia.calls("nvmlShutdown") == 1, named="the helper's goodbye")


def test_usage_without_a_gpu_is_nan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_ROOT", str(tmp_path))
    assert python("from stoker import get_gpu_usage", "print(get_gpu_usage())") == "nan"


def test_usage_works_in_threads_and_forked_workers(nvidia: MockMachine) -> None:
    busy(nvidia, 50)
    printed = python(
        "import os, threading",
        "from stoker import get_gpu_usage",
        "seen = []",
        "def ask():",
        "    for _ in range(20): seen.append(get_gpu_usage())",
        "threads = [threading.Thread(target=ask) for _ in range(4)]",
        "for thread in threads: thread.start()",
        "for thread in threads: thread.join()",
        "worker = os.fork()",
        "if worker == 0:",
        "    os._exit(0 if get_gpu_usage() == 0.5 else 1)",
        "_, code = os.waitpid(worker, 0)",
        "print(set(seen), len(seen), code, get_gpu_usage())",
    )
    assert printed == "{0.5} 80 0 0.5"
    assert nvidia.calls("nvmlInitWithFlags") == 2  # the program's own helper, and the worker's


def test_program_that_called_usage_exits_although_the_driver_hangs(nvidia: MockMachine) -> None:
    nvidia.fault("nvmlDeviceGetSamples", hang=600)
    usage, helper = python(
        "import os, psutil; os.environ['STOKER_DEADLINE'] = '300ms'",
        "from stoker import get_gpu_usage",
        "print(get_gpu_usage() + get_gpu_usage(), *(child.pid for child in psutil.Process().children()))",
    ).split()
    assert usage == "nan"
    nvidia.clear_faults()
    wait_for(lambda: not psutil.pid_exists(int(helper)), named="the helper's end")


def python(*lines: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()
