"""What must not be shown is not: in addresses, and in the list of processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from stoker.masking import without_passwords
from stoker.settings import load_settings
from stoker.streams import _warned


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
def test_passwords_in_addresses_are_left_out(text: str, shown: str) -> None:
    assert without_passwords(text) == shown


def test_the_list_of_processes_shows_no_password_and_the_program_still_has_it() -> None:
    code = (
        "import sys; from pathlib import Path; from stoker.cli.process_title import hide_passwords;"
        "print(hide_passwords(sys.argv[1:])); print(sys.argv[2]); print(Path('/proc/self/cmdline').read_text())"
    )
    words = ["--queue", "postgresql://stoker:hunter2@db/queue", "--", "ftp://a:of-the-job@b"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    hidden, kept, shown = done.stdout.split("\n", 2)
    assert (hidden, kept) == ("True", words[1])
    assert "postgresql://stoker@db/queue" in shown
    assert "hunter2" not in shown
    assert "of-the-job" in shown


@pytest.mark.parametrize(
    ("mode", "text", "is_told"),
    [
        (0o644, 'queue = "postgresql://stoker:hunter2@db/queue"', True),
        (0o644, '[notify]\nurls = ["ntfy://topic"]', True),
        (0o644, 'queue = "postgresql://stoker@db/queue"', False),
        (0o600, 'queue = "postgresql://stoker:hunter2@db/queue"', False),
    ],
)
def test_a_file_of_secrets_that_others_can_read_is_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mode: int, text: str, is_told: bool
) -> None:
    _warned.clear()
    file = tmp_path / "stoker.toml"
    file.write_text(text)
    file.chmod(mode)
    for _ in range(2):
        load_settings(file)
    said = f"stoker: other users of this machine can read the secrets in {file}: run `chmod 600 {file}`\n"
    assert capfd.readouterr().err == (said if is_told else "")
