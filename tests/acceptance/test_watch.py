"""`stoker watch` as typed."""

import itertools
import os
import re
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from stoker.procfs import identify, is_alive
from tests.support.command import Finished, stoker, stoker_command
from tests.support.descendants import descendants
from tests.support.http_receiver import Receiver
from tests.support.mock_nvml import MockMachine
from tests.support.stand_ins import StandIns
from tests.support.waiting import wait_for

SOON = ("--for", "300ms", "--every", "100ms", "--after", "0s")
NEVER = ("--for", "1h", "--every", "100ms", "--after", "0s")


class Machine:
    """A machine whose power switch is a stand-in: PATH holds nothing else, and its files are below a directory."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "root"
        (self.root / "proc/1").mkdir(parents=True)
        (self.root / "proc/1/comm").write_text("systemd\n")
        self.programs = StandIns(directory / "bin")

    def boot_systemd(self) -> None:
        (self.root / "run/systemd/system").mkdir(parents=True)

    @property
    def environment(self) -> dict[str, str]:
        return {"STOKER_ROOT": str(self.root), "PATH": self.programs.path}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


class Watching:
    """A watch that goes on beside the test, its stderr in a file."""

    def __init__(self, directory: Path) -> None:
        self._log = directory / "stderr"
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [stoker_command(), "watch", *arguments],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        self._processes.append(process)
        return process

    @property
    def said(self) -> list[str]:
        return self._log.read_text().splitlines()

    def wait_until_said(self, words: str) -> None:
        wait_for(lambda: words in self._log.read_text(), named=f"{words!r} among {self.said}")

    def clear(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    there = Watching(tmp_path)
    yield there
    there.clear()


def test_dry_run_reports_the_actions_and_does_nothing(nvidia: MockMachine, machine: Machine) -> None:
    machine.boot_systemd()
    machine.programs.add("systemctl")
    done = stoker("watch", *SOON, "--then", "shutdown", "--dry-run", environment=machine.environment)
    assert done.code == 124
    end = "shut this machine down by `systemctl poweroff`"
    assert done.err.splitlines() == [
        (
            f"stoker: watching GPU 0, GPU 1: all GPUs below 1% for 0.3s; or hung at full utilization "
            f"for 1h, then {end} (dry run: nothing is done)"
        ),
        *[line for line in done.err.splitlines()[1:-1] if "unless that changes" in line and f": would {end}" in line],
        f"stoker: GPU 0 and GPU 1 stayed below 1% for 0.3s; dry run: would {end} now",
    ]
    assert machine.programs.calls == []


@pytest.mark.parametrize(
    ("action", "systemd", "call"),
    [
        ("shutdown", True, "systemctl poweroff"),
        ("reboot", True, "systemctl reboot"),
        ("shutdown", False, "shutdown -h now"),
        ("reboot", False, "shutdown -r now"),
    ],
)
def test_idle_machine_is_shut_down_once(
    nvidia: MockMachine, machine: Machine, action: str, systemd: bool, call: str
) -> None:
    if systemd:
        machine.boot_systemd()
    machine.programs.add("systemctl")
    machine.programs.add("shutdown")
    if os.geteuid() != 0:  # a user who may do it without a password
        machine.programs.add("sudo", 'case "$*" in *-l*) ;; *) shift; exec "$@" ;; esac')
    done = stoker("watch", *SOON, "--then", action, environment=machine.environment)
    assert done.code == 124
    ended = [made for made in machine.programs.calls if made.startswith(("systemctl", "shutdown"))]
    assert ended == [call]


def as_unprivileged_user(*arguments: str, environment: Mapping[str, str]) -> Finished:
    """Runs the command without root, also when the tests run as root."""
    program = "import os; os.geteuid = lambda: 1000; from stoker.cli import main; main()"
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return Finished(done.returncode, done.stdout, done.stderr, time.monotonic() - begun)


def test_missing_permission_is_an_error_at_startup(nvidia: MockMachine, machine: Machine) -> None:
    machine.boot_systemd()
    machine.programs.add("systemctl")
    machine.programs.add("busctl", "echo 's \"challenge\"'")
    machine.programs.add("sudo", "echo 'sudo: a password is required' >&2; exit 1")
    done = as_unprivileged_user("watch", "--then", "shutdown", environment=machine.environment)
    assert done.code == 125
    [sentence] = done.err.splitlines()
    assert "may not shut this machine down without a password (sudo says: sudo: a password is required)" in sentence
    assert "NOPASSWD" in sentence
    assert not any(call.startswith("systemctl") for call in machine.programs.calls)


def test_actions_run_in_order_and_continue_after_a_failure(nvidia: MockMachine, tmp_path: Path) -> None:
    log = tmp_path / "log"
    done = stoker(
        "watch", *SOON, "--warn-at", "off",
        "--then", f"exec 'echo first >> {log}'",
        "--then", f"exec echo second >> {log}; exit 3",
        "--then", "exec", f"echo third $STOKER_EVENT >> {log}",
        "--then", f"exec echo last >> {log}",
    )  # fmt: skip
    assert log.read_text().splitlines() == ["first", "second", "third idle", "last"]
    assert done.code == 125
    result = [line for line in done.err.splitlines() if "failed" in line]
    assert result == ["stoker: failed: the command of exec ended with code 3"]


def test_command_past_its_timeout_is_killed_and_later_actions_run(nvidia: MockMachine) -> None:
    with Receiver().listening() as receiver:
        then = ("--then", "exec", "sleep 300 & wait", "--then", f"notify json://127.0.0.1:{receiver.port}/")
        done = stoker("watch", *SOON, "--warn-at", "off", *then, "--exec-timeout", "300ms", timeout=120)
        assert len(receiver.asked) == 1
    assert done.code == 125
    result = [line for line in done.err.splitlines() if "failed" in line]
    assert result == ["stoker: failed: the command of exec was ended because it took longer than 0.3s"]


@pytest.mark.parametrize(
    ("options", "code"), [((), 124), (("--idle-exit-code", "7"), 7), (("--idle-exit-code", "0"), 0)]
)
def test_exit_action_ends_the_watcher_with_its_code(nvidia: MockMachine, options: tuple[str, ...], code: int) -> None:
    assert stoker("watch", *SOON, "--then", "exit", *options).code == code


def test_facts_are_passed_to_the_command(nvidia: MockMachine) -> None:
    nvidia.gpus[1].utilization = 80
    done = stoker("watch", *SOON, "--require", "any", "--then", "exec", "echo $STOKER_GPUS_IDLE,$STOKER_HOST")
    assert done.code == 124
    assert done.out == f"{nvidia.gpus[0].uuid},{socket.gethostname()}\n"


def test_busy_gpu_triggers_nothing_until_idle(nvidia: MockMachine, watching: Watching, tmp_path: Path) -> None:
    nvidia.gpus[1].utilization = 90
    process = watching.start(*SOON, "--then", f"exec touch {tmp_path}/acted")
    watching.wait_until_said("watching GPU 0, GPU 1")
    nvidia.reset_calls()
    wait_for(lambda: nvidia.calls("nvmlDeviceGetSamples") > 20)  # ten looks, three times the window
    assert not (tmp_path / "acted").exists()
    nvidia.gpus[1].utilization = 0
    assert process.wait(60) == 124
    assert (tmp_path / "acted").exists()


def test_only_the_chosen_gpus_count(nvidia: MockMachine) -> None:
    nvidia.gpus[1].utilization = 90
    done = stoker("watch", *SOON, "--gpus", "0", "--then", "exit")
    assert done.code == 124
    assert "watching GPU 0: " in done.err


def test_gpus_that_never_worked_do_not_arm(nvidia: MockMachine, watching: Watching) -> None:
    process = watching.start(*SOON, "--arm-above", "80%", "--then", "exit")
    watching.wait_until_said("armed once a GPU was at 80% or more")
    nvidia.reset_calls()
    wait_for(lambda: nvidia.calls("nvmlDeviceGetSamples") > 20)
    assert process.poll() is None
    nvidia.gpus[0].utilization = 95
    watching.wait_until_said("armed: GPUs have been active")
    nvidia.gpus[0].utilization = 0
    assert process.wait(60) == 124


def test_process_is_stopped_with_its_tree(nvidia: MockMachine, tmp_path: Path) -> None:
    job = subprocess.Popen(["sh", "-c", f"setsid sleep 300 & echo $! > {tmp_path}/child; wait"])
    try:
        wait_for(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text().strip())
        child = identify(int((tmp_path / "child").read_text()))
        done = stoker("watch", *SOON, "--then", "stop", str(job.pid), "--grace", "60s", timeout=120)
        assert done.code == 124
        assert f"now: stop process {job.pid} (sh) and everything it started" in done.err
        assert job.wait(60) == -signal.SIGTERM
        assert child is not None
        assert not is_alive(child)
    finally:
        job.kill()
        job.wait()


def test_repeat_acts_once_per_idle_period(nvidia: MockMachine, watching: Watching, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    process = watching.start(*SOON, "--repeat", "--then", f"exec echo idle >> {log}")
    wait_for(lambda: log.read_text().count("idle") == 1)
    watching.wait_until_said("watching again")
    nvidia.gpus[0].utilization = 90
    watching.wait_until_said("armed: GPUs have been active")
    nvidia.gpus[0].utilization = 0
    wait_for(lambda: log.read_text().count("idle") == 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_signal_ends_the_watcher_and_leaves_no_process(
    nvidia: MockMachine, watching: Watching, number: signal.Signals, code: int
) -> None:
    process = watching.start(*NEVER, "--then", "exit")
    watching.wait_until_said("watching GPU 0")
    helpers = descendants(process.pid)
    assert helpers  # what reads the GPUs
    process.send_signal(number)
    assert process.wait(60) == code
    wait_for(lambda: not any(is_alive(helper) for helper in helpers), named="the end of the helper")


def test_running_command_ends_with_the_watcher(nvidia: MockMachine, watching: Watching, tmp_path: Path) -> None:
    process = watching.start(*SOON, "--then", f"exec echo $$ > {tmp_path}/pid; sleep 300", "--exec-timeout", "5m")
    file = tmp_path / "pid"
    shell = identify(int(wait_for(lambda: file.read_text().strip() if file.exists() else None)))
    assert shell is not None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert not is_alive(shell)


def test_ignored_signals_stay_ignored(nvidia: MockMachine, watching: Watching) -> None:
    """As with nohup, and as a shell starts what it puts into the background."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = watching.start(*NEVER, "--then", "exit")
    finally:
        signal.signal(signal.SIGHUP, before)
    watching.wait_until_said("watching GPU 0")
    process.send_signal(signal.SIGHUP)
    nvidia.reset_calls()
    wait_for(lambda: nvidia.calls("nvmlDeviceGetSamples") > 4)
    assert process.poll() is None


