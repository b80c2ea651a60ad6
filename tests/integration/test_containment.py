"""Nothing of a job survives its stop, whatever it does to get away, and nobody else is touched."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bare_supervisor import ROOT
from tests.support.deep import DEEP
from tests.support.escapes import ESCAPES, build
from tests.support.uml_machine import run_in_uml

TIMES = 100 if DEEP else 25


@pytest.fixture(autouse=True, scope="module")
def _compiled() -> None:
    build()


@pytest.mark.parametrize("means", ["cgroup", "descent"])
@pytest.mark.parametrize("way", ESCAPES)
def test_escaped_processes_are_stopped_and_no_other_process_is_signalled(way: str, means: str) -> None:
    command = [sys.executable, "-m", "tests.support.many_escapes", way, str(TIMES), means]
    # A separate session keeps the terminal of the test runner out of the experiment.
    tried = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, start_new_session=True)
    assert (tried.stdout, tried.stderr, tried.returncode) == ("", "", 0)


# As systemd starts a worker in a unit with `Delegate=yes` and `DelegateSubgroup=stoker-worker`.
LIMITS = """
cd /sys/fs/cgroup
echo '+cpu +memory' > cgroup.subtree_control
mkdir -p unit/stoker-worker
echo $$ > unit/stoker-worker/cgroup.procs
cd /run
python -m tests.support.limited_jobs
"""


def test_kernel_limits_a_job_to_its_cpus_and_ram(tmp_path: Path) -> None:
    printed = run_in_uml(tmp_path, LIMITS)
    found = [line for line in printed.splitlines() if line.startswith("{")]
    assert found, printed
    limited = "200000 100000\n41943040\n"
    assert json.loads(found[0]) == {
        "greedy": [["failed", 137, "it was killed for lack of RAM", limited]],
        "modest": [["succeeded", 0, "", f"{limited}fine\n"]],
        "after them": [["succeeded", 0, "", "max 100000\nmax\nfine\n"]],
        "left": ["stoker-worker"],
    }
