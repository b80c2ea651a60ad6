"""What a worker starts: the command to the letter, its environment, its directory, its version of the code."""

import subprocess
from pathlib import Path

import pytest

from tests.support.work_site import WorkSite

STRANGE = "a 'b' \"c\" \\ $HOME `d` {e} %s\n\tline two 🚀 é"


def printed(site: WorkSite, job: str) -> str:
    return site.output(job).read_text()


def test_arguments_arrive_as_submitted(site: WorkSite) -> None:
    job = site.submit(("printf", "%s|", STRANGE, "", "*"))
    site.work_until_empty()
    assert printed(site, job) == f"{STRANGE}||*|"


def test_shell_command_is_passed_unchanged(site: WorkSite) -> None:
    job = site.submit("cat <<'END'\n" + STRANGE + "\nEND\necho $((1+1)) | cat")
    site.work_until_empty()
    assert printed(site, job) == f"{STRANGE}\n2\n"


def test_command_of_one_mebibyte_runs_unless_one_argument_exceeds_the_kernel_limit(site: WorkSite) -> None:
    many = site.submit(("sh", "-c", 'echo "$#"', "sh", *["x" * 2**16] * 16))
    word = site.submit(("true", "x" * 2**20))
    text = site.submit("exit 0\n" + "# filler\n" * (2**20 // 9))
    site.work_until_empty()
    assert printed(site, many) == "16\n"
    for job in (word, text):
        found = site.job(job)
        assert (found.state, found.exit_code) == ("failed", 126)
        assert "its arguments and environment are too long" in found.reason


def test_job_has_its_id_in_its_environment(site: WorkSite) -> None:
    show = "echo $STOKER_JOB_ID {id} {{id}} {gpus} {batch_size} $WANDB_RUN_ID $WANDB_NAME $STOKER_ATTEMPT"
    job = site.submit(show, name="baseline", gpus=2, batch_size=64)
    site.work_until_empty()
    assert printed(site, job) == f"{job} {job} {{id}} 2 64 {job} baseline 1\n"


@pytest.mark.parametrize("whose", ["worker", "job"])
def test_wandb_variables_of_the_user_are_kept(site: WorkSite, whose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"WANDB_RUN_ID": "mine", "WANDB_NAME": "my name"}
    if whose == "worker":
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
    job = site.submit("echo $WANDB_RUN_ID $WANDB_NAME", environment=environment if whose == "job" else {})
    site.work_until_empty()
    assert printed(site, job) == "mine my name\n"


def test_job_runs_in_its_directory_and_its_variables_override_the_workers(
    site: WorkSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_WORKER", "1")
    monkeypatch.setenv("OF_BOTH", "worker")
    place = tmp_path / "a place with spaces"
    place.mkdir()
    job = site.submit(
        "pwd; echo $OF_WORKER $OF_BOTH $OF_JOB", directory=str(place), environment={"OF_BOTH": "job", "OF_JOB": "2"}
    )
    site.work_until_empty()
    assert printed(site, job) == f"{place}\n1 job 2\n"


def test_job_reads_nothing_from_the_workers_terminal(site: WorkSite) -> None:
    job = site.submit("cat; tty; echo done")
    site.work_until_empty()
    assert printed(site, job) == "not a tty\ndone\n"


class TestPin:
    def test_pinned_commit_runs_although_the_tree_has_changed(self, site: WorkSite) -> None:
        repository = _repository(site.directory / "code", "echo committed")
        job = site.stoker("submit", "--gpus", "0", "--pin", "--directory", str(repository), "sh", "run.sh").out.strip()
        (repository / "run.sh").write_text("echo changed\n")
        unpinned = site.stoker("submit", "--gpus", "0", "--directory", str(repository), "sh", "run.sh").out.strip()
        site.work_until_empty()
        assert printed(site, job) == "committed\n"
        assert printed(site, unpinned) == "changed\n"
        # The snapshot is gone, and the repository knows of none.
        assert not site.output(job).with_name("code").exists()
        assert len(_git(repository, "worktree", "list").splitlines()) == 1

    def test_subdirectory_of_the_repository_is_used_inside_the_snapshot(self, site: WorkSite) -> None:
        repository = _repository(site.directory / "code", "echo committed; pwd", inside="part")
        job = site.stoker(
            "submit", "--gpus", "0", "--pin", "--directory", str(repository / "part"), "sh", "run.sh"
        ).out.strip()
        site.work_until_empty()
        assert printed(site, job).splitlines()[0] == "committed"
        assert printed(site, job).splitlines()[1].endswith(f"{job}-1/code/part")


def _repository(place: Path, script: str, inside: str = ".") -> Path:
    (place / inside).mkdir(parents=True)
    (place / inside / "run.sh").write_text(f"{script}\n")
    _git(place, "init", "--quiet")
    _git(place, "add", ".")
    _git(place, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "first")
    return place


def _git(place: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(place), *words], check=True, capture_output=True, text=True).stdout
