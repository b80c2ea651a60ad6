"""`stoker submit --snapshot` and `stoker diff`: the code as it is now, on the machine that runs the job."""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.queue import init_queue
from tests.support.code_repository import CodeRepository, assert_everything, everything, tree_at
from tests.support.command import stoker
from tests.support.slurm_cluster import SlurmCluster
from tests.support.waiting import wait_for
from tests.support.work_site import WorkSite

MIB = 2**20


@pytest.fixture(params=["sqlite", "postgres"])
def any_site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[WorkSite]:
    url = str(request.getfixturevalue("postgres_url")) if request.param == "postgres" else str(tmp_path / "queue.db")
    with init_queue(url) as store, contextlib.closing(WorkSite(tmp_path, store, queue=url)) as site:
        yield site


def submit(site: WorkSite, directory: Path, *arguments: str) -> list[str]:
    done = site.stoker("submit", "--gpus", "0", "--snapshot", "--directory", str(directory), *arguments)
    assert done.code == 0, done.err
    return done.out.split()


def rows(site: WorkSite, table: str) -> int:
    return int(site.store._driver.fetch_text(f"SELECT count(*) FROM {table}", {})[0][0])


def log(site: WorkSite, job: str) -> str:
    attempt = site.last_attempt(job).id
    site.store.logs.wait(attempt)
    return site.store.logs.read(attempt)


def wait_until_gone(place: Path) -> None:
    wait_for(lambda: not place.exists(), named="that the unpacked code is removed")


def test_uncommitted_code_runs_on_a_machine_without_its_directory(any_site: WorkSite, tmp_path: Path) -> None:
    site = any_site
    code = CodeRepository(tmp_path / "here" / "code", {"part/run.sh": "echo committed\n", "lib.txt": "committed\n"})
    code.write({"part/run.sh": "cat ../lib.txt ../new.txt; pwd; touch written\n", "lib.txt": "changed\n"})
    code.write({"new.txt": "untracked\n"})
    jobs = submit(site, code.path / "part", "--name", "swept", "--sweep", "seed=1..3", "sh run.sh")
    assert (rows(site, "stoker_blobs"), rows(site, "stoker_blob_uses")) == (2, 6), "stored once for all three jobs"
    code.write({"part/run.sh": "echo later\n"})
    shutil.rmtree(tmp_path / "here")

    far = site.work(home=tmp_path / "far").ready()
    for job in jobs:
        site.wait_until(job, "succeeded")
        first, second, where = log(site, job).splitlines()
        assert (first, second, where) == ("changed", "untracked", f"{tmp_path}/far/attempts/{job}-1/code/part")
    assert site.stoker("retry", jobs[0]).code == 0
    wait_for(lambda: site.job(jobs[0]).attempts == 2, named="the second attempt")
    site.wait_until(jobs[0], "succeeded")
    assert log(site, jobs[0]).startswith("changed\nuntracked\n")
    for job, number in ((jobs[0], 1), (jobs[0], 2), (jobs[1], 1)):
        wait_until_gone(tmp_path / "far" / "attempts" / f"{job}-{number}" / "code")
    assert far.stop() == 0

    shown = site.stoker("show", jobs[0]).out
    assert "3 files, 64 B; 2 changed, 1 untracked (`stoker diff" in shown, shown
    difference = site.stoker("diff", jobs[0]).out
    assert "-echo committed\n+cat ../lib.txt" in difference
    assert difference.endswith("untracked: new.txt\n")
    assert site.stoker("clean", "--older-than", "0s").out.startswith(
        "3 jobs that ended more than 0s ago deleted, with "
    )
    assert (rows(site, "stoker_blobs"), rows(site, "stoker_blob_chunks")) == (0, 0)


