"""Identity of a pid: real processes, made-up /proc trees, and a real pid namespace."""

import errno
import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.gpus import processes
from stoker.gpus.model import Process, Unknown
from stoker.gpus.processes import ProcessCache
from stoker.procfs import inside_pid_namespace, read_stat
from tests.support.deep import examples

NO_PROCESS = 2**22 + 1  # One above the highest pid of Linux.
NOT_HERE = Unknown("no process with this pid is visible here")
OUTSIDE = Unknown("this pid is numbered outside this container, so it cannot be matched to a process here")


@pytest.fixture
def cache() -> Iterator[ProcessCache]:
    cache = ProcessCache()
    yield cache
    cache.close()


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for sleeper in started:
        sleeper.kill()
        sleeper.wait()


def sleeper(started: list[subprocess.Popen[bytes]]) -> int:
    # Popen returns after exec, so the process has its final name.
    started.append(subprocess.Popen(["sleep", "60"]))
    return started[-1].pid


def end(started: list[subprocess.Popen[bytes]], pid: int) -> None:
    (one,) = [each for each in started if each.pid == pid]
    one.kill()
    one.wait()


def identity(cache: ProcessCache, pid: int) -> tuple[object, object, object]:
    process = cache.process(pid, 0, 0.0)
    return process.started, process.name, process.user


def open_pidfds() -> int:
    links = list(Path("/proc/self/fd").iterdir())
    # The list includes the descriptor of the listing, which is closed by now.
    return sum("pidfd" in str(link.readlink()) for link in links if link.is_symlink())


def fake_process(root: Path, pid: int, *, name: str = "train", started: int = 1000) -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True, exist_ok=True)
    numbers = " ".join(["S", *(str(n) for n in range(4, 22)), str(started), "0", "0"])
    (folder / "stat").write_text(f"{pid} ({name}) {numbers}\n")


def fake_namespace(root: Path) -> None:
    (root / "proc/self/ns").mkdir(parents=True)
    (root / "proc/self/ns/pid").symlink_to("pid:[4026532758]")


def test_process_has_its_name_user_and_start_time(cache: ProcessCache, sleepers: list[subprocess.Popen[bytes]]) -> None:
    pid = sleeper(sleepers)
    started = int(Path(f"/proc/{pid}/stat").read_text().split()[21])
    me = pwd.getpwuid(os.geteuid()).pw_name
    assert cache.process(pid, 7, 0.5, 0.25) == Process(pid, started, "sleep", me, 7, 0.5, 0.25)


def test_driver_values_are_refreshed_each_time(cache: ProcessCache) -> None:
    cache.process(os.getpid(), 7, 0.5)
    process = cache.process(os.getpid(), 0, Unknown("no samples"))
    assert process.memory == 0
    assert process.utilization == Unknown("no samples")


@pytest.mark.parametrize("name", ["a b", "x) S 1 (y", "((", "))", "\x1b[31m!"])
def test_odd_names_are_reported_whole_and_without_control_characters(
    cache: ProcessCache, tmp_path: Path, name: str
) -> None:
    # A process is named after its script, not its interpreter.
    (tmp_path / name).write_text("#!/bin/sh\nread line\n")
    (tmp_path / name).chmod(0o755)
    with subprocess.Popen([tmp_path / name], stdin=subprocess.PIPE) as odd:
        process = cache.process(odd.pid, 0, 0.0)
        assert process.name == name.replace("\x1b", "?")
        assert process.started == int(Path(f"/proc/{odd.pid}/stat").read_text().split()[-31])


def test_pid_without_a_process_is_unknown(cache: ProcessCache) -> None:
    assert identity(cache, NO_PROCESS) == (NOT_HERE, NOT_HERE, NOT_HERE)
    assert cache.note is None


