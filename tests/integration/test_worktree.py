"""Snapshots of commits, made by a real git from real repositories."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stoker import program
from stoker.engines.worktree import Worktree
from stoker.errors import StokerError

AUTHOR = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always")


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    # As if started from a hook of another repository.
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "elsewhere" / "index"))


def git(at: Path, *words: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(["git", *AUTHOR, *words], cwd=at, env=clean, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits of train/main.py, `first` and `second`, and an edit that nobody committed."""
    at = tmp_path / "a repository"
    (at / "train").mkdir(parents=True)
    git(at, "init", "-q", "-b", "main")
    for text in ("first", "second"):
        (at / "train" / "main.py").write_text(text)
        git(at, "add", ".")
        git(at, "commit", "-q", "-m", text)
    (at / "train" / "main.py").write_text("edited since")
    return at


def test_job_runs_in_the_same_subdirectory_of_the_commit(repository: Path, tmp_path: Path) -> None:
    first = git(repository, "rev-parse", "HEAD~1")
    worktree = Worktree.create(str(repository / "train"), first, tmp_path / "snapshot")
    assert worktree.directory == str(tmp_path / "snapshot" / "train")
    assert (Path(worktree.directory) / "main.py").read_text() == "first"
    assert (repository / "train" / "main.py").read_text() == "edited since"
    assert git(repository, "branch", "--show-current") == "main"


def test_cancelled_snapshot_leaves_no_files(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def called_off() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "_CHECK_EVERY", 0.0)
    with pytest.raises(KeyboardInterrupt):
        Worktree.create(str(repository), "HEAD", tmp_path / "snapshot", called_off)
    assert not (tmp_path / "snapshot").exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_removed_snapshot_leaves_no_files_of_the_job(repository: Path, tmp_path: Path) -> None:
    worktree = Worktree.create(str(repository), "HEAD", tmp_path / "snapshot")
    (Path(worktree.directory) / "train" / "main.py").write_text("changed by the job")
    (Path(worktree.directory) / "checkpoint").write_text("new")
    worktree.remove()
    assert not (tmp_path / "snapshot").exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    worktree.remove()


def test_snapshot_can_be_removed_without_its_repository(repository: Path, tmp_path: Path) -> None:
    worktree = Worktree.create(str(repository), "HEAD", tmp_path / "snapshot")
    repository.rename(tmp_path / "moved")
    worktree.remove()
    assert not (tmp_path / "snapshot").exists()


def test_concurrent_snapshots_do_not_collide(repository: Path, tmp_path: Path) -> None:
    def come_and_go(number: int) -> str:
        worktree = Worktree.create(str(repository / "train"), "HEAD", tmp_path / str(number) / "snapshot")
        try:
            return (Path(worktree.directory) / "main.py").read_text()
        finally:
            worktree.remove()

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(come_and_go, range(64))) == ["second"] * 64
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_snapshot_of_a_snapshot_belongs_to_the_repository(repository: Path, tmp_path: Path) -> None:
    outer = Worktree.create(str(repository), "HEAD", tmp_path / "outer")
    inner = Worktree.create(f"{outer.directory}/train", "HEAD~1", tmp_path / "inner")
    outer.remove()
    assert (Path(inner.directory) / "main.py").read_text() == "first"


def test_submodules_are_left_out(repository: Path, tmp_path: Path) -> None:
    git(repository, "checkout", "-q", "--", ".")
    git(repository, "submodule", "--quiet", "add", str(repository), "module")
    git(repository, "commit", "-q", "-m", "with a module")
    git(repository, "config", "submodule.recurse", "true")
    worktree = Worktree.create(str(repository), "HEAD", tmp_path / "snapshot")
    assert list((Path(worktree.directory) / "module").iterdir()) == []
    worktree.remove()
    assert not (tmp_path / "snapshot").exists()


def test_git_hooks_are_not_run(repository: Path, tmp_path: Path) -> None:
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    assert Worktree.create(str(repository), "HEAD", tmp_path / "snapshot")


def test_directory_outside_a_repository_is_reported(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    with pytest.raises(StokerError, match=rf"no snapshot of {plain} can be made: not a git repository"):
        Worktree.create(str(plain), "HEAD", tmp_path / "snapshot")
    with pytest.raises(StokerError, match="the directory /is/not/there does not exist here"):
        Worktree.create("/is/not/there", "HEAD", tmp_path / "snapshot")


@pytest.mark.parametrize("commit", ["0123456789012345678901234567890123456789", "--all", "no such branch", ""])
def test_missing_commit_can_be_fetched(repository: Path, tmp_path: Path, commit: str) -> None:
    with pytest.raises(StokerError, match=r"is not in the repository of .*: `git fetch` there may bring it"):
        Worktree.create(str(repository), commit, tmp_path / "snapshot")
    assert not (tmp_path / "snapshot").exists()


def test_directory_missing_from_the_commit_is_reported(repository: Path, tmp_path: Path) -> None:
    (repository / "new").mkdir()
    with pytest.raises(StokerError, match="new is not part of commit HEAD"):
        Worktree.create(str(repository / "new"), "HEAD", tmp_path / "snapshot")
    assert not (tmp_path / "snapshot").exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_existing_files_are_not_overwritten(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "precious").touch()
    with pytest.raises(StokerError, match="something is there already"):
        Worktree.create(str(repository), "HEAD", tmp_path / "snapshot")
    assert (tmp_path / "snapshot" / "precious").exists()


def test_missing_git_is_reported(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StokerError, match="git could not be started: no such file or directory"):
        Worktree.create(str(repository), "HEAD", tmp_path / "snapshot")