def test_blocked_log_does_not_prevent_the_action(nvidia: MockMachine, tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [stoker_command(), "watch", *SOON, "--then", f"exec touch {tmp_path}/acted"]
    try:
        assert subprocess.run(command, stderr=writer, timeout=60, check=False).returncode == 124
    finally:
        os.close(writer)
    assert (tmp_path / "acted").exists()


def test_hanging_driver_is_never_idle(nvidia: MockMachine, watching: Watching) -> None:
    nvidia.gpus[0].utilization = 90
    process = watching.start(*SOON, "--then", "exit", "--deadline", "300ms", "--warn-at", "off")
    watching.wait_until_said("watching GPU")
    nvidia.fault("nvmlDeviceGetSamples", hang=600)
    nvidia.wait_until_hanging(deadline=60)
    nvidia.gpus[0].utilization = 0
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1.5)  # five times the window
    nvidia.clear_faults()
    assert process.wait(60) == 124


def test_systemd_is_notified_while_the_driver_hangs(nvidia: MockMachine, watching: Watching, tmp_path: Path) -> None:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(60)
    with manager:
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1200000"}
        process = watching.start(*NEVER, "--then", "exit", environment=environment)
        assert (
            manager.recv(4096)
            == b"READY=1\nSTATUS=watching: all GPUs below 1% for 1h; or hung at full utilization for 1h"
        )
        nvidia.fault("nvmlDeviceGetSamples", hang=600)
        nvidia.wait_until_hanging(deadline=60)
        signs: list[float] = []
        while len(signs) < 4:
            if manager.recv(4096) == b"WATCHDOG=1":
                signs.append(time.monotonic())
        # Most of them: a busy machine may hold one up.
        assert statistics.median(after - before for before, after in itertools.pairwise(signs)) < 1.2
        # Still while it hangs: what is sent after every look would fill the socket if nobody read it for a moment.
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: manager.recv(4096) == b"STOPPING=1")
        assert process.wait(60) == 143


