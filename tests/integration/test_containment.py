"""Nothing of a job survives its stop, whatever it does to get away, and nobody else is touched."""

import subprocess
import sys

import pytest

from tests.support.bare_supervisor import ROOT
from tests.support.deep import DEEP
from tests.support.escapes import ESCAPES, build

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
