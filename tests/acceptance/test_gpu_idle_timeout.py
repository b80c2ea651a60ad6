"""`gpu_idle_timeout` as typed: the transcripts of the original, and what it never does."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest

from tests.support.mock_nvml import MockMachine
from tests.support.terminal import terminal
from tests.support.waiting import wait_for

COMMAND = (sys.executable, "-m", "stoker.dropin.gpu_idle_timeout")
LINE = re.compile(
    r"(?P<time>[0-9-]{10} [0-9:]{8},[0-9]{3}): (?P<rest>(INFO|DEBUG|WARNING|ERROR): gpu_idle_timeout: .*)"
)
A, B = "GPU-a5b02c30-9c95-cb81-e41e-ca204d57aa3b", "GPU-b805d632-775b-c673-fe68-26b26996cd09"
NOT_SUPPORTED = 3


class Ended(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def log(self) -> list[str]:
        """The log without its times; every line must be one."""
        return [rest for _, rest in timed(self.err)]


def timed(log: str) -> list[tuple[float, str]]:
    """The lines with the seconds since the first of them."""
    matches = [LINE.fullmatch(line) for line in log.splitlines()]
    assert all(matches), log
    times = [datetime.strptime(match["time"], "%Y-%m-%d %H:%M:%S,%f") for match in matches if match]  # noqa: DTZ007 - as logged
    return [((at - times[0]).total_seconds(), match["rest"]) for at, match in zip(times, matches, strict=True) if match]


def idle_timeout(*arguments: str, program: Sequence[str] = COMMAND, **environment: str) -> Ended:
    """Runs it to its end, with a standard input that stays open and silent."""
    silent, open_end = os.pipe()
    try:
        done = subprocess.run(
            [*program, *arguments],
            env={**os.environ, **environment},
            stdin=silent,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        os.close(silent)
        os.close(open_end)
    assert "Traceback" not in done.stderr, done.stderr
    return Ended(done.returncode, done.stdout, done.stderr)


# The transcripts

# The whole program except the GPUs, whose readings are scripted, and the time between two samples.
DRIVER = """
import json, logging, os, sys, time
from stoker.dropin import gpu_idle_timeout
from stoker.gpus.model import Look, Unknown
from tests.support.looks import a_gpu, a_reading

SCRIPT = json.loads(os.environ["SCRIPT"])
BEGUN = 1_700_000_000.0
now = 0.0

class ScriptedSampler:
    def __init__(self, prober, every, first):
        self._every = every
        self._next = first
        self._looks = [[0.0] * len(SCRIPT["samples"][0])] * SCRIPT["before"] + SCRIPT["samples"]
        self._taken = 0

    def fileno(self):
        return -1

    def due(self):
        return self._next

    def postpone(self, seconds):
        self._next = time.monotonic() + seconds

    def step(self):
        global now
        if time.monotonic() < self._next:
            return None
        now = self._taken * self._every
        percents = self._looks[self._taken]
        self._taken += 1
        gpus = tuple(a_gpu(place, uuid=uuid) for place, uuid in enumerate(SCRIPT["uuids"]))
        readings = tuple(a_reading(g, p / 100, span=self._every) for g, p in zip(gpus, percents))
        return Look("test", now, BEGUN + now, gpus, readings)

def at_this_time(*arguments, **more):
    record = logging.LogRecord(*arguments, **more)
    record.created, record.msecs = BEGUN + now, 0.0
    return record

