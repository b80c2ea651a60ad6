"""Stopping processes and running commands, with real ones."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from stoker.actions.action import ActionError, Facts
from stoker.actions.command import Exec
from stoker.actions.stop import Stop
from stoker.procfs import Identity, identify, is_alive
from stoker.runs.processes.syscalls import share_file
from stoker.runs.processes.tree import descends
from tests.support.waiting import wait_for

PR_SET_CHILD_SUBREAPER = 36
FACTS = Facts(
    kind="idle",
    cause="its GPUs stayed idle",
    reason="GPU 0 and GPU 1 stayed below 1% for 30m",
    rule="all GPUs below 1% for 30m",
    gpus=("GPU-a", "GPU-b"),
    seconds=1800.4,
    host="node7",
)


class Started:
    """Processes of a test, which do not outlive it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._seen: list[Identity] = []

    def shell(self, script: str, output: IO[str] | None = None) -> subprocess.Popen[bytes]:
        command = ["sh", "-c", script]
        process = subprocess.Popen(command, cwd=self._directory, start_new_session=True, stdout=output)
        self._processes.append(process)
        return process

    def identity(self, file: str) -> Identity:
        """Of the process that wrote its pid into this file."""
        path = self._directory / file
        text = wait_for(lambda: path.read_text().strip() if path.exists() else None, named=f"a pid in {file}")
        found = identify(int(text))
        assert found is not None
        self._seen.append(found)
        return found

    def clear(self) -> None:
        for one in self._seen:
            if is_alive(one):
                os.kill(one.pid, signal.SIGKILL)
        for process in self._processes:
            # The pid of a reaped process may have been reused.
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(autouse=True)
def orphans_go_to_init() -> None:
    """A test before it may have made this process a sub-reaper, which would adopt them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    processes = Started(tmp_path)
    yield processes
    processes.clear()


def prepared(pid: int, grace: float = 60.0) -> Stop:
    action = Stop(pid, grace=grace)
    assert action.prepare() == ()
    return action


def test_process_and_descendants_are_stopped(started: Started, tmp_path: Path) -> None:
    root = started.shell(
        "setsid sh -c 'trap \"echo bye > said; exit\" TERM; echo $$ > child; while :; do sleep 0.05; done' & wait"
    )
    child = started.identity("child")
    action = prepared(root.pid)
    assert action.describe() == f"stop process {root.pid} (sh) and everything it started"
    action.act(FACTS)
    assert root.wait(60) == -signal.SIGTERM
    assert not is_alive(child)
    assert (tmp_path / "said").read_text() == "bye\n"


FORKS_TWICE = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("orphan.part", "w").write(str(os.getpid())); os.rename("orphan.part", "orphan")
        time.sleep(600)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize(
    "script",
    [
        # Once by the process itself, once by a child of a shell.
        f"exec {sys.executable} -c '{FORKS_TWICE}time.sleep(600)'",
        f"{sys.executable} -c '{FORKS_TWICE}time.sleep(600)'; true",
        # By shells, which run another program: it stays in their session.
        "(sh -c 'echo $$ > orphan.part; mv orphan.part orphan; exec sleep 600' &); sleep 600",
    ],
)
def test_double_forked_child_is_stopped(started: Started, script: str) -> None:
    root = started.shell(script)
    orphan = started.identity("orphan")
    wait_for(lambda: not descends(orphan.pid, root.pid), named="the death of its parent")
    prepared(root.pid).act(FACTS)
    root.wait(60)
    assert not is_alive(orphan)


def test_orphaned_child_seen_earlier_is_stopped(started: Started, tmp_path: Path) -> None:
    announce = "echo $$ > orphan.part; mv orphan.part orphan; exec sleep 600"
    root = started.shell(f"mkfifo fifo; (setsid sh -c '{announce}' & read line < fifo); sleep 600")
    orphan = started.identity("orphan")
    action = prepared(root.pid)
    with (tmp_path / "fifo").open("w") as fifo:
        fifo.write("go\n")
    wait_for(lambda: not descends(orphan.pid, root.pid), named="the death of its parent")
    action.act(FACTS)
    root.wait(60)
    assert not is_alive(orphan)


def test_program_in_another_session_is_recognized_by_its_streams(started: Started, tmp_path: Path) -> None:
    if not share_file(os.getpid(), os.getpid(), 2, 2):
        pytest.skip("this kernel or sandbox does not compare open files")
    announce = "echo $$ > $0.part; mv $0.part $0; exec sleep 600"
    with (tmp_path / "log").open("w") as log:
        root = started.shell(f"(setsid sh -c '{announce}' orphan &); sleep 600", output=log)
    with (tmp_path / "log").open("a") as log:  # the same file, but not the same opening of it
        started.shell(f"(setsid sh -c '{announce}' other &); sleep 600", output=log)
    orphan, other = started.identity("orphan"), started.identity("other")
    wait_for(lambda: not descends(orphan.pid, root.pid), named="the death of its parent")
    prepared(root.pid).act(FACTS)
    root.wait(60)
    assert not is_alive(orphan)
    assert is_alive(other)


def test_similar_processes_are_spared(started: Started, tmp_path: Path) -> None:
    # Two children of one program that forked them without an exec, in a session of their own each.
    program = (
        "import os, time\n"
        "for name in ('first', 'second'):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        open(name + '.part', 'w').write(str(os.getpid())); os.rename(name + '.part', name)\n"
        "        time.sleep(600)\n"
        "time.sleep(600)\n"
    )
    started.shell(f'exec {sys.executable} -c "{program}"')
    first, second = started.identity("first"), started.identity("second")
    prepared(first.pid).act(FACTS)
    assert not is_alive(first)
    assert is_alive(second)


def test_process_that_ignores_sigterm_is_killed_after_the_grace(started: Started) -> None:
    root = started.shell("trap '' TERM; echo $$ > root; while :; do sleep 0.05; done")
    started.identity("root")
    begun = time.monotonic()
    prepared(root.pid, grace=0.3).act(FACTS)
    assert 0.3 <= time.monotonic() - begun < 60
    assert root.wait(60) == -signal.SIGKILL


def test_suspended_process_ends_within_its_grace(started: Started) -> None:
    root = started.shell("echo $$ > root; while :; do sleep 0.05; done")
    started.identity("root")
    action = prepared(root.pid)
    root.send_signal(signal.SIGSTOP)
    action.act(FACTS)
    assert root.wait(60) == -signal.SIGTERM


def test_reused_pid_is_left_alone(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    root = started.shell("echo $$ > root; while :; do sleep 0.05; done")
    now = started.identity("root")
    action = Stop(root.pid, grace=0.1)
    # When the watching began, an older process had this number.
    older = Identity(now.pid, now.started - 100)
    with monkeypatch.context() as patch:
        patch.setattr("stoker.actions.stop.identify", lambda _pid: older)
        patch.setattr("stoker.actions.stop.is_alive", lambda _who: True)
        action.prepare()
    action.act(FACTS)
    assert is_alive(now)


def test_process_that_has_already_ended_is_no_failure(started: Started) -> None:
    root = started.shell("exec sleep 100")
    action = prepared(root.pid)
    root.kill()
    root.wait()
    action.act(FACTS)


def test_unused_pid_is_refused_at_startup(started: Started) -> None:
    ended = started.shell("exit 0")
    wait_for(lambda: (found := identify(ended.pid)) is not None and not is_alive(found), named="its end")
    # A zombie keeps its pid; the other pid is above the kernel's maximum.
    for pid in (ended.pid, 2**22 + 1):
        with pytest.raises(ActionError, match=f"there is no process {pid} to stop"):
            Stop(pid, grace=1).prepare()


def test_process_of_another_user_is_refused_at_startup(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    root = started.shell("exec sleep 100")

    def refuse(_pid: int, _signal: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr("stoker.actions.stop.os.kill", refuse)
        with pytest.raises(ActionError, match=rf"process {root.pid} belongs to \w+ and may not be stopped from here"):
            Stop(root.pid, grace=1).prepare()


def test_watcher_inside_the_tree_is_spared(started: Started, tmp_path: Path) -> None:
    program = (
        "import sys; from stoker.actions.stop import Stop; from stoker.actions.action import Facts; import os\n"
        "stop = Stop(os.getppid(), grace=60); stop.prepare()\n"
        "stop.act(Facts(kind='idle', cause='', reason='', rule='', gpus=(), seconds=0, host=''))\n"
        "open('over', 'w').write('over')\n"
    )
    (tmp_path / "program.py").write_text(program)
    root = started.shell(f"{sys.executable} program.py & sleep 100 & wait")
    assert root.wait(60) == -signal.SIGTERM
    wait_for((tmp_path / "over").exists, named="the end of the stopped process")


def command(line: str, timeout: float = 60.0, **environment: str) -> Exec:
    whole = {"PATH": os.environ["PATH"], **environment}
    action = Exec(line, timeout=timeout, environment=whole, late_grace=0.2)
    assert action.prepare() == ()
    return action


def test_command_gets_the_facts_as_environment_variables(tmp_path: Path) -> None:
    line = f"env | grep ^STOKER_ | sort > {tmp_path}/facts; env | grep -c NOTIFY_SOCKET > {tmp_path}/socket"
    with pytest.raises(ActionError, match="ended with code 1"):  # grep -c counts to nothing
        command(line, NOTIFY_SOCKET="/run/systemd/notify").act(FACTS)
    assert (tmp_path / "facts").read_text().splitlines() == [
        "STOKER_EVENT=idle",
        "STOKER_GPUS_IDLE=GPU-a,GPU-b",
        "STOKER_HOST=node7",
        "STOKER_IDLE_SECONDS=1800",
        "STOKER_REASON=GPU 0 and GPU 1 stayed below 1% for 30m",
        "STOKER_RULE=all GPUs below 1% for 30m",
    ]
    assert (tmp_path / "socket").read_text() == "0\n"


def test_command_output_is_passed_through(capfd: pytest.CaptureFixture[str]) -> None:
    command("echo out; echo err >&2; cat").act(FACTS)
    assert capfd.readouterr() == ("out\n", "err\n")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [("exit 3", "the command of exec ended with code 3"), ("kill -9 $$", "the command of exec was ended by SIGKILL")],
)
def test_failed_command_is_a_failed_action(line: str, sentence: str) -> None:
    with pytest.raises(ActionError, match=sentence):
        command(line).act(FACTS)


def test_command_past_its_timeout_is_killed_with_its_descendants(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = f"cd {tmp_path}; (trap '' TERM; sh -c 'echo $PPID > child; exec sleep 100' & while :; do wait; done) & wait"
    action = command(line, timeout=0.1)
    start = action._start
    deaf: list[Identity] = []

    def start_all(facts: Facts) -> "subprocess.Popen[bytes]":
        """Its time is counted from when it has started all that it starts."""
        process = start(facts)
        deaf.append(started.identity("child"))
        return process

    monkeypatch.setattr(action, "_start", start_all)
    with pytest.raises(ActionError, match=r"was ended because it took longer than 0\.1s"):
        action.act(FACTS)
    assert not is_alive(deaf[0])


def test_running_command_is_stopped_when_the_watcher_ends(started: Started, tmp_path: Path) -> None:
    action = command(f"echo $$ > {tmp_path}/pid; sleep 100")
    failures: list[str] = []

    def act() -> None:
        try:
            action.act(FACTS)
        except ActionError as error:
            failures.append(str(error))

    thread = threading.Thread(target=act)
    thread.start()
    shell = started.identity("pid")
    action.cancel()
    thread.join(60)
    assert failures == ["the command of exec was ended by SIGKILL"]
    assert not is_alive(shell)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("no-such-program --now", "there is no no-such-program here"),
        ("/no/such/program", "there is no /no/such/program here"),
        ("if then", "the shell does not understand the command of exec"),
        ("echo 'open", "the shell does not understand the command of exec"),
    ],
)
def test_missing_command_is_refused_at_startup(line: str, sentence: str) -> None:
    with pytest.raises(ActionError, match=sentence):
        command(line)


@pytest.mark.parametrize("line", ["if true; then echo yes; fi", "A=1 env", "(exit 0)", "[ 1 = 1 ]", "exit 0", "'true'"])
def test_any_shell_command_is_accepted(line: str) -> None:
    command(line).act(FACTS)


def test_exec_needs_a_shell() -> None:
    with pytest.raises(ActionError, match="there is no sh on PATH"):
        Exec("true", timeout=1, environment={"PATH": "/nowhere"}).prepare()
