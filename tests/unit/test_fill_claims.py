"""One filler per GPU, across users."""

import contextlib
import getpass
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.errors import StokerError
from stoker.fill.claims import Claims, machine_of
from stoker.gpus.model import Gpu, Unknown

NOT_REPORTED = Unknown("not reported")
TWO = [Gpu(f"GPU-{n}", n, NOT_REPORTED, "nvidia", n, NOT_REPORTED, NOT_REPORTED) for n in (0, 1)]

# Another process; as root, also another user.
_ANOTHER = """
import os, sys
from stoker.errors import StokerError
from stoker.fill.claims import Claims
from stoker.gpus.model import Gpu
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
try:
    Claims(sys.argv[1]).take([Gpu("GPU-1", 1, "a GPU", "nvidia", 1, 0, "")])
except StokerError as error:
    print(error)
else:
    print("taken")
"""


def another(machine: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _ANOTHER, str(machine)], stdout=subprocess.PIPE, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def test_gpu_is_filled_by_one_process_at_a_time_across_users(tmp_path: Path) -> None:
    with contextlib.closing(Claims(str(tmp_path))) as claims:
        claims.take(TWO[:1])
        assert another(tmp_path) == "taken"  # it is another GPU
        claims.take(TWO)  # its own claim is no obstacle
        who = f"by {getpass.getuser()} (pid {os.getpid()})"
        assert another(tmp_path) == f"GPU 1 is being filled already {who}: a GPU has one filler at a time"
        assert another(tmp_path / "another machine") == "taken"
        with pytest.raises(StokerError, match="GPU 0 is being filled already"):
            Claims(str(tmp_path)).take(TWO)
    assert another(tmp_path) == "taken"


def test_claims_are_separate_for_each_simulated_machine(tmp_path: Path) -> None:
    environment = {"STOKER_SIM_DIR": str(tmp_path)}
    assert machine_of("auto", Path("/")) == machine_of("nvml", Path("/")) == ""
    assert machine_of("sim:2", Path("/"), environment) == machine_of(f"sim:2@{tmp_path}", Path("/"), {}) != ""
    assert machine_of("nvml", tmp_path) not in {"", machine_of("sim:2", Path("/"), environment)}
