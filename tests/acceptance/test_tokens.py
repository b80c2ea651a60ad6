"""`stoker tokens` as typed."""

import os
import pty
import stat
import subprocess
from pathlib import Path

import pytest

from stoker.web.auth.keys import Keys
from tests.support.command import stoker, stoker_command


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "stoker-home")


def test_list_is_empty_before_the_first_start(keys: Keys) -> None:
    answer = stoker("tokens")
    assert answer.code == 0
    assert answer.out.startswith("no tokens yet")
    assert not keys.path.exists()
    assert stoker("tokens", "--json").json() == []


def test_token_is_created_listed_and_its_link_printed_again(keys: Keys) -> None:
    made = stoker("tokens", "add", "--viewer", "--name", "anna", "--url", "https://stoker.example.org/")
    assert made.code == 0
    (token,) = keys.tokens()
    assert made.out == f"https://stoker.example.org/login#{token.secret}\n"
    assert "read everything, and change nothing" in made.err
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    keys.log_in(token.secret, "A phone")
    listed = stoker("tokens")
    header, row = listed.out.splitlines()
    assert header.split() == ["name", "role", "id", "made", "devices", "last", "seen"]
    assert row.split()[:3] == ["anna", "viewer", token.id]
    assert token.secret not in listed.out
    (result,) = stoker("tokens", "--json").json()
    assert (result["name"], result["role"], [device["agent"] for device in result["devices"]]) == (
        "anna",
        "viewer",
        ["A phone"],
    )
    again = stoker("tokens", "link", "anna", "--json").json()
    assert again["link"].endswith(f"/login#{token.secret}")


def test_unnamed_tokens_are_named_after_their_role(keys: Keys) -> None:
    for _ in range(2):
        result = stoker("tokens", "add", "--json").json()
        assert result["role"] == "operator"
        assert result["link"].endswith(result["token"])
    assert [token.name for token in keys.tokens()] == ["operator", "operator-2"]


def test_json_option_works_before_the_subcommand(keys: Keys) -> None:
    result = stoker("tokens", "--json", "add", "--name", "anna").json()
    assert result["name"] == "anna"
    assert stoker("tokens", "--json", "revoke", "anna").json()["id"] == result["id"]


def test_link_has_the_address_of_the_last_start(keys: Keys) -> None:
    keys.remember_address("http://192.0.2.7:9000")
    assert stoker("tokens", "link").out == f"http://192.0.2.7:9000/login#{keys.first().secret}\n"


def test_revoking_removes_the_token_and_its_devices(keys: Keys) -> None:
    token = keys.first()
    entered = keys.log_in(token.secret)
    assert entered is not None
    answer = stoker("tokens", "revoke", token.id)
    assert answer.out == f"{token.id} (operator): revoked, 1 device logged out\n"
    assert Keys(keys.path.parent).by_session(entered[1]) is None
    again = stoker("tokens", "revoke", token.id)
    assert again.code == 2
    assert again.err == f"stoker: there is no token {token.id!r}: `stoker tokens` lists the tokens\n"


def test_file_readable_by_others_is_refused(keys: Keys) -> None:
    keys.first()
    keys.path.chmod(0o644)
    answer = stoker("tokens")
    assert answer.code == 1
    assert answer.err.count("\n") == 1
    assert f"run `chmod 600 {keys.path}`" in answer.err


def test_help_states_that_an_operator_can_run_commands() -> None:
    assert "run any command as this user" in " ".join(stoker("tokens", "--help").out.split())


@pytest.mark.parametrize(("columns", "has_code"), [("120", True), ("30", False)])
def test_qr_code_is_printed_on_a_wide_terminal(keys: Keys, columns: str, has_code: bool) -> None:
    keys.first()
    own, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": columns, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [stoker_command(), "tokens", "link"], stdout=theirs, stderr=subprocess.PIPE, env=environment, check=True
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(own, 65536)
        except OSError:
            break
    os.close(own)
    assert done.returncode == 0
    assert keys.first().secret.encode() in shown
    assert ("▀".encode() in shown) == has_code
