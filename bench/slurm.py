"""The Slurm engine beside plain `sbatch`: a thousand jobs of a second on a real cluster, and what waiting jobs cost it.

On this machine the controller, three nodes and the worker share the same cores, and the supervisor that Stoker starts
for each job is a Python program: on a real cluster the nodes pay for it, here it delays everything. So there are two
measurements. In the first the body of a job is the same C program on both sides, which leaves the files in the
attempt's directory that a supervisor would leave: what is left is the worker and what it asks of the controller. In
the second everything runs as it is; its ratio is that of this machine. There plain `sbatch` is measured once more, with
scripts that start an empty Python before the job: no supervisor in Python can take less.
"""

import os
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from bench.site import (
    compiled_job,
    ended_seconds,
    environment_of,
    rows_of,
    scratch,
    stoker_command,
    undisturbed,
    wait_for_all,
    wait_for_rows,
)
from bench.table import QUICK, Figure, print_figures
from stoker.engines.attempt import AttemptResult
from stoker.queue import JobSpec, init_queue
from tests.support.slurm_cluster import SlurmCluster, running_cluster
from tests.support.waiting import wait_for

JOBS = 100 if QUICK else 1000
ROUNDS = 2
MAX_PENDING = 100
WAITING = 100 if QUICK else 500
# More may wait in Slurm, so that others start, too.
BESIDE = 20
WATCHED = 30.0 if QUICK else 120.0
PATIENCE = 600.0
# Jobs that run at a time on each of the three nodes.
SLOTS = 128
# Starts, loads nothing, and becomes the job: with the flags of a shim.
EMPTY_PYTHON = (sys.executable, "-S", "-P", "-c", "import os, sys; os.execv(sys.argv[1], sys.argv[1:])")
# A worker whose jobs have another body.
STAND_IN = """
import shlex, sys
from stoker.engines.slurm import engine
body = sys.argv.pop(1)
engine.script = lambda _python, directory: f"#!/bin/sh\\ncd {shlex.quote(directory)}\\nexec {body}\\n"
from stoker.cli import main
main()
"""


class Run(NamedTuple):
    """One round: seconds from the submission to the end of the last job, and processor seconds per job."""

    total: float
    login: float
    """Of what submits: `sbatch`, or the worker with the commands that it starts."""
    controller: float
    nodes: float


def main() -> int:
    with scratch() as place:
        job = compiled_job(place)
        missed = 0
        # The second takes all cores for minutes: it must not keep other programs of the machine from them.
        for stand_in, way in ((True, undisturbed), (False, nullcontext)):
            with way(), _cluster() as cluster:
                missed += _dispatch(cluster, place, job, stand_in=stand_in)
        with _cluster() as cluster:
            return missed + _waiting(cluster, place)


@contextmanager
def _cluster() -> Iterator[SlurmCluster]:
    with running_cluster({"DefMemPerCPU": 1, "MaxJobCount": 20_000}, cpus=SLOTS) as cluster:
        os.environ.update(cluster.environment())
        yield cluster


# A thousand jobs


