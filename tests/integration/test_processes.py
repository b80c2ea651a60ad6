"""Real processes by pid and start time: who descends from whom, and a signal that hits nobody else."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from stoker.procfs import Identity, KeptFiles, identify, is_alive, stat
from stoker.runs.processes import tree as processes
from stoker.runs.processes.signals import SignalStream
from stoker.runs.processes.tree import (
    children,
    descends,
    describe,
    environments,
    exit_code,
    find_tagged,
    scan_processes,
    send,
    walk_processes,
)
from tests.support.descendants import descendants
from tests.support.waiting import wait_for

# A process with two threads, each of which starts a child, which starts one too.
FAMILY = """
import subprocess, threading
script = "sleep 60 & echo $! $$; wait"
start = lambda: started.append(subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True))
started = []
start()
thread = threading.Thread(target=lambda: (start(), stay.wait()))
stay = threading.Event()
thread.start()
while len(started) < 2: pass
print(*[child.stdout.readline().strip() for child in started], flush=True)
input()
"""


class Family:
    """A process with its children and grandchildren."""

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-E", "-c", FAMILY]
        self.root = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.root.stdout is not None
        self.pids = {int(word) for word in self.root.stdout.readline().split()}


@pytest.fixture
def family() -> Iterator[Family]:
    family = Family()
    yield family
    for pid in family.pids:
        os.kill(pid, signal.SIGKILL)
    family.root.kill()
    family.root.communicate()


@pytest.fixture
def child() -> Iterator[Identity]:
    """A process that stops or dies of any signal."""
    with subprocess.Popen(["sleep", "60"]) as process:
        who = identify(process.pid)
        assert who is not None
        yield who
        process.kill()


@pytest.fixture(params=["listed", "scanned", "too many threads"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways in which a kernel lets children be found."""
    if request.param == "scanned":
        monkeypatch.setattr(processes, "_kernel_lists_children", lambda: False)
    if request.param == "too many threads":
        monkeypatch.setattr(processes, "_worthwhile_threads", lambda: 2)
        monkeypatch.setattr(processes, "_FEW_THREADS", 0)


@pytest.mark.usefixtures("way")
def test_descendants_of_all_threads_are_found(family: Family) -> None:
    assert {member.pid for member in descendants(family.root.pid)} == family.pids
    assert scan_processes([family.root.pid]).settled
    assert all(descends(pid, family.root.pid) for pid in family.pids)
    assert not descends(family.root.pid, family.root.pid)


@pytest.mark.usefixtures("way")
def test_excluded_process_is_left_out_with_its_descendants(family: Family) -> None:
    excluded = children(family.root.pid)[0]
    left = family.pids - {excluded} - {member.pid for member in descendants(excluded)}
    assert len(left) == 2
    assert {member.pid for member in descendants(family.root.pid, exclude={excluded})} == left


@pytest.mark.usefixtures("way")
def test_zombie_does_not_count() -> None:
    process = subprocess.Popen(["true"])
    wait_for(lambda: (found := stat(process.pid)) is not None and found.is_zombie, named="the zombie")
    assert process.pid not in {member.pid for member in descendants(os.getpid())}
    assert process.pid in children(os.getpid())
    who = identify(process.pid)
    assert who is not None
    assert not is_alive(who)
    process.wait()


def test_figures_of_a_tree_are_read_by_descriptors_that_end_with_their_processes() -> None:
    def opened() -> set[str]:
        return set(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the names

    files = KeptFiles()
    with subprocess.Popen(["sh", "-c", "sh -c 'sleep 60; :' & wait"]) as root:
        before = opened()
        wait_for(lambda: len(walk_processes(root.pid, files)) == 2, named="both descendants")
        for _ in range(3):
            found = walk_processes(root.pid, files)
            assert {one.pid for one in found} == {member.pid for member in descendants(root.pid)}
            files.end_round()
            assert 0 < len(opened() - before) <= 6
        for one in walk_processes(root.pid, files):
            os.kill(one.pid, signal.SIGKILL)
        wait_for(lambda: not walk_processes(root.pid, files), named="their end")
        root.kill()
    files.close()
    assert opened() <= before


def test_process_in_the_middle_of_an_exec_is_found_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    # `posix_spawn` returns when the old program is gone; the environment of the new one may not be there yet.
    # A look at all processes would come too late to meet that.
    started: list[str] = []
    monkeypatch.setattr(os, "listdir", lambda _directory: started[-1:])
    for _ in range(300):
        pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], {"STOKER_TEST": "found"})
        started.append(str(pid))
        found = [who.pid for who in find_tagged("STOKER_TEST", "found")]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert found == [pid]


