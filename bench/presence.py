"""What it costs to see who holds eight GPUs among 300 other processes, beside `fuser`; how soon an opening rings."""

import resource
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from bench.table import Figure, print_figures
from stoker.presence.device_events import DeviceEvents
from stoker.presence.holders import HolderScanner
from tests.support.node_holders import NUMBERS, make_node

GPUS = 8
PROCESSES = 300
# What an ordinary process has open beside its standard streams.
FILES_PER_PROCESS = 8
SCANS = 30
TRIALS = 100
# How far apart the scans of a watcher at rest are, in seconds: as far as those of the original, which has no alarm.
REST = 10.0

Nodes = Mapping[str, tuple[Path, ...]]

OPENER = """
import os, sys, time
for line in sys.stdin:
    at = time.monotonic()
    held = os.open(sys.argv[1], os.O_RDONLY)
    print(at, flush=True)
    sys.stdin.readline()
    os.close(held)
    print("closed", flush=True)
"""


class Cost(NamedTuple):
    """Milliseconds of one scan."""

    wall: float
    processor: float


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as directory, ExitStack() as stack:
        place = Path(directory)
        nodes = _nodes(place)
        alone = _cost(HolderScanner(nodes).scan, SCANS)
        stack.enter_context(_crowd(place))
        holder = stack.enter_context(_opener(nodes["GPU-1"][0]))
        _tell(holder, "open")
        holders = HolderScanner(nodes)
        first = _cost(lambda: _found(holders, holder.pid), 1)
        ours = _cost(lambda: _found(holders, holder.pid), SCANS)
        processes = _processes()
        fuser = _fuser(nodes)
        rings, named = _latencies(nodes, stack)
    return _report(processes, alone, first, ours, fuser, rings, named)


def _nodes(place: Path) -> Nodes:
    """Eight stand-ins: seven that nobody opens and one to open, of a number that few programs use."""
    first = make_node(place / "dev/nvidia0", NUMBERS[1])
    others = [place / f"dev/nvidia{index}" for index in range(1, GPUS)]
    for path in others:
        path.touch()
    return {f"GPU-{index}": (path,) for index, path in enumerate([first, *others])}


def _processes() -> int:
    return sum(path.name.isdecimal() for path in Path("/proc").iterdir())


@contextmanager
def _crowd(place: Path) -> Iterator[None]:
    with ExitStack() as stack:
        files = []
        for index in range(FILES_PER_PROCESS):
            (place / f"file{index}").touch()
            files.append(stack.enter_context((place / f"file{index}").open()).fileno())
        sleepers = [subprocess.Popen(["sleep", "3600"], pass_fds=files) for _ in range(PROCESSES)]
        try:
            yield
        finally:
            for sleeper in sleepers:
                sleeper.kill()
            for sleeper in sleepers:
                sleeper.wait()


@contextmanager
def _opener(node: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", OPENER, str(node)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _tell(process: "subprocess.Popen[str]", word: str) -> str:
    _say(process, word)
    return _heard(process)


def _say(process: "subprocess.Popen[str]", word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()


def _heard(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def _found(holders: HolderScanner, pid: int) -> None:
    assert pid in [holder.pid for holder in holders.scan().by_gpu["GPU-1"]]


def _cost(work: Callable[[], object], times: int) -> Cost:
    """The medians over so many times, children included."""
    walls, processors = [], []
    for _ in range(times):
        began, used = time.perf_counter(), _processor()
        work()
        walls.append(time.perf_counter() - began)
        processors.append(_processor() - used)
    return Cost(statistics.median(walls) * 1000, statistics.median(processors) * 1000)


def _processor() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _fuser(nodes: Nodes) -> Cost | None:
    if shutil.which("fuser") is None:
        return None
    command = ["fuser", *(str(path) for paths in nodes.values() for path in paths)]
    return _cost(lambda: subprocess.run(command, capture_output=True, check=True), SCANS)


def _latencies(nodes: Nodes, stack: ExitStack) -> tuple[list[float], list[float]]:
    """Milliseconds from another process's opening to the ring, and to the knowledge of who it was, sorted."""
    alarm = stack.enter_context(closing(DeviceEvents(nodes)))
    holder = stack.enter_context(_opener(nodes["GPU-0"][0]))
    holders = HolderScanner(nodes)
    holders.scan()
    rings, named = [], []
    for _ in range(TRIALS):
        alarm.changed()
        _say(holder, "open")
        select.select([alarm.fileno()], [], [])
        rang = time.monotonic()
        assert alarm.changed() == {"GPU-0"}
        assert holder.pid in [holder.pid for holder in holders.scan().by_gpu["GPU-0"]]
        known = time.monotonic()
        opened = float(_heard(holder))
        rings.append((rang - opened) * 1000)
        named.append((known - opened) * 1000)
        _tell(holder, "close")
    return sorted(rings), sorted(named)


def _report(
    processes: int, alone: Cost, first: Cost, ours: Cost, fuser: Cost | None, rings: list[float], named: list[float]
) -> int:
    crowd = f"{PROCESSES} others with {FILES_PER_PROCESS + 3} open files, {processes} processes in all"
    print(f"\nWho holds {GPUS} device nodes: {crowd}")
    print(f"  {'way':12} {'ms':>8} {'ms of processor':>16}")
    for name, cost in {"without them": alone, "first scan": first, "scan": ours, "fuser": fuser}.items():
        print(f"  {name:12} {cost.wall:8.2f} {cost.processor:16.2f}" if cost else f"  {name:12} is not installed here")
    print(f"  opening to ring: median {_median(rings):.2f} ms, worst {rings[-1]:.2f} ms of {TRIALS}")
    print(f"  opening to name: median {_median(named):.2f} ms, worst {named[-1]:.2f} ms of {TRIALS}")
    # What else this machine runs at the moment is not what the figure is about.
    added = ours.processor - alone.processor
    figures = [
        Figure(f"what {PROCESSES} processes add to a scan", added, 15.0, "ms"),
        Figure(f"share of a core for them, a scan every {REST:g} s", added / REST / 10, 0.2, "%"),
        Figure("opening to ring, median", _median(rings), 5.0, "ms"),
        Figure("opening to the holder's name, median", _median(named), 50.0, "ms"),
        Figure("opening to the holder's name, worst", named[-1], 250.0, "ms"),
    ]
    if fuser is not None:
        figures.append(Figure("scan ÷ fuser", ours.processor / fuser.processor, 0.5))
    return print_figures("Presence", figures)


def _median(sorted_values: list[float]) -> float:
    return statistics.median(sorted_values)
