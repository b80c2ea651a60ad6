"""A job under its reaper: started as a shell would, tracked, and stopped also when its supervisor is killed."""

import contextlib
import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.procfs import identify, stat
from stoker.runs.processes.tree import exit_code
from tests.support.bare_supervisor import BareSupervisor
from tests.support.escapes import Holders, build
from tests.support.waiting import wait_for


@pytest.fixture
def holders() -> Iterator[Holders]:
    """A pipe that every process of the job holds."""
    holders = Holders()
    yield holders
    holders.close()


def escaping(way: str, holders: Holders, terminal: "Terminal | None" = None, **orders: object) -> BareSupervisor:
    """A supervisor of a program that has escaped in this way."""
    pipe = holders.writer
    popen = {"start_new_session": True, **(terminal.popen if terminal else {}), "pass_fds": [pipe]}
    supervisor = BareSupervisor(str(build()), way, str(pipe), popen=popen, let_go=[pipe], **orders)
    holders.let_go()
    return supervisor


HELD = """
import os, select, signal, sys
from pathlib import Path
from stoker.runs.processes.reaper import LaunchRequest, Program, fork_reaper
from stoker.runs.processes.syscalls import boot_clock

def begin(*command):
    reaper.start(LaunchRequest(Program(command, dict(os.environ)), signal.SIGTERM, 10.0))

def received():
    while not reaper.empty:
        select.select([reaper.fileno()], [], [])
        while (event := reaper.next_event()) is not None:
            yield type(event).__name__

reaper = fork_reaper()
{script}
reaper.close()
"""
DEADLINE_PASSED = """
reaper.set_deadline(boot_clock() + 600.0)
reaper.set_deadline(boot_clock() + 0.3)
begin("sh", "-c", "trap '' TERM; while :; do sleep 0.05; done")
print(*received())
"""
TOO_LATE = """
reaper.set_deadline(boot_clock() - 0.1)
begin("touch", "ran")
print(*received(), Path("ran").exists())
"""
STOPPED = """
reaper.set_deadline(boot_clock() + 600.0)
begin("sleep", "600")
os.kill(os.getpid(), signal.SIGSTOP)
print("went on")
reaper.kill() or os.kill(reaper.job.pid, signal.SIGKILL)
"""
GIVEN_UP = """
os.kill(reaper.pid, signal.SIGSTOP)
begin("touch", "ran")
reaper.cancel_start()
print(*received(), reaper.job, Path("ran").exists())
"""


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (DEADLINE_PASSED, "Started DeadlinePassed Ended Empty"),
        (TOO_LATE, "DeadlinePassed Empty False"),
        (GIVEN_UP, "None False"),
        (STOPPED, "went on"),
    ],
    ids=["stopped in time", "not started too late", "not started once given up", "supervisor was stopped"],
)
def test_reaper_enforces_the_deadline(script: str, says: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELD.format(script=script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == (says, "")


# Started as if typed


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 137), ("kill $$", 143)])
def test_exit_is_reported_with_its_status(script: str, code: int) -> None:
    with BareSupervisor("sh", "-c", script) as supervisor:
        assert supervisor.hear("started") > 0
        assert exit_code(supervisor.hear("ended")) == code
        assert supervisor.hear("empty")


def test_command_inherits_standard_streams(tmp_path: Path) -> None:
    script = "read word; echo $word $WORD; pwd; cat /dev/fd/$DESCRIPTOR"
    reader, writer = os.pipe()
    os.write(writer, b"from the caller's pipe\n")
    os.close(writer)
    environment = {"PATH": os.environ["PATH"], "WORD": "there", "DESCRIPTOR": str(reader)}
    output = tmp_path / "output"
    output.write_text("before\n")
    with BareSupervisor(
        "sh", "-c", script, environment=environment, directory=str(tmp_path), output=str(output),
        popen={"pass_fds": [reader]},
    ) as supervisor:  # fmt: skip
        assert supervisor.process.stdin is not None
        supervisor.process.stdin.write(b"hello\n")
        supervisor.process.stdin.flush()
        supervisor.hear("finished")
    os.close(reader)
    assert output.read_text() == f"before\nhello there\n{tmp_path}\nfrom the caller's pipe\n"


