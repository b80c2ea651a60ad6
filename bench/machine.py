"""One machine with 64 GPUs and a job on each: what the jobs cost at rest, and how long their start takes.

Method: 64 jobs that wait, beside the same ones under tsp and Slurm. The start is from before the submission until the
last job runs. At rest everything is counted that is not the job itself: the worker and all its processes; tsp's server
and clients; slurmctld, slurmd and slurmstepd.

The floor of memory and processor time is what two Python processes per job cost that are forked from one with the same
modules and never do more than wait: one of them is woken and reads its clock every five seconds, as looks wake a shim.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.site import compiled_job, running_worker, scratch, undisturbed, wait_for_all
from bench.table import QUICK, Figure, print_figures
from stoker.queue import JobSpec, init_queue
from tests.support.slurm_cluster import running_cluster
from tests.support.waiting import wait_for

JOBS = 64
STARTS = 3 if QUICK else 5
SETTLE = 5.0
REST = 10.0 if QUICK else 60.0
PATIENCE = 120.0
MIB = 2**20
# Of pairs of processes that only wait; each pair says when it is there.
FLOOR = """
import gc, os, select, sys
from stoker.engines.local.shims import _import_all
_import_all(None)
jobs, begun, end = int(sys.argv[1]), os.pipe(), os.pipe()
gc.freeze()
for _ in range(jobs):
    if os.fork() == 0:
        os.close(end[1])
        is_shim = os.fork() != 0
        poll = select.poll()
        poll.register(end[0], select.POLLIN)
        os.write(begun[1], b".")
        while not poll.poll(5000 if is_shim else None):
            pass
        os._exit(0)
for _ in range(2 * jobs):
    os.read(begun[0], 1)