def test_everything_in_the_repository_survives(site: WorkSite, tmp_path: Path) -> None:
    code = everything(tmp_path / "code")
    copy = tmp_path / "copy"
    (job,) = submit(site, code.path, "--", "cp", "--archive", ".", str(copy))
    shutil.rmtree(code.path)
    site.work_until_empty()
    assert site.job(job).state == "succeeded", log(site, job)
    assert_everything(tree_at(copy))
    changes = site.stoker("diff", job, "--json").json()
    assert changes["untracked"] == [
        "caf\ufffd \ufffd.txt",
        "embedded/own.py",
        "line\nbreak\r",
        "module/extra.py",
        "new.txt",
    ]
    for part in (
        "a/module/lib.py",
        "-library = 1\n+library = 2\n",
        "deleted file mode",
        "-echo committed\n+echo changed",
    ):
        assert part in changes["diff"]


@pytest.mark.parametrize("unit", [MIB, 1024 * MIB], ids=["200 MiB", "200 GiB"])
def test_large_tree_is_refused_with_its_ten_largest_paths(tmp_path: Path, unit: int) -> None:
    code = CodeRepository(tmp_path / "code", {"train.py": "print(1)\n"})
    sizes = {f"data/part {number:02d}.bin": number for number in range(1, 16)} | {"top.bin": 80}
    for name, size in sizes.items():
        (code.path / name).parent.mkdir(exist_ok=True)
        with (code.path / name).open("wb") as file:
            file.truncate(size * unit)  # without blocks on the disk, but as long to read
    refused = stoker("submit", "--snapshot", "--directory", str(code.path), "true")
    assert refused.code == 2
    assert refused.err.count("\n") == 1
    assert "would be 200 " in refused.err
    assert "more than the limit of 50 MiB" in refused.err
    largest = sorted(sizes, key=lambda name: -sizes[name])[:10]
    assert [name for name in sizes if f"{name} (" in refused.err] == [name for name in sizes if name in largest]
    assert refused.seconds < 20
    allowed = stoker(
        "submit", "--snapshot", "--snapshot-limit", "1GiB", "--dry-run", "--directory", str(code.path), "true"
    )
    if unit == MIB:
        assert (allowed.code, "17 files, 200 MiB; 16 untracked" in allowed.err) == (0, True), allowed.err


def test_edited_job_runs_what_is_in_its_directory(site: WorkSite, tmp_path: Path) -> None:
    code = CodeRepository(tmp_path / "code", {"run.sh": "echo first\n"})
    (job,) = submit(site, code.path, "--hold", "sh run.sh")
    (plain,) = site.stoker("submit", "--gpus", "0", "--hold", "--directory", str(code.path), "sh run.sh").out.split()
    code.write({"run.sh": "echo second\n"})
    refused = site.stoker("edit", job, "--directory", str(tmp_path))
    assert (refused.code, "--no-snapshot lets it run in another directory" in refused.err) == (2, True)
    refused = site.stoker("edit", plain, "--snapshot")
    assert (refused.code, "the job has no snapshot of its code" in refused.err) == (2, True)
    assert site.stoker("edit", job, "--no-snapshot").code == 0
    assert "it is not used" in site.stoker("show", job).out
    site.stoker("release", job)
    site.work_until_empty()
    assert log(site, job) == "second\n"
    assert site.stoker("edit", job, "--snapshot").code == 0
    site.stoker("retry", job)
    site.work_until_empty()
    assert log(site, job) == "first\n"