def test_watchdog_messages_continue_during_a_slow_action(
    nvidia: MockMachine, watching: Watching, tmp_path: Path
) -> None:
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(60)
    with manager:
        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "800000"}
        line = f"while ! [ -e {tmp_path}/go ]; do sleep 0.05; done"
        # Seldom looks: there is a word after each, and the socket holds ten if nobody reads it for a moment.
        process = watching.start(*SOON, "--every", "300ms", "--then", "exec", line, environment=environment)
        wait_for(lambda: manager.recv(4096).startswith(b"STATUS=acting: run "))
        for _ in range(3):
            assert manager.recv(4096) == b"WATCHDOG=1"
        (tmp_path / "go").touch()
        assert process.wait(60) == 124


def test_warning_and_notification_are_sent(nvidia: MockMachine, watching: Watching) -> None:
    with Receiver().listening() as receiver:
        then = ("--then", f"notify json://127.0.0.1:{receiver.port}/s3cret", "--then", "exit")
        process = watching.start(*NEVER, "--warn-at", "0.001%", *then)
        warned = wait_for(lambda: receiver.asked, named="the warning")[0].json()["message"]
        assert re.search(r"in (59m.*|1h), unless that changes: notify by json://, then exit\.", warned)
        assert "s3cret" not in "".join(watching.said)
        process.kill()
        receiver.asked.clear()
        done = stoker("watch", *SOON, "--warn-at", "off", *then)
        assert done.code == 124
        (result,) = (asked.json()["message"] for asked in receiver.asked)
    assert result == "GPU 0 and GPU 1 stayed below 1% for 0.3s (rule: all GPUs below 1% for 0.3s)."
    assert "s3cret" not in done.err


