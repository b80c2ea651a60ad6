"""`stoker submit` as typed."""

import os
import pty
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stoker.queue import JobSpec, View, init_queue, open_queue
from tests.support.command import Finished, stoker, stoker_command
from tests.support.stand_ins import StandIns
from tests.support.waiting import wait_for

ID = re.compile(r"[0-9a-f]{8}")


@pytest.fixture(autouse=True)
def _a_plain_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is no repository, without a Python environment."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    place = tmp_path / "place"
    place.mkdir()
    monkeypatch.chdir(place)


def submit(*arguments: str, environment: Mapping[str, str] | None = None) -> Finished:
    return stoker("submit", *arguments, environment=environment)


def submitted(*arguments: str, environment: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    done = submit("--json", *arguments, environment=environment)
    assert done.code == 0, done.err
    jobs: list[dict[str, Any]] = done.json()
    return jobs


def job(*arguments: str, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    (only,) = submitted(*arguments, environment=environment)
    return only


def how_many() -> int:
    with init_queue() as queue:
        return sum(queue.jobs.counts().values())


def fed(text: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """With that on standard input."""
    done = subprocess.run(
        [stoker_command(), "submit", *arguments], input=text, capture_output=True, timeout=60, check=False
    )
    assert b"Traceback" not in done.stderr
    return done


class Repository:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.git("init", "--quiet")

    def git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", *identity, *arguments], cwd=self.path, check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout.strip()

    def commit(self) -> str:
        (self.path / "train.py").write_text("print(1)\n")
        self.git("add", "train.py")
        self.git("commit", "--quiet", "--message", "first")
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """A submit without the time limit for git, which is slow on a busy machine."""
    patience = tmp_path / "patience"
    patience.mkdir()
    (patience / "sitecustomize.py").write_text("import stoker.queue.provenance as asking\nasking.GIT_SECONDS = 50.0\n")
    monkeypatch.setenv("PYTHONPATH", str(patience))
    return Repository(Path.cwd())


def test_submit_prints_only_the_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_UNUSED_FOR")
    done = submit("--", "python", "train.py", "--lr=1")
    assert (done.code, done.err) == (0, "")
    assert ID.fullmatch(done.out.removesuffix("\n"))
    with open_queue() as queue:
        found = queue.jobs.get(done.out.strip())
    assert found.command == ("python", "train.py", "--lr=1")
    assert found.directory == str(tmp_path / "place")
    assert (found.gpus, found.state, found.environment, found.policy) == (1, "queued", {}, {})


def test_single_argument_runs_in_a_shell_and_several_do_not() -> None:
    assert job("echo a | wc -c")["command"] == "echo a | wc -c"
    assert job("--", "echo", "a | wc -c")["command"] == ["echo", "a | wc -c"]
    assert job("python", "t.py", "--name", "x")["command"] == ["python", "t.py", "--name", "x"]


def test_every_option_reaches_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_UNUSED_FOR")
    first, second = submit("true").out.strip(), submit("--name", "the second", "true").out.strip()
    found = job(
        *("--name", "a name", "--tag", "x", "--tag", "y", "--gpus", "2", "--memory", "20GiB", "--share"),
        *("--priority", "-3", "--after", first[:6], "--after-any", "the second", "--retries", "2", "--backoff", "1m"),
        *("--time-limit", "12h", "--preemptible", "--on-loss", "hold", "--hold", "--env", "A=1=2", "--env", "COPIED"),
        *(
            "--directory",
            "/srv/not here",
            "--batch-size",
            "32",
            "--for",
            "5m",
            "--idle-after",
            "0s",
            "--warn-at",
            "off",
        ),
        *("--gpu-model", "A100 | h100", "--cpus", "8", "--ram", "64GiB", "--partition", "gpu,spare", "--qos", "high"),
        *("--sbatch=--exclude=node3", "--sbatch", "--nice=100"),
        *("--gpu-memory", "40GiB", "--machine", "box", "--label", "ib", "--label", "nvme", "--exclude-machine", "old"),
        *("--require", "any", "--", "train", "{batch_size}"),
        environment={"COPIED": "from here"},
    )
    expected = {
        "name": "a name", "tags": ["x", "y"], "gpus": 2, "memory": 20 * 2**30, "share": True, "priority": -3,
        "after": [first], "after_any": [second], "retries": 2, "backoff": 60.0, "time_limit": 43200.0,
        "preemptible": True, "on_loss": "hold", "state": "held", "environment": {"A": "1=2", "COPIED": "from here"},
        "directory": "/srv/not here", "batch_size": 32,
        "gpu_memory": 40 * 2**30, "machine": "box", "labels": ["ib", "nvme"], "exclude_machines": ["old"],
        "gpu_model": "A100|h100", "cpus": 8, "ram": 64 * 2**30, "nodes": 1,
        "slurm": {"partition": "gpu,spare", "qos": "high", "sbatch": ["--exclude=node3", "--nice=100"]},
        "policy": {"window": 300.0, "after": 0.0, "warn_at": None, "require": "any"},
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected


def test_job_can_be_exempt_from_the_idle_rule() -> None:
    assert job("--idle", "off", "true")["policy"] == {"idle": False}


def test_active_python_environment_is_used_by_the_job() -> None:
    active = {"VIRTUAL_ENV": "/venv", "PATH": f"/venv/bin:{os.environ['PATH']}", "PYTHONPATH": "/lib/mine"}
    found = job("true", environment=active)["environment"]
    assert found == active | {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    assert job("--env", "PYTHONPATH=other", "true", environment=active)["environment"]["PYTHONPATH"] == "other"
    assert job("--bare-env", "true", environment=active)["environment"] == {}
    conda = job("true", environment={"CONDA_PREFIX": "/conda/x", "CONDA_DEFAULT_ENV": "x"})["environment"]
    assert conda["CONDA_DEFAULT_ENV"] == "x"
    assert conda["PATH"] == os.environ["PATH"]


def test_sweep_creates_one_job_per_combination() -> None:
    jobs = submitted("--name", "base", "--sweep", "lr=1e-3,1e-4", "--sweep", "seed=1..2", "train {lr}")
    assert [(job["command"], job["name"]) for job in jobs] == [
        ("train 1e-3 --seed=1", "base lr=1e-3 seed=1"),
        ("train 1e-3 --seed=2", "base lr=1e-3 seed=2"),
        ("train 1e-4 --seed=1", "base lr=1e-4 seed=1"),
        ("train 1e-4 --seed=2", "base lr=1e-4 seed=2"),
    ]
    positions = [job["position"] for job in jobs]
    assert positions == sorted(positions)


def test_sweep_over_the_batch_size_needs_no_other_batch_size() -> None:
    jobs = submitted("--sweep", "batch_size=16,32", "train {batch_size}")
    assert [job["command"] for job in jobs] == ["train 16", "train 32"]


def test_file_creates_one_job_per_line(tmp_path: Path) -> None:
    file = tmp_path / "gpu_queue.txt"
    file.write_bytes(
        b"\xef\xbb\xbfpython a.py\r\n\n# not this one\n   # nor this\n"
        b"  python b.py | tee 'b c'.log  \npython c.py # why"
    )
    jobs = submitted("--from", str(file), "--gpus", "2", "--tag", "night")
    assert [job["command"] for job in jobs] == ["python a.py", "python b.py | tee 'b c'.log", "python c.py # why"]
    assert all(job["gpus"] == 2 and job["tags"] == ["night"] for job in jobs)
    swept = submitted("--from", str(file), "--sweep", "seed=1,2")
    assert [job["command"] for job in swept][:3] == ["python a.py --seed=1", "python a.py --seed=2",
                                                    "python b.py | tee 'b c'.log --seed=1"]  # fmt: skip


def test_standard_input_creates_one_job_per_line() -> None:
    done = fed("echo 1\necho 'ü 🔥'\n".encode(), "--from", "-")
    assert done.returncode == 0
    with open_queue() as queue:
        assert [queue.jobs.get(name).command for name in done.stdout.decode().split()] == ["echo 1", "echo 'ü 🔥'"]


def test_job_that_no_worker_could_run_is_refused() -> None:
    submit("true")
    for words in (("--nodes", "2", "true"), ("--dry-run", "--nodes", "2", "true")):
        done = submit(*words)
        assert (done.code, done.out) == (2, "")
        assert done.err == "stoker: nodes: a job over several machines needs a worker with --engine slurm\n"


def test_dry_run_prints_the_commands_and_creates_no_queue() -> None:
    done = submit("--dry-run", "--sweep", "x=a b,c", "--", "train", "{x}")
    assert (done.code, done.out) == (0, "train 'a b'\ntrain c\n")
    assert "2 jobs would be submitted" in done.err
    assert not (Path(os.environ["STOKER_HOME"]) / "queue.db").exists()
    (planned,) = submit("--dry-run", "--json", "--gpus", "3", "train").json()
    assert (planned["command"], planned["gpus"], planned["id"]) == ("train", 3, "")
    first = submit("true").out.strip()
    (planned,) = submit("--dry-run", "--json", "--after", first[:7], "train").json()
    assert planned["after"] == [first]
    assert how_many() == 1


def test_queue_comes_from_option_environment_or_file(tmp_path: Path) -> None:
    for number, (flags, environment) in enumerate(
        [
            (("--queue", str(tmp_path / "q0")), {}),
            ((), {"STOKER_QUEUE": str(tmp_path / "q1")}),
            ((), {"STOKER_CONFIG": str(tmp_path / "stoker.toml")}),
        ]
    ):
        (tmp_path / "stoker.toml").write_text(f'queue = "{tmp_path}/q2"\n')
        done = submit(*flags, "true", environment=environment)
        assert done.code == 0, done.err
        with open_queue(str(tmp_path / f"q{number}")) as queue:
            assert queue.jobs.get(done.out.strip()).command == "true"


def test_submitter_is_stored() -> None:
    assert job("true", environment={"LOGNAME": "alice"})["submitter"] == "alice"


def test_commit_and_uncommitted_changes_are_stored(repository: Repository) -> None:
    assert (found := job("true"))["commit"] is None
    assert found["dirty"] is None
    commit = repository.commit()
    (repository.path / "results.csv").write_text("not tracked")
    (repository.path / "below").mkdir()
    found = job("--directory", "below", "true")
    assert (found["commit"], found["dirty"]) == (commit, False)
    (repository.path / "train.py").write_text("print(2)\n")
    assert job("true")["dirty"] is True
    assert job("--directory", "/", "true")["commit"] is None


def test_only_committed_code_can_be_pinned(repository: Repository) -> None:
    assert "a pinned job needs a commit to run: the git repository of" in submit("--pin", "true").err
    commit = repository.commit()
    found = job("--pin", "true")
    assert (found["pin"], found["commit"]) == (True, commit)
    (repository.path / "train.py").write_text("print(2)\n")
    refused = submit("--pin", "true")
    assert refused.code == 2
    assert "has changes that are not: commit them, or leave them out with --allow-dirty" in refused.err
    found = job("--pin", "--allow-dirty", "true")
    assert (found["pin"], found["commit"], found["dirty"]) == (True, commit, True)
    elsewhere = submit("--pin", "--directory", "/", "true")
    assert (elsewhere.code, "not in a git repository" in elsewhere.err) == (2, True)


def test_missing_or_hanging_git_leaves_the_job_without_a_commit(tmp_path: Path) -> None:
    programs = StandIns(tmp_path / "bin")
    assert job("true", environment={"PATH": programs.path})["commit"] is None
    git = tmp_path / "bin" / "git"
    # Longer than any command is waited for here.
    git.write_text("#!/bin/sh\nexec /bin/sleep 600\n")
    git.chmod(0o755)
    assert job("true", environment={"PATH": programs.path})["commit"] is None


def test_job_starts_in_the_logical_directory_of_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "place")
    assert job("true", environment={"PWD": str(link)})["directory"] == str(link)
    assert job("true", environment={"PWD": str(tmp_path)})["directory"] == str(tmp_path / "place")
    assert job("--directory", "..", "true")["directory"] == str(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    refused = submit("true")
    assert (refused.code, "this directory was removed" in refused.err) == (2, True)
    assert submit("--directory", str(tmp_path), "true").code == 0


def on_a_terminal(*arguments: str) -> str:
    """Standard error on a terminal."""
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [stoker_command(), "submit", *arguments], stdout=subprocess.PIPE, stderr=theirs, timeout=60, check=True
        )
        assert ID.fullmatch(done.stdout.decode().strip())
        os.write(theirs, b"<end>\n")
        seen = b""
        while not seen.endswith(b"<end>\r\n"):
            seen += os.read(ours, 4096)
        return seen.decode().removesuffix("<end>\r\n")
    finally:
        os.close(ours)
        os.close(theirs)


def test_missing_worker_is_reported_on_a_terminal() -> None:
    assert on_a_terminal("true") == "no worker is running: `stoker work` starts one\r\n"
    with open_queue() as queue:
        queue.workers.heartbeat("w", "host", View())
        assert on_a_terminal("true") == ""
        queue.pause()
        assert "the queue is paused" in on_a_terminal("true")


WORD = 128 * 1024 - 1


@pytest.mark.parametrize(
    "command",
    [
        "echo 'it''s' \"quoted\" \\ $HOME `x` %s :name {x} {} {{",
        "echo one\necho two\n\techo three",
        "echo 🔥 ünï ﷽",
        "echo '\x1b[31m' \x01",
        "x" * 100_000,
        "-not-an-option",
        "=",
    ],
    ids=["quotes", "newlines", "emoji", "control letters", "100 kB", "dash", "sign"],
)
def test_unusual_commands_are_stored_unchanged(command: str) -> None:
    assert job("--", command)["command"] == command
    assert job("--", "words", command)["command"] == ["words", command]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "there is no command to submit: write it after --"),
        (("",), "a job needs a command: this one is empty"),
        (("  ",), "this one is empty"),
        (("--", "", "a"), "this one is empty"),
        (("--", "echo", "\udcff"), r"must be text in UTF-8, and this is not: '\udcff'"),
        (("echo \udcff",), "text in UTF-8"),
        (("--name", "\udcff", "true"), "text in UTF-8"),
        (("--name", "a\nb", "true"), "is not one line"),
        (("--tag", "", "true"), "a tag must not be empty"),
        (("--tag", "x" * 300, "true"), "is not one line"),
        (("--gpus", "-1", "true"), "--gpus"),
        (("--gpus", "many", "true"), "--gpus"),
        (("--gpus", "99999999999", "true"), "--gpus: must be between 0"),
        (("--memory", "lots", "true"), "--memory: 'lots' is not an amount of memory"),
        (("--share", "true"), "memory: a job that shares a GPU must say how much memory it needs"),
        (("--gpu-model", "a100|", "true"), "--gpu-model: 'a100|' is not the name of a GPU: write a part of it"),
        (("--gpus", "0", "--gpu-model", "a100", "true"), "gpu_model: a job without a GPU cannot choose its model"),
        (("--cpus", "0", "true"), "--cpus: must be between 1"),
        (("--ram", "64", "true"), "--ram: 64 bytes is not the memory of a program: write it like 64GiB"),
        (("--ram", "much", "true"), "--ram: 'much' is not an amount of memory"),
        (("--nodes", "1025", "true"), "--nodes: must be between 1 and 1024, not 1025"),
        (("--partition", "", "true"), "--partition: '' is not text"),
        (("--sbatch", "nice", "true"), "--sbatch: 'nice' is not an option of sbatch: it must begin with -"),
        (("--sbatch=--job-name=x", "true"), "'--job-name=x' cannot be given to sbatch: Stoker sets --job-name itself"),
        (("--priority", "99999999999", "true"), "must be between"),
        (("--retries", "-1", "true"), "--retries"),
        (("--time-limit", "0", "true"), "--time-limit: must be greater than zero"),
        (("--backoff", "soon", "true"), "--backoff: 'soon' is not a duration"),
        (("--on-loss", "cry", "true"), "--on-loss"),
        (("--after", "12345678", "true"), "there is no job '12345678'"),
        (("--after-any", "nobody", "true"), "there is no job 'nobody'"),
        (("--env", "=x", "true"), "is not a variable"),
        (("--env", "NOT_THERE", "true"), "it is not set here"),
        (("--env", "A=\udcff", "true"), "the variable 'A' is not text in UTF-8"),
        (("--directory", "nowhere", "true"), "place/nowhere is not there"),
        (("--directory", "/etc/passwd", "true"), "/etc/passwd is not a directory"),
        (("--directory", "/\udcff", "true"), "text in UTF-8"),
        (("--pin", "true"), "a pinned job needs a commit to run"),
        (("--snapshot-limit", "1MiB", "true"), "--snapshot-limit is the limit of a snapshot: add --snapshot"),
        (("--at-most", "0", "--group", "a", "true"), "--at-most: must be between 1"),
        (("--at-most", "2", "true"), "at_most: only groups have a cap: put the jobs into one with --group"),
        (("--metric", "a b", "true"), "--metric: 'a b' cannot be a figure of a log"),
        (("--notify", "soon", "true"), "--notify: there is no event 'soon' of a job"),
        (("--deadline", "soon", "true"), "--deadline: 'soon' is not a time"),
        (("--gpu-memory", "40", "true"), "--gpu-memory: 40 bytes is not the memory of a program"),
        (("--machine", "a b", "true"), "--machine: 'a b' cannot be the name of a machine"),
        (("--machine", "x", "--exclude-machine", "x", "true"), "the job is to run on x and not on it"),
        (("--batch-size", "0", "true"), "--batch-size"),
        (("train {batch_size}",), "give a batch size"),
        (("--", "train", "--bs={batch_size}"), "give a batch size"),
        (("--for", "1s", "--idle-every", "5s", "true"), "--for 1s is shorter than --every 5s"),
        (("--idle", "maybe", "true"), "--idle"),
        (("--sweep", "lr", "true"), "--sweep: 'lr' is not a sweep"),
        (("--sweep", "lr=\udcff", "true"), "text in UTF-8"),
        (("--sweep", "a=1..1000", "--sweep", "b=1..1000", "true"), "that would be 1,000,000 jobs"),
        (("--sweep", "a=1", "--sweep", "a=2", "true"), "'a' is swept twice"),
        (("--from", "nowhere.txt"), "nowhere.txt cannot be read: No such file"),
        (("--from", "/"), "/ cannot be read: Is a directory"),
        (("--from", "/dev/null"), "there is no command in /dev/null"),
        (("--from", "/dev/null", "true"), "leave one of them out"),
        (("--from", "/dev/zero"), "it is not a list of commands"),
        (("--queue", "mysql://x", "true"), "is not the address of a queue"),
    ],
)  # fmt: skip
def test_invalid_input_is_refused_in_one_sentence(arguments: tuple[str, ...], says: str) -> None:
    done = submit(*arguments)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert done.err.startswith("stoker: ")
    assert done.err.count("\n") == 1
    if "--queue" not in arguments:
        assert how_many() == 0


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (b"echo 1\necho \xff\n", "line 2 of standard input is not text in UTF-8"),
        (b"echo 1\n\necho \0\n", "line 3 of standard input: a command cannot contain the character NUL"),
        (b"echo 1\n" + b"x" * 2**20, "line 2 of standard input: a command of 1,048,576 bytes in one word is too long"),
        (b"echo 1\n" + b"x" * (WORD + 1), "put it into a script and submit that"),
        (b"echo 1\ntrain {batch_size}\n", "give a batch size"),
        (b"\n# only this\n", "there is no command in standard input"),
    ],
    ids=["bytes", "NUL", "1 MiB", "one byte too long", "batch size", "nothing"],
)
def test_one_invalid_line_rejects_all_lines(lines: bytes, says: str) -> None:
    done = fed(lines, "--from", "-")
    assert (done.returncode, done.stdout) == (2, b"")
    assert says in done.stderr.decode()
    assert how_many() == 0


def test_longest_possible_command_is_accepted() -> None:
    """One word of as much as Linux gives a program, which `sh -c` really runs."""
    text = b": " + b"x" * (WORD - 2)
    subprocess.run(["sh", "-c", text], check=True)
    done = fed(text, "--from", "-")
    assert done.returncode == 0
    with open_queue() as queue:
        assert queue.jobs.get(done.stdout.decode().strip()).command == text.decode()


def test_arguments_above_the_total_limit_are_refused() -> None:
    done = submit("--", "echo", *(["x" * 100_000] * 11))
    assert (done.code, "at most 1,048,576 can be started" in done.err) == (2, True)


def test_ambiguous_name_is_refused() -> None:
    for _ in range(2):
        submit("--name", "twin", "true")
    refused = submit("--after", "twin", "true")
    assert (refused.code, "'twin' fits several jobs" in refused.err) == (2, True)


def test_submit_wakes_listeners(tmp_path: Path) -> None:
    with init_queue() as queue:
        queue.jobs.submit([JobSpec(command="true")])
        changes = queue.listen()
        try:
            changes.poll()
            submit("true")
            wait_for(changes.poll, named="the changes")
        finally:
            changes.close()
