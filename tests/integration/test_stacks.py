"""Real processes that hang, and what is found out about them from outside."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stoker.gpus.model import Unknown, known
from stoker.runs.postmortem import stacks
from stoker.runs.postmortem.processes import ProcessInfo, read_processes
from stoker.runs.postmortem.stacks import Frame, Stack, Thread, collect_stacks
from stoker.runs.processes.tree import children
from tests.support.waiting import wait_for

LOCKED = """
import threading
def take_the_lock(lock):
    lock.acquire()
lock = threading.Lock()
lock.acquire()
print("ready", flush=True)
take_the_lock(lock)
"""
SLEEPING = """
import time
def nap():
    print("ready", flush=True)
    time.sleep(1000)
nap()
"""
WORKERS = """
import multiprocessing
def work(started, tasks):
    started.release()
    tasks.recv()
if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    started, pipes = spawn.Semaphore(0), [spawn.Pipe() for _ in range(2)]
    children = [spawn.Process(target=work, args=(started, pipe[0])) for pipe in pipes]
    for child in children:
        child.start()
    for child in children:
        started.acquire()
    print("ready", flush=True)
    children[0].join()
"""
# The parent of a posix_spawn cannot be interrupted until the child has opened its files, and a pipe opens only when
# a reader opens the other end: a real uninterruptible sleep, without a driver.
UNINTERRUPTIBLE = """
import os, sys
def stuck():
    print("ready", flush=True)
    opens = (os.POSIX_SPAWN_OPEN, 0, sys.argv[1], os.O_RDONLY, 0)
    os.posix_spawn("/bin/true", ["true"], {}, file_actions=[opens])
stuck()
"""
HAVING_WORKED = """
import time
while time.process_time() < 0.1:
    pass
print("ready", flush=True)
time.sleep(1000)
"""
ASKING = """
print("ready", flush=True)
input("continue? ")
"""

# The kernel gives no number above 2**22 to a process.
NOBODY = 2**22 + 1
PYTHON = sys.executable  # which some tests pretend to be another
Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a Python program and waits until it has got to where it hangs; ends it with all that it started."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str, *arguments: str, stdin: int = subprocess.DEVNULL) -> int:
        script = tmp_path / f"train{len(started)}.py"
        script.write_text(program)
        process = subprocess.Popen(
            [PYTHON, str(script), *arguments],
            stdin=stdin,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process.pid

    yield run
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replaces py-spy by a script, with a timeout that suits a busy machine."""
    monkeypatch.setattr(stacks, "PATIENCE", 60.0)
    monkeypatch.setattr(stacks, "REAP", 60.0)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def write(script: str) -> None:
        program = folder / "py-spy"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return write


class Clock:
    """The time, for `stacks`: it can be set forward."""

    def __init__(self) -> None:
        self.ahead = 0.0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stacks, "time", clock)
    return clock


def stack_of(pid: int, deadline: float = 180.0) -> Stack:
    return collect_stacks([pid], deadline=deadline)[0]


def threads_of(stack: Stack) -> tuple[Thread, ...]:
    assert known(stack.threads), stack.threads
    return stack.threads


def reason(stack: Stack) -> str:
    assert isinstance(stack.threads, Unknown), stack.threads
    return stack.threads.reason


def waiting_member(pid: int) -> ProcessInfo:
    """The process once it has come to rest: `ready` is said a moment before it hangs."""

    def resting() -> ProcessInfo | None:
        process = read_processes([pid])[0]
        return process if process.state in "SDT" and known(process.call) and "write" not in process.call else None

    return wait_for(resting, named="the process's rest")


def wait_for_call(pid: int, function: str) -> tuple[Thread, ...]:
    """Its threads, once the innermost user frame is in this function."""

    def arrived() -> tuple[Thread, ...] | None:
        threads = threads_of(stack_of(pid))
        return threads if any(frame.own and frame.function == function for frame in threads[0].frames) else None

    return wait_for(arrived, named=f"the call of {function}")


