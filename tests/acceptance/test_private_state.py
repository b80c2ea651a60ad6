"""Files of Stoker are private after any first command and with any umask; jobs keep the umask."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.paths import tighten_home
from stoker.queue import init_queue
from tests.support.command import stoker


@pytest.fixture(autouse=True)
def careless_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home directory of a user who has never used Stoker."""
    monkeypatch.delenv("STOKER_HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "alice"))
    monkeypatch.setenv("STOKER_GPUS", "sim:1")
    (tmp_path / "alice").mkdir()
    return tmp_path / "alice"


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def open_to_others(place: Path) -> dict[str, str]:
    return {str(path): oct(mode_of(path)) for path in place.rglob("*") if mode_of(path) & 0o077}


@pytest.mark.parametrize(
    "first",
    [
        ("run", "--", "sh", "-c", "umask"),
        ("work", "--until-empty"),
        ("submit", "true"),
        ("tokens", "add", "--name", "anna"),
        ("sim", "train", "--steps", "1", "--step", "10ms"),
    ],
    ids=lambda words: words[0],
)
def test_every_file_is_private_after_any_first_command(account: Path, first: tuple[str, ...]) -> None:
    done = stoker(*first)
    assert done.code == 0, done.err
    assert (account / ".local/state/stoker").is_dir()
    assert open_to_others(account) == {}
    if first[0] == "run":
        assert done.out == "0000\n"


def test_queued_job_keeps_the_umask_and_its_record_is_private(account: Path) -> None:
    job = stoker("submit", "--json", "--gpus", "0", f"umask; touch {account}/result").json()[0]["id"]
    assert stoker("work", "--until-empty").code == 0
    assert stoker("logs", job).out == "0000\n"
    assert mode_of(account / "result") == 0o666
    assert open_to_others(account) == {str(account / "result"): "0o666"}
    # Nothing that Stoker writes there counts as a file of another user.
    home = account / ".local/state/stoker"
    home.chmod(0o755)
    assert tighten_home(home) is not None
    assert mode_of(home) == 0o700


def test_write_ahead_log_is_private(tmp_path: Path) -> None:
    with init_queue(str(tmp_path / "new" / "queue.db")):
        assert {path.name for path in (tmp_path / "new").iterdir()} == {"queue.db", "queue.db-wal", "queue.db-shm"}
        assert open_to_others(tmp_path) == {}


def test_permissions_are_restricted_and_reported_once(tmp_path: Path) -> None:
    home = tmp_path / "stoker-home"
    home.mkdir(mode=0o755)
    init_queue(str(home / "queue.db")).close()
    (home / "queue.db").chmod(0o644)
    assert stoker("list").err == f"stoker: other users had access to {home} and 1 more there: now only you do\n"
    assert (mode_of(home), mode_of(home / "queue.db")) == (0o700, 0o600)
    assert stoker("list").err == ""


def test_directory_with_other_files_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch(0o644)
    (tmp_path / "runs").mkdir(0o755)
    tmp_path.chmod(0o755)
    assert tighten_home(tmp_path) == f"other users had access to {tmp_path}/runs: now only you do"
    assert (mode_of(tmp_path), mode_of(tmp_path / "runs"), mode_of(tmp_path / "thesis.tex")) == (0o755, 0o700, 0o644)


def test_shared_directory_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    assert tighten_home(tmp_path) is None
    assert mode_of(tmp_path) == 0o1777


@pytest.mark.parametrize(("mode", "after"), [(0o660, 0o660), (0o644, 0o600)])
def test_queue_outside_the_home_stays_shared_only_with_its_writers(tmp_path: Path, mode: int, after: int) -> None:
    place = tmp_path / "queue.db"
    init_queue(str(place)).close()
    place.chmod(mode)
    result = stoker("list", "--queue", str(place)).err
    assert mode_of(place) == after
    assert ("other users had access" in result) == (mode != after)
