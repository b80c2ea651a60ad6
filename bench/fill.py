"""How soon a background program steps aside, beside the way of a `fuser` every ten seconds; what watching costs."""

import os
import random
import shutil
import stat
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import psutil

from bench.table import Promise, print_promises
from tests.support.fill_stage import FillStage, SteppingAside, Visitor, visit
from tests.support.openers import NUMBERS
from tests.support.waiting import wait_for

GPUS = 8
PROCESSES = 300
# What an ordinary process has open beside its standard streams.
FILES_PER_PROCESS = 8
TRIALS = 100
CONTAINER_TRIALS = 10
INTERVAL = 10.0
SHORT_INTERVAL = 2.0
# As a program that writes a small checkpoint when it is asked to end.
LINGER = 0.2
GRACE = 5.0
FUSER_SCANS = 30
WARM_UP = 20.0
REST = 120.0


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as directory, _crowd(Path(directory)):
        place = Path(directory)
        print(f"\n{GPUS} mock GPUs, {PROCESSES} other processes; load of this machine {os.getloadavg()[0]:.1f}")
        visits = _visits(place / "visits")
        unheard = _unheard_visits(place / "unheard") if os.geteuid() == 0 else []
        share, wakeups = _rest(place / "rest")
    return _report(visits, unheard, share, wakeups)


@contextmanager
def _crowd(place: Path) -> Iterator[None]:
    with ExitStack() as stack:
        paths = [place / f"file{index}" for index in range(FILES_PER_PROCESS)]
        files = [stack.enter_context(path.open("w")).fileno() for path in paths]
        sleepers = [subprocess.Popen(["sleep", "3600"], pass_fds=files) for _ in range(PROCESSES)]
        try:
            yield
        finally:
            for sleeper in sleepers:
                sleeper.kill()
            for sleeper in sleepers:
                sleeper.wait()


def _visits(place: Path) -> list[SteppingAside]:
    """Somebody opens the node of one GPU after another, at any moment."""
    stage = FillStage(place, gpus=GPUS, linger=LINGER, interval=INTERVAL, keys=f"idle_for = 0\ngrace = {GRACE}")
    chance = random.Random(1)
    found = []
    with closing(stage), closing(Visitor()) as visitor:
        stage.fill(eager=True)
        stage.wait_until_running(list(stage.nodes))
        for trial in range(TRIALS):
            gpu = list(stage.nodes)[trial % GPUS]
            stage.wait_until_running([gpu])
            time.sleep(chance.uniform(0.4, 1.6))
            found.append(visit(stage, visitor, gpu))
            _print_fuser(stage) if trial == TRIALS - 1 else None
    return found


def _unheard_visits(place: Path) -> list[SteppingAside]:
    """Somebody opens a container's own node of the same device, of which no event comes."""
    number = NUMBERS[1]
    stage = FillStage(place, gpus=1, interval=SHORT_INTERVAL, keys=f"idle_for = 0\ngrace = {GRACE}")
    (gpu,) = stage.nodes
    stage.nodes[gpu].unlink()
    os.mknod(stage.nodes[gpu], stat.S_IFCHR | 0o666, number)
    own = place / "container"
    os.mknod(own, stat.S_IFCHR | 0o666, number)
    chance = random.Random(2)
    found = []
    with closing(stage), closing(Visitor()) as visitor:
        stage.fill(eager=True)
        for _ in range(CONTAINER_TRIALS):
            stage.wait_until_running([gpu])
            time.sleep(chance.uniform(0.4, 0.4 + SHORT_INTERVAL))
            found.append(visit(stage, visitor, gpu, own))
    return found


def _rest(place: Path) -> tuple[float, float]:
    """With a program on every GPU and nobody coming: the share of a core, and how often it wakes in a second."""
    stage = FillStage(place, gpus=GPUS, interval=INTERVAL)
    with closing(stage):
        filler = stage.fill()
        stage.wait_until_running(list(stage.nodes))
        time.sleep(WARM_UP)
        watchers = _watchers(filler.pid)
        before, begun, switches = _seconds(watchers), time.monotonic(), _switches(watchers)
        time.sleep(REST)
        elapsed = time.monotonic() - begun
        return (_seconds(watchers) - before) / elapsed, (_switches(watchers) - switches) / elapsed


def _watchers(filler: int) -> list[int]:
    """The filler, its helper and the guardians, without the programs themselves."""
    here = [psutil.Process(filler), *psutil.Process(filler).children()]
    return [process.pid for process in here]


def _seconds(pids: list[int]) -> float:
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9


def _switches(pids: list[int]) -> int:
    return sum(psutil.Process(pid).num_ctx_switches().voluntary for pid in pids)