def test_process_without_environment_is_not_waited_for() -> None:
    pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], {})
    began = time.monotonic()
    for _ in range(10):
        list(environments())
    took = time.monotonic() - began
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert took < 2.0


def test_signal_reaches_the_process(child: Identity) -> None:
    assert send(child, signal.SIGTERM)
    wait_for(lambda: not is_alive(child), named="its end")


@pytest.mark.parametrize("pidfds", [True, False], ids=["pidfd", "no pidfd"])
def test_reused_pid_gets_no_signal(child: Identity, pidfds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not pidfds:
        monkeypatch.setattr(os, "pidfd_open", _not_in_this_kernel)
    forebear = Identity(child.pid, child.started - 1)
    assert not send(forebear, signal.SIGKILL)
    assert not is_alive(forebear)
    assert describe(forebear) is None
    assert is_alive(child)
    assert send(child, signal.SIGKILL)
    wait_for(lambda: not is_alive(child), named="its end")


def test_shortage_of_descriptors_does_not_count_as_end_of_a_process() -> None:
    program = (
        "import os, resource, subprocess\n"
        "from stoker.procfs import is_alive, is_gone, identify\n"
        "from stoker.runs.processes.tree import scan_processes\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "who = identify(child.pid)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "print(scan_processes([os.getpid()]).settled)\n"
        "try:\n"
        "    print(is_alive(who))\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
        "print(is_gone(who))\n"
        "child.kill(), child.wait()\n"
        "print(is_gone(who))"
    )
    tried = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert tried.stdout == "False\nToo many open files\nFalse\nTrue\n"


def test_ended_process_gets_no_signal() -> None:
    gone = subprocess.Popen(["true"])
    who = identify(gone.pid)
    gone.wait()
    assert who is not None
    assert not send(who, signal.SIGKILL)
    assert identify(gone.pid) != who
    assert not descends(gone.pid, os.getpid())


def test_process_name_cannot_forge_its_stat() -> None:
    name = ") Z 1 1 \n(1"
    program = f"import ctypes, sys; ctypes.CDLL(None).prctl(15, {name!r}.encode()); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_for(
            lambda: (waiting := stat(process.pid)) is not None and waiting.state == "S", named="its wait for input"
        )
        found = stat(process.pid)
        assert found is not None
        assert (found.parent, found.is_zombie) == (os.getpid(), False)
        assert describe(found.identity) == f") Z 1 1 ?(1 (pid {process.pid}, sleeping)"
        process.communicate()


@pytest.mark.parametrize(("status", "code"), [(0, 0), (3 << 8, 3), (9, 137), (2, 130), (11 | 0x80, 139)])
def test_wait_status_becomes_the_exit_code_of_a_shell(status: int, code: int) -> None:
    assert exit_code(status) == code


def test_signal_stream_holds_signals_until_it_is_closed() -> None:
    program = """if True:
        import os, select, signal
        from stoker.runs.processes.signals import SignalStream
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        stream = SignalStream([signal.SIGTERM, signal.SIGINT])
        assert stream.original == {signal.SIGUSR2}
        assert stream.read() == []
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert select.select([stream], [], [], 10)[0]
        came = {(received.signal, received.sender, received.user, received.from_kernel) for received in stream.read()}
        assert came == {(signum, os.getpid(), os.getuid(), False) for signum in (signal.SIGTERM, signal.SIGINT)}, came
        stream.close()
        os.kill(os.getpid(), signal.SIGTERM)
    """
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.stderr, ended.returncode) == ("", -signal.SIGTERM)


def test_signal_stream_without_signals_is_not_readable() -> None:
    with SignalStream([signal.SIGUSR1]) as stream:
        assert select.select([stream], [], [], 0)[0] == []


def _not_in_this_kernel(_pid: int) -> int:
    raise OSError(38, os.strerror(38))
