"""`stoker run` as typed: everything passes through, and idle GPUs end it, with an explanation."""

import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from stoker.paths import state_home
from stoker.runs.record import Records, Status
from tests.support.command import Finished, stoker, stoker_command
from tests.support.mock_nvml import MockMachine
from tests.support.terminal import terminal
from tests.support.waiting import wait_for

QUICK = ("--after", "0s", "--every", "100ms", "--for", "600ms", "--below", "5%", "--grace", "60s")
# On a busy machine a job may take longer to start than the window is long: what comes before its work must not count.
ONCE_AT_WORK = (*QUICK, "--arm-above", "20%")
LOAD = ("stoker", "sim", "load", "--gpu", "0", "--memory", "2GiB")
WORK_THEN_IDLE = (*LOAD, "--phase", "busy 90% 300ms", "--phase", "idle 10m")


def job_at_work(doing: str, seconds: float) -> tuple[str, ...]:
    """A job that lasts that many seconds after its load has started; the load is busy until it is stopped."""
    up = "until [ -s up ]; do sleep 0.05; done"
    return "sh", "-c", f"{' '.join(LOAD)} {doing} > up & {up}; sleep {seconds}"


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STOKER_GPUS", f"sim:2x8GiB@{tmp_path}/machine")
    monkeypatch.chdir(tmp_path)


def run(*arguments: str) -> Finished:
    return stoker("run", *arguments, timeout=120)


def run_until_said(*options: str, words: str, more: str) -> tuple[int, str]:
    """The code and all that was said, of a job that goes on with `more` when these words were said."""
    said = Path("said")
    job = f"until grep -q '{words}' said; do sleep 0.05; done; {more}"
    with said.open("w") as errors:
        done = subprocess.run(
            [stoker_command(), "run", *options, "--", "sh", "-c", job], stderr=errors, timeout=120, check=False
        )
    return done.returncode, said.read_text()


def newest_run() -> dict[str, object]:
    found: dict[str, object] = stoker("show", "--json").json()
    return found


def newest_status() -> Status | None:
    """What its record says, without the start of another command."""
    return next((record.status() for record in Records(state_home()).newest_first()), None)


def is_gone(pid: int) -> bool:
    """Also when nobody has collected it yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# Progress

# Makes steps until the record of the run says that they are seen, or a minute is over.
STEPS = """
import json, os, time
import stoker
def seen():
    try:
        with open(os.environ["STOKER_RUN_DIR"] + "/status.json") as file:
            return json.load(file)["progress"]
    except FileNotFoundError:  # the run has only begun
        return None
number, ends = 0, time.monotonic() + 60
while time.monotonic() < ends and (seen() or {{}}).get("trust") != {wanted!r}:
    {step}
    number += 1
    time.sleep(0.05)