def test_failed_message_is_reported_and_later_actions_run(nvidia: MockMachine, tmp_path: Path) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else can
        closed = f"json://127.0.0.1:{deaf.getsockname()[1]}/s3cret"
        then = ("--then", "notify", closed, "--then", f"exec touch {tmp_path}/acted")
        done = stoker("watch", *SOON, "--warn-at", "off", *then)
    assert done.code == 125
    assert "failed: the message by json:// was not delivered" in done.err
    assert "s3cret" not in done.err
    assert (tmp_path / "acted").exists()


def test_startup_hook_kills_the_determined_task(nvidia: MockMachine) -> None:
    with Receiver().listening() as master:
        environment = {
            **os.environ,
            "DET_MASTER": f"http://127.0.0.1:{master.port}",
            "DET_TASK_TYPE": "TRIAL",
            "DET_TASK_ID": "7.abc",
            "DET_TRIAL_ID": "42",
            "DET_SESSION_TOKEN": "token",
        }
        line = shlex.join([stoker_command(), "watch", *SOON, "--then", "determined"])
        hook = subprocess.run(["sh", "-c", f"{line} < /dev/null > /dev/null 2>&1 &"], env=environment, check=True)
        assert hook.returncode == 0
        wait_for(lambda: any(asked.method == "POST" for asked in master.asked), named="the call that ends the task")
        assert [asked.path for asked in master.asked] == ["/api/v1/me", "/api/v1/trials/42/kill"]


def test_missing_determined_environment_is_reported_at_once(nvidia: MockMachine) -> None:
    done = stoker("watch", "--then", "determined", environment={"DET_TASK_TYPE": "", "DET_TASK_ID": ""})
    assert done.code == 125
    assert "this is not the inside of a Determined task" in done.err


