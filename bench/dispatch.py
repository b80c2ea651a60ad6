"""From one job to the next: gaps, jobs per second and processor time, beside the shell, xargs, tsp, nq and two queues.

Method: a C program that notes when it starts and ends, so that its own start hides nothing. Jobs are queued behind one
per slot that waits for a file; the gap is from the end of one job to the start of the next. All take turns: what else
the machine does falls on all of them.
"""

import itertools
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil

from bench.queue_peers import PREPARE
from bench.site import (
    PATIENCE,
    Row,
    compiled_job,
    ended_seconds,
    postgres,
    rows_of,
    running_worker,
    scratch,
    undisturbed,
    wait_for_all,
    wait_for_rows,
)
from bench.table import QUICK, Figure, print_figures
from stoker.queue import JobSpec, init_queue
from tests.support.postgres import PostgresServer
from tests.support.waiting import wait_for

JOBS = 50
ROUNDS = 4 if QUICK else 8
SLOTS = 4
MANY = 400 if QUICK else 800  # tsp takes less than a thousand
MANY_ROUNDS = 4
IDLE_SUBMITS = 5 if QUICK else 15
BACKLOG_ROUNDS = 3
BACKLOGS = (10_000,) if QUICK else (1_000, 10_000, 100_000)
SERVE = "import sys; from bench.queue_peers import SERVE; SERVE[sys.argv[1]](sys.argv[2], sys.argv[3:])"


class Place:
    """A directory with the job in it."""

    def __init__(self, directory: Path, server: PostgresServer) -> None:
        self.directory = directory
        self.server = server
        self.job = compiled_job(directory)
        self._rooms = itertools.count()

    def room(self) -> Path:
        room = self.directory / str(next(self._rooms))
        room.mkdir()
        return room


Way = Callable[[Place, Path, int, int], None]
"""Runs this number of jobs in that directory, with this number of slots."""


def main() -> int:
    with undisturbed(), scratch() as directory, postgres() as server:
        place = Place(directory, server)
        return sum(part(place) for part in (_gaps, _rates, _backlogs, _idle_submits))


# Ways to run jobs


def _shell(place: Place, room: Path, jobs: int, _slots: int) -> None:
    subprocess.run(["sh", "-c", f"for i in $(seq {jobs}); do {place.job} {room}/noted; done"], check=True)


def _xargs(place: Place, room: Path, jobs: int, slots: int) -> None:
    subprocess.run(["sh", "-c", f"seq {jobs} | xargs -P {slots} -I @ {place.job} {room}/noted"], check=True)


def _tsp(place: Place, room: Path, jobs: int, slots: int) -> None:
    environment = {**os.environ, "TS_SOCKET": str(room / "socket"), "TMPDIR": str(room)}

    def tsp(*words: str) -> None:
        subprocess.run(["tsp", *words], env=environment, stdout=subprocess.DEVNULL, check=True)

    tsp("-S", str(slots))
    for _ in range(slots):
        tsp("-n", str(place.job), "/dev/null", str(room / "go"))
    for _ in range(jobs):
        tsp("-n", str(place.job), str(room / "noted"))
    (room / "go").touch()
    wait_for_rows(room, jobs)
    tsp("-K")


def _nq(place: Place, room: Path, jobs: int, _slots: int) -> None:
    environment = {**os.environ, "NQDIR": str(room)}
    words = [[str(place.job), "/dev/null", str(room / "go")], *[[str(place.job), str(room / "noted")]] * jobs]
    for command in words:
        subprocess.run(["nq", "-q", *command], env=environment, check=True)
    (room / "go").touch()
    wait_for_rows(room, jobs)