logging.setLogRecordFactory(at_this_time)
gpu_idle_timeout.Sampler = ScriptedSampler
gpu_idle_timeout.main()
"""


def scripted(arguments: str, samples: Sequence[tuple[int, int]], *, before: int) -> Ended:
    """Runs it with these percents as samples; `before` is the number of samples before the first that counts."""
    script = {"uuids": [A, B], "samples": samples, "before": before}
    program = (sys.executable, "-c", DRIVER)
    return idle_timeout(
        *arguments.split(),
        program=program,
        SCRIPT=msgspec.json.encode(script).decode(),
        STOKER_GPUS="sim:1",
        PYTHONPATH=f"{Path(__file__).parents[2]}:{os.environ.get('PYTHONPATH', '')}",
    )


FIRST_TRANSCRIPT = """
2024-03-15 11:04:29,052: INFO: gpu_idle_timeout: Starting GPU idle watcher: threshhold_percentage=50%, sample_freq=6, num_samples=5, delay_samples=3, window_size=30
2024-03-15 11:04:35,055: INFO: gpu_idle_timeout: waiting for delay samples. 12 seconds left
2024-03-15 11:04:41,061: INFO: gpu_idle_timeout: waiting for delay samples. 6 seconds left
2024-03-15 11:04:47,084: DEBUG: gpu_idle_timeout: GPU-a5b02c30-9c95-cb81-e41e-ca204d57aa3b usage 0%
2024-03-15 11:04:47,084: DEBUG: gpu_idle_timeout: GPU-b805d632-775b-c673-fe68-26b26996cd09 usage 0%
2024-03-15 11:04:53,111: DEBUG: gpu_idle_timeout: GPU-a5b02c30-9c95-cb81-e41e-ca204d57aa3b usage 0%
2024-03-15 11:04:53,111: DEBUG: gpu_idle_timeout: GPU-b805d632-775b-c673-fe68-26b26996cd09 usage 0%
2024-03-15 11:04:59,135: DEBUG: gpu_idle_timeout: GPU-a5b02c30-9c95-cb81-e41e-ca204d57aa3b usage 0%
2024-03-15 11:04:59,136: DEBUG: gpu_idle_timeout: GPU-b805d632-775b-c673-fe68-26b26996cd09 usage 0%
2024-03-15 11:05:05,157: DEBUG: gpu_idle_timeout: GPU-a5b02c30-9c95-cb81-e41e-ca204d57aa3b usage 0%
2024-03-15 11:05:05,157: DEBUG: gpu_idle_timeout: GPU-b805d632-775b-c673-fe68-26b26996cd09 usage 0%
2024-03-15 11:05:11,182: DEBUG: gpu_idle_timeout: GPU-a5b02c30-9c95-cb81-e41e-ca204d57aa3b usage 0%
2024-03-15 11:05:11,183: DEBUG: gpu_idle_timeout: GPU-b805d632-775b-c673-fe68-26b26996cd09 usage 0%
2024-03-15 11:05:11,183: ERROR: gpu_idle_timeout: usage for all GPUs: ['GPU-a5b02c30-9c95-cb81-e41e-ca204d57aa3b', 'GPU-b805d632-775b-c673-fe68-26b26996cd09'] was below threshhold 50% for last 30 seconds. Killing process.
2024-03-15 11:05:11,183: ERROR: gpu_idle_timeout: process still alive, maybe hung, killing.
"""  # noqa: E501 - as it was written


def test_output_and_timing_equal_the_first_transcript_of_the_original() -> None:
    done = scripted("-t 50 -s 6 -n 5 -d 3 -x grep foo", [(0, 0)] * 5, before=3)
    # The original falls behind by some hundredths at every sample.
    expected = [(round(at / 6) * 6.0, rest) for at, rest in timed(FIRST_TRANSCRIPT.strip())]
    assert timed(done.err) == expected
    assert done.code == 1


def test_determined_example_that_hangs_is_killed_seven_samples_later() -> None:
    busy = [(37, 19), (68, 70), (38, 100), (70, 63), (55, 55)]
    hanging = [(0, 1)] * 7
    done = scripted("-t 20 -s 3 -n 7 -d 1 -x python3 -c input()", busy + hanging, before=1)
    start = (
        "INFO: gpu_idle_timeout: Starting GPU idle watcher: threshhold_percentage=20%, sample_freq=3, num_samples=7, "
        "delay_samples=1, window_size=21"
    )
    expected = [(0.0, start)]
    for place, (first, second) in enumerate(busy + hanging, start=1):
        expected.append((place * 3.0, f"DEBUG: gpu_idle_timeout: {A} usage {first}%"))
        expected.append((place * 3.0, f"DEBUG: gpu_idle_timeout: {B} usage {second}%"))
    words = f"usage for all GPUs: ['{A}', '{B}'] was below threshhold 20% for last 21 seconds. Killing process."
    expected.append((36.0, f"ERROR: gpu_idle_timeout: {words}"))
    expected.append((36.0, "ERROR: gpu_idle_timeout: process still alive, maybe hung, killing."))
    assert timed(done.err) == expected
    assert done.code == 1


def test_real_run_has_the_output_and_timing_of_the_original(nvidia: MockMachine) -> None:
    first, second = (gpu.uuid for gpu in nvidia.gpus)
    # A busy machine may hold it up now and then: once in three times it keeps its times.
    tries = (idle_timeout("-t", "50", "-s", "1", "-n", "2", "-d", "2", "-x", "grep", "foo") for _ in range(3))
    done = next(done for done in tries if [int(at + 0.2) for at, _ in timed(done.err)] == [0, 1, 2, 2, 3, 3, 3, 3])
    lines = timed(done.err)
    words = f"usage for all GPUs: ['{first}', '{second}'] was below threshhold 50% for last 2 seconds. Killing process."
    start = "threshhold_percentage=50%, sample_freq=1, num_samples=2, delay_samples=2, window_size=2"
    assert [rest.replace(": gpu_idle_timeout", "") for _, rest in lines] == [
        f"INFO: Starting GPU idle watcher: {start}",
        "INFO: waiting for delay samples. 1 seconds left",
        f"DEBUG: {first} usage 0%",
        f"DEBUG: {second} usage 0%",
        f"DEBUG: {first} usage 0%",
        f"DEBUG: {second} usage 0%",
        f"ERROR: {words}",
        "ERROR: process still alive, maybe hung, killing.",
    ]
    assert done.code == 1


def test_real_job_that_hangs_is_killed_n_samples_later(nvidia: MockMachine, tmp_path: Path) -> None:
    for gpu in nvidia.gpus:
        gpu.utilization = 60
    ready = tmp_path / "ready"
    with running("-t", "50", "-s", "1", "-n", "2", "-d", "0", "-x", "sh", "-c", f"touch {ready}; cat") as job:
        wait_for(ready.exists)
        wait_for(lambda: job.err.count("usage 60%") >= 6, named="three samples at work")
        assert job.process.poll() is None
        for gpu in nvidia.gpus:
            gpu.utilization = 0
        assert job.process.wait(60) == 1
    # The GPU that stopped last counts: a sample may fall between the two.
    last = f"DEBUG: gpu_idle_timeout: {nvidia.gpus[-1].uuid} usage "
    samples = [line.removeprefix(last) for line in Ended(0, "", job.err).log if line.startswith(last)]
    # The sample during which it stopped working still has work in it.
    assert samples[-2:] == ["0%"] * 2
    assert samples.count("0%") == 2


class Running:
    """It, while it runs, with its output in files."""

    def __init__(self, folder: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._out, self._err = folder / "stdout", folder / "stderr"
        self._silent, self._open_end = os.pipe()
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                command, env={**os.environ, **environment}, stdin=self._silent, stdout=out, stderr=err
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._silent)
        os.close(self._open_end)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert "Traceback" not in self.err


@pytest.fixture(autouse=True)
def _a_folder_to_run_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def running(*arguments: str, program: Sequence[str] = COMMAND, **environment: str) -> Running:
    return Running(Path.cwd(), [*program, *arguments], environment)


QUICK = ("-t", "50", "-s", "1", "-n", "1", "-d", "1")
# No sample comes before a command is over that does next to nothing, also where that takes its time.
SELDOM = ("-s", "600")


def until_idle(nvidia: MockMachine, ready: Callable[[Running], object], *arguments: str, **more: Any) -> Ended:
    """Runs it while the GPUs work until the command is ready, and then do nothing."""
    for gpu in nvidia.gpus:
        gpu.utilization = 90
    with running(*QUICK, *arguments, **more) as job:
        wait_for(lambda: ready(job), named="the command's readiness")
        for gpu in nvidia.gpus:
            gpu.utilization = 0
        code = job.process.wait(60)
        return Ended(code, job.out, job.err)


def until_said(words: str, **environment: str) -> Ended:
    """Runs a command that goes on for another sample when these words were logged, and ends with code 5."""
    script = f"until grep -q '{words}' stderr; do sleep 0.05; done; sleep 1.2; exit 5"
    with running(*QUICK, "sh", "-c", script, **environment) as job:
        code = job.process.wait(60)
        return Ended(code, job.out, job.err)


def test_readings_are_logged_only_with_debug(nvidia: MockMachine) -> None:
    done = idle_timeout(*QUICK, "cat")
    assert [line.split(":")[0] for line in done.log] == ["INFO", "ERROR", "ERROR"]


# The command


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143)])
def test_exit_code_and_output_of_the_command_pass_through(nvidia: MockMachine, script: str, code: int) -> None:
    done = idle_timeout(*SELDOM, "sh", "-c", f"echo out; {script}")
    assert (done.code, done.out) == (code, "out\n")
    assert len(done.log) == 1


@pytest.mark.parametrize("name", ["gpu_idle_timeout", "gpu_sentinel", "gpu_mon"])
def test_script_of_the_same_name_also_runs_as_a_copy(nvidia: MockMachine, name: str, tmp_path: Path) -> None:
    found = importlib.util.find_spec(name)
    assert found is not None
    assert found.origin is not None
    copy = shutil.copy(found.origin, tmp_path)
    assert os.access(copy, os.X_OK)
    shown = subprocess.run([sys.executable, copy, "--help"], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    assert shown.stdout.startswith(f"usage: {name} ")
    if name == "gpu_idle_timeout":
        done = subprocess.run([sys.executable, copy, "-d", "0", "sh", "-c", "exit 3"], check=False, timeout=60)
        assert done.returncode == 3


def test_unwritable_log_does_not_change_the_exit_code(nvidia: MockMachine) -> None:
    done = subprocess.run(["sh", "-c", 'exec "$@" 2>/dev/full', "sh", *COMMAND, "sh", "-c", "exit 3"], check=False)
    assert done.returncode == 3


def test_missing_or_not_executable_command_is_reported(nvidia: MockMachine) -> None:
    assert idle_timeout(*SELDOM, "no-such-command") == Ended(
        127, "", "gpu_idle_timeout: cannot run 'no-such-command': there is no such command\n"
    )
    done = idle_timeout(*SELDOM, "/etc/passwd")
    assert done.code == 126
    assert done.err.startswith("gpu_idle_timeout: cannot run '/etc/passwd': ")


def test_options_after_the_command_belong_to_the_command(nvidia: MockMachine) -> None:
    assert idle_timeout("echo", "-x", "-t", "5").out == "-x -t 5\n"
    assert idle_timeout("-s", "9", "--", "echo", "-x", "--", "y").out == "-x -- y\n"


ESCAPING = """
import os, signal, sys, time
def note(): open(sys.argv[1], "a").write(f"{os.getpid()}\\n")
for way in ("child", "session", "double"):
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if way != "child":
            os.setsid()
        if way == "double" and os.fork():
            os._exit(0)
        note()
        time.sleep(600)
    if way == "double": os.waitpid(child, 0)