def test_unit_is_printed_for_the_same_command_line(tmp_path: Path) -> None:
    words = ["--below", "5%", "--then", "exec echo $STOKER_REASON", "--then", "shutdown"]
    environment = {"STOKER_GPUS": "nvml", "PATH": "/nowhere"}
    done = stoker("watch", *words, "--print-unit", environment=environment)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    [start] = [line.removeprefix("ExecStart=") for line in lines if line.startswith("ExecStart=")]
    assert shlex.split(start.replace("%%", "%").replace("$$", "$")) == [stoker_command(), "watch", *words]
    for line in ("Type=notify", "WatchdogSec=60", "Restart=on-failure", "Environment=STOKER_GPUS=nvml"):
        assert line in lines
    assert (
        "Description=Stoker: all GPUs below 5%% for 30m; or hung at full utilization for 1h, then exec, then shutdown"
        in lines
    )


def test_unit_has_the_variables_and_the_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "watch"
    file.write_text(
        'gpus = "sim:3"\n[watch]\nfor = 1200\nbelow = 0.07\nwarn-at = "off"\nrepeat = true\nidle-exit-code = 3\n'
        'then = ["exec true", "shutdown"]\n'
    )
    there = {"STOKER_ARM_ABOVE": "80%", "STOKER_REQUIRE": "any", "STOKER_EVERY": "7s", "STOKER_DEADLINE": "9s"}
    done = stoker("--config", str(file), "watch", "--every", "2s", "--print-unit", environment=there)
    lines = done.out.splitlines()
    assert (
        "Description=Stoker: any GPU below 7%% for 20m; or hung at full utilization for 1h, then exec, then shutdown"
        in lines
    )
    assert f"ExecStart={stoker_command()} watch --every 2s" in lines
    carried = {**there, "STOKER_ARM_ABOVE": "80%%", "STOKER_CONFIG": str(file)}
    # As an option it wins over the variable.
    assert {f"Environment={name}={value}" for name, value in carried.items()} <= {
        line.replace('"', "") for line in lines
    }
    assert "SuccessExitStatus=3 143" in lines


def test_unit_with_a_secret_has_a_warning() -> None:
    done = stoker("watch", "--then", "notify ntfy://topic", "--print-unit")
    assert done.code == 0
    assert "make the file readable by root only" in done.err


def test_machine_without_gpus_is_refused(tmp_path: Path) -> None:
    done = stoker("watch", "--then", "exit", "--source", "drm", environment={"STOKER_ROOT": str(tmp_path)})
    assert done.code == 125
    assert done.err.startswith("stoker: there is no GPU to watch: ")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "give at least one --then, such as --then shutdown"),
        (("--then", "explode"), "'explode' is not an action"),
        (("--then", "stop"), "'stop' needs the pid of a process"),
        (("--then", "exit", "--repeat"), "--repeat and --then exit exclude each other"),
        (("--then", "exit", "--below", "0%"), "--below 0% would never or always be idle"),
        (("--then", "exit", "--below", "120%"), "--below: '120%' is out of range"),
        (("--then", "exit", "--for", "-5s"), "--for: '-5s' is not a duration"),
        (("--then", "exit", "--for", "1s", "--every", "10s"), "not a single look would fit into the window"),
        (("--then", "exit", "--gpus", "7"), "there is no GPU 7 here"),
        (("--then", "exit", "--gpus", "GPU-nobody"), "'GPU-nobody' is no GPU here"),
        (("--then", "exit", "--require", "3"), "--require 3 can never be: only 2 GPU(s) are watched"),
        (("--then", "exit", "--idle-exit-code", "256"), "256 is not in the range 0<=x<=255"),
        (("--then", "exit", "--exec-timeout", "0"), "--exec-timeout must be greater than zero"),
        (("--then", "exit", "--grace", "later"), "--grace: 'later' is not a duration"),
        (("--then", "notify nonsense://x"), "is not a URL that apprise understands"),
    ],
)
def test_invalid_input_is_reported_with_code_2(nvidia: MockMachine, arguments: tuple[str, ...], sentence: str) -> None:
    done = stoker("watch", *arguments)
    assert done.code == 2
    assert sentence in done.err
    assert done.err.count("\n") == 1


def test_missing_process_is_an_error_at_startup(nvidia: MockMachine) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    done = stoker("watch", "--then", f"stop {gone.pid}")
    assert (done.code, done.err) == (125, f"stoker: there is no process {gone.pid} to stop\n")