def _dispatch(cluster: SlurmCluster, place: Path, job: Path, *, stand_in: bool) -> int:
    kind = "nodes left out" if stand_in else "everything here"
    ways: dict[str, list[Run]] = {name: [] for name in ("sbatch", "stoker") + (() if stand_in else ("python",))}
    result = msgspec.json.encode(AttemptResult("succeeded", 0, "")).decode()
    rounds = ROUNDS if stand_in else 1  # the second takes minutes
    for number in range(rounds):
        for name, runs in ways.items():
            room = place / f"{name}-{kind}-{number}".replace(" ", "-")
            room.mkdir()
            body = [str(job), str(room / "noted"), "-"]
            other = shlex.join([*body, result]) if stand_in else None
            if name == "stoker":
                runs.append(_stoker(cluster, room, body, other))
            else:
                runs.append(_sbatch(cluster, room, [*EMPTY_PYTHON, *body] if name == "python" else body))
    print(f"\n{JOBS} jobs of a second, {kind}: {rounds} rounds in turns; --max-pending {MAX_PENDING}")
    medians = {name: Run(*map(statistics.median, zip(*runs, strict=True))) for name, runs in ways.items()}
    plain, ours = medians["sbatch"], medians["stoker"]
    for name, run in medians.items():
        totals = " ".join(f"{one.total:.1f}" for one in ways[name])
        print(
            f"  {name:7} {run.total:6.2f} s ({totals}); processor time per job, ms: "
            f"login {run.login * 1000:.1f}, slurmctld {run.controller * 1000:.2f}, nodes {run.nodes * 1000:.1f}"
        )
    figures = [Figure(f"time until the last job has ended, {kind}", ours.total / plain.total, 1.2)]
    if stand_in:
        figures += [
            Figure("processor time of the login node", ours.login / plain.login, 2.0),
            Figure("processor time of slurmctld", ours.controller / plain.controller, 1.2),
        ]
    else:
        figures.append(Figure("processor time of the nodes", ours.nodes / plain.nodes, 5.0))
        least = medians["python"]
        print(
            f"  plain sbatch with an empty Python before each job takes {least.total / plain.total:.2f} times as long, "
            f"and {least.nodes / plain.nodes:.2f} times the processor time of the nodes"
        )
    return print_figures(f"{JOBS} jobs of a second, through Stoker ÷ plain sbatch", figures)


def _sbatch(cluster: SlurmCluster, room: Path, body: list[str]) -> Run:
    """Four at a time, which is as fast as two cores can."""
    script = room / "script"
    script.write_text(f"#!/bin/sh\nexec {shlex.join(body)}\n")
    sbatch = ["sbatch", "--parsable", "--output=/dev/null", "--input=/dev/null", "--nodes=1", "--ntasks=1", str(script)]
    controller, before, begun = _controller_seconds(), ended_seconds(), time.time()
    jobs, known = JOBS, _children()
    subprocess.run(
        ["sh", "-c", f"seq {jobs} | xargs -P 4 -I @ {shlex.join(sbatch)}"], check=True, stdout=subprocess.DEVNULL
    )
    submitted = ended_seconds()
    wait_for_rows(room, jobs)
    total = rows_of(room)[-1][1] / 1e9 - begun
    _wait_for_nodes(cluster, known)
    spent = (submitted - before, _controller_seconds() - controller, ended_seconds() - submitted)
    return Run(total, *(seconds / jobs for seconds in spent))


def _stoker(cluster: SlurmCluster, room: Path, body: list[str], stand_in: str | None) -> Run:
    queue, jobs = str(room / "queue.db"), JOBS
    with init_queue(queue) as store, _worker(room, queue, MAX_PENDING, stand_in) as worker:
        wait_for(store.workers.all, deadline=PATIENCE, named="the worker's first heartbeat")
        known = _children()
        started, controller, before, begun = (
            _worker_seconds(worker),
            _controller_seconds(),
            ended_seconds(),
            time.time(),
        )
        store.jobs.submit([JobSpec(command=tuple(body), gpus=0)] * jobs)
        wait_for_rows(room, jobs)
        total = max(end for _start, end in rows_of(room)) / 1e9 - begun
        wait_for(lambda: not store.attempts.running(), deadline=PATIENCE, named="the results of all jobs")
        login = _worker_seconds(worker) - started
        counts = store.jobs.counts()
        assert counts.get("succeeded") == jobs, f"not all jobs succeeded: {counts}"
        _wait_for_nodes(cluster, known)
        spent = (login, _controller_seconds() - controller, ended_seconds() - before)
    return Run(total, *(seconds / jobs for seconds in spent))


@contextmanager
def _worker(room: Path, queue: str, max_pending: int, stand_in: str | None) -> Iterator[psutil.Process]:
    start = [stoker_command()] if stand_in is None else [sys.executable, "-c", STAND_IN, stand_in]
    with (room / "worker.log").open("wb") as log:
        worker = psutil.Popen(
            [*start, "work", "--engine", "slurm", "--max-pending", str(max_pending)],
            env=environment_of(room, queue),
            stdout=log,
            stderr=log,
        )
    try:
        yield worker
    finally:
        worker.terminate()
        worker.wait()


