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
# A job that ends once the mistake was told of, or else when it has waited for long.
UNTIL_TOLD = "for look in $(seq 3000); do [ -e told ] && exit 7; sleep 0.02; done"


@pytest.mark.parametrize(
    ("mistake", "command", "code", "sentence"),
    [
        ("supervisor.IdleRule.observe = broken", UNTIL_TOLD, 7, "the command goes on"),
        ("supervisor.Journal.append = broken", UNTIL_TOLD, 7, "the command goes on"),
        ("inquest.collect_stacks = broken", "sleep 60", 124, "the report is incomplete"),
        ("inquest.render = broken", "sleep 60", 124, "the report is incomplete"),
        ("inquest.Evidence = broken", "sleep 60", 124, "the report is incomplete"),
    ],
    ids=["rule", "journal", "stacks", "page", "evidence"],
)
def test_a_mistake_of_ours_neither_kills_nor_spares_a_job(
    mistake: str, command: str, code: int, sentence: str, tmp_path: Path
) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(mistake=mistake, command=command)],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    with supervisor:
        assert supervisor.stderr is not None
        said = []
        for line in supervisor.stderr:
            said.append(line)
            if sentence in line:
                (tmp_path / "told").touch()
    assert supervisor.returncode == code, said
    assert sentence in "".join(said)
    assert "Traceback" not in "".join(said)
