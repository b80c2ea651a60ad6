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

from bench.table import Figure, print_figures
from tests.support.fill_machine import FillMachine, OtherUser, PreemptionTimes, occupy
from tests.support.node_holders import NUMBERS

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
WARM_UP = 12.0
REST = 60.0


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as directory, _crowd(Path(directory)):
        place = Path(directory)
        everybody = sum(path.name.isdecimal() for path in Path("/proc").iterdir())
        print(
            f"\n{GPUS} mock GPUs, {PROCESSES} other processes, {everybody} with the kernel's and whatever else is here;"
        )
        print(f"  load of this machine {os.getloadavg()[0]:.1f}")
        visits, fuser = _visits(place / "visits")
        unheard = _unheard_visits(place / "unheard") if os.geteuid() == 0 else []
        share, wakeups = _rest(place / "rest")
    _print_visits(visits, unheard, fuser)
    print(f"  at rest, a program on every GPU: {share * 100:.3f} % of a core, {wakeups:.2f} wake-ups a second")
    asked = [aside.asked * 1000 for aside in visits]
    figures = [
        Figure("opening to SIGTERM, median", statistics.median(asked), 100.0, "ms"),
        Figure("opening to SIGTERM, worst", max(asked), 500.0, "ms"),
        Figure("opening to memory back ÷ grace, worst", max(aside.gone for aside in visits) / GRACE, 1.0),
        Figure("share of a core at rest", share * 100, 0.2, "%"),
    ]
    if unheard:
        latest = max(aside.asked for aside in unheard)
        figures.append(Figure("a container's own node ÷ scan interval, worst", latest / SHORT_INTERVAL, 1.1))
    if fuser:
        figures.append(Figure("median ÷ a fuser every 10 s", statistics.median(asked) / _median_by_fuser(fuser), 0.1))
    return print_figures("Filling", figures)


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


def _visits(place: Path) -> tuple[list[PreemptionTimes], list[float]]:
    """Somebody opens the node of one GPU after another, at any moment; and what `fuser` takes there, in seconds."""
    machine = FillMachine(place, gpus=GPUS, linger=LINGER, interval=INTERVAL, keys=f"idle_for = 0\ngrace = {GRACE}")
    chance = random.Random(1)
    found = []
    with closing(machine), closing(OtherUser()) as user:
        machine.fill(eager=True)
        machine.wait_until_running(list(machine.nodes))
        for trial in range(TRIALS):
            gpu = list(machine.nodes)[trial % GPUS]
            machine.wait_until_running([gpu])
            time.sleep(chance.uniform(0.4, 1.6))
            found.append(occupy(machine, user, gpu))
        return found, _fuser(machine)


def _fuser(machine: FillMachine) -> list[float]:
    """What one scan by the original's means takes, for all nodes at once, which is the best for it."""
    if shutil.which("fuser") is None:
        return []
    taken = []
    for _ in range(FUSER_SCANS):
        began = time.monotonic()
        subprocess.run(["fuser", *map(str, machine.nodes.values())], capture_output=True, check=False)
        taken.append(time.monotonic() - began)
    return taken


def _median_by_fuser(taken: list[float]) -> float:
    """Milliseconds, computed: who comes at any moment waits for half an interval on the average, and for the scan."""
    return (INTERVAL / 2 + statistics.median(taken)) * 1000


def _print_visits(visits: list[PreemptionTimes], unheard: list[PreemptionTimes], fuser: list[float]) -> None:
    print(f"  {'from the opening of a node, ms':40} {'median':>8} {'worst':>8}")
    _print_row(f"to SIGTERM, {len(visits)} visits", [aside.asked for aside in visits])
    _print_row(f"to the end of a program that takes {LINGER:g} s", [aside.gone for aside in visits])
    if unheard:
        _print_row(f"no event, a scan every {SHORT_INTERVAL:g} s", [aside.asked for aside in unheard])
    if fuser:
        worst = (INTERVAL + max(fuser)) * 1000
        print(f"  {'by fuser every 10 s (computed)':40} {_median_by_fuser(fuser):8.1f} {worst:8.1f}")
        _print_row("one scan by fuser", fuser)


def _print_row(what: str, seconds: list[float]) -> None:
    print(f"  {what:40} {statistics.median(seconds) * 1000:8.1f} {max(seconds) * 1000:8.1f}")


def _unheard_visits(place: Path) -> list[PreemptionTimes]:
    """Somebody opens a container's own node of the same device, of which no event comes."""
    number = NUMBERS[1]
    machine = FillMachine(place, gpus=1, interval=SHORT_INTERVAL, keys=f"idle_for = 0\ngrace = {GRACE}")
    (gpu,) = machine.nodes
    machine.nodes[gpu].unlink()
    os.mknod(machine.nodes[gpu], stat.S_IFCHR | 0o666, number)
    own = place / "container"
    os.mknod(own, stat.S_IFCHR | 0o666, number)
    chance = random.Random(2)
    found = []
    with closing(machine), closing(OtherUser()) as user:
        machine.fill(eager=True)
        for _ in range(CONTAINER_TRIALS):
            machine.wait_until_running([gpu])
            time.sleep(chance.uniform(0.4, 0.4 + SHORT_INTERVAL))
            found.append(occupy(machine, user, gpu, own))
    return found


def _rest(place: Path) -> tuple[float, float]:
    """With a program on every GPU and nobody coming: the share of a core, and how often it wakes in a second."""
    machine = FillMachine(place, gpus=GPUS, interval=INTERVAL)
    with closing(machine):
        filler = machine.fill()
        machine.wait_until_running(list(machine.nodes))
        time.sleep(WARM_UP)
        watchers = _watchers(filler.pid)
        before, begun, switches = _seconds(watchers), time.monotonic(), _switches(watchers)
        time.sleep(REST)
        elapsed = time.monotonic() - begun
        return (_seconds(watchers) - before) / elapsed, (_switches(watchers) - switches) / elapsed


def _watchers(filler: int) -> list[int]:
    """The filler, its helper and the reapers, without the programs themselves."""
    here = [psutil.Process(filler), *psutil.Process(filler).children()]
    return [process.pid for process in here]


def _seconds(pids: list[int]) -> float:
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9


def _switches(pids: list[int]) -> int:
    return sum(psutil.Process(pid).num_ctx_switches().voluntary for pid in pids)