note()
while len(open(sys.argv[1]).readlines()) < 4: time.sleep(0.01)
if len(sys.argv) == 2: time.sleep(600)
"""


def escaped() -> list[int]:
    return [int(line) for line in Path("pids").read_text().split()] if Path("pids").exists() else []


def is_gone(pid: int) -> bool:
    """Also when nobody has collected it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_descendants_of_a_killed_command_are_stopped(nvidia: MockMachine) -> None:
    done = until_idle(nvidia, lambda _job: len(escaped()) == 4, sys.executable, "-c", ESCAPING, "pids")
    assert [pid for pid in escaped() if not is_gone(pid)] == []
    assert done.code == 1


def test_descendants_of_an_ended_command_are_stopped(nvidia: MockMachine) -> None:
    done = idle_timeout(*SELDOM, sys.executable, "-c", ESCAPING, "pids", "done")
    assert len(escaped()) == 4
    assert [pid for pid in escaped() if not is_gone(pid)] == []
    assert done.code == 0
    assert "left 3 process(es) behind" in done.log[-1]


def test_command_ends_when_the_program_is_killed(nvidia: MockMachine) -> None:
    with running("sh", "-c", "echo $$ > pid; exec sleep 600") as job:
        wait_for(lambda: Path("pid").exists() and Path("pid").read_text().endswith("\n"), named="the command's start")
        pid = int(Path("pid").read_text())
        job.process.kill()
        job.process.wait()
        wait_for(lambda: is_gone(pid), named="the command's end")