def test_code_of_two_jobs_is_compared(site: WorkSite, tmp_path: Path) -> None:
    code = CodeRepository(tmp_path / "code", {"a.py": "one\ntwo\n", "tool": "x\n", "big.bin": "\0one"})
    (first,) = submit(site, code.path, "true")
    code.write({"a.py": "one\nthree", "b.py": "new\n", "big.bin": "\0two"})
    (code.path / "tool").chmod(0o755)
    commit = code.commit()
    (second,) = submit(site, code.path, "true")
    assert site.stoker("diff", first, second).out == (
        "diff --git a/a.py b/a.py\n--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n"
        "\\ No newline at end of file\n"
        "diff --git a/b.py b/b.py\nnew file mode 100644\n--- /dev/null\n+++ b/b.py\n@@ -0,0 +1 @@\n+new\n"
        "diff --git a/big.bin b/big.bin\nFiles a/big.bin and b/big.bin differ\n"
        "diff --git a/tool b/tool\nold mode 100644\nnew mode 100755\n"
    )
    same = site.stoker("diff", second)
    assert (same.out, same.err) == ("", f"stoker: the code of job {second} is the same as commit {commit}\n")
    (plain,) = site.stoker("submit", "true").out.split()
    refused = site.stoker("diff", plain)
    assert refused.code == 2
    assert refused.err == f"stoker: job {plain} has no snapshot of its code: `stoker submit --snapshot` makes one\n"


def test_snapshot_is_described_and_secrets_are_pointed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = CodeRepository(tmp_path / "code", {"train.py": "print(1)\n", ".env.example": "TOKEN=\n"})
    code.write({".env": "TOKEN=1\n"})
    done = stoker("submit", "--snapshot", "--directory", str(code.path), "true")
    described, warned = done.err.splitlines()
    assert described.endswith(": 3 files, 24 B; 1 untracked")
    assert "the snapshot contains .env, which everyone who can read the queue can read now" in warned
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "plain").mkdir()
    refused = stoker("submit", "--snapshot", "--directory", str(tmp_path / "plain"), "true")
    assert refused.code == 2
    assert refused.err.count("\n") == 1
    assert "is not in a working tree of git" in refused.err
    both = stoker("submit", "--snapshot", "--pin", "--directory", str(code.path), "true")
    assert (both.code, "leave out --pin or --snapshot" in both.err) == (2, True)


def test_repository_without_a_commit_is_enough(site: WorkSite, tmp_path: Path) -> None:
    place = tmp_path / "fresh"
    place.mkdir()
    subprocess.run(["git", "init", "--quiet", str(place)], check=True)
    (place / "run.sh").write_text("echo fresh\n")
    (job,) = submit(site, place, "sh run.sh")
    assert (site.job(job).commit, site.job(job).code is not None) == (None, True)
    assert site.stoker("diff", job).out == "untracked: run.sh\n"


def test_job_on_a_cluster_runs_its_snapshot(site: WorkSite, cluster: SlurmCluster, tmp_path: Path) -> None:
    site.environment |= {**cluster.environment(), "STOKER_ENGINE": "slurm"}
    code = CodeRepository(tmp_path / "code", {"part/run.sh": "echo committed\n"})
    code.write({"part/run.sh": 'echo changed on "$SLURMD_NODENAME" in "$PWD"\n'})
    code.write({"nodes.sh": f'echo "$PWD $PYTHONPATH" > {tmp_path}/$STOKER_NODE_RANK\n'})
    jobs = submit(site, code.path / "part", "--sweep", "seed=1,2", "sh run.sh")
    path = f"PYTHONPATH={code.path}/lib"
    (on_two_nodes,) = submit(site, code.path, "--nodes", "2", "--env", path, "sh nodes.sh")
    shutil.rmtree(code.path)
    worker = site.work("--until-empty")
    for job in jobs:
        site.wait_until(job, "succeeded")
        attempt = site.home / "attempts" / f"{job}-1"
        assert re.fullmatch(rf"changed on node\d in {attempt}/code-[0-9a-f]{{8}}/part\n", log(site, job))
        wait_for(lambda: not list(attempt.glob("code*")), named="that code and archive are removed")  # noqa: B023 - now
    site.wait_until(on_two_nodes, "succeeded")
    where = [(tmp_path / rank).read_text() for rank in "01"]
    assert where[0] == where[1], "both run in one copy"
    assert re.fullmatch(rf"({site.home}/attempts/{on_two_nodes}-1/code-[0-9a-f]{{8}}) \1/lib\n", where[0])
    assert worker.process.wait(timeout=60) == 0, worker.said
