"""What the queue takes by itself, on both databases: submitting, listing a million jobs, a worker's turn, a crowd."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.table import Figure
from stoker.queue import JobSpec, Store, init_queue
from tests.support.postgres import PostgresServer
from tests.support.queue_contention import crowd
from tests.support.queue_history import write_history

SUBMITTED = 10_000
MILLION = 1_000_000
TURNS = 300
WAITING = 50
CROWD_SECONDS = 60.0
DATABASES = ("SQLite", "PostgreSQL")


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
        figures.append(Figure(f"finish, ready and claim together, {database}", took["all three"] * 1000, at_most, "ms"))
    return figures


def _medians_of_turns(queue: Store) -> dict[str, float]:
    attempt = queue.attempts.claim([queue.attempts.ready(WAITING)[0].id], "w", ["GPU-0"], 60.0)
    took: dict[str, list[float]] = {"finish": [], "ready": [], "claim": [], "all three": []}
    for _ in range(TURNS - 1):
        assert attempt is not None
        begun = time.perf_counter()
        queue.attempts.finish(attempt.id, "succeeded", 0)
        finished = time.perf_counter()
        ready = queue.attempts.ready(WAITING)
        looked = time.perf_counter()
        attempt = queue.attempts.claim([ready[0].id], "w", ["GPU-0"], 60.0)
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
            without = _median(lambda: _claim_and_finish(queue), TURNS)
        with places.queue(database) as (queue, _url):
            write_history(queue, MILLION)
            queue.jobs.submit([JobSpec(command="after")] * TURNS)
            listed = _median(lambda: (queue.jobs.find(), queue.jobs.counts()), 7)
            unfinished = _median(lambda: queue.jobs.find(["queued", "held", "running"], order="queue"), 7)
            claimed = _median(lambda: _claim_and_finish(queue), TURNS)
            walks = "stoker_jobs_queued" in _plan_of_claim(queue)
        print(
            f"  {database}: over a million jobs, the newest hundred and the counts {listed * 1000:.0f} ms, "
            f"unfinished ones {unfinished * 1000:.1f} ms; claim+finish {claimed * 1000:.2f} ms, "
            f"{without * 1000:.2f} without history; "
            f"its plan {'walks' if walks else 'DOES NOT WALK'} along the index of queued jobs"
        )
        figures += [
            Figure(f"listing over a million jobs, {database}", listed, 1.0, "s"),
            Figure(f"claim+finish with a million ended jobs ÷ with none, {database}", claimed / without, 2.0),
            Figure(f"plans of a claim that read the history, {database}", float(not walks), 0.0, ""),
        ]
    return figures


def _claim_and_finish(queue: Store) -> None:
    attempt = queue.attempts.claim(None, "w", ["GPU-0"], 60.0)
    assert attempt is not None
    assert queue.attempts.finish(attempt.id, "succeeded", 0)


def _plan_of_claim(queue: Store) -> str:
    driver = queue._driver  # noqa: SLF001 - its plan is the question
    sql = driver.sql("claim next")
    parameters: dict[str, str | int | float] = {"wanted": 1, "worker": "w", "attempt": "a"}
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