def test_command_is_killed_and_reported_when_the_reaper_is_killed(nvidia: MockMachine) -> None:
    with running("sh", "-c", "echo $$ $PPID > pids; exec sleep 600") as job:
        wait_for(lambda: Path("pids").exists() and Path("pids").read_text().endswith("\n"), named="the command's start")
        command, reaper = map(int, Path("pids").read_text().split())
        assert reaper != job.process.pid
        os.kill(reaper, signal.SIGKILL)
        assert job.process.wait(60) == 1
        assert is_gone(command)
        assert "the process that guards the command was killed from outside" in job.err


def test_signals_reach_the_command_and_its_exit_code_is_returned(nvidia: MockMachine) -> None:
    script = "trap 'echo received; exit 9' TERM; touch ready; while :; do sleep 0.05; done"
    with running("sh", "-c", script) as job:
        wait_for(Path("ready").exists)
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(60) == 9
        assert job.out == "received\n"


def test_second_ctrl_c_kills_at_once_and_a_second_sigint_from_a_program_does_not(nvidia: MockMachine) -> None:
    script = "import signal, time; signal.signal(2, lambda *_: print('no', flush=True)); print('ready', flush=True)\n"
    script += "while True: time.sleep(1)"
    with terminal([*COMMAND, sys.executable, "-c", script]) as screen:
        screen.until("ready")
        for _ in range(3):
            before = len(screen.drawn)
            os.kill(screen.pid, signal.SIGINT)
            screen.until("no", before)
        # The kernel merges two presses that come before the first is handled: press again.
        while os.waitid(os.P_PID, screen.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            screen.press("\x03")
            screen._read(0.2)
        assert screen.code() in {130, -signal.SIGINT}  # the latter: of a press more, when all was over


# A signal before the kill

# It gives handlers three seconds, in which a busy machine may not let them have their turn.
WITH_TIME = """
from stoker.dropin import gpu_idle_timeout
gpu_idle_timeout.HANDLERS_TIME = 60.0
gpu_idle_timeout.main()
"""
PATIENT = (sys.executable, "-c", WITH_TIME)
TALKER = "import os, signal, sys, time\ndef end(*_): os.write(1, b'ended politely\\n'); sys.exit()\n"


def test_signal_before_kill_is_configurable(nvidia: MockMachine) -> None:
    program = f"{TALKER}signal.signal(signal.SIGTERM, end)\nos.write(1, b'ready\\n')\ntime.sleep(600)"
    words = ("--signal-name", "SIGTERM", sys.executable, "-c", program)
    done = until_idle(nvidia, lambda job: job.out, *words, program=PATIENT)
    assert (done.code, done.out) == (1, "ready\nended politely\n")
    assert re.fullmatch(r"INFO: gpu_idle_timeout: Sending signal SIGTERM to process \d+", done.log[-1])


def test_command_that_ignores_the_signal_is_killed_after_three_seconds(nvidia: MockMachine) -> None:
    words = ("--signal-name", "TERM", "sh", "-c", "trap '' TERM; echo ready; cat")
    done = until_idle(nvidia, lambda job: job.out, *words)
    (asked, _), (killed, said) = timed(done.err)[-2:]
    assert 2.9 < killed - asked < 12
    assert said == "ERROR: gpu_idle_timeout: process still alive, maybe hung, killing."
    assert done.code == 1


def test_children_are_signalled_before_their_parents(nvidia: MockMachine) -> None:
    program = (
        f"{TALKER}signal.signal(signal.SIGQUIT, end)\nif os.fork() == 0: os.fork()\n"
        "os.write(1, f'{os.getpid()} {os.getppid()}\\n'.encode())\ntime.sleep(600)"
    )
    words = ("--signal-children", sys.executable, "-c", program)
    done = until_idle(nvidia, lambda job: job.out.count("\n") == 3, *words, program=PATIENT)
    result = [line.split() for line in done.out.splitlines() if line[0].isdigit()]
    parents = {int(pid): int(parent) for pid, parent in result}
    order = [int(line.rpartition(" ")[2]) for line in done.log if "Sending signal SIGQUIT to process" in line]
    assert sorted(order) == sorted(parents)
    assert len(order) == 3
    for pid in order:
        assert parents[pid] not in order[: order.index(pid)]
    assert done.out.count("ended politely") == 3
    assert "still alive" not in done.err


# Which GPUs


def test_all_waits_for_every_gpu_and_any_for_one(nvidia: MockMachine) -> None:
    nvidia.gpus[0].utilization = 90
    patient = idle_timeout(*QUICK, "sh", "-c", "sleep 1.5; exit 5")
    assert patient.code == 5
    done = idle_timeout(*QUICK, "-a", "any", "cat")
    assert done.code == 1
    assert f"usage for any GPUs: ['{nvidia.gpus[1].uuid}'] was below threshhold 50%" in done.err


# Unknown is never idle


def test_unknown_utilization_never_kills(nvidia: MockMachine) -> None:
    for gpu in nvidia.gpus:
        gpu.gpm_supported = 0
    for function in ("nvmlDeviceGetSamples", "nvmlDeviceGetUtilizationRates"):
        nvidia.fault(function, code=NOT_SUPPORTED)
    done = until_said("usage unknown")
    assert done.code == 5
    assert [line for line in done.log if "usage unknown" in line] == [
        f"WARNING: gpu_idle_timeout: {gpu.uuid} usage unknown: not supported by this GPU" for gpu in nvidia.gpus
    ]


def test_missing_gpus_never_kill() -> None:
    done = until_said("usage unknown", STOKER_ROOT=str(Path.cwd()))
    assert done.code == 5
    (line,) = [line for line in done.log if "unknown" in line]
    assert line.startswith("WARNING: gpu_idle_timeout: usage unknown: no GPU was found (nvml: ")


def test_hanging_driver_never_kills_and_delays_nothing(nvidia: MockMachine) -> None:
    nvidia.fault("nvmlDeviceGetSamples", hang=600)
    # It ends long before the driver answers.
    assert until_said("usage unknown: the driver", STOKER_DEADLINE="300ms").code == 5


# The help and the mistakes


HELP = """
usage: gpu_idle_timeout [-h] [-t THRESHHOLD_PERCENTAGE] [-s SAMPLE_FREQ] [-n NUM_SAMPLES] [-d DELAY_SAMPLES]
Launches a process and terminates when GPU usage drops below threshhold during sample window.
  exec_command_and_args
                        Command and arguments to execute
  -h, --help            show this help message and exit
  -t THRESHHOLD_PERCENTAGE, --threshhold-percentage THRESHHOLD_PERCENTAGE
                        Threshhold in percentage of GPU usage which triggers a failure. Must be greater than 0. (default: 1)
  -s SAMPLE_FREQ, --sample-freq SAMPLE_FREQ
                        How frequently, in seconds, to sample the GPU usage. Must be greater than 0. (default: 5)
  -n NUM_SAMPLES, --num-samples NUM_SAMPLES
                        Number of samples in window used to evaluate GPU usage. Must be greater than 0. (default: 60)
  -d DELAY_SAMPLES, --delay-samples DELAY_SAMPLES
                        Number of samples to delay before evaluating GPU usage. (default: 12)
  -a ALL_OR_ANY, --all_or_any ALL_OR_ANY
                        Whether to verify that all or any of the GPUs have the specified threshold. Must be either all or any (default: all)
  --signal-children     Whether to signal the children of the process first. (default: False)
  -x, --debug           Enable debug logging (reports GPU readings each sample period). (default: False)
"""  # noqa: E501 - as it was written


def test_help_has_the_options_of_the_original_in_order() -> None:
    done = idle_timeout("--help", COLUMNS="400")
    assert done.code == 0
    place = 0
    # From Python 3.13 on, argparse names the value of an option once: `-t, --threshold VALUE`.
    expected = re.sub(r"(-\w) [A-Z_{},a-z]+, --", r"\1, --", HELP) if sys.version_info >= (3, 13) else HELP
    for words in expected.strip("\n").splitlines():
        assert words in done.out[place:]
        place = done.out.index(words, place)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("-t 0", "argument -t/--threshhold-percentage: must be greater than 0, not 0"),
        ("-t 101", "argument -t/--threshhold-percentage: must be 100 at the most, not 101"),
        ("-s 0", "argument -s/--sample-freq: must be greater than 0, not 0"),
        ("-s 0.5", "argument -s/--sample-freq: '0.5' is not a whole number"),
        ("-n -3", "argument -n/--num-samples: must be greater than 0, not -3"),
        ("-d -1", "argument -d/--delay-samples: must be greater than -1, not -1"),
        ("-a most", "argument -a/--all_or_any: invalid choice: 'most'"),
        ("--signal-name SIGNOTHING", "argument --signal-name: 'SIGNOTHING' is not a signal"),
        ("--frequency 3", "argument"),
    ],
)
def test_invalid_arguments_are_refused(arguments: str, words: str) -> None:
    done = idle_timeout(*arguments.split(), "touch", "started")
    assert done.code == 2
    assert words in done.err.splitlines()[-1]
    assert not Path("started").exists()