print("there", flush=True)
sys.stdin.read()
os.close(end[1])
"""


class Rest(NamedTuple):
    """What holds the jobs: share of a core in percent; processes and MiB per job."""

    share: float
    processes: float
    memory: float


class Room:
    """Where jobs note their start, and wait for `end`."""

    def __init__(self, directory: Path, job: Path) -> None:
        self.directory = directory
        self.directory.mkdir()
        self.command = [str(job), str(directory / "noted"), str(directory / "go")]

    def last_start(self) -> float:
        """When the last of them started, once all have."""

        def rows() -> list[str]:
            noted = self.directory / "noted"
            return noted.read_text().splitlines() if noted.exists() else []

        wait_for(lambda: len(rows()) == JOBS, deadline=PATIENCE, named=f"the start of {JOBS} jobs")
        return max(int(line.split()[0]) for line in rows()) / 1e9

    def end(self) -> None:
        (self.directory / "go").touch()
        wait_for(lambda: not _running(self.command[0]), deadline=PATIENCE, named="the end of all jobs")


def main() -> int:
    starts: dict[str, list[float]] = {"tsp": [], "Slurm": [], "stoker": []}
    rest: dict[str, Rest] = {}
    ways = {"tsp": _tsp, "Slurm": _slurm, "stoker": _stoker}
    with scratch() as place:
        job = compiled_job(place)
        for number in range(STARTS):
            for name, way in ways.items():
                room = Room(place / f"{name}-{number}", job)
                with undisturbed(), way(room) as submit:
                    begun = time.time()
                    submit()
                    starts[name].append(room.last_start() - begun)
                    if number == 0 and (name == "stoker" or not QUICK):
                        rest[name] = _at_rest(room)
                    room.end()
                wait_for_all()
    with undisturbed():
        rest["floor"] = _floor()
    wait_for_all()
    return _report({name: statistics.median(times) for name, times in starts.items()}, rest)


@contextmanager
def _tsp(room: Room) -> Iterator[Callable[[], None]]:
    environment = {**os.environ, "TS_SOCKET": str(room.directory / "socket"), "TMPDIR": str(room.directory)}

    def tsp(*words: str) -> None:
        subprocess.run(["tsp", *words], env=environment, stdout=subprocess.DEVNULL, check=True)

    def submit() -> None:
        for _ in range(JOBS):
            tsp("-n", *room.command)

    tsp("-S", str(JOBS))
    yield submit
    tsp("-K")


@contextmanager
def _slurm(room: Room) -> Iterator[Callable[[], None]]:
    """An array: that is how one submits 64 jobs there."""
    script = f"#!/bin/sh\nexec {' '.join(room.command)}\n"
    with running_cluster(cpus=JOBS) as cluster:

        def submit() -> None:
            options = ("--output=/dev/null", f"--array=1-{JOBS}", "--nodelist=node1")
            cluster.run("sbatch", *options, script=script)

        yield submit
        cluster.run("scancel", "--user", str(os.getuid()))


@contextmanager
def _stoker(room: Room) -> Iterator[Callable[[], None]]:
    queue = str(room.directory / "queue.db")
    source = f"sim:{JOBS}@{room.directory}/machine"
    with init_queue(queue) as store, running_worker(room.directory, queue, STOKER_GPUS=source):
        wait_for(store.workers.all, deadline=PATIENCE, named="the worker's first heartbeat")
        time.sleep(SETTLE / 2)  # it has nothing to do

        def submit() -> None:
            store.jobs.submit([JobSpec(command=tuple(room.command))] * JOBS)

        yield submit
        wait_for(lambda: not store.attempts.running(), deadline=PATIENCE, named="the results of all jobs")


def _at_rest(room: Room) -> Rest:
    time.sleep(SETTLE)
    holders = [process for process in psutil.Process().children(recursive=True) if process.exe() != room.command[0]]
    rest = _measured(holders)
    for name in sorted({process.name() for process in holders}):
        alike = [process for process in holders if process.name() == name]
        memory = sum(_proportional(process.pid) for process in alike) / MIB / JOBS
        print(f"    {name}: {len(alike)} processes, {memory:.2f} MiB per job")
    return rest


def _floor() -> Rest:
    command = [sys.executable, "-c", FLOOR, str(JOBS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"there\n"
        time.sleep(SETTLE)
        pairs = psutil.Process(parent.pid).children(recursive=True)
        rest = _measured(pairs)
        parent.stdin.close()
    return rest


def _measured(holders: list[psutil.Process]) -> Rest:
    before, begun = _processor_seconds(holders), time.monotonic()
    time.sleep(REST)
    share = (_processor_seconds(holders) - before) / (time.monotonic() - begun)
    memory = sum(_proportional(process.pid) for process in holders) / MIB
    return Rest(share * 100, len(holders) / JOBS, memory / JOBS)


def _processor_seconds(processes: list[psutil.Process]) -> float:
    """To the nanosecond, of all threads."""
    tasks = [task for process in processes for task in Path(f"/proc/{process.pid}/task").iterdir()]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _proportional(pid: int) -> int:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("Pss:"))


def _running(program: str) -> bool:
    for process in psutil.Process().children(recursive=True):
        try:
            if process.exe() == program:
                return True
        except psutil.Error:
            continue
    return False


def _report(starts: dict[str, float], rest: dict[str, Rest]) -> int:
    print(f"\n{JOBS} jobs on one machine: start at the median of {STARTS} rounds, then {REST:g} s at rest")
    for name, start in starts.items():
        print(f"  {name:8} {start:6.2f} s to start")
    for name, (share, processes, memory) in rest.items():
        print(f"  {name:8} {share:6.2f} % of a core, {processes:4.2f} processes and {memory:5.2f} MiB per job")
    ours, floor = rest["stoker"], rest["floor"]
    return print_figures(
        f"One machine with {JOBS} GPUs and {JOBS} jobs",
        [
            Figure("start of all ÷ tsp", starts["stoker"] / starts["tsp"], 3.0),
            Figure("start of all ÷ Slurm", starts["stoker"] / starts["Slurm"], 0.5),
            Figure("start of all", starts["stoker"], 0.5, "s"),
            Figure("share of a core at rest", ours.share, 1.0, "%"),
            Figure("processes per job", ours.processes, 2.1, "processes"),
            Figure("memory per job, shared pages once", ours.memory, 6.0, "MiB"),
            Figure("memory per job ÷ that of two forks that only wait", ours.memory / floor.memory, 8.0),
        ],
    )
