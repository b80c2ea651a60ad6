"""Many workers on one PostgreSQL: connections, what they ask at rest, and what a burst of jobs and a backlog cost.

Real workers with eight simulated GPUs each, all on this machine. What the server did is counted by pg_stat_statements:
statements, and rows that it sent or changed; so it does not matter that the workers share two cores. Its own time is
printed for information: it contains waiting for a core.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from bench.site import compiled_job, postgres, rows_of, running_worker, scratch, wait_for_rows
from bench.table import QUICK, Figure, print_figures
from stoker.queue import JobSpec, Store, init_queue
from tests.support.postgres import PostgresServer
from tests.support.waiting import wait_for

FEW = 5
MANY = 10 if QUICK else 30
GPUS = 8
BURST = 200 if QUICK else 600
BACKLOG = 400
REST = 5.0 if QUICK else 20.0
SUBMITS = 5 if QUICK else 20
PATIENCE = 300.0
# The stock number of connections: a worker that needs more than three of them could not be measured here.
SETTINGS = ("shared_preload_libraries=pg_stat_statements", "pg_stat_statements.track=all", "max_connections=100")


class Work(NamedTuple):
    """What the server did."""

    statements: float
    rows: float
    milliseconds: float

    def per(self, number: float) -> "Work":
        return Work(*(value / number for value in self))


class Costs(NamedTuple):
    """Per worker: connections, and in a second at rest and with a backlog; per job: a burst."""

    connections: float
    rest: Work
    burst: Work
    backlog: Work


def main() -> int:
    with scratch() as place, postgres(SETTINGS) as server:
        costs = {number: _costs(place / str(number), server, number) for number in (FEW, MANY)}
    print(f"\nWorkers of {GPUS} GPUs on one PostgreSQL: statements, rows and ms of the server")
    for number, found in costs.items():
        print(f"  {number} workers, {found.connections:.1f} connections each")
        print(f"    at rest, per worker and second       {_text(found.rest)}")
        print(f"    burst of {BURST} jobs, per job           {_text(found.burst)}")
        print(
            f"    {BACKLOG} jobs that fit nowhere and one submit a second, per worker and second {_text(found.backlog)}"
        )
    few, many = costs.values()
    return print_figures(
        "Many workers on one PostgreSQL",
        [
            Figure("connections per worker", many.connections, 1.0, ""),
            Figure("statements of a worker at rest in a second", many.rest.statements, 1.5, ""),
            Figure(f"rows per job of a burst, {MANY} workers", many.burst.rows, 20.0, "rows"),
            Figure(
                f"rows per job of a burst, {MANY} workers ÷ {FEW}",
                many.burst.rows / few.burst.rows,
                1.5,
            ),
            Figure(f"rows per worker and second with a backlog, {MANY} workers", many.backlog.rows, 20.0, "rows"),
            Figure(
                f"rows per worker with a backlog, {MANY} workers ÷ {FEW}",
                many.backlog.rows / few.backlog.rows,
                1.5,
            ),
        ],
    )


def _text(work: Work) -> str:
    return f"{work.statements:7.2f} statements {work.rows:8.2f} rows {work.milliseconds:7.3f} ms"


def _costs(place: Path, server: PostgresServer, number: int) -> Costs:
    place.mkdir()
    job, url = compiled_job(place), server.create_database()
    with init_queue(url) as store, _statistics(url) as statistics, ExitStack() as workers:
        for index in range(number):
            room = place / f"worker-{index}"
            room.mkdir()
            workers.enter_context(running_worker(room, url, STOKER_GPUS=f"sim:{GPUS}@{room}/machine"))
        wait_for(lambda: len(store.workers.all()) == number, deadline=PATIENCE, named=f"{number} workers")
        time.sleep(REST / 2)
        connections = statistics.connections() / number
        statistics.take()
        time.sleep(REST)
        rest = statistics.take().per(number * REST)
        burst = _burst(place, store, statistics, job).per(BURST)
        backlog = _backlog(place, store, statistics, job)
    server.drop_database(url)
    return Costs(connections, rest, burst, backlog.per(number))


def _burst(place: Path, store: Store, statistics: "_Statistics", job: Path) -> Work:
    statistics.take()
    begun = time.monotonic()
    store.jobs.submit([JobSpec(command=(str(job), str(place / "noted")))] * BURST)
    wait_for_rows(place, BURST)
    _wait_for_results(store)
    print(f"  {BURST} jobs took {time.monotonic() - begun:.1f} s", flush=True)
    return statistics.take()


def _backlog(place: Path, store: Store, statistics: "_Statistics", job: Path) -> Work:
    """Per second."""
    store.jobs.submit([JobSpec(command=("true",), gpus=GPUS + 1)] * BACKLOG)
    time.sleep(3)
    statistics.take()
    begun, done = time.monotonic(), len(rows_of(place))
    for index in range(SUBMITS):
        time.sleep(max(0.0, begun + index - time.monotonic()))
        store.jobs.submit([JobSpec(command=(str(job), str(place / "noted")))])
    wait_for_rows(place, done + SUBMITS)
    found = statistics.take().per(time.monotonic() - begun)
    wait_for(lambda: not store.attempts.running(), deadline=PATIENCE, named="the results of all jobs")
    return found


def _wait_for_results(store: Store) -> None:
    """Asks seldom, because each question is counted."""
    ends = time.monotonic() + PATIENCE
    while store.attempts.running():
        assert time.monotonic() < ends, f"jobs have no result after {PATIENCE:g} s"
        time.sleep(0.2)


class _Statistics:
    """What the server counts, for one database."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def take(self) -> Work:
        """Since the last time, without its own questions."""
        row = self._row(
            "SELECT coalesce(sum(calls), 0), coalesce(sum(rows), 0), coalesce(sum(total_exec_time), 0) "
            "FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid "
            "WHERE d.datname = current_database() AND query NOT LIKE '%pg_stat%'"
        )
        self._row("SELECT 1 FROM pg_stat_statements_reset()")
        return Work(*map(float, row))

    def connections(self) -> float:
        """Of others: neither this one nor that of the store in this process."""
        (count,) = self._row(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND backend_type = 'client backend'"
        )
        return float(count) - 2

    def _row(self, statement: str) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self._connection.execute(statement).fetchone()
        return found


@contextmanager
def _statistics(url: str) -> Iterator[_Statistics]:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION pg_stat_statements")
        yield _Statistics(connection)