def _worker_seconds(worker: psutil.Process) -> float:
    """With the commands that it has started."""
    used = worker.cpu_times()
    return float(used.user + used.system + used.children_user + used.children_system)


def _controller_seconds() -> float:
    found = [child for child in psutil.Process().children() if child.name() == "slurmctld"]
    return sum(sum(process.cpu_times()[:2]) for process in found)


def _wait_for_nodes(cluster: SlurmCluster, known: set[int]) -> None:
    """Until no job is left on the nodes, and the processor time of all of them is known here."""
    wait_for(lambda: not cluster.active_jobs(), deadline=PATIENCE, named="the end of all jobs in Slurm")
    wait_for_all(known)


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


# Jobs that wait


def _waiting(cluster: SlurmCluster, place: Path) -> int:
    """What the controller is asked while nothing can start."""
    room = place / "waiting"
    room.mkdir()
    queue = str(room / "queue.db")
    cluster.run("scontrol", "update", "PartitionName=main", "State=DOWN")
    alone = _requests_per_minute(cluster, WATCHED / 4)
    with init_queue(queue) as store, _worker(room, queue, WAITING + BESIDE, None) as worker:
        store.jobs.submit([JobSpec(command=("true",), gpus=0)] * WAITING)
        wait_for(lambda: len(cluster.active_jobs()) == WAITING, deadline=PATIENCE, named=f"{WAITING} jobs in Slurm")
        before, begun = _worker_seconds(worker), time.monotonic()
        found = _requests_per_minute(cluster, WATCHED) - alone
        share = (_worker_seconds(worker) - before) / (time.monotonic() - begun)
        # Others run and end meanwhile, three at a time: each takes a whole node.
        others = JobSpec(command=("sleep", "3"), gpus=0, cpus=SLOTS, slurm={"partition": "spare"})
        store.jobs.submit([others] * int(WATCHED))
        wait_for(lambda: store.jobs.counts().get("succeeded"), deadline=PATIENCE, named="the first end")
        ended, asked, begun = store.jobs.counts()["succeeded"], _questions(cluster), time.monotonic()
        time.sleep(WATCHED)
        questions = (_questions(cluster) - asked) / (time.monotonic() - begun) * 60
        ended = store.jobs.counts()["succeeded"] - ended
    cluster.run("scancel", "--user", str(os.getuid()))
    cluster.run("scontrol", "update", "PartitionName=main", "State=UP")
    print(f"\n{WAITING} jobs wait in Slurm for {WATCHED:g} s; without a worker there are {alone:.0f} requests a minute")
    print(f"  then {ended} others began and ended in {WATCHED:g} s, each with one more request for its sbatch")
    return print_figures(
        f"While {WAITING} jobs wait in Slurm",
        [
            Figure("requests to slurmctld a minute", found, 30.0, "RPCs"),
            Figure("requests beside sbatch a minute, while others begin and end", questions, 30.0, "RPCs"),
            Figure("share of a core of the worker", share * 100, 3.0, "%"),
        ],
    )


def _requests_per_minute(cluster: SlurmCluster, seconds: float) -> float:
    """By this user, as `sdiag` counts them, without its own."""
    before, begun = _requests(cluster), time.monotonic()
    time.sleep(seconds)
    return (_requests(cluster) - before - 1) / (time.monotonic() - begun) * 60


def _questions(cluster: SlurmCluster) -> int:
    """What was asked about jobs, nodes and partitions; by whom is not known."""
    by_type = cluster.run("sdiag").partition("statistics by message type")[2].partition("statistics by user")[0]
    return sum(map(int, re.findall(r"REQUEST_(?:JOB|JOB_USER|NODE|PARTITION)_INFO\w*\s.*?count:(\d+)", by_type)))


def _requests(cluster: SlurmCluster) -> int:
    by_user = cluster.run("sdiag").partition("statistics by user")[2]
    return sum(
        int(count) for user, count in re.findall(r"\(\s*(\d+)\)\s+count:(\d+)", by_user) if int(user) == os.getuid()
    )
