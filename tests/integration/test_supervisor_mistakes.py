"""A mistake of ours costs readings or a report, never the job and never its stop."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from stoker.runs import inquest, supervisor
from stoker.runs.plan import Plan
from stoker.verdicts.policy import Policy

def broken(*_arguments, **_more):
    raise ZeroDivisionError("a mistake of ours")

{mistake}
policy = Policy(below=0.05, window=0.5, after=0.0, every=0.1)
sys.exit(supervisor.supervise(Plan(command=("sh", "-c", {command!r}), policy=policy, source="sim:1", grace=5.0)))
"""


@pytest.mark.parametrize(
    ("mistake", "command", "code", "sentence"),
    [
        ("supervisor.IdleRule.observe = broken", "sleep 1; exit 7", 7, "the command goes on"),
        ("supervisor.Journal.append = broken", "sleep 1; exit 7", 7, "the command goes on"),
        ("inquest.collect_stacks = broken", "sleep 60", 124, "the report is incomplete"),
        ("inquest.render = broken", "sleep 60", 124, "the report is incomplete"),
        ("inquest.Evidence = broken", "sleep 60", 124, "the report is incomplete"),
    ],
    ids=["rule", "journal", "stacks", "page", "evidence"],
)
def test_a_mistake_of_ours_neither_kills_nor_spares_a_job(
    mistake: str, command: str, code: int, sentence: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(mistake=mistake, command=command)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
