"""Who holds a GPU's device node: real processes and stand-in nodes."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.presence.holders import DeviceHolder, HolderScanner, Mounts
from stoker.procfs import read_stat
from tests.support.node_holders import (
    NOBODY,
    NUMBERS,
    NodeHolders,
    as_nobody,
    make_node,
    needs_root,
    node_holders,
    place,
)
from tests.support.waiting import wait_for

__all__ = ["node_holders", "place"]

SCAN = 'holders = HolderScanner({"GPU-a": (Path(sys.argv[1]),)})\n'
TWO_THREADS = """
import ctypes, platform, sys, threading, time
opened = open(sys.argv[1])
def go_on():
    print("ready", flush=True)
    time.sleep(300)
threading.Thread(target=go_on).start()
if sys.argv[2] == "first thread ends":
    # The system call ends this thread alone.
    ctypes.CDLL(None).syscall({"x86_64": 60}.get(platform.machine(), 93), 0)
time.sleep(300)
"""
FORKED = """
import os, sys, time
opened = open(sys.argv[1])
child = os.fork()
if child:
    print("ready", flush=True)
    opened.close()
    os.waitpid(child, 0)
time.sleep(300)
"""


@pytest.fixture
def nodes(place: Path) -> dict[str, tuple[Path, ...]]:
    return {
        f"GPU-{letter}": (make_node(place / f"dev/{letter}", number),)
        for letter, number in zip("ab", NUMBERS, strict=True)
    }


def test_holder_is_reported_with_its_name_program_user_and_start(
    nodes: dict[str, tuple[Path, ...]], node_holders: NodeHolders
) -> None:
    process = node_holders.open(*nodes["GPU-a"])
    # It says that it is ready a moment before it becomes a `sleep`.
    wait_for(lambda: read_stat(f"/proc/{process.pid}/stat").name == "sleep")
    (found,) = [holder for holder in HolderScanner(nodes).scan().by_gpu["GPU-a"] if holder.pid == process.pid]
    stat = read_stat(f"/proc/{process.pid}/stat")
    program = Path(f"/proc/{process.pid}/exe").readlink().name
    user = pwd.getpwuid(os.geteuid()).pw_name
    assert found == DeviceHolder(process.pid, stat.started, stat.name, program, user)


def test_each_gpu_has_its_own_holders(nodes: dict[str, tuple[Path, ...]], node_holders: NodeHolders) -> None:
    both = node_holders.open(*nodes["GPU-a"], *nodes["GPU-b"])
    second = node_holders.open(*nodes["GPU-b"])
    by_gpu = HolderScanner(nodes).scan().by_gpu
    assert node_holders.among(by_gpu["GPU-a"]) == [both.pid]
    assert node_holders.among(by_gpu["GPU-b"]) == sorted([both.pid, second.pid])


def test_slices_that_share_a_node_share_its_holders(
    nodes: dict[str, tuple[Path, ...]], node_holders: NodeHolders
) -> None:
    process = node_holders.open(*nodes["GPU-a"])
    scan = HolderScanner({"MIG-1": nodes["GPU-a"], "MIG-2": nodes["GPU-a"], "GPU-none": ()}).scan()
    assert {uuid: node_holders.among(found) for uuid, found in scan.by_gpu.items()} == {
        "MIG-1": [process.pid],
        "MIG-2": [process.pid],
        "GPU-none": [],
    }


@needs_root
@pytest.mark.parametrize("name", ["container/dev/a", "elsewhere/a", "elsewhere/by another name"])
def test_node_of_the_same_device_inside_a_container_counts(
    nodes: dict[str, tuple[Path, ...]], place: Path, node_holders: NodeHolders, name: str
) -> None:
    own = make_node(place / name, NUMBERS[0])
    process = node_holders.open(own)
    holders = HolderScanner(nodes)
    assert node_holders.among(holders.scan().by_gpu["GPU-a"]) == [process.pid]
    own.unlink()
    assert node_holders.among(holders.scan().by_gpu["GPU-a"]) == [process.pid]


def test_open_and_close_between_scans_is_noticed(
    nodes: dict[str, tuple[Path, ...]], place: Path, node_holders: NodeHolders
) -> None:
    (place / "data").touch()
    code = """