def test_user_without_an_entry_is_reported_by_number(cache: ProcessCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing_user(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", missing_user)
    assert cache.process(os.getpid(), 0, 0.0).user == str(os.geteuid())


def test_process_that_ended_is_forgotten_at_the_next_refresh(
    cache: ProcessCache, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    pid, other = sleeper(sleepers), sleeper(sleepers)
    before = identity(cache, pid), identity(cache, other)
    cache.refresh()
    assert (identity(cache, pid), identity(cache, other)) == before
    end(sleepers, pid)
    cache.refresh()
    assert identity(cache, pid) == (NOT_HERE, NOT_HERE, NOT_HERE)
    assert identity(cache, other) == before[1]


def test_pid_without_a_process_is_read_again_after_a_refresh(tmp_path: Path) -> None:
    cache = ProcessCache(tmp_path)
    assert cache.process(77, 0, 0.0).name == NOT_HERE
    fake_process(tmp_path, 77)
    cache.refresh()
    assert cache.process(77, 0, 0.0).name == "train"


def test_known_process_is_not_read_again(cache: ProcessCache, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(cache, os.getpid())

    def forbidden(*_: object) -> NoReturn:
        raise AssertionError("a file was opened")

    monkeypatch.setattr(os, "open", forbidden)
    for _ in range(3):
        cache.refresh()
        assert identity(cache, os.getpid()) == before


def test_reused_pid_is_another_process(tmp_path: Path) -> None:
    fake_process(tmp_path, 77, name="mine", started=1000)
    cache = ProcessCache(tmp_path)
    assert identity(cache, 77)[:2] == (1000, "mine")
    cache.refresh()
    assert identity(cache, 77)[:2] == (1000, "mine")
    fake_process(tmp_path, 77, name="theirs", started=2000)
    cache.refresh()
    assert identity(cache, 77)[:2] == (2000, "theirs")


def test_process_that_left_the_gpus_is_no_longer_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_process(tmp_path, 77)
    cache = ProcessCache(tmp_path)
    cache.process(77, 0, 0.0)
    cache.refresh()
    cache.refresh()

    def forbidden(path: str) -> NoReturn:
        raise AssertionError(f"{path} was read")

    monkeypatch.setattr(processes, "read_stat", forbidden)
    cache.refresh()


def test_name_can_be_read_alone(cache: ProcessCache, sleepers: list[subprocess.Popen[bytes]]) -> None:
    pid = sleeper(sleepers)
    assert cache.name(pid) == "sleep"
    assert cache.name(pid) == cache.process(pid, 0, 0.0).name
    assert cache.name(NO_PROCESS) == NOT_HERE


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS, errno.EMFILE])
def test_ends_are_noticed_without_pidfds(
    monkeypatch: pytest.MonkeyPatch, sleepers: list[subprocess.Popen[bytes]], code: int
) -> None:
    def refused(pid: int, flags: int = 0) -> NoReturn:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pidfd_open", refused)
    cache = ProcessCache()
    pid = sleeper(sleepers)
    before = identity(cache, pid)
    cache.refresh()
    assert identity(cache, pid) == before
    assert before[1] == "sleep"
    end(sleepers, pid)
    cache.refresh()
    assert identity(cache, pid) == (NOT_HERE, NOT_HERE, NOT_HERE)


def test_number_of_pidfds_is_limited_and_all_are_closed(
    monkeypatch: pytest.MonkeyPatch, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.setattr(processes, "MOST_PIDFDS", 2)
    before = open_pidfds()
    cache = ProcessCache()
    pids = [sleeper(sleepers) for _ in range(3)]
    assert [cache.process(pid, 0, 0.0).name for pid in pids] == ["sleep"] * 3
    assert open_pidfds() - before == 2
    for pid in pids:
        end(sleepers, pid)
    cache.refresh()
    assert [cache.process(pid, 0, 0.0).name for pid in pids] == [NOT_HERE] * 3
    cache.close()
    assert open_pidfds() == before


def test_processes_that_left_the_gpus_make_room_for_new_ones(
    monkeypatch: pytest.MonkeyPatch, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.setattr(processes, "MOST_PIDFDS", 2)
    before = open_pidfds()
    cache = ProcessCache()
    left, stayed, came = (sleeper(sleepers) for _ in range(3))
    cache.process(left, 0, 0.0)
    cache.process(stayed, 0, 0.0)
    cache.refresh()
    cache.process(stayed, 0, 0.0)
    cache.refresh()  # After one look without `left`, its pidfd is released.
    assert open_pidfds() - before == 1
    cache.process(came, 0, 0.0)
    assert open_pidfds() - before == 2
    cache.close()


@settings(max_examples=examples(50))
@given(
    name=st.text(st.characters(codec="utf-8", exclude_characters="\0\n"), max_size=15),
    started=st.integers(0, 2**63),
)
def test_any_name_and_start_time_can_be_read_back(
    tmp_path_factory: pytest.TempPathFactory, name: str, started: int
) -> None:
    root = tmp_path_factory.getbasetemp() / "any-name"
    fake_process(root, 5, name=name, started=started)
    shown = "".join(letter if letter.isprintable() else "?" for letter in name)
    stat = read_stat(f"{root}/proc/5/stat")
    assert (stat.pid, stat.name, stat.started) == (5, shown, started)


@pytest.mark.parametrize("text", ["", "12", "12 (cut) S 1 2", "no brackets here at all"])
def test_malformed_stat_file_is_unknown(tmp_path: Path, text: str) -> None:
    fake_process(tmp_path, 12)
    (tmp_path / "proc/12/stat").write_text(text)
    assert ProcessCache(tmp_path).process(12, 0, 0.0).started == NOT_HERE


def test_first_pid_namespace_is_distinguished_from_all_others(tmp_path: Path) -> None:
    assert not inside_pid_namespace(tmp_path)
    fake_namespace(tmp_path)
    assert inside_pid_namespace(tmp_path)
    (tmp_path / "proc/self/ns/pid").unlink()
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
    assert not inside_pid_namespace(tmp_path)


class TestPidNamespace:
    """A /proc tree of a container; /dev/zero stands in for the device node of the GPU."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        fake_namespace(tmp_path)
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/nvidia0").symlink_to("/dev/zero")
        for pid in (31, 32):
            fake_process(tmp_path, pid)
            (tmp_path / f"proc/{pid}/fd").mkdir()
        (tmp_path / "proc/31/fd/7").symlink_to(tmp_path / "dev/nvidia0")
        (tmp_path / "proc/32/fd/0").symlink_to("/dev/null")
        (tmp_path / "proc/32/fd/9").symlink_to("/gone/nvidia0")
        return tmp_path

    def test_process_with_the_device_open_is_confirmed(self, root: Path) -> None:
        cache = ProcessCache(root)
        assert cache.process(31, 0, 0.0).name == "train"
        assert cache.note is None

    def test_process_that_only_shares_the_pid_is_not_reported(self, root: Path) -> None:
        cache = ProcessCache(root)
        for _ in range(2):
            assert identity(cache, 32) == (OUTSIDE, OUTSIDE, OUTSIDE)
            cache.refresh()
        assert cache.note is not None
        assert "--pid=host" in cache.note

    def test_file_named_like_a_device_is_not_a_device(self, root: Path) -> None:
        (root / "nvidia.log").write_text("")
        (root / "proc/32/fd/3").symlink_to(root / "nvidia.log")
        assert ProcessCache(root).process(32, 0, 0.0).name == OUTSIDE

    def test_confirmed_process_that_ended_is_not_in_another_namespace(self, root: Path) -> None:
        cache = ProcessCache(root)
        cache.process(31, 0, 0.0)
        (root / "proc/31/stat").unlink()
        cache.refresh()
        assert cache.process(31, 0, 0.0).name == NOT_HERE
        assert cache.note is None

    def test_pid_without_a_process_here_is_in_another_namespace(self, root: Path) -> None:
        cache = ProcessCache(root)
        assert identity(cache, 645400) == (OUTSIDE, OUTSIDE, OUTSIDE)
        assert cache.note is not None

    def test_process_with_hidden_files_is_unknown(self, root: Path) -> None:
        (root / "proc/31/fd/7").unlink()
        (root / "proc/31/fd").rmdir()
        cache = ProcessCache(root)
        name = cache.process(31, 0, 0.0).name
        assert isinstance(name, Unknown)
        assert "open files" in name.reason
        assert cache.note is None

    def test_pids_found_in_proc_need_no_confirmation(self, root: Path) -> None:
        assert ProcessCache(root, pids_from="proc").process(32, 0, 0.0).name == "train"


IN_A_CONTAINER = """
import json, os, subprocess, sys
from pathlib import Path
from stoker.gpus.model import Unknown
from stoker.gpus.processes import ProcessCache
from stoker.procfs import inside_pid_namespace

root = Path(sys.argv[1])
device = os.open(root / "dev/nvidia0", os.O_RDONLY)
holder = subprocess.Popen(["sleep", "60"], pass_fds=[device])
bystander = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
cache = ProcessCache(root)

def identified(pid):
    process = cache.process(pid, 0, 0.0)
    return [v.reason if isinstance(v, Unknown) else v for v in (process.name, process.user)]

said = {"inside": inside_pid_namespace(), "holder": identified(holder.pid), "note before": cache.note}
said |= {"bystander": identified(bystander.pid), "outsider": identified(int(sys.argv[2])), "note after": cache.note}
holder.kill(), holder.wait(), bystander.kill(), bystander.wait()
cache.refresh()
said["ended holder"] = identified(holder.pid)
print(json.dumps(said))
"""


@pytest.mark.skipif(
    os.geteuid() != 0 and "CI" not in os.environ, reason="making a namespace and a device node takes root"
)
def test_only_holders_of_the_device_are_named_in_a_pid_namespace(
    tmp_path: Path, sleepers: list[subprocess.Popen[bytes]]
) -> None:
    outsider = sleeper(sleepers)
    (tmp_path / "dev").mkdir()
    # The device number of /dev/null: a process with the real /dev/null open is not a holder of this node.
    os.mknod(tmp_path / "dev/nvidia0", 0o20666, os.makedev(1, 3))
    (tmp_path / "proc").symlink_to("/proc")
    unshare = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    inside = [sys.executable, "-c", IN_A_CONTAINER, str(tmp_path), str(outsider)]
    done = subprocess.run([*unshare, *inside], check=True, capture_output=True, text=True, timeout=60)
    said = json.loads(done.stdout)
    assert said["inside"] is True
    assert said["holder"] == ["sleep", pwd.getpwuid(0).pw_name]
    assert said["note before"] is None
    assert said["bystander"] == [OUTSIDE.reason] * 2
    assert said["outsider"] == [OUTSIDE.reason] * 2
    assert said["ended holder"] == [NOT_HERE.reason] * 2
    assert "outside this container" in said["note after"]