"""


@pytest.mark.parametrize(
    ("trust", "step", "words"),
    [
        ("call", "stoker.step()", "seen by calls of stoker.step()"),
        ("log", "print('step', number, flush=True)", "seen by step counts in its log"),
        ("output", "print('alive', flush=True)", "seen by its output"),
    ],
)
def test_steps_are_seen_where_output_goes_to_a_file(trust: str, step: str, words: str) -> None:
    program = STEPS.format(wanted=trust, step=step)
    with Path("out").open("wb") as out:
        command = [stoker_command(), "run", "--every", "100ms", "--", sys.executable, "-c", program]
        assert subprocess.run(command, stdout=out, stderr=out, timeout=120, check=False).returncode == 0
    found = newest_run()["progress"]
    assert isinstance(found, dict)
    assert (found["trust"], found["steps"] >= 2, len(found["ranks"])) == (trust, True, trust == "call")
    assert words in stoker("show").out


def test_output_to_a_pipe_is_not_touched_and_shows_no_steps() -> None:
    program = "import time\nfor n in range(40): print('step', n, flush=True); time.sleep(0.1)"
    assert run("--every", "100ms", "--", sys.executable, "-c", program).out.count("step") == 40
    assert newest_run()["progress"] is None


# Passing through


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["true"], 0),
        (["sh", "-c", "exit 7"], 7),
        (["sh", "-c", "kill -9 $$"], 137),
        (["sh", "-c", "kill -TERM $$"], 143),
        (["no-such-command-anywhere"], 127),
        (["/etc/passwd"], 126),
        (["/"], 126),
    ],
)
def test_exit_code_follows_gnu_timeout(command: list[str], code: int) -> None:
    done = run("--", *command)
    assert done.code == code, done.err
    expected = subprocess.run(["timeout", "60", *command], capture_output=True, check=False).returncode
    assert code == (expected if expected >= 0 else 128 - expected)


@pytest.mark.parametrize("redirection", [">&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full"])
@pytest.mark.parametrize(("command", "code"), [("sh -c 'exit 3'", 3), ("no-such-command", 127)])
def test_unwritable_streams_do_not_change_the_exit_code(redirection: str, command: str, code: int) -> None:
    line = f"{stoker_command()} run -- {command} {redirection}"
    assert subprocess.run(["sh", "-c", line], timeout=60, check=False).returncode == code


def test_input_output_and_arguments_pass_through_unchanged() -> None:
    script = "import sys; d = sys.stdin.buffer.read(); sys.stdout.buffer.write(d); sys.stderr.write(repr(sys.argv[1:]))"
    done = subprocess.run(
        [stoker_command(), "run", "--", sys.executable, "-c", script, "--for", "a b", "--", "-x", ""],
        input=bytes(range(256)) * 1000,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, bytes(range(256)) * 1000)
    assert done.stderr.decode() == "['--for', 'a b', '--', '-x', '']"


def test_invalid_utf8_in_arguments_and_directory_passes_through_and_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / os.fsdecode(b"caf\xe9")
    place.mkdir()
    monkeypatch.chdir(place)
    command = ["sh", "-c", 'pwd; printf %s "$1"; exec sleep 600', "sh", os.fsdecode(b"na\xefve")]
    done = subprocess.run([stoker_command(), "run", *QUICK, "--", *command], capture_output=True, check=False)
    assert done.returncode == 124, done.stderr
    assert done.stdout == b"%s\nna\xefve" % os.fsencode(place)
    found = newest_run()
    assert found["command"] == ["sh", "-c", command[2], "sh", r"na\xefve"]
    assert found["directory"] == rf"{tmp_path}/caf\xe9"
    assert r"na\xefve" in Path(str(found["report"])).read_text()
    refused = stoker("submit", "true")
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert r"caf\udce9" in refused.err


def test_leftover_processes_are_stopped_when_the_command_ends() -> None:
    done = run("--", "sh", "-c", "setsid nohup sleep 300 >/dev/null 2>&1 & echo $!; exit 4")
    assert done.code == 4
    assert is_gone(int(done.out))
    assert "left 1 process(es) behind: they are stopped" in done.err


def test_command_runs_in_a_removed_directory(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"cd {gone} && rmdir {gone} && exec {stoker_command()} run -- sh -c 'exit 8'"
    assert subprocess.run(["sh", "-c", script], capture_output=True, check=False).returncode == 8


def test_nested_run_is_a_separate_run() -> None:
    done = run("--", "stoker", "run", "--", "sh", "-c", "echo $STOKER_RUN; exit 5")
    assert done.code == 5
    inner, outer = sorted(stoker("runs", "--json").json(), key=lambda found: len(found["command"]))
    assert done.out.strip() == inner["id"] != outer["id"]


def test_job_uses_the_terminal_as_if_started_from_the_shell(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        script = "import sys, os; print(sys.stdin.isatty(), os.tcgetpgrp(0) == os.getpgrp()); print('got', input())"
        os.execv(stoker_command(), ["stoker", "run", "--", sys.executable, "-c", script])
    os.write(terminal, b"hello\n")
    seen = _read_all(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"True True" in seen
    assert b"got hello" in seen


def _read_all(terminal: int) -> bytes:
    seen = b""
    try:
        while piece := os.read(terminal, 65536):
            seen += piece
    except OSError:
        pass  # how a terminal says that its last user left
    return seen


def _read_for(terminal: int, seconds: float, text: bytes) -> bytes:
    """Output within that many seconds, or up to the text."""
    seen = b""
    ends = time.monotonic() + seconds
    while text not in seen and select.select([terminal], [], [], max(ends - time.monotonic(), 0))[0]:
        try:
            seen += os.read(terminal, 65536)
        except OSError:
            break
    return seen


REPL = """
import signal, sys, termios, time, tty
tty.setraw(0)
ends_politely = sys.argv[1:] == ["politely"]
signal.signal(signal.SIGTERM, (lambda *_: sys.exit(0)) if ends_politely else signal.SIG_DFL)
print("raw", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ((stoker_command(), "run", "--", sys.executable, "-c", REPL), 143),
        ((stoker_command(), "run", "--max-time", "1s", "--", sys.executable, "-c", REPL, "politely"), 124),
        ((sys.executable, "-m", "stoker.dropin.gpu_idle_timeout", sys.executable, "-c", REPL), 143),
    ],
    ids=["run, a signal", "run, a limit", "gpu_idle_timeout"],
)
def test_terminal_is_restored_after_a_repl_is_stopped(command: tuple[str, ...], code: int) -> None:
    with terminal(list(command)) as screen:
        screen.until("raw")
        assert screen.modes_now() != screen.modes
        if code == 143:
            os.kill(screen.pid, signal.SIGTERM)
        assert screen.code() == code
        assert screen.modes_now() == screen.modes