class TestPythonProcesses:
    def test_process_waiting_for_a_lock_shows_the_line_that_takes_it(self, start: Start) -> None:
        frame = wait_for_call(start(LOCKED), "take_the_lock")[0].frames[0]
        assert (frame.function, frame.line, frame.own) == ("take_the_lock", 4, True)
        assert frame.file.endswith("train0.py")

    def test_sleeping_process_shows_where_it_sleeps(self, start: Start) -> None:
        pid = start(SLEEPING)
        assert [frame.function for frame in wait_for_call(pid, "nap")[0].frames] == ["nap", "<module>"]
        assert "sleep" in waiting_member(pid).in_words()

    def test_stacks_of_a_tree_keep_the_requested_order(self, start: Start) -> None:
        parent = start(WORKERS)
        family = [parent, *children(parent)]
        found = collect_stacks(family, deadline=180)
        assert [stack.pid for stack in found] == family
        functions = [{frame.function for thread in threads_of(stack) for frame in thread.frames} for stack in found]
        assert "<module>" in functions[0]
        # Two workers and the helper that multiprocessing starts for itself.
        assert sum("work" in names for names in functions[1:]) == 2
        assert len(family) == 4

    def test_standard_library_frames_are_not_user_code(self, start: Start) -> None:
        parent = start(WORKERS)

        def joining() -> tuple[Frame, ...] | None:
            frames = threads_of(stack_of(parent))[0].frames
            return frames if any(frame.function.endswith("join") for frame in frames) else None

        *inner, outermost = wait_for(joining, named="the wait for the first worker")
        assert outermost.own
        assert [frame.own for frame in inner] == [False] * len(inner)
        assert {frame.short_file.partition("/")[0] for frame in inner} == {"multiprocessing"}

    def test_suspended_process_is_read(self, start: Start) -> None:
        pid = start(SLEEPING)
        wait_for_call(pid, "nap")
        os.kill(pid, signal.SIGSTOP)
        wait_for(lambda: read_processes([pid])[0].state == "T", named="the stop")
        assert threads_of(stack_of(pid))[0].frames[0].function == "nap"
        assert "SIGCONT" in read_processes([pid])[0].in_words()

    def test_uninterruptible_process_is_read_at_once(
        self, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(stacks, "PATIENCE", 60.0)
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        pid = start(UNINTERRUPTIBLE, str(pipe))
        wait_for(lambda: read_processes([pid])[0].state == "D", named="the uninterruptible sleep")
        begun = time.monotonic()
        assert threads_of(stack_of(pid))[0].frames[0].function == "stuck"
        # A debugger that pauses threads would have waited for this one for as long as it was allowed to.
        assert time.monotonic() - begun < stacks.PATIENCE
        process = read_processes([pid])[0]
        assert process.blocked == 1
        assert "blocked in the kernel (often the GPU driver" in process.in_words()


class TestOtherProcesses:
    def test_non_python_program_is_reported_with_its_wait_channel(self) -> None:
        process = subprocess.Popen(["sleep", "1000"])
        try:
            wait_for(lambda: read_processes([process.pid])[0].name == "sleep", named="the start of sleep")
            assert reason(stack_of(process.pid)) == "not a Python process"
            assert "nanosleep" in waiting_member(process.pid).in_words()
        finally:
            process.kill()
            process.wait()

    def test_ended_process_and_zombie_are_reported(self) -> None:
        process = subprocess.Popen(["true"])
        wait_for(lambda: read_processes([process.pid])[0].state == "Z", named="the end")
        assert "ended" in reason(stack_of(process.pid))
        assert "its parent has not collected it" in read_processes([process.pid])[0].in_words()
        process.wait()
        # Its pid may have been reused.
        assert "ended" in reason(stack_of(NOBODY))
        assert read_processes([NOBODY]) == []

    def test_process_reading_from_the_terminal_is_reported(self, start: Start) -> None:
        ours, theirs = pty.openpty()
        try:
            pid = start(ASKING, stdin=theirs)
            terminal = os.ttyname(theirs)
            call = waiting_member(pid).call
            assert known(call)
            assert call.startswith("read of ")
            assert terminal in call
        finally:
            os.close(ours)
            os.close(theirs)


class TestMembers:
    def test_process_has_its_numbers_and_names(self, start: Start) -> None:
        pid = start(HAVING_WORKED, "--epochs", "3")
        process = read_processes([pid])[0]
        assert (process.pid, process.parent, process.threads) == (pid, os.getpid(), 1)
        assert known(process.command)
        assert process.command.endswith("train0.py --epochs 3")
        assert 0.05 < process.cpu < 10
        assert 2**20 < process.memory < 2**30
        assert process.started > 0

    def test_ended_processes_are_omitted_and_the_order_is_kept(self, start: Start) -> None:
        first, second = start(SLEEPING), start(SLEEPING)
        assert [process.pid for process in read_processes([second, NOBODY, first])] == [second, first]

    def test_name_with_parentheses_is_parsed(self, tmp_path: Path) -> None:
        a_fake_process(tmp_path, 7, name="a) R (b")
        process = read_processes([7], proc=str(tmp_path))[0]
        assert (process.name, process.state, process.parent) == ("a) R (b", "S", 1)

    def test_hanging_command_line_read_omits_only_the_command_line(self, tmp_path: Path) -> None:
        a_fake_process(tmp_path, 7)
        a_fake_process(tmp_path, 8)
        stuck = tmp_path / "7/cmdline"
        stuck.unlink()
        os.mkfifo(stuck)  # opening it blocks, as reading that of a process blocks whose memory is locked
        begun = time.monotonic()
        hung, healthy = read_processes([7, 8], proc=str(tmp_path))
        assert time.monotonic() - begun < 60
        assert isinstance(hung.command, Unknown)
        assert "hangs in the kernel" in hung.command.reason
        assert healthy.command == "python train.py"
        os.close(os.open(stuck, os.O_RDWR))  # the thread that was left behind goes
        wait_for(lambda: not any(thread.name == "reader of 7" for thread in threading.enumerate()), named="its end")

    def test_remaining_facts_are_reported_when_no_thread_can_start(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pid = start(SLEEPING)

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", refuse)
        process = read_processes([pid])[0]
        assert isinstance(process.command, Unknown)
        assert process.name == "python"

    def test_thread_in_the_gpu_driver_is_found_among_others(self, tmp_path: Path) -> None:
        a_fake_process(tmp_path, 7, threads={7: "S", 8: "S", 9: "D"})
        (tmp_path / "7/task/9/wchan").write_text("os_acquire_rwlock_write")
        (tmp_path / "7/task/9/syscall").write_text("16 0x3 0x0")
        (tmp_path / "7/fd").mkdir()
        (tmp_path / "7/fd/3").symlink_to("/dev/nvidia0")
        process = read_processes([7], proc=str(tmp_path))[0]
        assert process.blocked == 1
        assert process.in_words().startswith("1 of its 3 threads blocked in the kernel")
        if os.uname().machine == "x86_64":
            assert process.in_words().endswith("in ioctl of /dev/nvidia0 (os_acquire_rwlock_write)")

    def test_frozen_cgroup_is_reported(self, tmp_path: Path) -> None:
        a_fake_process(tmp_path, 7)
        (tmp_path / "7/wchan").write_text("do_freezer_trap")
        assert read_processes([7], proc=str(tmp_path))[0].in_words().startswith("frozen by its cgroup")


class TestWithoutPySpy:
    def test_missing_py_spy_is_reported_with_the_package_to_install(
        self, start: Start, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pid = start(SLEEPING)
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
        monkeypatch.setenv("PATH", "/nonexistent:")
        assert reason(stack_of(pid)) == "py-spy is not installed: pip install 'stoker[report]'"

    def test_py_spy_beside_python_is_preferred_to_path(
        self, py_spy: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        py_spy("true")
        beside = stacks.find_py_spy()
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
        assert stacks.find_py_spy() == beside == str(tmp_path / "bin/py-spy")
        (tmp_path / "bin/py-spy").chmod(0o644)
        assert stacks.find_py_spy() is None

    def test_py_spy_that_cannot_start_is_reported(
        self, start: Start, py_spy: Callable[[str], None], tmp_path: Path
    ) -> None:
        py_spy("")
        (tmp_path / "bin/py-spy").write_text("#!/nonexistent/interpreter\n")
        assert "could not be started" in reason(stack_of(start(SLEEPING)))


class TestFailures:
    @pytest.mark.parametrize(
        ("said", "result"),
        [
            ("Permission Denied: Try running again with elevated permissions", "no permission to read its memory"),
            ("Error: Failed to suspend\\nCaused by: Operation not permitted (os error 1)", "--cap-add SYS_PTRACE"),
            ("Error: Unsupported version of Python: 3.99.0", "does not support this version of Python"),
            ("Error: Failed to find python version from target process", "pip install -U py-spy"),
            ("Error: the moon is full\\n\\nStack backtrace:\\n 0: main", "py-spy failed: the moon is full"),
            ("", "py-spy ended without a message"),
        ],
    )
    def test_each_failure_has_a_reason(
        self, start: Start, py_spy: Callable[[str], None], said: str, result: str
    ) -> None:
        py_spy(f"printf '{said}' >&2; exit 1")
        assert result in reason(stack_of(start(SLEEPING)))

    @pytest.mark.parametrize(
        ("scope", "result"),
        [
            ("0", "another user"),
            ("1", "kernel.yama.ptrace_scope is 1; an administrator can set it to 0"),
            ("2", "kernel.yama.ptrace_scope is 2"),
            ("3", "until the next boot"),
            (None, "--cap-add SYS_PTRACE"),
        ],
    )
    def test_refused_permission_names_the_kernel_setting(
        self, py_spy: Callable[[str], None], tmp_path: Path, scope: str | None, result: str
    ) -> None:
        py_spy("echo 'Permission Denied: try sudo' >&2; exit 1")
        a_fake_process(tmp_path, 7)
        (tmp_path / "7/exe").symlink_to("/usr/bin/python3.11")
        if scope is not None:
            (tmp_path / "sys/kernel/yama").mkdir(parents=True)
            (tmp_path / "sys/kernel/yama/ptrace_scope").write_text(f"{scope}\n")
        assert result in reason(collect_stacks([7], deadline=180, proc=str(tmp_path))[0])

    def test_process_that_cannot_be_paused_is_read_without_pausing(
        self, start: Start, py_spy: Callable[[str], None]
    ) -> None:
        py_spy(
            'case "$*" in *--nonblocking*) ;; *) echo "Error: Failed to suspend process" >&2; exit 1 ;; esac\n'
            "printf 'Python v3.11\\n\\nThread 1 (idle): \"MainThread\"\\n    f (/home/me/a.py:3)\\n'"
        )
        assert threads_of(stack_of(start(SLEEPING)))[0].frames[0].function == "f"

    def test_pausing_read_that_hangs_is_abandoned_in_time_for_a_retry(
        self, start: Start, py_spy: Callable[[str], None], clock: Clock, tmp_path: Path
    ) -> None:
        py_spy(
            f"case \"$*\" in *--nonblocking*) ;; *) touch '{tmp_path}/hangs'; exec sleep 1000 ;; esac\n"
            "printf 'Python v3.11\\n\\nThread 1 (idle): \"MainThread\"\\n    f (/home/me/a.py:3)\\n'"
        )

        def pass_time() -> bool:
            """Once it hangs, a good third of the time is over."""
            clock.ahead = 61.0 if (tmp_path / "hangs").exists() else 0.0
            return False

        (found,) = collect_stacks([start(SLEEPING)], deadline=180, enough=pass_time)
        assert threads_of(found)[0].frames[0].function == "f"

    def test_hanging_py_spy_is_killed_at_the_deadline_with_its_children(
        self, start: Start, py_spy: Callable[[str], None], clock: Clock, tmp_path: Path
    ) -> None:
        log = tmp_path / "pids"
        log.touch()
        py_spy(f"echo $$ >> '{log}'; exec sleep 1000")
        pids = [start(SLEEPING) for _ in range(6)]

        def pass_time() -> bool:
            """Once as many hang as are asked at once, all of the time is over."""
            clock.ahead = 200.0 if log.read_text().count("\n") >= stacks.AT_ONCE else 0.0
            return False

        begun = time.monotonic()
        found = collect_stacks(pids, deadline=200, enough=pass_time)
        assert time.monotonic() - begun < 150
        assert all(isinstance(stack.threads, Unknown) for stack in found)
        assert {reason(stack) for stack in found} <= {stacks.TIMED_OUT, stacks.NO_TIME_LEFT}
        asked = [int(pid) for pid in log.read_text().split()]
        assert len(asked) >= stacks.AT_ONCE
        assert not set(asked).intersection(children(os.getpid()))

    def test_endless_output_is_cut_off(self, start: Start, py_spy: Callable[[str], None]) -> None:
        py_spy("exec yes")
        assert reason(stack_of(start(SLEEPING))) == "py-spy failed: y"

    def test_number_of_concurrent_py_spy_processes_is_limited(
        self, py_spy: Callable[[str], None], tmp_path: Path
    ) -> None:
        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        py_spy(f"echo begun >> '{tmp_path}/log'; read line < '{fifo}'; echo ended >> '{tmp_path}/log'")
        for pid in range(100, 110):
            a_fake_process(tmp_path, pid)
            (tmp_path / f"{pid}/exe").symlink_to("/usr/bin/python3.11")
        (tmp_path / "log").touch()
        asking = threading.Thread(
            target=lambda: collect_stacks(range(100, 110), deadline=180, proc=str(tmp_path)), daemon=True
        )
        asking.start()
        log = (tmp_path / "log").read_text
        wait_for(lambda: log().count("begun") == stacks.AT_ONCE, named="the first round")
        writer = os.open(fifo, os.O_RDWR)
        while asking.is_alive():
            assert log().count("begun") - log().count("ended") <= stacks.AT_ONCE
            os.write(writer, b"\n")
            asking.join(0.02)
        os.close(writer)
        assert log().count("begun") == 10

    def test_short_deadline_returns_partial_results(self, start: Start, py_spy: Callable[[str], None]) -> None:
        py_spy("exec sleep 1000")
        begun = time.monotonic()
        found = collect_stacks([start(SLEEPING)], deadline=180, enough=lambda: time.monotonic() > begun + 0.1)
        assert time.monotonic() - begun < 60
        assert reason(found[0]) == stacks.TIMED_OUT


def a_fake_process(proc: Path, pid: int, *, name: str = "python", threads: dict[int, str] | None = None) -> None:
    """A process in a pretended /proc."""
    for thread, state in (threads or {pid: "S"}).items():
        folder = proc / f"{pid}/task/{thread}"
        folder.mkdir(parents=True)
        (folder / "stat").write_text(stat_line(thread, name, state, len(threads or [1])))
    (proc / f"{pid}/stat").write_text(stat_line(pid, name, "S", len(threads or [1])))
    (proc / f"{pid}/cmdline").write_bytes(b"python\0train.py\0")


def stat_line(pid: int, name: str, state: str, threads: int) -> str:
    before_threads = " ".join(["1", *["0"] * 15])
    return f"{pid} ({name}) {state} {before_threads} {threads} 0 4242 0 100 {' '.join(['0'] * 20)}\n"
