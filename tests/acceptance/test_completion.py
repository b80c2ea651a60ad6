"""What a shell completes after `stoker`, in a real bash."""

import functools
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from stoker.queue import Store
from tests.support.command import stoker
from tests.support.queue_jobs import start, submit


@functools.cache
def bash_script() -> str:
    return stoker("completion", "bash").out


def completed(*words: str) -> list[str]:
    """What bash offers for the last word of the line."""
    script = (
        'eval "$SCRIPT"\n'
        'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))\n'
        "_stoker_completion stoker\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", "stoker", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "SCRIPT": bash_script()},
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_verbs_and_options() -> None:
    assert completed("ca") == ["cancel"]
    assert {"hold", "release", "move", "submit"} <= set(completed(""))
    assert completed("cancel", "--dry") == ["--dry-run"]
    assert completed("move", "f") == ["first"]
    assert completed("queue", "ch") == ["check"]


def test_bash_completes_ids_and_names_of_jobs_the_command_can_change(queue: Store) -> None:
    runs, held, waits = submit(queue, "resnet-runs", "resnet-held", "a name; with rm -rf")
    start(queue, runs)
    queue.jobs.hold([held])
    assert completed("release", "res") == ["resnet-held"]
    assert completed("cancel", "resnet") == ["resnet-held", "resnet-runs"]
    assert completed("cancel", waits[:5]) == [waits]
    # What a shell would take for something else is offered by its id alone.
    assert set(completed("hold", "")) == {waits}
    assert completed("move", "first", held[:4]) == [held]


def test_bash_completes_tags_from_the_queue_on_the_command_line(queue: Store, tmp_path: Path) -> None:
    submit(queue, "a", tags=("sweep-1", "other"))
    assert completed("cancel", "--tag", "sw") == ["sweep-1"]
    assert completed("cancel", "--queue", str(tmp_path / "none.db"), "") == []
    assert completed("cancel", "--queue", queue.place, "a")[:1] == ["a"]


@pytest.mark.parametrize("verb", ["show", "logs", "wait", "why"])
def test_bash_completes_jobs_for_read_only_commands(queue: Store, verb: str) -> None:
    submit(queue, "resnet")
    assert completed(verb, "res") == ["resnet"]


def test_bash_completes_dependencies_of_submit(queue: Store) -> None:
    submit(queue, "resnet")
    assert completed("submit", "--after", "res") == ["resnet"]


def test_unreadable_queue_completes_nothing_silently(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is not a database, but it is long enough to be looked at as one" * 20)
    assert completed("cancel", "--queue", str(tmp_path / "text"), "") == []
    assert completed("cancel", "--queue", "postgresql://nobody@127.0.0.1:1/none", "") == []
    assert completed("cancel", "--queue", "gopher://x", "") == []
    assert completed("cancel", "") == []


def test_completion_does_not_wait_for_an_unreachable_database() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        begun = time.monotonic()
        url = f"postgresql://nobody@127.0.0.1:{port}/none?connect_timeout=100"
        assert completed("cancel", "--queue", url, "") == []
        assert time.monotonic() - begun < 50


@pytest.mark.parametrize(
    ("shell", "mark"), [("zsh", "#compdef stoker"), ("fish", "complete --no-files --command stoker")]
)
def test_scripts_for_other_shells_are_printed(shell: str, mark: str) -> None:
    done = stoker("completion", shell)
    assert (done.code, mark in done.out) == (0, True)


def test_unknown_shell_is_refused() -> None:
    done = stoker("completion", "tcsh")
    assert (done.code, done.err.count("\n")) == (2, 1)