def test_terminal_settings_made_by_the_command_are_kept() -> None:
    with terminal([stoker_command(), "run", "--", "stty", "-echo"]) as screen:
        assert screen.code() == 0
        assert screen.modes_now() != screen.modes


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1])
def test_signal_to_stoker_reaches_the_job_once(number: signal.Signals, tmp_path: Path) -> None:
    script = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: (print('got it', flush=True), setattr(sys, 'got', True)))\n"
        "print('ready', flush=True)\n"
        "while not hasattr(sys, 'got'): time.sleep(0.05)\n"
        "time.sleep(0.3); sys.exit(5)\n"
    )
    process = subprocess.Popen(
        [stoker_command(), "run", "--", sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert (process.returncode, out) == (5, "got it\n")


def test_ctrl_c_is_delivered_once_and_a_second_one_kills_at_once() -> None:
    script = (
        "import signal, time\n"
        "signal.signal(signal.SIGINT, lambda *_: print('interrupt', flush=True))\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(60)\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(stoker_command(), ["stoker", "run", "--", sys.executable, "-c", script])
    seen = b""
    while b"ready" not in seen:
        seen += os.read(terminal, 65536)
    os.write(terminal, b"\x03")
    while b"interrupt" not in seen:
        seen += os.read(terminal, 65536)
    # The kernel merges two presses that come before the first is handled: on a busy machine, press again.
    for _press in range(10):
        os.write(terminal, b"\x03")
        if b"Ctrl-C was pressed twice" in (seen := seen + _read_for(terminal, 0.5, b"Ctrl-C was pressed twice")):
            break
    seen += _read_all(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert b"Ctrl-C was pressed twice" in seen


def test_every_sigint_from_a_program_is_forwarded() -> None:
    # At first it signals the process group in which Stoker is too.
    script = (
        "import os, signal, sys, time\n"
        "got = []\n"
        "signal.signal(signal.SIGINT, lambda *_: (got.append(0), print('received', flush=True)))\n"
        "os.killpg(0, signal.SIGINT)\n"
        # Not pause(): it would miss a signal that arrives just before it.
        "while len(got) < 4: time.sleep(0.05)\n"
        "sys.exit(7)\n"
    )
    process = subprocess.Popen(
        [stoker_command(), "run", "--", sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    for _ in range(3):
        assert process.stdout.readline() == "received\n"
        # A signal that comes while an equal one is pending is lost.
        wait_for(lambda: not _is_pending(process.pid, signal.SIGINT), named="the signal before it being read")
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 7


def _is_pending(pid: int, signum: int) -> bool:
    fields = dict(
        line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
    )
    return bool((int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)) & 1 << (signum - 1))


def test_job_control_works_as_if_started_from_the_shell() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["PS1"] = "prompt> "
        os.execvp("bash", ["bash", "--norc", "--noediting", "-i"])
    counting = "i=0; while :; do i=$((i+1)); echo tick $i; sleep 0.1; done"
    _await(terminal, b"prompt> ")
    os.write(terminal, f"{stoker_command()} run -- sh -c '{counting}'\n".encode())
    _await(terminal, b"tick 3\r")
    os.write(terminal, b"\x1a")
    assert b"Stopped" in _await(terminal, b"prompt> ")
    os.write(terminal, b"fg\n")
    _await(terminal, b"tick 9\r")
    os.write(terminal, b"\x03")
    _await(terminal, b"prompt> ")
    os.write(terminal, b"echo code $?; exit\n")
    assert b"code 130" in _read_all(terminal)
    os.waitpid(pid, 0)


def _await(terminal: int, text: bytes) -> bytes:
    seen = b""
    while text not in seen:
        seen += os.read(terminal, 65536)
    return seen


# Stopping


def test_idle_job_is_stopped_with_its_children_and_explained(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    done = run(*ONCE_AT_WORK, "--", "sh", "-c", f"(setsid sleep 300 & echo $! > {pids}); {shlex.join(WORK_THEN_IDLE)}")
    assert done.code == 124, done.err
    assert "GPU 0 stayed below 5% for 0.6s" in done.err
    summary = newest_run()
    assert (summary["state"], summary["ending"], summary["exit_code"]) == ("ended", "idle", 124)
    assert summary["left"] == []
    report = Path(str(summary["report"])).read_text()
    assert "GPU 0 stayed below 5% for 0.6s" in report
    assert "sim load" in report
    assert is_gone(int(pids.read_text()))


def test_training_that_saves_on_sigterm_still_has_its_workers(tmp_path: Path) -> None:
    script = f"""
import signal, subprocess, sys, time
from stoker.gpus.sim import SimulatedProcess
worker = subprocess.Popen(["sleep", "300"])
def save(*_):
    time.sleep(0.5)
    open({str(tmp_path / "saved")!r}, "w").write("whole" if worker.poll() is None else "its worker was gone")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
SimulatedProcess.attach(0).work(0.9, seconds=0.3)
time.sleep(300)
"""
    assert run(*ONCE_AT_WORK, "--", sys.executable, "-c", script).code == 124
    assert (tmp_path / "saved").read_text() == "whole"


def test_busy_job_is_not_stopped() -> None:
    done = run(*ONCE_AT_WORK, "--", *job_at_work("--utilization 90%", 1.5))
    assert done.code == 0, done.err


def test_short_bursts_between_samples_count_as_activity() -> None:
    options = ("--after", "0s", "--every", "1s", "--for", "1500ms", "--below", "5%", "--arm-above", "20%")
    done = run(*options, "--", *job_at_work("--phase 'burst 80% 0.3s/1s'", 3.5))
    assert done.code == 0, done.err


def test_idle_exit_code_is_configurable() -> None:
    assert run(*QUICK, "--idle-exit-code", "99", "--", "sleep", "60").code == 99


def test_dry_run_reports_the_time_and_does_nothing() -> None:
    options = (*QUICK, "--dry-run", "--warn-at", "10%")
    code, said = run_until_said(*options, words="would stop the job now", more="sleep 0.5; exit 3")
    assert code == 3
    assert "is stopped" not in said
    assert said.count("would stop the job now") == 1


def test_time_limit_stops_a_busy_job() -> None:
    done = run("--max-time", "800ms", "--", *LOAD, "--utilization", "90%")
    assert done.code == 124
    assert newest_run()["ending"] == "time limit"


def test_warning_precedes_the_stop() -> None:
    # A supervisor that was held up for most of the window sees only that it is over.
    tries = (run(*ONCE_AT_WORK, "--warn-at", "10%", "--", *WORK_THEN_IDLE).err for _ in range(3))
    said = next(said for said in tries if "unless it works or is snoozed" in said)
    warning = said.index("unless it works or is snoozed")
    assert "stayed below 5% for 0.6s" in said[warning:]


def test_armed_rule_does_nothing_before_activity(tmp_path: Path) -> None:
    armed = ("--arm-above", "50%", "--arm-for", "300ms")
    never = run(*QUICK, *armed, "--", "sleep", "1.5")
    assert never.code == 0
    # It works until it is seen to be armed.
    job = f"{shlex.join(LOAD)} > /dev/null & until [ -e enough ]; do sleep 0.05; done; kill $!; wait; sleep 300"
    after = subprocess.Popen([stoker_command(), "run", *QUICK, *armed, "--", "sh", "-c", job])
    wait_for(lambda: (status := newest_status()) and status.verdict == "busy", named="activity for long enough")
    (tmp_path / "enough").touch()
    assert after.wait(timeout=60) == 124


def test_startup_delay_is_respected() -> None:
    options = [word if word != "0s" else "60s" for word in QUICK]
    assert run(*options, "--", "sleep", "1.5").code == 0


# Unknown is never idle


@pytest.mark.parametrize(
    "fault",
    [["lost"], ["unsupported", "utilization"], ["absurd", "utilization"], ["hang", "60"], ["absent"]],
    ids=" ".join,
)
def test_unreadable_gpu_stops_nothing(fault: list[str]) -> None:
    assert stoker("sim", "fault", *fault).code == 0
    done = run(*QUICK, "--deadline", "200ms", "--", "sleep", "1.8")
    stoker("sim", "fault", "--clear")
    assert done.code == 0, done.err
    assert done.seconds < 40  # not as long as the driver hangs


def test_hanging_driver_delays_neither_signals_nor_the_end_of_the_job(
    nvidia: MockMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_GPUS", "nvml")
    nvidia.fault("nvmlDeviceGetSamples", hang=600)
    process = subprocess.Popen([stoker_command(), "run", *QUICK, "--deadline", "600s", "--", "sleep", "600"])
    nvidia.wait_until_hanging(deadline=60)
    process.terminate()
    assert process.wait(timeout=60) == 143  # long before the driver answers or is given up


def test_command_without_any_gpu_runs_and_it_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STOKER_GPUS", "auto")
    monkeypatch.setenv("STOKER_ROOT", str(tmp_path))
    # It goes on for longer than the window afterwards, and is let.
    code, _said = run_until_said(*QUICK, words="whether it is idle cannot be seen", more="sleep 1")
    assert code == 0


# Shared machines


@pytest.fixture
def load_of_another_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A load of another user that keeps GPU 0 busy, on a machine that both use."""
    if os.geteuid() != 0 and not os.environ.get("CI"):
        pytest.skip("needs root to become another user")
    # Everything is imported before the change of user, who may not read this installation.
    program = (
        "import os; from stoker.cli import app; from stoker.cli.verbs import sim;"
        "import stoker.gpus.sim, stoker.gpus.sim.faults, stoker.settings;"
        "os.umask(0); os.setgid(65534); os.setuid(65534);"
        "app.run(['sim', 'load', '--gpu', '0', '--memory', '1GiB', '--utilization', '95%'])"
    )
    with tempfile.TemporaryDirectory(prefix="stoker-shared-") as shared:
        Path(shared).chmod(0o777)
        monkeypatch.setenv("STOKER_GPUS", f"sim:2x8GiB@{shared}")
        environment = {**os.environ, "XDG_CONFIG_HOME": "/nonexistent"}
        load = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment)
        assert load.stdout is not None
        with load.stdout:
            assert "pid" in load.stdout.readline()
        yield
        load.kill()
        load.wait()


def test_load_of_another_user_does_not_keep_an_idle_job_running(load_of_another_user: None) -> None:
    done = run(*QUICK, "--", *LOAD, "--phase", "busy 4% 300ms", "--phase", "idle 60s")
    assert done.code == 124, done.err


def test_idle_gpu_of_another_user_does_not_stop_a_busy_job() -> None:
    done = run(*ONCE_AT_WORK, "--require", "any", "--", *job_at_work("--utilization 80%", 1.5))
    assert done.code == 0, done.err  # GPU 1 is idle, but the job does not use it


def test_mine_considers_only_gpus_used_by_the_job() -> None:
    never = run(*QUICK, "--gpus", "mine", "--", "sleep", "1.5")
    assert never.code == 0, never.err
    used = run(*QUICK, "--gpus", "mine", "--", *WORK_THEN_IDLE)
    assert used.code == 124, used.err


def test_chosen_gpu_counts_for_every_user() -> None:
    with subprocess.Popen([*LOAD, "--utilization", "90%"], stdout=subprocess.PIPE, text=True) as load:
        assert load.stdout is not None
        assert "busy 90%" in load.stdout.readline()
        busy = run(*QUICK, "--gpus", "0", "--", "sleep", "1.5")
        idle = run(*QUICK, "--gpus", "1", "--", "sleep", "60")
        load.kill()
    assert (busy.code, idle.code) == (0, 124)


# Snooze


def test_job_can_snooze_its_own_run() -> None:
    quiet = shlex.join([*LOAD, "--phase", "busy 90% 300ms", "--phase", "idle 1500ms"])
    done = run(*ONCE_AT_WORK, "--", "sh", "-c", f"stoker snooze 10m && {quiet}")
    assert done.code == 0, done.err


def test_window_restarts_after_a_snooze_and_the_run_is_stopped(tmp_path: Path) -> None:
    job = f"date +%s.%N > before; stoker snooze 2s; {shlex.join(WORK_THEN_IDLE)}"
    done = run(*ONCE_AT_WORK, "--for", "1500ms", "--", "sh", "-c", job)
    assert done.code == 124
    status = newest_status()
    assert status is not None
    assert status.ended is not None
    assert status.ended > float((tmp_path / "before").read_text()) + 2 + 1.5


def test_snooze_is_shown_with_the_run() -> None:
    job = f"stoker snooze 10m; {shlex.join(WORK_THEN_IDLE)}"
    process = subprocess.Popen([stoker_command(), "run", *ONCE_AT_WORK, "--", "sh", "-c", job])
    found = wait_for(lambda: [r for r in stoker("runs", "--json").json() if r["snoozed_until"]])[0]
    assert "snoozed" in stoker("runs").out
    assert "snoozed      until" in stoker("show", found["id"]).out
    assert "watched again" in stoker("snooze", "--end", environment={"STOKER_RUN": found["id"]}).out
    assert process.wait(timeout=60) == 124


# When Stoker itself dies


def test_killed_supervisor_does_not_leave_the_job_running(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    process = subprocess.Popen(
        [stoker_command(), "run", "--", "sh", "-c", f"setsid sleep 300 & echo $! $$ > {pids}; wait"]
    )
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    process.kill()
    process.wait()
    for pid in map(int, pids.read_text().split()):
        wait_for(lambda pid=pid: is_gone(pid), named="the end of the job")  # type: ignore[misc]  # a default argument is the usual way to bind
    wait_for(lambda: (status := newest_status()) and status.state == "ended", named="the reaper's last word")
    assert newest_run()["ending"] == "supervisor killed"


# Settings


def test_rule_comes_from_option_then_variable_then_file(tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('[run]\nafter = "0s"\nevery = "100ms"\nfor = "600ms"\nidle-exit-code = 77\n')
    configured = stoker("--config", str(tmp_path / "my.toml"), "run", "--", "sleep", "60")
    assert configured.code == 77, configured.err
    patient = {"STOKER_FOR": "60s"}
    over_file = stoker("--config", str(tmp_path / "my.toml"), "run", "--", "sleep", "1.5", environment=patient)
    assert over_file.code == 0, over_file.err
    flag = stoker(
        "--config", str(tmp_path / "my.toml"), "run", "--for", "500ms", "--", "sleep", "60", environment=patient
    )
    assert flag.code == 77


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('[run]\nfro = "5m"', "did you mean 'for'?"),
        ('[run]\nfor = "soon"', "'soon' is not a duration"),
        ('[run]\nfor = "1s"\nevery = "10s"', "shorter than --every"),
        ("run = 5", "run"),
    ],
)
def test_invalid_configured_rule_is_reported_before_the_start(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(text)
    done = stoker("--config", str(tmp_path / "my.toml"), "run", "--", "touch", str(tmp_path / "started"))
    assert (done.code, sentence in done.err) == (125, True), done.err
    assert not (tmp_path / "started").exists()


# Bad input


BAD = [
    (["--for", "-5s", "--", "true"], "--for"),
    (["--for", "0s", "--", "true"], "greater than zero"),
    (["--below", "0%", "--", "true"], "--below 0%"),
    (["--below", "101%", "--", "true"], "between 0% and 100%"),
    (["--below", "20", "--", "true"], "write 20%"),
    (["--for", "1s", "--every", "10s", "--", "true"], "shorter than --every"),
    (["--gpus", "7", "--", "true"], "7"),
    (["--gpus", "GPU-nope", "--", "true"], "GPU-nope"),
    (["--signal", "NOPE", "--", "true"], "is not a signal"),
    (["--require", "0", "--", "true"], "--require"),
    (["--arm-for", "5s", "--", "true"], "--arm-for needs --arm-above"),
    (["--warn-at", "100%", "--", "true"], "--warn-at"),
    (["--source", "cuda", "--", "true"], "is not a source"),
    (["--frobnicate", "--", "true"], "--frobnicate"),
    ([], "there is no command to run"),
    (["--"], "there is no command to run"),
]


@pytest.mark.parametrize(("arguments", "sentence"), BAD, ids=[" ".join(words) or "nothing" for words, _ in BAD])
def test_invalid_input_exits_with_125_and_starts_nothing(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    trace = tmp_path / "started"
    done = run(*[word.replace("true", f"touch {trace}") for word in arguments])
    assert (done.code, done.out) == (125, "")
    assert sentence in done.err
    assert done.err.count("\n") == 1
    assert not trace.exists()
    assert stoker("runs", "--json").json() == []


def test_command_without_a_writable_record_runs_and_is_watched(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    nowhere = {"STOKER_HOME": str(tmp_path / "file")}
    done = stoker("run", "--", "sh", "-c", "echo ${STOKER_RUN-none}; exit 7", environment=nowhere)
    assert (done.code, done.out) == (7, "none\n")
    assert done.err.count("\n") == 1
    assert "the command runs without a record" in done.err
    assert "STOKER_HOME" in done.err
    idle = stoker("run", *QUICK, "--", "sleep", "600", environment=nowhere)
    assert idle.code == 124
    assert idle.err.count("record") == done.err.count("record")


def test_command_runs_with_a_home_of_another_user(tmp_path: Path) -> None:
    """As under `sudo -u nobody`: neither settings nor records can be had from there."""
    home = tmp_path / "home"
    home.mkdir(mode=0o000)
    program = (
        "import os, sys\n"
        "import stoker.cli.app, stoker.cli.verbs.run, stoker.runs.supervisor\n"
        "if os.geteuid() == 0:\n"
        "    os.setresuid(65534, 65534, 65534)\n"
        "from stoker.cli import main\n"
        "sys.argv = ['stoker', 'run', '--', 'sh', '-c', 'exit 7']\n"
        "sys.exit(main())"
    )
    inherited = ("STOKER_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in inherited}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "HOME": str(home)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "without a record" in done.stderr


def test_full_disk_loses_the_record_but_not_the_job(tmp_path: Path) -> None:
    if os.geteuid() != 0 and not os.environ.get("CI"):
        pytest.skip("needs root for a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=True)
    try:
        fill = f"head -c 100000 /dev/zero > {disk}/fill 2>/dev/null; sleep 0.5; exit 6"
        done = stoker("run", *QUICK[:4], "--for", "60s", "--", "sh", "-c", fill, environment={"STOKER_HOME": str(disk)})
        assert done.code == 6, done.err
        assert "No space left" in done.err
        # As full from the start.
        done = stoker("run", "--", "sh", "-c", "exit 7", environment={"STOKER_HOME": str(disk)})
        assert (done.code, done.err.count("\n")) == (7, 1), done.err
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # whatever still leaves it


def test_runs_and_show_report_the_outcome() -> None:
    assert "no runs yet" in stoker("runs").out
    run("--", "sh", "-c", "exit 4")
    listing = stoker("runs").out
    assert "ended" in listing
    assert "sh -c 'exit 4'" in listing
    shown = stoker("show")
    assert "with code 4" in shown.out
    assert stoker("show", "zzzz").code == 2
    assert msgspec.json.decode(stoker("show", "--json").out)["exit_code"] == 4
