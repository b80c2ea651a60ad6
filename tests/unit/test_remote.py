"""What `stoker machines` decides here: files for the other machine, sentences about what it said, wheels."""

import io
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

from stoker.errors import BadInputError, StokerError
from stoker.remote.far_side import MARK
from stoker.remote.installation import (
    MachineFacts,
    WorkerFiles,
    advice,
    ask_facts,
    check_facts,
    check_portable,
    environment_name,
    environment_text,
    launcher_text,
    queue_error,
    worker_unit,
)
from stoker.remote.ssh import FIND_PYTHON, RemoteMachine, connection_error, no_python
from stoker.remote.wheels import Wheel, dependency_wheels, stoker_wheel
from tests.support.scripts import REPOSITORY

FACTS = MachineFacts(
    host="gpu-box",
    user="anna",
    home="/home/anna",
    system="Linux",
    machine="x86_64",
    python="3.12.3",
    executable="/usr/bin/python3",
    uv="",
    data="/home/anna/.local/share/stoker",
    config="/home/anna/.config",
    free=2**34,
    systemd=True,
)
ADDRESS = "postgresql://stoker:secret@db/stoker"


class TestFiles:
    def test_unit_keeps_jobs_alive_and_starts_on_its_own_machine_only(self) -> None:
        text = worker_unit("gpu-box", ("/venv/bin/stoker", "work", "--gpus", "0,1"), "/home/anna/worker.env")
        lines = text.splitlines()
        for line in (
            "ConditionHost=gpu-box",
            "EnvironmentFile=/home/anna/worker.env",
            "ExecStart=/venv/bin/stoker work --gpus 0,1",
            "Restart=always",
            "KillMode=process",
            "OOMPolicy=continue",
            "WantedBy=default.target",
        ):
            assert line in lines

    def test_words_of_the_command_are_not_expanded_by_systemd(self) -> None:
        assert 'ExecStart=stoker "a b%%h$$X"' in worker_unit("gpu-box", ("stoker", "a b%h$X"), "/e").splitlines()

    def test_shell_reads_what_was_written(self, tmp_path: Path) -> None:
        secret = 'postgresql://u:a$b`c\\d"e%20f&;#!@db/q?x=1'
        environment, launcher = tmp_path / "worker env", tmp_path / "launcher"
        environment.write_text(environment_text({"STOKER_QUEUE": secret}))
        launcher.write_text(launcher_text(("printenv", "STOKER_QUEUE"), str(environment)))
        done = subprocess.run(["sh", str(launcher)], check=True, capture_output=True, text=True)
        assert done.stdout == f"{secret}\n"

    def test_quote_in_an_address_is_percent_encoded(self) -> None:
        assert "STOKER_QUEUE='postgresql://u:it%27s@db/q'\n" in environment_text(
            {"STOKER_QUEUE": "postgresql://u:it's@db/q"}
        )

    def test_line_break_in_an_address_is_refused(self) -> None:
        with pytest.raises(BadInputError, match="STOKER_QUEUE contains a line break"):
            environment_text({"STOKER_QUEUE": "postgresql://db/q\nX=1"})

    def test_machines_that_share_a_home_have_their_own_files(self) -> None:
        one, other = WorkerFiles(FACTS), WorkerFiles(msgspec.structs.replace(FACTS, host="gpu-box-2"))
        for name in ("unit", "environment", "launcher", "pid_file", "log"):
            assert getattr(one, name) != getattr(other, name)
        assert one.venvs == other.venvs
        assert one.shown(one.unit) == "~/.config/systemd/user/stoker-worker-gpu-box.service"

    def test_environment_has_a_name_for_each_content_and_python(self) -> None:
        names = {
            environment_name(wheel, facts)
            for wheel in (Wheel("stoker.whl", b"1"), Wheel("stoker.whl", b"2"))
            for facts in (FACTS, msgspec.structs.replace(FACTS, python="3.13.0"))
        }
        assert len(names) == 4


