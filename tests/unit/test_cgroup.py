"""Where the cgroup of a job is created, for several cgroup layouts."""

import os
from pathlib import Path

import pytest

from stoker.procfs import identify
from stoker.runs.processes.cgroup import Cgroup, NoCgroupError, cpus_here, locate, ram_here

UNIFIED = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
HYBRID = """\
31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"""
CONTAINER = "30 24 0:26 /docker/abc /sys/fs/cgroup ro - cgroup2 cgroup rw"
STRANGE = r"30 24 0:26 / /mnt/a\040place rw - cgroup2 none rw"


@pytest.mark.parametrize(
    ("memberships", "mounts", "place"),
    [
        ("0::/user.slice/session-1.scope\n", UNIFIED, "/sys/fs/cgroup/user.slice/session-1.scope"),
        ("0::/\n", UNIFIED, "/sys/fs/cgroup"),
        ("4:memory:/x\n0::/\n", HYBRID, "/sys/fs/cgroup/unified"),
        ("0::/docker/abc\n", CONTAINER, "/sys/fs/cgroup"),
        ("0::/docker/abc/inner\n", CONTAINER, "/sys/fs/cgroup/inner"),
        ("0::/jobs\n", STRANGE, "/mnt/a place/jobs"),
    ],
)
def test_own_cgroup_is_found_wherever_it_is_mounted(memberships: str, mounts: str, place: str) -> None:
    assert locate(memberships, mounts) == Path(place)


@pytest.mark.parametrize(
    ("memberships", "mounts", "words"),
    [
        ("4:memory:/x\n", HYBRID, "not mounted"),
        ("0::/\n", "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw", "not mounted"),
        ("0::/docker/other\n", CONTAINER, "outside"),
        ("0::/docker/abcdef\n", CONTAINER, "outside"),
    ],
)
def test_missing_cgroup_is_explained(memberships: str, mounts: str, words: str) -> None:
    with pytest.raises(NoCgroupError, match=words):
        locate(memberships, mounts)


def test_cgroup_without_kill_is_removed_again(tmp_path: Path) -> None:
    with pytest.raises(NoCgroupError, match=r"cgroup\.kill"):
        Cgroup.create(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_cgroup_without_permission_is_explained(tmp_path: Path) -> None:
    with pytest.raises(NoCgroupError, match="no such file"):
        Cgroup.create(tmp_path / "missing")


def test_cgroups_of_killed_runs_are_removed_by_the_next_run(tmp_path: Path) -> None:
    me = identify(os.getpid())
    assert me is not None
    ours, theirs, abandoned = (
        f"stoker-{me.pid}-{me.started}-0",
        "something-1-1-0",
        f"stoker-{me.pid}-{me.started - 1}-0",
    )
    for name in (ours, theirs, f"{abandoned}/made-by-the-job"):
        (tmp_path / name).mkdir(parents=True)
    with pytest.raises(NoCgroupError):
        Cgroup.create(tmp_path)
    assert {left.name for left in tmp_path.iterdir()} == {ours, theirs}


def test_nested_cgroups_of_the_job_count_and_are_removed(tmp_path: Path) -> None:
    (tmp_path / "job/inner/deeper").mkdir(parents=True)
    for place, pids in (("job", "10\n0\n"), ("job/inner", ""), ("job/inner/deeper", "11\n12\n")):
        (tmp_path / place / "cgroup.procs").write_text(pids)
    job = Cgroup(tmp_path / "job")
    assert sorted(job.pids()) == [10, 11, 12]
    for file in tmp_path.rglob("cgroup.procs"):
        file.unlink()
    assert job.remove()
    assert not (tmp_path / "job").exists()


def test_only_the_limits_of_delegated_controllers_are_set(tmp_path: Path) -> None:
    """`test_containment.py` has real limits; here one of the two controllers is missing."""
    cgroup = Cgroup(tmp_path / "job")
    cgroup.path.mkdir()
    assert cgroup.limit(0, 0), "nothing was asked for"
    assert not cgroup.limit(2, 2**30)
    assert list(cgroup.path.iterdir()) == []
    (cgroup.path / "memory.max").write_text("max")
    assert not cgroup.limit(2, 2**30)
    assert (cgroup.path / "memory.max").read_text() == str(2**30)
    assert cgroup.limit(0, 2**30)


def test_reaper_leaves_for_the_cgroup_of_the_worker_if_there_is_one(tmp_path: Path) -> None:
    cgroup = Cgroup(tmp_path / "job")
    assert cgroup.evict(7)
    (tmp_path / "stoker-worker").mkdir()
    assert cgroup.evict(8)
    assert (tmp_path / "cgroup.procs").read_text() == "7"
    assert (tmp_path / "stoker-worker/cgroup.procs").read_text() == "8"


def test_cpus_and_ram_of_this_machine_are_known() -> None:
    assert 1 <= cpus_here() <= (os.cpu_count() or 1)
    assert 2**24 < ram_here() <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
