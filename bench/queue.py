"""The queue by itself, on both databases: claims beside other queues, submissions, a worker's turn, a million jobs."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.queue_peers import DRAIN, PREPARE, WARM_UP, pgqueuer_driver
from bench.site import postgres, scratch, undisturbed
from bench.table import Figure, print_figures
from stoker.queue import JobSpec, Store, init_queue
from stoker.queue.attempts import ClaimRequest
from stoker.queue.fields import shape_of
from tests.support.postgres import PostgresServer
from tests.support.queue_contention import crowd
from tests.support.queue_history import write_history

PROGRAM = "import sys; from bench.queue_peers import DRAIN; DRAIN[sys.argv[1]](sys.argv[2])"
WORKERS = 16
JOBS = 4_000
ROUNDS = 3
SUBMITTED = 10_000
MILLION = 1_000_000
TURNS = 300
WAITING = 50
_NEXT = ClaimRequest(shape=shape_of(JobSpec(command="")), worker="w", gpus=("GPU-0",), lease=60.0)
CROWD_SECONDS = 60.0
DATABASES = ("SQLite", "PostgreSQL")


def main() -> int:
    # Sixteen processes take all cores for minutes: they must not keep other programs of the machine from them.
    with scratch() as directory, postgres() as server:
        missed = print_figures("Claiming, beside other queues", claims(server))
        print()
        missed += print_figures("Crowds", crowds(Places(server, directory)))
    with undisturbed(), scratch() as directory, postgres() as server:
        places = Places(server, directory)
        print()
        return missed + print_figures("The queue by itself", [*submissions(places), *turns(places), *history(places)])


def claims(server: PostgresServer) -> list[Figure]:
    """Jobs that many processes together take and finish in a second, one at a time, in turns."""
    rates: dict[str, list[float]] = {name: [] for name in DRAIN}
    for _ in range(ROUNDS):
        for name, values in rates.items():
            values.append(_rate(server, name))
    drivers = {"pgqueuer": pgqueuer_driver()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"\n{JOBS} jobs claimed and finished by {WORKERS} processes, fsync on, median of {ROUNDS} runs in turns")
    for name, values in rates.items():
        every = " ".join(f"{value:.0f}" for value in values)
        print(f"  {name:18} {medians[name]:7.0f} jobs/s   ({every}; {drivers.get(name, 'psycopg')})")
    return [
        Figure(f"rate of {peer} ÷ {way}", medians[peer] / medians[way], 1.0)
        for way in ("ours", "ours, as a worker")
        for peer in ("procrastinate", "pgqueuer")
    ]


def _rate(server: PostgresServer, name: str) -> float:
    url = server.create_database()
    PREPARE[name](url, JOBS + WORKERS * WARM_UP)
    server.administer("CHECKPOINT")
    command = [sys.executable, "-c", PROGRAM, name, url]
    workers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(WORKERS)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n", f"{name} did not start"
    began = time.monotonic()
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("\n")
        worker.stdin.flush()
    told = [worker.communicate(timeout=300)[0].split() for worker in workers]
    assert sum(int(done) for done, _ended in told) == JOBS, f"{name} did not finish every job"
    server.drop_database(url)
    return JOBS / (max(float(ended) for _done, ended in told) - began)


class Places:
    """Where fresh queues are made."""

    def __init__(self, server: PostgresServer, directory: Path) -> None:
        self._server = server
        self.directory = directory

    @contextmanager
    def queue(self, database: str) -> Iterator[tuple[Store, str]]:
        url = self._server.create_database() if database == "PostgreSQL" else str(self.directory / "queue.db")
        with init_queue(url) as queue:
            yield queue, url
        if database == "PostgreSQL":
            self._server.drop_database(url)
        for file in self.directory.glob("queue.db*"):
            file.unlink()


def submissions(places: Places) -> list[Figure]:
    figures = []
    for database in DATABASES:
        with places.queue(database) as (queue, _url):
            jobs = [JobSpec(command=f"python train.py --seed {number}", tags=("sweep",)) for number in range(SUBMITTED)]
            begun = time.perf_counter()
            queue.jobs.submit(jobs)
            took = time.perf_counter() - begun
        figures.append(Figure(f"submitting {SUBMITTED} jobs at once, {database}", took, 5.0, "s"))
    return figures


def turns(places: Places) -> list[Figure]:
    """What stands between the end of one job and the start of the next, on the side of the queue."""
    figures = []
    for database, at_most in (("SQLite", 0.5), ("PostgreSQL", 10.0)):
        with places.queue(database) as (queue, _url):
            queue.jobs.submit(
                [JobSpec(command=("python", "train.py", str(number))) for number in range(TURNS + WAITING)]
            )
            took = _medians_of_turns(queue)
        parts = ", ".join(f"{name} {value * 1000:.3f}" for name, value in took.items())
        print(f"  {database}: with {WAITING} jobs that wait, medians in ms: {parts}")
        figures.append(Figure(f"finish, heads and claim together, {database}", took["all three"] * 1000, at_most, "ms"))
    return figures


def _medians_of_turns(queue: Store) -> dict[str, float]:
    claimed = queue.attempts.take_head(_NEXT)
    took: dict[str, list[float]] = {"finish": [], "heads": [], "claim": [], "all three": []}
    for _ in range(TURNS - 1):
        assert claimed is not None
        begun = time.perf_counter()
        queue.attempts.finish(claimed.attempt.id, "succeeded", 0)
        finished = time.perf_counter()
        queue.attempts.heads("w")
        looked = time.perf_counter()
        claimed = queue.attempts.take_head(_NEXT)
        ended = time.perf_counter()
        for name, value in zip(took, (finished - begun, looked - finished, ended - looked, ended - begun), strict=True):
            took[name].append(value)
    return {name: statistics.median(values) for name, values in took.items()}


def history(places: Places) -> list[Figure]:
    """A million jobs that have ended must cost a list little, and a claim nothing."""
    figures = []
    for database in DATABASES:
        with places.queue(database) as (queue, _url):
            queue.jobs.submit([JobSpec(command="before")] * TURNS)
            without = _median(lambda: claim_and_finish(queue), TURNS)
        with places.queue(database) as (queue, _url):
            write_history(queue, MILLION)
            queue.jobs.submit([JobSpec(command="after")] * TURNS)
            listed = _median(lambda: (queue.jobs.find(), queue.jobs.counts()), 7)
            unfinished = _median(lambda: queue.jobs.find(["queued", "held", "running"], order="queue"), 7)
            claimed = _median(lambda: claim_and_finish(queue), TURNS)
            walks = "stoker_jobs_ready" in _plan_of_claim(queue)
        print(
            f"  {database}: over a million jobs, the newest hundred and the counts {listed * 1000:.0f} ms, "
            f"unfinished ones {unfinished * 1000:.1f} ms; claim+finish {claimed * 1000:.2f} ms, "
            f"{without * 1000:.2f} without history; "
            f"its plan {'walks' if walks else 'DOES NOT WALK'} along the index of ready jobs"
        )
        figures += [
            Figure(f"listing over a million jobs, {database}", listed, 1.0, "s"),
            Figure(f"claim+finish with a million ended jobs ÷ with none, {database}", claimed / without, 2.0),
            Figure(f"plans of a claim that read the history, {database}", float(not walks), 0.0, ""),
        ]
    return figures


def claim_and_finish(queue: Store) -> None:
    claimed = queue.attempts.take_head(_NEXT)
    assert claimed is not None
    assert queue.attempts.finish(claimed.attempt.id, "succeeded", 0)


def _plan_of_claim(queue: Store) -> str:
    driver = queue._driver  # noqa: SLF001 - its plan is the question
    sql = driver.sql("claim head")
    which: dict[str, str | int | float] = {"shape": "", "others": "[]", "priority": 0, "position": 0.0}
    parameters: dict[str, str | int | float] = {**which, "worker": "w", "attempt": "a", "pending": 0}
    if Path(queue.place).exists():
        rows = driver.fetch_text("EXPLAIN QUERY PLAN " + sql.split(";")[0], parameters)
    else:
        rows = driver.fetch_text("EXPLAIN " + sql, {**parameters, "gpus": "[]", "lease": 60.0})
    return "\n".join(str(row[-1]) for row in rows)


def crowds(places: Places) -> list[Figure]:
    figures = []
    for database in DATABASES:
        with places.queue(database) as (queue, url):
            wrong = 0.0
            try:
                jobs = crowd(queue, url, 16, CROWD_SECONDS, places.directory)
                print(f"  {database}: sixteen processes took {jobs} jobs in {CROWD_SECONDS:g} s, each once")
            except AssertionError as error:
                print(f"  {database}: {error}")
                wrong = 1.0
        figures.append(Figure(f"crowds that lost a job or had it twice, {database}", wrong, 0.0, ""))
    return figures


def _median(work: Callable[[], object], times: int) -> float:
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        took.append(time.perf_counter() - begun)
    return statistics.median(took)