def test_command_inherits_signal_dispositions(tmp_path: Path) -> None:
    """Blocked and ignored ones, as under nohup, without what Stoker and Python change for themselves."""
    command = ["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"]

    def as_nohup_does() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])

    bare = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=as_nohup_does).stdout
    output = tmp_path / "output"
    with BareSupervisor(*command, output=str(output), popen={"preexec_fn": as_nohup_does}) as supervisor:
        supervisor.hear("finished")
    assert output.read_text() == bare
    assert f"{1 << (signal.SIGUSR2 - 1):016x}" in bare, "the caller's own settings are what is compared"


def test_status_is_known_although_caller_ignores_sigchld() -> None:
    def ignore() -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)

    with BareSupervisor("sh", "-c", "exit 3", popen={"preexec_fn": ignore}) as supervisor:
        assert exit_code(supervisor.hear("ended")) == 3
        assert supervisor.hear("finished")["status"] == 3 << 8


def test_command_stays_in_group_and_session_of_its_caller() -> None:
    with BareSupervisor("sleep", "60", popen={"start_new_session": True}) as supervisor:
        job = stat(supervisor.hear("started"))
        assert job is not None
        assert (job.group, job.session) == (supervisor.process.pid, supervisor.process.pid)
        supervisor.order_stop("SIGTERM", 5)
        supervisor.hear("finished")


def test_command_gets_new_session_on_request() -> None:
    with BareSupervisor("sleep", "60", session=True) as supervisor:
        job = supervisor.hear("started")
        found = stat(job)
        assert found is not None
        assert (found.group, found.session) == (job, job)
        supervisor.order_stop("SIGTERM", 5)
        supervisor.hear("finished")