# Without a command: the Determined task around it


class Master:
    """A Determined master that notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.refusals = 0
        master = self

        class Answers(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200)

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                refused = master.refusals > 0
                master.refusals -= refused
                master.asked.append(self.path)
                self._answer(404 if refused else 200)

            def _answer(self, code: int) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: Any) -> None:
                """Not into the test's output."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
        self.environment = {
            "DET_MASTER": f"http://127.0.0.1:{self.server.server_port}",
            "DET_SESSION_TOKEN": "token",
            "DET_TASK_TYPE": "NOTEBOOK",
            "DET_TASK_ID": "5c902731",
        }


@pytest.fixture
def master() -> Iterator[Master]:
    master = Master()
    thread = threading.Thread(target=master.server.serve_forever, args=(0.02,))
    thread.start()
    yield master
    master.server.shutdown()
    thread.join()
    master.server.server_close()


def test_surrounding_determined_task_is_killed_once_without_a_command(nvidia: MockMachine, master: Master) -> None:
    nvidia.gpus[0].utilization = 90
    done = idle_timeout("-t", "50", "-s", "1", "-n", "2", "-d", "1", "-a", "any", "-x", **master.environment)
    assert master.asked == ["/api/v1/notebooks/5c902731/kill"]
    assert done.code == 1
    assert done.log[0].startswith("INFO: gpu_idle_timeout: Starting GPU idle watcher: threshhold_percentage=50%")
    words = f"usage for any GPUs: ['{nvidia.gpus[1].uuid}'] was below threshhold 50% for last 2 seconds."
    assert done.log[-1] == f"ERROR: gpu_idle_timeout: {words}"


def test_failed_task_kill_is_retried_after_another_window(nvidia: MockMachine, master: Master) -> None:
    master.refusals = 1
    done = idle_timeout(*QUICK, **master.environment)
    assert master.asked == ["/api/v1/notebooks/5c902731/kill"] * 2
    assert sum("was below threshhold" in line for line in done.log) == 2
    assert any("answered 404" in line for line in done.log)
    assert done.code == 1


def test_missing_determined_environment_is_reported_at_once(nvidia: MockMachine) -> None:
    done = idle_timeout("-t", "50", "-s", "30", "-n", "6", "-d", "2", "-a", "any", "-x")
    assert done.code == 1
    assert done.err.startswith("gpu_idle_timeout: ")
    assert "not the inside of a Determined task" in done.err
    assert len(done.err.splitlines()) == 1
    assert nvidia.calls() == 0