def _queue_peer(name: str, place: Place, room: Path, jobs: int, _slots: int) -> None:
    url = place.server.create_database()
    PREPARE[name](url, jobs)
    subprocess.run(
        [sys.executable, "-c", SERVE, name, url, str(place.job), str(room / "noted")],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    place.server.drop_database(url)


def _floor(database: str, place: Place, room: Path, jobs: int, _slots: int) -> None:
    """Not Stoker: the same processes and one transaction for each job, and nothing else."""
    with place_of_queue(database, place, room) as url:
        words = [str(jobs), str(place.job), str(room / "noted")]
        subprocess.run([sys.executable, "-m", "bench.floor", url, *words], check=True)


def _stoker(database: str, gpus: int, place: Place, room: Path, jobs: int, slots: int) -> None:
    with place_of_queue(database, place, room) as url:
        # As words, without a shell in between: so do the others.
        blocker = JobSpec(command=(str(place.job), "/dev/null", str(room / "go")), gpus=gpus)
        work = JobSpec(command=(str(place.job), str(room / "noted")), gpus=gpus)
        with init_queue(url) as store:
            store.jobs.submit([*[blocker] * slots, *[work] * jobs])
            options = ("--until-empty", "--cpu-jobs", str(slots))
            with running_worker(room, url, *options, STOKER_GPUS=f"sim:{slots}@{room}/machine") as worker:
                wait_for(lambda: len(store.attempts.running()) == slots, deadline=PATIENCE, named="the first jobs")
                (room / "go").touch()
                assert worker.wait(timeout=PATIENCE) == 0


@contextmanager
def place_of_queue(database: str, place: Place, room: Path) -> Iterator[str]:
    if database == "SQLite":
        yield str(room / "queue.db")
        return
    url = place.server.create_database()
    yield url
    place.server.drop_database(url)


# What is measured


def _gaps(place: Place) -> int:
    ways: dict[str, Way] = {
        "shell loop": _shell,
        "tsp": _tsp,
        "nq": _nq,
        "stoker, SQLite": partial(_stoker, "SQLite", 0),
        "stoker, SQLite, a GPU each": partial(_stoker, "SQLite", 1),
        "stoker, PostgreSQL": partial(_stoker, "PostgreSQL", 0),
        "procrastinate": partial(_queue_peer, "procrastinate"),
        "pgqueuer": partial(_queue_peer, "pgqueuer"),
        "bare processes, SQLite": partial(_floor, "SQLite"),
        "bare processes, PostgreSQL": partial(_floor, "PostgreSQL"),
    }
    gaps: dict[str, list[list[float]]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            room = place.room()
            way(place, room, JOBS, 1)
            gaps[name].append(gaps_of(rows_of(room)))
    print(f"\nFrom the end of one job to the start of the next, {ROUNDS} rounds of {JOBS} jobs, ms")
    medians = {}
    for name, rounds in gaps.items():
        ordered = sorted(itertools.chain.from_iterable(rounds))
        # Other programs only ever add to a gap: the quietest round has most of Stoker, and of each peer, in it.
        medians[name] = min(statistics.median(values) for values in rounds)
        print(
            f"  {name:28} median of the quietest round {medians[name]:5.2f}   "
            f"of all {statistics.median(ordered):5.2f}   p95 {ordered[int(len(ordered) * 0.95)]:6.2f}"
        )
    return print_figures(
        "The gap between two jobs, at the median of the quietest round",
        [
            Figure("gap on SQLite ÷ tsp", medians["stoker, SQLite"] / medians["tsp"], 1.5),
            Figure("gap on SQLite ÷ nq", medians["stoker, SQLite"] / medians["nq"], 1.5),
            Figure("gap on SQLite ÷ shell loop", medians["stoker, SQLite"] / medians["shell loop"], 2.0),
            Figure("gap on SQLite with a GPU each ÷ tsp", medians["stoker, SQLite, a GPU each"] / medians["tsp"], 1.5),
            Figure("gap on PostgreSQL ÷ tsp", medians["stoker, PostgreSQL"] / medians["tsp"], 4.0),
            Figure("gap on PostgreSQL ÷ procrastinate", medians["stoker, PostgreSQL"] / medians["procrastinate"], 1.0),
            Figure("gap on PostgreSQL ÷ pgqueuer", medians["stoker, PostgreSQL"] / medians["pgqueuer"], 1.0),
            # What is left when processes like Stoker's do nothing but a transaction: the floor of the figures above.
            Figure("bare processes on SQLite ÷ tsp", medians["bare processes, SQLite"] / medians["tsp"], 1.5),
            Figure(
                "bare processes on PostgreSQL ÷ pgqueuer",
                medians["bare processes, PostgreSQL"] / medians["pgqueuer"],
                1.0,
            ),
        ],
    )


def gaps_of(rows: list[Row]) -> list[float]:
    return [(later[0] - earlier[1]) / 1e6 for earlier, later in itertools.pairwise(rows)]


def _rates(place: Place) -> int:
    """Jobs per second with all slots busy, and the processor time of one: everything but the submission of ours."""
    ways: dict[str, Way] = {
        "xargs": _xargs,
        "tsp": _tsp,
        "stoker, SQLite": partial(_stoker, "SQLite", 0),
        "stoker, PostgreSQL": partial(_stoker, "PostgreSQL", 0),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    costs: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(MANY_ROUNDS):
        for name, way in ways.items():
            # The worker's own start is not the jobs': the time of one with few jobs is taken off.
            _few, start = _measured(place, way, SLOTS)
            rows, whole = _measured(place, way, MANY + SLOTS)
            rates[name].append((len(rows) - 1) / ((rows[-1][1] - rows[0][0]) / 1e9))
            costs[name].append((whole - start) / MANY * 1000)
    print(f"\n{MANY} trivial jobs in {SLOTS} slots, best of {MANY_ROUNDS} rounds in turns (all of them)")
    speed = {name: max(values) for name, values in rates.items()}
    cost = {name: min(values) for name, values in costs.items()}
    for name in ways:
        every = " ".join(f"{value:.0f}" for value in rates[name])
        print(f"  {name:20} {speed[name]:7.0f} jobs/s ({every})   {cost[name]:6.2f} ms of processor time per job")
    return print_figures(
        f"Trivial jobs in {SLOTS} slots",
        [
            Figure("rate of tsp ÷ ours on SQLite", speed["tsp"] / speed["stoker, SQLite"], 2.0),
            Figure("rate of tsp ÷ ours on PostgreSQL", speed["tsp"] / speed["stoker, PostgreSQL"], 3.4),
            Figure("rate of xargs ÷ ours on SQLite", speed["xargs"] / speed["stoker, SQLite"], 1.6),
            Figure("processor time per job, SQLite ÷ tsp", cost["stoker, SQLite"] / cost["tsp"], 2.0),
            Figure("processor time per job, PostgreSQL ÷ tsp", cost["stoker, PostgreSQL"] / cost["tsp"], 2.5),
            Figure("processor time per job, SQLite", cost["stoker, SQLite"], 4.0, "ms"),
            Figure("processor time per job, PostgreSQL", cost["stoker, PostgreSQL"], 5.0, "ms"),
        ],
    )


def _measured(place: Place, way: Way, jobs: int) -> tuple[list[Row], float]:
    room = place.room()
    spent = processor_time(place.server, lambda: way(place, room, jobs, SLOTS))
    return rows_of(room), spent


def processor_time(server: PostgresServer, work: Callable[[], None]) -> float:
    """Seconds that everything took that was started meanwhile, also what outlived its parent, and the database."""
    known = {child.pid for child in psutil.Process().children()}
    before = ended_seconds() + server_time(server)
    work()
    wait_for_all(known)
    return ended_seconds() + server_time(server) - before


def server_time(server: PostgresServer) -> float:
    """Of the server and its processes, living and ended."""
    postmaster = psutil.Process(server.pid)
    times = [postmaster.cpu_times(), *(child.cpu_times() for child in postmaster.children())]
    return sum(one.user + one.system for one in times) + times[0].children_user + times[0].children_system


def _backlogs(place: Place) -> int:
    """The gap while many jobs wait; with as few as in the other measurements it should be the same."""
    figures = []
    for database in ("SQLite", "PostgreSQL"):
        medians = dict.fromkeys((0, *BACKLOGS), math.inf)
        for _ in range(BACKLOG_ROUNDS):
            for waiting, least in medians.items():
                gaps = gaps_of(_first_jobs(database, place, place.room(), waiting))
                medians[waiting] = min(least, statistics.median(gaps))
        found = ", ".join(f"{waiting:,}: {value:.2f}" for waiting, value in medians.items())
        print(f"\nThe gap on {database} in ms, by the number of jobs behind: {found}")
        figures += [
            Figure(f"gap with {waiting:,} queued ÷ with {JOBS}, {database}", medians[waiting] / medians[0], 1.2)
            for waiting in BACKLOGS
        ]
    return print_figures("Long queues", figures)


def _first_jobs(database: str, place: Place, room: Path, waiting: int) -> list[Row]:
    with place_of_queue(database, place, room) as url, init_queue(url) as store:
        work = JobSpec(command=(str(place.job), str(room / "noted")), gpus=0)
        for _ in range(waiting // 10_000):
            store.jobs.submit([work] * 10_000)
        store.jobs.submit([work] * (waiting % 10_000 + JOBS + 10))
        with running_worker(room, url, "--cpu-jobs", "1"):
            wait_for_rows(room, JOBS + 10)
        # The shim of the last job delivers its result itself.
        wait_for(lambda: not store.attempts.running(), deadline=PATIENCE, named="the end of the last job")
    return rows_of(room)[10:][:JOBS]


def _idle_submits(place: Place) -> int:
    figures = []
    for database in ("SQLite", "PostgreSQL"):
        room = place.room()
        with place_of_queue(database, place, room) as url:
            times = _idle(place, room, url)
        figures.append(Figure(f"idle submit to start, {database}", statistics.median(times), 100.0, "ms"))
    return print_figures("From a submit to the start of the job on an idle machine, at the median", figures)


def _idle(place: Place, room: Path, queue: str) -> list[float]:
    """Milliseconds from the submission to the start of the job."""
    times = []
    with init_queue(queue) as store, running_worker(room, queue):
        for number in range(IDLE_SUBMITS + 1):
            time.sleep(0.4)  # it has nothing to do, as at night
            begun = time.time_ns()
            store.jobs.submit([JobSpec(command=(str(place.job), str(room / "noted")), gpus=0)])
            wait_for_rows(room, number + 1)
            times.append((rows_of(room)[-1][0] - begun) / 1e6)
    return times[1:]  # the first one waited for the worker itself