def test_script_without_interpreter_runs_with_sh(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text('exit "$1"\n')
    script.chmod(0o755)
    with BareSupervisor(str(script), "5") as supervisor:
        assert exit_code(supervisor.hear("ended")) == 5


def _nothing(_place: Path) -> None:
    pass


def _not_executable(place: Path) -> None:
    place.write_text("exit 0\n")


def _directory(place: Path) -> None:
    place.mkdir()


def _without_interpreter(place: Path) -> None:
    place.write_text("#!/no/such/interpreter\n")
    place.chmod(0o755)


def _binary(place: Path) -> None:
    place.write_bytes(b"\x7fELF\0\0\0\0garbage")
    place.chmod(0o755)


@pytest.mark.parametrize(
    ("make", "number", "code", "words"),
    [
        (_nothing, errno.ENOENT, 127, "no such"),
        (_not_executable, errno.EACCES, 126, "chmod"),
        (_directory, errno.EISDIR, 126, "directory"),
        (_without_interpreter, errno.ENOENT, 126, "interpreter"),
        (_binary, errno.ENOEXEC, 126, "not a program"),
    ],
)
@pytest.mark.parametrize("searched", [True, False], ids=["on the path", "by its place"])
def test_failed_start_is_explained(
    make: object, number: int, code: int, words: str, searched: bool, tmp_path: Path
) -> None:
    assert callable(make)
    make(tmp_path / "the-command")
    command = "the-command" if searched else str(tmp_path / "the-command")
    with BareSupervisor(command, environment={"PATH": f"/no/such/place:{tmp_path}"}) as supervisor:
        failed = supervisor.hear("failed")
        supervisor.hear("finished")
    assert (failed["errno"], failed["exit_code"]) == (number, code)
    assert words in failed["why"]


def test_missing_directory_is_not_reported_as_missing_command(tmp_path: Path) -> None:
    with BareSupervisor("true", directory=str(tmp_path / "missing")) as supervisor:
        failed = supervisor.hear("failed")
    assert failed["exit_code"] == 125
    assert "directory" in failed["why"]


def test_command_without_permission_does_not_hide_a_later_one(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "the-command").write_text("exit 4\n")
    (tmp_path / "second/the-command").chmod(0o755)
    with BareSupervisor("the-command", environment={"PATH": f"{tmp_path}/first:{tmp_path}/second"}) as supervisor:
        assert exit_code(supervisor.hear("ended")) == 4


# Root may enter every directory, so this runs as nobody.
_AS_NOBODY = """
import os, sys
from stoker.fill.config_files import find_config
from stoker.errors import StokerError
from stoker.runs.processes.spawn import CannotStartError, Program, failure, start
from stoker.runs.postmortem.stacks import find_py_spy
closed, command = sys.argv[1:]
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
else:
    os.chmod(closed, 0)
os.environ.update(PATH=closed, HOME=closed)
os.environ.pop("XDG_CONFIG_HOME", None)
find_py_spy()
try:
    find_config(None)
except StokerError as error:
    assert "there is nothing to fill with" in str(error), error
try:
    pid = start(Program([command], {"PATH": f"{closed}:/usr/bin:/bin"}), None, lambda: None)
except CannotStartError as error:
    print(failure(error.stage, error.number).exit_code)
else:
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize(("command", "code"), [("false", 1), ("no-such-command", 127), ("CLOSED/inside", 126)])
def test_directory_without_permission_does_not_hide_a_later_command(tmp_path: Path, command: str, code: int) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    words = [sys.executable, "-c", _AS_NOBODY, str(closed), command.replace("CLOSED", str(closed))]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    closed.chmod(0o700)
    assert done.stdout == f"{code}\n"


# Events


def test_orphans_are_tracked_until_they_end() -> None:
    with BareSupervisor("sh", "-c", "(setsid sleep 60 &) ; exit 7") as supervisor:
        assert exit_code(supervisor.hear("ended")) == 7
        with pytest.raises(AssertionError, match="did not say"):
            supervisor.hear("empty", deadline=0.1)
        supervisor.order_stop("SIGTERM", 5)
        assert supervisor.hear("outcome")["asked"] == 1


def test_suspended_command_is_reported() -> None:
    # A separate group: the kernel does not suspend an orphaned group, as when a service runs the tests.
    with BareSupervisor("sh", "-c", "kill -TSTP $$; exit 3", popen={"process_group": 0}) as supervisor:
        job = supervisor.hear("started")
        assert supervisor.hear("stopped") == signal.SIGTSTP
        os.kill(job, signal.SIGCONT)
        assert exit_code(supervisor.hear("ended")) == 3


def test_supervisor_suspended_with_its_job_is_continued_with_it() -> None:
    with BareSupervisor("sleep", "60") as supervisor:
        job = supervisor.hear("started")
        for pid in (supervisor.process.pid, job):
            os.kill(pid, signal.SIGSTOP)
            _wait_until_stopped(pid)
        os.kill(job, signal.SIGCONT)
        wait_for(lambda: _state(supervisor.process.pid) != "T", named="the supervisor's going on")


def test_signal_is_reported_with_its_sender() -> None:
    script = "trap : USR1; kill -USR1 0; read line"
    with BareSupervisor("sh", "-c", script, popen={"start_new_session": True}) as supervisor:
        assert supervisor.hear("signal") == {"number": signal.SIGUSR1, "from_kernel": False, "from_job": True}
        supervisor.process.send_signal(signal.SIGHUP)
        assert supervisor.hear("signal") == {"number": signal.SIGHUP, "from_kernel": False, "from_job": False}


# On a terminal without a shell, as in a container or a separate window


@pytest.fixture
def terminal() -> Iterator["Terminal"]:
    terminal = Terminal()
    yield terminal
    terminal.hang_up()


class Terminal:
    """A terminal for the process that is started with `popen`."""

    def __init__(self) -> None:
        self._keyboard, self._screen = os.openpty()
        self.popen = {"stdin": self._screen, "start_new_session": True, "preexec_fn": self._take}

    def type(self, keys: bytes) -> None:
        os.write(self._keyboard, keys)

    def hang_up(self) -> None:
        for end in (self._screen, self._keyboard):
            with contextlib.suppress(OSError):
                os.close(end)

    def _take(self) -> None:
        fcntl.ioctl(self._screen, termios.TIOCSCTTY, 0)


def test_ctrl_c_reaches_the_job_and_is_known_to_come_from_the_terminal(terminal: Terminal) -> None:
    with BareSupervisor("sh", "-c", "trap 'exit 5' INT; read line", popen=terminal.popen) as supervisor:
        job = supervisor.hear("started")
        wait_for(lambda: _catches(job, signal.SIGINT), named="the trap")
        terminal.type(b"\x03")
        assert supervisor.hear("signal") == {"number": signal.SIGINT, "from_kernel": True, "from_job": False}
        assert exit_code(supervisor.hear("ended")) == 5


def test_ctrl_z_does_not_suspend_an_orphaned_group(terminal: Terminal) -> None:
    """The reaper is the parent of the job, but the kernel must not take it for a job-control shell."""
    with BareSupervisor("sh", "-c", "trap 'exit 5' INT; read line", popen=terminal.popen) as supervisor:
        job = supervisor.hear("started")
        wait_for(lambda: _catches(job, signal.SIGINT), named="the trap")
        terminal.type(b"\x1a\x03")
        assert exit_code(supervisor.hear("ended")) == 5


def test_hangup_reaches_only_the_session_leader(terminal: Terminal) -> None:
    with BareSupervisor("sleep", "60", popen=terminal.popen) as supervisor:
        supervisor.hear("started")
        terminal.hang_up()
        assert supervisor.hear("signal") == {"number": signal.SIGHUP, "from_kernel": False, "from_job": False}


# Stopped


def test_stop_kills_only_processes_that_ignore_the_signal(holders: Holders) -> None:
    with escaping("subreaper", holders) as supervisor:
        holders.wait_until_ready(2)
        supervisor.order_stop("SIGTERM", 0.05)
        outcome = supervisor.hear("outcome")
        assert (outcome["asked"], outcome["killed"], outcome["survivors"]) == (2, 2, [])
        assert not holders.anyone_left()
        # Known by then: a reaper that is slow to collect what was killed is not waited for in the stop itself.
        assert exit_code(supervisor.hear("finished")["status"]) == 137


def test_stop_ends_as_soon_as_the_job_has_ended(holders: Holders) -> None:
    with escaping("setsid", holders) as supervisor:
        holders.wait_until_ready(2)
        supervisor.order_stop("SIGTERM", 600)
        outcome = supervisor.hear("outcome")
        assert (outcome["asked"], outcome["killed"]) == (2, 0)
        assert exit_code(supervisor.hear("finished")["status"]) == 143


def test_suspended_process_is_continued_so_that_it_can_end(holders: Holders) -> None:
    with escaping("stopped", holders) as supervisor:
        holders.wait_until_ready(2)
        supervisor.order_stop("SIGTERM", 600)
        assert supervisor.hear("outcome")["killed"] == 0


def test_ctrl_c_ends_the_grace_but_sigint_from_a_program_does_not(holders: Holders, terminal: Terminal) -> None:
    with escaping("says-when-asked", holders, terminal, session=True) as supervisor:
        holders.wait_until_ready(1)
        supervisor.order_stop("SIGTERM", 600)
        holders.wait_until_ready(1)
        supervisor.process.send_signal(signal.SIGINT)
        wait_for(lambda: not _pending(supervisor.process.pid), named="the signal being read")
        with pytest.raises(AssertionError, match="did not say"):
            supervisor.hear("outcome", deadline=0.2)
        terminal.type(b"\x03")
        assert supervisor.hear("outcome")["killed"] == 1


# The supervisor or the reaper is killed


@pytest.mark.parametrize("cgroup", [True, False], ids=["cgroup", "descent"])
@pytest.mark.parametrize("way", ["setsid", "subreaper"])
def test_job_of_killed_supervisor_is_stopped(holders: Holders, tmp_path: Path, way: str, cgroup: bool) -> None:
    reported = tmp_path / "reported"
    with escaping(way, holders, orphaned=str(reported), grace=0.05, cgroup=cgroup) as supervisor:
        holders.wait_until_ready(2)
        supervisor.process.kill()
        stop = _last_word(reported)
    assert not holders.anyone_left()
    assert exit_code(stop["status"]) == (143 if way == "setsid" else 137)
    assert stop["survivors"] == []


def test_kill_of_the_whole_group_leaves_nothing_of_the_job(holders: Holders, tmp_path: Path) -> None:
    """It kills the supervisor and the command at once, but no process with its own session."""
    reported = tmp_path / "reported"
    with escaping("setsid", holders, orphaned=str(reported)) as supervisor:
        holders.wait_until_ready(2)
        os.killpg(supervisor.process.pid, signal.SIGKILL)
        stop = _last_word(reported)
    assert not holders.anyone_left()
    assert exit_code(stop["status"]) == 137


def test_supervisor_killed_after_its_job_ended_is_recorded(tmp_path: Path) -> None:
    """The supervisor can be killed between the end of the job and the last write of its record."""
    reported = tmp_path / "reported"
    program = (
        "import os, signal; from pathlib import Path; from stoker.runs.processes.reaper import Program, launch\n"
        f"reported = Path({str(reported)!r})\n"
        "g = launch(Program(['true'], os.environ), orphaned=lambda stop: reported.write_text(str(stop.status)))\n"
        "while not g.empty: g.update()\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program], check=False)
    assert _last_word(reported) == 0


def test_killed_supervisor_without_job_leaves_no_cgroup() -> None:
    # In a cgroup where no other supervisor tidies up.
    program = (
        "import os; from stoker.runs.processes.cgroup import own_cgroup; "
        "from stoker.runs.processes.reaper import fork_reaper\n"
        "place = own_cgroup() / f'alone-{os.getpid()}'; place.mkdir()\n"
        "(place / 'cgroup.procs').write_text(str(os.getpid()))\n"
        "print(fork_reaper(keeps_output=True).cgroup.path.parent, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if not done.stdout:
        pytest.skip("no cgroup can be made here")

    def is_empty() -> bool:
        with contextlib.suppress(OSError):
            Path(done.stdout.strip()).rmdir()
            return True
        return False

    wait_for(is_empty, deadline=20.0, named="the end of the cgroup")


@pytest.mark.parametrize("cgroup", [True, False], ids=["cgroup", "descent"])
def test_killed_reaper_loses_no_process_of_the_job(holders: Holders, cgroup: bool) -> None:
    helper = ["sh", "-c", "(sleep 60 &) ; exec sleep 60"]
    with escaping("setsid", holders, helper=helper, cgroup=cgroup) as supervisor:
        helper_pid = supervisor.hear("helper")
        reaper = supervisor.hear("reaper")
        job = supervisor.hear("started")
        holders.wait_until_ready(2)
        os.kill(reaper, signal.SIGKILL)
        processes = supervisor.hear("gone")
        assert job in processes
        assert helper_pid not in processes
        assert len(processes) == 2
        os.kill(job, signal.SIGKILL)
        assert exit_code(supervisor.hear("ended")) == 137, "the status of the job is still learned"
        supervisor.order_stop("SIGTERM", 5)
        assert supervisor.hear("outcome")["asked"] == 1
        assert not holders.anyone_left()
        assert "reaper was killed" in supervisor.hear("finished")["containment"]
        assert supervisor.hear("helper_left_alone")
        supervisor.process.wait(timeout=60)


def test_reaper_killed_during_the_start_loses_no_process() -> None:
    """The job can run before its reaper has confirmed that."""
    program = (
        "import os, select, signal\n"
        "from stoker.runs.processes import reaper_process\n"
        "from stoker.runs.processes.reaper import ReaperKilled, Program, launch\n"
        "from stoker.runs.processes.termination import stop\n"
        "reaper_process.ReaperProcess._close_inherited = lambda self: os.kill(os.getpid(), signal.SIGKILL)\n"
        "reaper = launch(Program(['sleep', '60'], os.environ))\n"
        "assert select.select([reaper], [], [], 60)[0], 'nothing calls for attention'\n"
        "assert isinstance(reaper.next_event(), ReaperKilled)\n"
        "outcome = stop(reaper, signal.SIGTERM, 60)\n"
        "reaper.close()\n"
        "print(outcome.asked, outcome.killed, reaper.empty)"
    )
    tried = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert tried.stdout == "1 0 True\n"


def test_signal_before_the_confirmed_start_reaches_the_job() -> None:
    program = (
        "import os, select, signal\n"
        "from stoker.runs.processes import reaper as module, reaper_process\n"
        "closing, (held, let_go) = reaper_process.ReaperProcess._close_inherited, os.pipe()\n"
        "def late(self):\n"
        "    os.read(held, 1)\n"
        "    closing(self)\n"
        "reaper_process.ReaperProcess._close_inherited = late\n"
        "module._START_PATIENCE = 0\n"
        "reaper = module.launch(module.Program(['sleep', '60'], os.environ))\n"
        "print(reaper.next_event(), reaper.signal(signal.SIGTERM))\n"
        "os.write(let_go, b'.')\n"
        "reported = []\n"
        "while not reported or not isinstance(reported[-1], module.Ended):\n"
        "    assert select.select([reaper], [], [], 60)[0], reported\n"
        "    reported += [event for event in [reaper.next_event()] if event is not None]\n"
        "reaper.close()\n"
        "print(*(type(event).__name__ for event in reported), os.waitstatus_to_exitcode(reported[-1].status))"
    )
    tried = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert tried.stdout == "None True\nStarted Ended -15\n"


def test_suspended_reaper_does_not_block_the_supervisor(holders: Holders) -> None:
    with escaping("setsid", holders) as supervisor:
        reaper = supervisor.hear("reaper")
        holders.wait_until_ready(2)
        os.kill(reaper, signal.SIGSTOP)
        _wait_until_stopped(reaper)
        supervisor.order_stop("SIGKILL", 0)
        assert supervisor.hear("outcome")["survivors"] == []
        assert not holders.anyone_left()


def test_reaper_holds_no_inherited_pipe_open() -> None:
    """A reader of the caller's pipe must see its end when the caller and the job close it."""
    reader, writer = os.pipe()
    with BareSupervisor("sh", "-c", "read line", popen={"pass_fds": [writer]}) as supervisor:
        os.close(writer)
        reaper = supervisor.hear("reaper")
        supervisor.hear("started")
        links = [link.readlink() for link in wait_for(lambda: _descriptors(reaper), named="the reaper's pipes")]
        assert Path(f"pipe:[{os.fstat(reader).st_ino}]") not in links
    os.close(reader)


_PREPARING = """
import os, select, signal, sys
from stoker.runs.processes.reaper import LaunchRequest, Program, fork_reaper

def request(name):
    program = Program(["touch", f"{sys.argv[1]}/{name}"], os.environ, session=True)
    return LaunchRequest(program, signal.SIGTERM, 1.0, log=f"{sys.argv[1]}/log", log_limit=1000)

def wait_until_empty():
    while not reaper.empty:
        assert select.select([reaper], [], [], 60)[0]
        reaper.update()

reaper = fork_reaper(keeps_output=True)
reaper.prepare(request("prepared"))
if sys.argv[2] == "start":
    reaper.set_deadline(1e9, with_start=True)
    reaper.start(request("prepared"))
    wait_until_empty()
elif sys.argv[2] == "other":
    reaper.set_deadline(1e9, with_start=True)
    reaper.start(request("other"))
    wait_until_empty()
    reaper.start(request("third"))
    wait_until_empty()
elif sys.argv[2] == "late":
    reaper.set_deadline(0.0, with_start=True)
    reaper.start(request("prepared"))
    wait_until_empty()
elif sys.argv[2] == "killed":
    print(reaper.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
reaper.close()
"""


@pytest.mark.parametrize(
    ("then", "runs"),
    [("start", {"prepared"}), ("other", {"other", "third"}), ("late", set()), ("close", set()), ("killed", set())],
)
def test_prepared_command_runs_only_when_it_is_started(then: str, runs: set[str], tmp_path: Path) -> None:
    """Not when its supervisor is killed, releases the reaper or starts another, and not after its deadline."""
    words = [sys.executable, "-c", _PREPARING, str(tmp_path), then]
    tried = subprocess.run(words, check=False, capture_output=True, text=True)
    assert tried.returncode == (-signal.SIGKILL if then == "killed" else 0), tried.stderr
    for pid in map(int, tried.stdout.split()):
        wait_for(lambda pid=pid: identify(pid) is None, named="the end of the reaper")  # type: ignore[misc]
    assert {file.name for file in tmp_path.iterdir()} - {"log"} == runs


_FAST_PATH = """
import os, select, signal, sys
from stoker.runs.processes.reaper import LaunchRequest, Program, fork_reaper
from stoker.runs.processes.reaper_process import FAST_START
from stoker.runs.processes.syscalls import boot_clock

place, script = sys.argv[1:]
reaper = fork_reaper(keeps_output=True, has_fast_path=True)
worker = reaper.take_connection()

def prepare(command, name=b"a" * 16):
    program = Program(["sh", "-c", command], os.environ, session=True)
    request = LaunchRequest(program, signal.SIGTERM, 1.0, log=f"{place}/log", log_limit=1000, id=name, success=b"done")
    reaper.prepare(request)
    reaper.set_deadline(boot_clock() + 600.0, with_start=True)
    reaper.start(request, waits=False, is_ordered=True)

def order(name=b"a" * 16, seconds=600.0):
    worker.send(FAST_START.pack(name, boot_clock() + seconds))

def end():
    while not reaper.empty:
        assert select.select([reaper], [], [], 60)[0]
        reaper.update()
    said = worker.recv(100) if select.select([worker], [], [], 0)[0] else b""
    lines = open(f"{place}/ran").read().split() if os.path.exists(f"{place}/ran") else []
    print(lines, said.decode(), reaper.reported, reaper.status, sep="|", flush=True)

run = f"echo ran >> {place}/ran"
exec(script)
reaper.close()
"""
_REPORTED = "select.select([worker], [], [])"
_GO_ON = "prepare(f'{run}; until [ -e {place}/go ]; do sleep 0.02; done'); order()"


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("prepare(run); order(); end()", ["['ran']|done|True|0"]),
        # A second order changes nothing, not even for the following job.
        ("prepare(run); order(); reaper.ensure_start(); order(); end()", ["['ran']|done|True|0"]),
        (
            "prepare(run); order(); order(); end(); prepare(run, b'b' * 16); order(); order(b'b' * 16); end()",
            ["['ran']|done|True|0", "['ran', 'ran']|done|True|0"],
        ),
        # A worker that was killed before it sent the order.
        ("prepare(run); worker.shutdown(2); reaper.ensure_start(); end()", ["['ran']||False|0"]),
        # What was meant for another attempt, or comes after the end of the lease.
        ("prepare(run); order(b'b' * 16); reaper.ensure_start(); end()", ["['ran']|done|True|0"]),
        ("prepare(run); order(seconds=-1.0); end()", ["[]||False|None"]),
        # Only a success is the same for every job.
        ("prepare(f'{run}; exit 3'); order(); end()", [f"['ran']||False|{3 << 8}"]),
        # The outcome is decided once: by the supervisor, which may change its mind, or by the reaper.
        (f"{_GO_ON}; print(reaper.decide()); open(f'{{place}}/go', 'w'); end()", ["True", "['ran']||False|0"]),
        (
            f"{_GO_ON}; reaper.decide(); reaper.leave_undecided(); open(f'{{place}}/go', 'w'); end()",
            ["['ran']|done|True|0"],
        ),
        (
            f"prepare(run); order(); {_REPORTED}; print(reaper.decide(), reaper.wait_for_status()); end()",
            ["False 0", "['ran']|done|True|0"],
        ),
    ],
    ids=[
        "success", "ordered-twice", "late-order", "worker-gone", "other-attempt", "too-late", "failure", "stopped",
        "not-stopped-after-all", "stopped-too-late",
    ],
)  # fmt: skip
def test_worker_and_reaper_start_and_report_a_job_once(script: str, says: list[str], tmp_path: Path) -> None:
    words = [sys.executable, "-c", _FAST_PATH, str(tmp_path), script]
    tried = subprocess.run(words, check=False, capture_output=True, text=True, timeout=120)
    assert tried.stdout.splitlines() == says, tried.stderr


