"""However often a filler is killed: its programs are asked to end, never two are on one GPU, and none is left.

`CHAOS_KILLS=50` does more of it, `CHAOS_SEED` does the same again.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from stoker.procfs import stat
from stoker.runs.processes.reaper_process import REAPER_NAME
from stoker.runs.processes.tree import children, descends
from tests.support.fill_machine import FillMachine
from tests.support.waiting import wait_for

pytestmark = pytest.mark.timeout(300)

KILLS = int(os.environ.get("CHAOS_KILLS") or 4)
# From the start of the interpreter until after every program runs, as multiples of what the first one needed.
LIFE_PER_START = 2.0
GPUS = 3
# A program ends within its grace.
LINGER, GRACE = 0.3, 30.0


@pytest.fixture
def chance() -> random.Random:
    seed = int(os.environ.get("CHAOS_SEED") or random.randrange(10**6))
    sys.stdout.write(f"kills with seed {seed}\n")
    return random.Random(seed)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[FillMachine]:
    keys = f"idle_for = 0\ngrace = {GRACE}"
    with closing(FillMachine(tmp_path / "machine", gpus=GPUS, linger=LINGER, keys=keys)) as machine:
        yield machine


def test_programs_of_killed_fillers_are_stopped(machine: FillMachine, chance: random.Random) -> None:
    for filler in fillers(machine, chance):
        filler.kill()
        filler.wait()
    end_well(machine)


def test_programs_of_fillers_killed_with_their_reapers_are_stopped(machine: FillMachine, chance: random.Random) -> None:
    for filler in fillers(machine, chance):
        # All at once, as far as that can be. Once it stands still it neither starts nor buries any.
        filler.send_signal(signal.SIGSTOP)
        wait_for(lambda filler=filler: (found := stat(filler.pid)) and found.state in "TZ")  # type: ignore[misc]  # bound now
        reapers = [child for child in children(filler.pid) if (found := stat(child)) and found.name == REAPER_NAME]
        for reaper in reapers:
            os.kill(reaper, signal.SIGSTOP)
        for pid in (filler.pid, *reapers):
            os.kill(pid, signal.SIGKILL)
        filler.wait()
    end_well(machine)


def fillers(machine: FillMachine, chance: random.Random) -> Iterator["subprocess.Popen[bytes]"]:
    """One after the other, each when it is to be killed: the first when a program of its runs, the others any time."""
    begun = time.monotonic()
    filler = machine.fill()
    wait_for(lambda: any(map(machine.running, machine.nodes)), named="a program on a GPU")
    longest = LIFE_PER_START * (time.monotonic() - begun)
    yield filler
    for _ in range(KILLS - 1):
        filler = machine.fill()
        time.sleep(chance.uniform(0.0, longest))
        yield filler


def end_well(machine: FillMachine) -> None:
    """The last filler lives long enough to have a program on every GPU, and takes them with it."""
    filler = machine.fill()
    # Of this filler: what an earlier one started may still be running.
    wait_for(
        lambda: all((pid := machine.running(gpu)) and descends(pid, filler.pid) for gpu in machine.nodes),
        named="a program on every GPU",
    )  # fmt: skip
    filler.send_signal(signal.SIGTERM)

    assert filler.wait(60) == 0
    wait_for(lambda: not machine.programs(), named="the end of every program")
    journal = machine.journal()
    ran = {entry.pid for entry in journal if entry.what == "runs"}
    asked = {entry.pid for entry in journal if entry.what == "asked"}
    assert [entry for entry in journal if entry.what == "overlaps"] == []
    assert ran <= asked
    assert len(ran) > GPUS, "nothing was running when it was killed"
    assert "Traceback" not in machine.said