import sys
print("ready", flush=True)
data = open(sys.argv[2])
for line in sys.stdin:
    opened = open(sys.argv[1]) if line == "open\\n" else opened.close()
    print("done", flush=True)
"""
    process = node_holders.python(code, nodes["GPU-a"][0], place / "data")
    assert process.stdin is not None
    assert process.stdout is not None
    holders = HolderScanner(nodes)
    for order, expected in [("open", [process.pid]), ("close", []), ("open", [process.pid])]:
        process.stdin.write(f"{order}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        assert node_holders.among(holders.scan().by_gpu["GPU-a"]) == expected


def test_child_with_an_inherited_node_is_the_holder_after_the_parent_closes_it(
    nodes: dict[str, tuple[Path, ...]], node_holders: NodeHolders
) -> None:
    parent = node_holders.python(FORKED, nodes["GPU-a"][0])
    holders = HolderScanner(nodes)
    found = wait_for(lambda: [pid for pid in node_holders.among(holders.scan().by_gpu["GPU-a"]) if pid != parent.pid])
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    assert found == [int(child) for child in children]
    wait_for(lambda: parent.pid not in node_holders.among(holders.scan().by_gpu["GPU-a"]))


@pytest.mark.parametrize("fate", ["first thread ends", "both go on"])
def test_process_with_threads_is_one_holder(
    nodes: dict[str, tuple[Path, ...]], node_holders: NodeHolders, fate: str
) -> None:
    process = node_holders.python(TWO_THREADS, nodes["GPU-a"][0], fate)
    if fate == "first thread ends":
        wait_for(lambda: read_stat(f"/proc/{process.pid}/stat").state == "Z")
    assert node_holders.among(HolderScanner(nodes).scan().by_gpu["GPU-a"]) == [process.pid]


def test_process_is_named_after_the_program_it_executes(
    nodes: dict[str, tuple[Path, ...]], node_holders: NodeHolders
) -> None:
    process = node_holders.run(["sh", "-c", f'exec 3<"{nodes["GPU-a"][0]}"; echo ready; read go; exec sleep 300'])
    holders = HolderScanner(nodes)

    def seen(name: str) -> list[DeviceHolder]:
        return [each for each in holders.scan().by_gpu["GPU-a"] if (each.pid, each.name) == (process.pid, name)]

    (before,) = seen("sh")
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    (after,) = wait_for(lambda: seen("sleep"))
    assert after.started == before.started
    assert after.executable != before.executable


def test_late_or_recreated_node_is_recognized(place: Path, node_holders: NodeHolders) -> None:
    node = place / "late"
    holders = HolderScanner({"GPU-a": (node,)})
    assert holders.scan().by_gpu == {"GPU-a": ()}
    for _ in range(2):
        make_node(node, NUMBERS[0])
        process = node_holders.open(node)
        assert process.pid in node_holders.among(holders.scan().by_gpu["GPU-a"])
        node.unlink()


@needs_root
def test_holder_of_the_device_is_found_once_its_node_exists_here(place: Path, node_holders: NodeHolders) -> None:
    holders = HolderScanner({"GPU-a": (place / "late",)})
    process = node_holders.open(make_node(place / "in a container", NUMBERS[0]))
    assert holders.scan().by_gpu == {"GPU-a": ()}
    make_node(place / "late", NUMBERS[0])
    assert node_holders.among(holders.scan().by_gpu["GPU-a"]) == [process.pid]


@needs_root
def test_process_of_another_user_has_the_name_of_that_user(
    nodes: dict[str, tuple[Path, ...]], node_holders: NodeHolders
) -> None:
    process = node_holders.open(*nodes["GPU-a"], user=NOBODY)
    held = {holder.pid: holder for holder in HolderScanner(nodes).scan().by_gpu["GPU-a"]}
    assert held[process.pid].user == "nobody"


@needs_root
def test_unprivileged_scan_sees_own_processes_and_counts_the_others(
    nodes: dict[str, tuple[Path, ...]], node_holders: NodeHolders
) -> None:
    own = node_holders.open(*nodes["GPU-a"], user=NOBODY)
    other = node_holders.open(*nodes["GPU-a"])
    seen = "scan = holders.scan(); seen = {holder.pid for holder in scan.by_gpu['GPU-a']}"
    result = "; print([int(pid) in seen for pid in sys.argv[2:]], scan.unseen > 0)"
    assert as_nobody(SCAN + seen + result, *nodes["GPU-a"], own.pid, other.pid) == "[True, False] True\n"


@needs_root
def test_zombies_and_kernel_threads_do_not_count_as_unseen(nodes: dict[str, tuple[Path, ...]]) -> None:
    with subprocess.Popen(["true"]) as dead:
        wait_for(lambda: read_stat(f"/proc/{dead.pid}/stat").state == "Z")
        code = "pids = [int(argument) for argument in sys.argv[2:]]; print([holders._is_program(pid) for pid in pids])"
        # Process 2 is the parent of the kernel's threads; in a container it may be anything.
        kernel = [2] if Path("/proc/2/comm").exists() and not Path("/proc/2/cmdline").read_bytes() else []
        result = as_nobody(SCAN + code, *nodes["GPU-a"], os.getpid(), dead.pid, *kernel)
    assert result == f"{[True, False] + [False] * len(kernel)}\n"


def test_processes_that_start_or_end_during_a_scan_are_no_error(
    nodes: dict[str, tuple[Path, ...]], node_holders: NodeHolders
) -> None:
    process = node_holders.open(*nodes["GPU-a"])
    commotion = f'echo ready; while true; do (sleep 0.001 <"{nodes["GPU-b"][0]}") & /bin/true; wait; done'
    node_holders.run(["sh", "-c", commotion])
    holders = HolderScanner(nodes)
    for _ in range(60):
        assert node_holders.among(holders.scan().by_gpu["GPU-a"]) == [process.pid]


@pytest.mark.parametrize(
    ("mount", "may_be_asked"),
    [
        ("7 1 8:1 / / rw,relatime - ext4 /dev/sda rw", True),
        ("7 1 0:5 / /dev rw,nosuid shared:2 - devtmpfs udev rw", True),
        ("7 1 8:2 / /home rw,nodev - ext4 /dev/sdb rw", False),
        ("7 1 0:50 / /data rw - nfs4 server:/data rw", False),
        ("7 1 0:51 / /mnt rw - fuse.sshfs host: rw", False),
        ("8 1 8:1 / / rw - ext4 /dev/sda rw", False),
    ],
)
def test_scan_calls_stat_only_on_possible_device_files(tmp_path: Path, mount: str, may_be_asked: bool) -> None:
    process = tmp_path / "10"
    (process / "fdinfo").mkdir(parents=True)
    (process / "fdinfo/3").write_text("pos:\t0\nflags:\t0100000\nmnt_id:\t7\nino:\t5\n")
    (process / "mountinfo").write_text(mount + "\n")
    assert Mounts(str(tmp_path)).can_hold_nodes(10, f"{process}/fd/3") is may_be_asked
    assert Mounts(str(tmp_path)).can_hold_nodes(10, f"{process}/fd/4") is False


def test_hidepid_is_reported(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    assert HolderScanner({"GPU-a": ()}, tmp_path).scan().unseen == 1


def test_first_scan_imports_nothing_heavy() -> None:
    code = "import sys, stoker.presence.holders; print('asyncio' in sys.modules or 'pynvml' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert result.stdout == "False\n"
