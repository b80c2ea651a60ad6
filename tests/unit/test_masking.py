"""Masking of secrets in URLs, process titles, commands and JSON."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker import masking
from stoker.masking import (
    masked,
    masked_command,
    masked_environment,
    masked_words,
    unmasked_notify,
    without_passwords,
)
from stoker.settings import load_settings
from stoker.streams import _warned
from tests.support.deep import examples


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://stoker:hunter2@db/queue", "postgresql://stoker@db/queue"),
        ("postgresql://stoker:hunt@er2@db/queue?a=b@c", "postgresql://stoker@db/queue?a=b@c"),
        ("postgresql://stoker:hun/ter2@db/queue", "postgresql://stoker@db/queue"),
        ("postgresql:///queue?host=db&password=hunter2&user=x", "postgresql:///queue?host=db&password=…&user=x"),
        ("--queue=postgresql://stoker:hunter2@db/queue", "--queue=postgresql://stoker@db/queue"),
        ("postgresql://stoker@db:5432/queue", "postgresql://stoker@db:5432/queue"),
        ("python train.py --lr 3:4@5", "python train.py --lr 3:4@5"),
    ],
)
def test_passwords_in_urls_are_masked(text: str, shown: str) -> None:
    assert without_passwords(text) == shown


def test_process_title_hides_the_password_and_the_program_keeps_it() -> None:
    code = (
        "import sys; from pathlib import Path; from stoker.cli.startup import hide_passwords;"
        "print(hide_passwords(sys.argv[1:])); print(sys.argv[2]); print(Path('/proc/self/cmdline').read_text())"
    )
    words = [
        "--queue",
        "postgresql://stoker:hunter2@db/queue",
        "--then",
        "notify tgram://hunter2/7",
        "--",
        "ftp://a:job@b",
    ]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    hidden, kept, shown = done.stdout.split("\n", 2)
    assert (hidden, kept) == ("True", words[1])
    assert "postgresql://stoker@db/queue" in shown
    assert "hunter2" not in shown
    assert "notify tgram://…" in shown
    assert "ftp://a:job@b" in shown


@pytest.mark.parametrize(
    ("mode", "text", "is_reported"),
    [
        (0o644, 'queue = "postgresql://stoker:hunter2@db/queue"', True),
        (0o644, '[notify]\nurls = ["ntfy://topic"]', True),
        (0o644, 'queue = "postgresql://stoker@db/queue"', False),
        (0o600, 'queue = "postgresql://stoker:hunter2@db/queue"', False),
    ],
)
def test_world_readable_file_with_secrets_is_reported_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: int, text: str, is_reported: bool
) -> None:
    _warned.clear()
    file = tmp_path / "stoker.toml"
    file.write_text(text)
    file.chmod(mode)
    for _ in range(2):
        load_settings(file)
    said = f"stoker: other users of this machine can read the secrets in {file}: run `chmod 600 {file}`\n"
    assert capfd.readouterr().err == (said if is_reported else "")


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "DB_PWD", "GITHUBTOKEN", "SSH_AUTH_SOCK",
     "GOOGLE_APPLICATION_CREDENTIALS", "api-key", "NGC_APIKEY"],
)  # fmt: skip
def test_value_with_a_secret_name_is_masked(name: str) -> None:
    assert masked_environment({name: "x"}) == {name: "***"}


@pytest.mark.parametrize(
    ("name", "value"),
    [("TOKENIZERS_PARALLELISM", "false"), ("MAX_TOKENS", "2048"), ("PAD_TOKEN", "<pad>"), ("AUTHOR", "anna"),
     ("PWD", "/"), ("OLDPWD", "/"), ("PATH", "/usr/bin"), ("HF_TOKEN", ""), ("GIT_COMMIT", "a" * 40)],
)  # fmt: skip
def test_ordinary_value_is_shown(name: str, value: str) -> None:
    assert masked_environment({name: value}) == {name: value}
    assert masked_environment({name: value}, all_values=True) == {name: "***"}


@pytest.mark.parametrize("value", ["ghp_" + "a" * 36, "sk-" + "b" * 40, "redis://:hunter2@cache/0", "AKIA" + "C" * 16])
def test_value_formatted_like_a_secret_is_masked(value: str) -> None:
    assert masked_environment({"SETTING": value}) == {"SETTING": "***"}


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("WANDB_API_KEY=abc python train.py --lr=3", "WANDB_API_KEY=*** python train.py --lr=3"),
        ("python train.py --hf-token abc --epochs 3", "python train.py --hf-token *** --epochs 3"),
        ("export DB_PASSWORD='a b c'; python x.py", "export DB_PASSWORD=***; python x.py"),
        ("curl -H 'Authorization: Bearer abcdefghij' x", "curl -H 'Authorization: Bearer ***' x"),
        ("python x.py --data s3://me:abc@host/x", "python x.py --data s3://me@host/x"),
        ("python x.py trainer.secret=abc", "python x.py trainer.secret=***"),
        ("python x.py --pad-token '<pad>' --max-tokens 5", "python x.py --pad-token '<pad>' --max-tokens 5"),
        ("python x.py --key loss model.key=3 --tokenizer t5", "python x.py --key loss model.key=3 --tokenizer t5"),
        ("python x.py --token --verbose", "python x.py --token --verbose"),
    ],
)
def test_secrets_in_a_command_are_masked(command: str, shown: str) -> None:
    assert masked_command(command) == shown


_PIECES = st.sampled_from(
    [
        *(
            "secret",
            "PassPhrase",
            "passwd",
            "credential",
            "api_key",
            "APIKEY",
            "cookie",
            "key",
            "tokens",
            "Auth",
            "pass",
        ),
        *(
            "_pwd",
            "_PAT",
            "sk-",
            "ghp_",
            "GHO_",
            "github_pat_",
            "glpat-",
            "hf_",
            "xoxb-",
            "AKIA",
            "AIza",
            "stk_",
            "eyJ",
        ),
        *(
            "-----BEGIN RSA PRIVATE KEY",
            "Bearer ",
            "BAſIC ",
            "://",
            "@",
            ":",
            "?",
            "password=",
            "--",
            "-",
            "_",
            "=",
            " ",
        ),
        *("a" * 20, "A" * 20, "0" * 20, ".", "x", "train.py", "lr", "'", '"', ";"),
    ]
)


@given(st.lists(_PIECES, max_size=8).map("".join))
@settings(max_examples=examples(2000))
def test_command_without_a_hint_has_no_secret(command: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masking, "_HINT", "")
        thorough = masked_command(command)
    assert masked_command(command) == thorough


def test_secrets_in_an_argument_list_are_masked() -> None:
    words = ["python", "x.py", "--api-key", "a b", "--name=x", "TOKEN=abc"]
    assert masked_words(words) == ["python", "x.py", "--api-key", "***", "--name=x", "TOKEN=***"]


def test_jobs_in_json_are_masked_at_any_depth() -> None:
    job = {
        "id": "1",
        "environment": {"HF_TOKEN": "abc", "SEED": "1"},
        "command": ["x", "--token", "abc"],
        "after": ("2",),
    }
    listing = {"jobs": [job, {"id": "2", "environment": None, "command": "TOKEN=abc x"}], "count": 2}
    assert masked(listing) == {
        "jobs": [
            job | {"environment": {"HF_TOKEN": "***", "SEED": "1"}, "after": ["2"]},
            {"id": "2", "environment": None, "command": "TOKEN=abc x"},
        ],
        "count": 2,
    }


def test_viewers_see_no_values_and_no_secrets_in_commands() -> None:
    jobs = [
        {"environment": {"SEED": "1"}, "command": ["x", "--token", "abc"]},
        {"environment": {}, "command": "TOKEN=abc x"},
        {"environment": {}, "command": None},
    ]
    assert masked(jobs, for_viewer=True) == [
        {"environment": {"SEED": "***"}, "command": ["x", "--token", "***"]},
        {"environment": {}, "command": "TOKEN=*** x"},
        {"environment": {}, "command": None},
    ]


@pytest.mark.parametrize(
    "part", ["export A=b; c -d e://f:g\n", "x", "-", "a:", "http://a:", "sk-", "--a ", "a.", "eyJ"]
)
def test_long_script_is_masked_in_linear_time(part: str) -> None:
    begun = time.monotonic()
    masked_command(part * (100_000 // len(part)))
    assert time.monotonic() - begun < 5.0


def test_notification_urls_are_hidden_from_operators_and_services_from_viewers() -> None:
    entries = ["end", "failed:ntfy://user:s3cret@host/t0pic?x=y"]
    assert masked({"notify": entries}) == {"notify": ["end", "failed:ntfy://***"]}
    assert masked({"jobs": [{"notify": entries}]}, for_viewer=True) == {"jobs": [{"notify": ["end", "failed:***"]}]}


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (["end", "failed:ntfy://***"], ("end", "failed:ntfy://a")),
        (["end:json://***", "end:json://***"], ("end:json://b", "end:json://c")),
        (["done:ntfy://new"], ("done:ntfy://new",)),
        (["end:json://***"], None),
        (["failed:mailto://***"], None),
    ],
)
def test_hidden_notification_url_stays_as_it_is(said: list[str], kept: tuple[str, ...] | None) -> None:
    earlier = ("failed:ntfy://a", "end:json://b", "end:json://c")
    assert unmasked_notify(said, earlier) == kept