def test_many_jobs_in_a_row_leak_no_descriptors(tmp_path: Path) -> None:
    """Neither in the reaper nor in the supervisor, whether the jobs can be started or not."""
    program = (
        "import os, select, signal, sys\n"
        "from stoker.runs.processes.reaper import LaunchRequest, Program, fork_reaper\n"
        "from tests.support.waiting import wait_for\n"
        "reaper = fork_reaper(keeps_output=True)\n"
        "for number in range(24):\n"
        "    program = Program(['no-such-command' if number % 3 == 2 else 'true'], os.environ, session=True)\n"
        "    reaper.start(LaunchRequest(program, signal.SIGTERM, 1.0, log=f'{sys.argv[1]}/{number}', log_limit=1000))\n"
        "    while not reaper.empty:\n"
        "        assert select.select([reaper], [], [], 60)[0]\n"
        "        reaper.update()\n"
        # It opens the log of a job that prints nothing a moment later.
        "    wait_for(lambda: os.path.exists(f'{sys.argv[1]}/{number}'), named='the log')\n"
        "    if number >= 3:\n"
        "        print(*(len(os.listdir(f'/proc/{pid}/fd')) for pid in (reaper.pid, 'self')))\n"
        "reaper.close()"
    )
    tried = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    counted = tried.stdout.splitlines()
    assert len(counted) == 21
    assert len(set(counted)) == 1, counted


def _descriptors(reaper: int) -> list[Path]:
    """Once it has closed what it inherited: standard streams, two pipes, a signalfd and an epoll."""
    descriptors = list(Path(f"/proc/{reaper}/fd").iterdir())
    return descriptors if len(descriptors) <= 7 else []


def _state(pid: int) -> str:
    found = stat(pid)
    return found.state if found else ""


def _catches(pid: int, signum: int) -> bool:
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) & 1 << (signum - 1))


def _pending(pid: int) -> bool:
    """Whether a signal is pending for it."""
    return "ShdPnd:\t0000000000000000" not in Path(f"/proc/{pid}/status").read_text()


def _wait_until_stopped(pid: int) -> None:
    wait_for(lambda: _state(pid) == "T", named="the stop")


def _last_word(reported: Path) -> Any:
    """What the reaper wrote when its supervisor was killed."""
    text = wait_for(lambda: reported.read_text() if reported.exists() else None, named="the reaper's last word")
    return json.loads(text)