class TestSentences:
    @pytest.mark.parametrize(
        ("said", "message"),
        [
            (["Host key verification failed."], "run `ssh anna@gpu-box` once, compare the key and confirm it"),
            (
                ["@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @", "Host key verification failed."],
                "somebody intercepts the connection",
            ),
            (["anna@gpu-box: Permission denied (publickey,password)."], "`ssh-copy-id anna@gpu-box`"),
            (
                ["ssh: Could not resolve hostname gpu-box: Name or service not known"],
                "anna@gpu-box cannot be reached: ssh: Could not resolve hostname gpu-box",
            ),
            ([], "ssh ended with code 255"),
        ],
    )
    def test_failed_connection(self, said: list[str], message: str) -> None:
        error = str(connection_error("anna@gpu-box", 255, said))
        assert message in error
        assert "\n" not in error

    def test_login_that_runs_no_command(self) -> None:
        error = connection_error("gpu-box", 1, ["This account is currently not available."])
        assert str(error).startswith("the login on gpu-box ended: This account is currently not available.")

    def test_python_that_was_named_and_is_not_there(self) -> None:
        assert str(no_python("gpu-box", "", "python3.14")).startswith("there is no python3.14 on gpu-box")

    @pytest.mark.parametrize(
        ("said", "what"),
        [
            ("OSError: [Errno 28] No space left on device", "free some space there"),
            ("The virtual environment was not created because ensurepip is not available", "python3-venv or uv"),
            ("ERROR: No matching distribution found for click", "--offline"),
            ("something else", "correct that, and repeat this"),
        ],
    )
    def test_advice_about_a_failed_step(self, said: str, what: str) -> None:
        assert what in advice(said)

    def test_queue_behind_a_name_that_means_every_machine_itself(self) -> None:
        local = str(queue_error("gpu-box", "postgresql://u:secret@localhost/q", "it cannot be reached"))
        assert "pass --queue with an address that is valid on both machines" in local
        other = str(queue_error("gpu-box", ADDRESS, f"the queue {ADDRESS} cannot be reached"))
        assert "let the database accept connections from there" in other
        assert "secret" not in local + other

    def test_machine_that_is_not_linux_or_full_is_refused(self) -> None:
        with pytest.raises(StokerError, match="gpu-box runs Darwin: Stoker's worker needs Linux"):
            check_facts(msgspec.structs.replace(FACTS, system="Darwin"), "gpu-box")
        with pytest.raises(StokerError, match="gpu-box has 10 MiB free"):
            check_facts(msgspec.structs.replace(FACTS, free=10 * 2**20), "gpu-box")

    def test_compiled_packages_need_the_same_python(self) -> None:
        compiled, pure = Wheel("a-1-cp39-cp39-linux_sparc.whl", b""), Wheel("a-1-py3-none-any.whl", b"")
        other = msgspec.structs.replace(FACTS, machine="sparc")
        check_portable([pure], other, "gpu-box")
        with pytest.raises(BadInputError, match=r"--offline: gpu-box has Python 3\.12 on sparc"):
            check_portable([pure, compiled], other, "gpu-box")


def test_search_for_python_is_plain_text_in_any_login_shell() -> None:
    """csh expands exclamation marks inside of quotes, fish backslashes, and neither takes a line break there."""
    assert not set(FIND_PYTHON) & set("'\\!\n")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("{}", "gpu-box answered something that is not understood"),
        ("{", "gpu-box answered something that is not understood"),
        ('{"answer": {"host": 7}}', "gpu-box answered something that is not understood: "),
        ('{"failed": "\\u001b[2J gone"}', "cannot look at gpu-box:  [2J gone; correct that"),
    ],
)
def test_answer_of_a_strange_machine_is_one_sentence(answer: str, message: str) -> None:
    ssh = shlex.join(["sh", "-c", f"echo {shlex.quote(MARK + answer)}; cat >/dev/null"])
    with RemoteMachine("gpu-box", ssh) as remote, pytest.raises(StokerError) as raised:
        ask_facts(remote)
    assert str(raised.value).startswith(message)


class TestWheels:
    def test_wheel_of_this_installation_equals_a_built_one(self, tmp_path: Path) -> None:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
        subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
        [built] = tmp_path.glob("*.whl")
        made = stoker_wheel()
        assert made.name == built.name
        assert made.is_portable
        with zipfile.ZipFile(built) as theirs, zipfile.ZipFile(io.BytesIO(made.content)) as ours:
            assert set(ours.namelist()) == set(theirs.namelist())
            for name in theirs.namelist():
                if name.startswith("stoker/"):
                    assert ours.read(name) == theirs.read(name), name

    def test_same_files_make_the_same_wheel(self) -> None:
        assert stoker_wheel() == stoker_wheel()

    def test_everything_that_the_worker_needs_comes_along(self) -> None:
        names = {wheel.name.partition("-")[0].lower() for wheel in dependency_wheels(["postgres", "report"])}
        assert {"click", "msgspec", "nvidia_ml_py", "rich", "pygments", "psycopg", "psycopg_binary", "py_spy"} <= names
        assert not names & {"fastapi", "gspread", "pytest"}

    def test_programs_of_a_package_are_packed(self) -> None:
        [wheel] = [wheel for wheel in dependency_wheels(["report"]) if wheel.name.startswith("py_spy-")]
        with zipfile.ZipFile(io.BytesIO(wheel.content)) as archive:
            assert [name for name in archive.namelist() if name.endswith(".data/scripts/py-spy")]
