"""A thousand machines on one PostgreSQL: what the server pays for workers at rest, at work, and after its restart.

A few processes run the workers (`fleet_workers`). What the server did is counted by itself (pg_stat_statements, WAL)
and by the kernel (processor time of all its processes).

python -m bench fleet [--quick] [--pooled=transaction|session] [--workers=1000]
"""

import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.fleet_workers import run_fleet
from bench.site import postgres, scratch
from bench.table import QUICK, Figure, print_figures
from stoker.queue import JobSpec, init_queue, open_queue
from tests.support.postgres import PgBouncer, PostgresServer

GPUS = 8
# Workers in one process: more threads would wait for Python's lock, not for the server.
EACH = 125
BACKLOG = 10_000
ENDS = 50
SPAN = 10.0 if QUICK else 20.0
AWAY = 5.0
PATIENCE = 200.0
# Enough to keep every GPU of the fleet and to start the next jobs in some order: GPUs per job of the waiting ones.
SIZES = (1, 2, 4, 8)


def option(name: str, otherwise: str) -> str:
    given = [word.partition("=")[2] for word in sys.argv if word.startswith(f"--{name}=")]
    return given[-1] if given else otherwise


WORKERS = int(option("workers", "200" if QUICK else "1000"))
POOLED = option("pooled", "")
# PgBouncer's connections to the server: as many as workers when a client keeps its own.
POOL = WORKERS if POOLED == "session" else 20


class Cost(NamedTuple):
    """What happened in a second, on average."""

    server: float
    """Of a core, as are the next two."""
    pooler: float
    workers: float
    statements: float
    rows: float
    commits: float
    wal: float
    """Bytes."""
    syncs: float

    def text(self) -> str:
        pooler = f" pooler {self.pooler:6.1%}" if POOLED else ""
        return (
            f"server {self.server:6.1%}{pooler} (generator {self.workers:6.1%})  {self.statements:7.1f} statements "
            f"{self.rows:8.1f} rows {self.commits:7.1f} commits {self.wal / 2**20:7.3f} MiB WAL {self.syncs:6.1f} syncs"
        )


class Back(NamedTuple):
    """After a restart of the server."""

    seconds: float
    """Until all workers were back."""
    most_a_second: float
    """New connections in the busiest second."""
    lost: int
    """Attempts that ended because of it."""


def main() -> int:
    settings = (
        *("shared_preload_libraries=pg_stat_statements", "pg_stat_statements.track=all"),
        "pg_stat_statements.track_planning=on",
        *(f"max_connections={WORKERS + 50}", "log_connections=on"),
    )
    print(
        f"\n{WORKERS} workers of {GPUS} GPUs{f', PgBouncer in {POOLED} mode with {POOL}' if POOLED else ''}", flush=True
    )
    with scratch() as place, postgres(settings) as server, _queue(server) as (url, address, pooler):
        with _fleet(place, address) as (generators, order):
            observer = _Observer(server, url, generators, pooler)
            seconds = _until(lambda: observer.count("stoker_workers") == WORKERS, generators, "the workers")
            print(
                f"  {WORKERS} workers are there after {seconds:.1f} s, {observer.memory():.1f} MiB of the server each"
            )
            time.sleep(SPAN / 2)
            rest = observer.measured("at rest")
            print(f"  connections: {observer.connections()}", flush=True)
            _submit(url, WORKERS * GPUS, (1,))
            all_run = lambda: observer.count("stoker_attempts") >= WORKERS * GPUS  # noqa: E731
            seconds = _until(all_run, generators, "the first jobs")
            print(f"  {WORKERS * GPUS} jobs were started in {seconds:.1f} s", flush=True)
            # Half of them are next: when a job ends, one like it follows. The others are of all sizes, and wait.
            _submit(url, BACKLOG // 2, (1,), priority=1)
            _submit(url, BACKLOG // 2, SIZES)
            time.sleep(5.0)
            backlog = observer.measured(f"all GPUs busy, {BACKLOG} jobs wait, a submission a second", _submitter(url))
            order("prints 1")
            time.sleep(7.0)
            prints = observer.measured("the same, and each job prints a line a second")
            order("prints 0")
            order(f"ends {ENDS * EACH / WORKERS}")
            time.sleep(3.0)
            done = observer.count("stoker_attempts", "outcome IS NOT NULL")
            ends = observer.measured(f"{ENDS} jobs end in a second")
            rate = (observer.count("stoker_attempts", "outcome IS NOT NULL") - done) / SPAN
            of_server, of_generator = ends.server - backlog.server, ends.workers - backlog.workers
            print(
                f"  {rate:.1f} ends a second; beside waiting each takes {1000 * of_server / rate:.1f} ms of the server "
                f"and {1000 * of_generator / rate:.1f} ms of the generator",
                flush=True,
            )
            order("ends 0")
            time.sleep(2.0)
            print(f"  connections: {observer.connections()}", flush=True)
            back = _restart(server, observer)
        print("".join(f"  {line}\n" for line in (place / "log").read_text().splitlines()[-5:]))
    title = f"{WORKERS} workers on one PostgreSQL" + (f" through PgBouncer, {POOLED} mode" if POOLED else "")
    return print_figures(
        title,
        [
            Figure("share of a core of the server at rest", 100 * rest.server, 50.0, "%"),
            Figure(f"the same with all GPUs busy and {BACKLOG} jobs waiting", 100 * backlog.server, 100.0, "%"),
            Figure("the same with jobs that print a line a second", 100 * prints.server, 100.0, "%"),
            Figure(f"the same with {ENDS} ends of jobs in a second", 100 * ends.server, 100.0, "%"),
            Figure(f"{ENDS} wanted ends of jobs a second ÷ those there were", ENDS / rate, 1.1),
            Figure("WAL at rest in a second", rest.wal / 2**20, 0.25, "MiB"),
            Figure("WAL with jobs that print, in a second", prints.wal / 2**20, 2.0, "MiB"),
            Figure("syncs of the disk at rest in a second", rest.syncs, 20.0, ""),
            Figure("a restart: connections in the busiest second", back.most_a_second, 250.0, ""),
            Figure("a restart: seconds until all workers are back", back.seconds, 30.0, "s"),
            Figure("a restart: attempts lost or requeued", back.lost, 0.0, ""),
        ],
    )


@contextmanager
def _queue(server: PostgresServer) -> Iterator[tuple[str, str, PgBouncer | None]]:
    """The direct address of a new queue, the one for workers, and the pooler between them."""
    url = server.create_database()
    init_queue(url).close()
    if not POOLED:
        yield url, url, None
        return
    with tempfile.TemporaryDirectory(prefix="stoker-pgbouncer-") as directory:
        pooler = PgBouncer(server, POOLED, Path(directory), POOL, clients=WORKERS + 50)
        pooler.wait_until_there()
        try:
            yield url, pooler.url(url), pooler
        finally:
            pooler.stop()


@contextmanager
def _fleet(place: Path, address: str) -> Iterator[tuple[list[psutil.Process], Callable[[str], None]]]:
    """The processes with the workers, and how they are told what their jobs do."""
    children, pipes = [], []
    for first in range(0, WORKERS, EACH):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            os.close(write)
            try:
                run_fleet(place, address, range(first, min(first + EACH, WORKERS)), GPUS, read)
            except BaseException:  # noqa: BLE001 - it must not return into this function
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(read)
        children.append(child)
        pipes.append(write)

    def order(text: str) -> None:
        for pipe in pipes:
            os.write(pipe, f"{text}\n".encode())

    try:
        yield [psutil.Process(child) for child in children], order
    finally:
        for child, pipe in zip(children, pipes, strict=True):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(pipe)


def _submit(url: str, number: int, sizes: tuple[int, ...], priority: int = 0) -> None:
    with open_queue(url) as store:
        for first in range(0, number, 1000):
            some = range(first, min(number, first + 1000))
            store.jobs.submit(
                [JobSpec(command=("train", str(one)), gpus=sizes[one % len(sizes)], priority=priority) for one in some]
            )


def _submitter(url: str) -> Callable[[], None]:
    return lambda: _submit(url, 1, (1,), priority=1)


def _until(is_true: Callable[[], bool], generators: list[psutil.Process], what: str) -> float:
    begun = time.monotonic()
    while not is_true():
        assert time.monotonic() - begun < PATIENCE, f"{what} did not come within {PATIENCE:g} s"
        ended = [process.pid for process in generators if process.status() == psutil.STATUS_ZOMBIE]
        assert not ended, f"processes with workers have ended: {ended}"
        time.sleep(0.2)
    return time.monotonic() - begun


def _restart(server: PostgresServer, observer: "_Observer") -> Back:
    lost = observer.count("stoker_attempts", "outcome IN ('lost', 'requeued')")
    observer.close()
    server.kill()
    time.sleep(AWAY)
    server.start()
    began, before = time.time(), observer.busy()
    since = time.monotonic()
    while observer.count("stoker_workers", f"seen > {began}") < WORKERS:
        assert time.monotonic() - since < PATIENCE, "not all workers came back"
        time.sleep(0.25)
    seconds = time.monotonic() - since
    found = observer.begins(began)
    busiest = max(Counter(int(moment) for moment in found).values(), default=0)
    print(f"  restart: all back after {seconds:.1f} s, {len(found)} connections made, at most {busiest} in a second")
    print(f"    server {(observer.busy() - before) / seconds:.1%} of a core meanwhile")
    print("    " + " ".join(f"{int(s - began)}:{n}" for s, n in sorted(Counter(map(int, found)).items())))
    observer.measured("after the restart")
    now_lost = observer.count("stoker_attempts", "outcome IN ('lost', 'requeued')")
    print(f"    {now_lost - lost} attempts lost or requeued by the restart", flush=True)
    return Back(seconds, busiest, now_lost - lost)


class _Observer:
    """What the server counts, and what the kernel counts of it."""

    def __init__(
        self, server: PostgresServer, url: str, generators: list[psutil.Process], pooler: PgBouncer | None
    ) -> None:
        self._server = server
        self._url = url
        self._generators = generators
        self._pooler = pooler
        self._connection: Any = None
        self._rows("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")

    def close(self) -> None:
        self._connection.close()
        self._connection = None

    def measured(self, title: str, each_second: Callable[[], None] | None = None) -> Cost:
        self._rows("SELECT 1 FROM pg_stat_statements_reset()")
        before, begun = self._figures(), time.monotonic()
        while (left := begun + SPAN - time.monotonic()) > 0:
            if each_second is not None:
                each_second()
            time.sleep(min(1.0, left))
        spent = time.monotonic() - begun
        cost = Cost(*((after - first) / spent for after, first in zip(self._figures(), before, strict=True)))
        print(f"  {title}\n    {cost.text()}")
        print(self.top(5), flush=True)
        return cost

    def _figures(self) -> tuple[float, ...]:
        ((statements, rows),) = self._rows(
            "SELECT coalesce(sum(calls), 0), coalesce(sum(rows), 0) "
            "FROM pg_stat_statements WHERE query NOT LIKE '%pg_stat%'"
        )
        ((wal, syncs, commits),) = self._rows(
            "SELECT pg_current_wal_insert_lsn() - '0/0', (SELECT wal_sync FROM pg_stat_wal), "
            "(SELECT sum(xact_commit) FROM pg_stat_database)"
        )
        pooler = 0.0 if self._pooler is None else _used(psutil.Process(self._pooler.pid))
        counts = map(float, (statements, rows, commits, wal, syncs))
        return (self.busy(), pooler, sum(map(_used, self._generators)), *counts)

    def top(self, most: int) -> str:
        found = self._rows(
            "SELECT calls, rows, total_exec_time, plans, total_plan_time, wal_bytes, "
            "left(regexp_replace(query, '\\s+', ' ', 'g'), 90) "
            "FROM pg_stat_statements WHERE query NOT LIKE '%pg_stat%' "
            f"ORDER BY total_exec_time + total_plan_time DESC LIMIT {most}"
        )
        return "\n".join(
            f"      {calls:7} calls {rows:8} rows {ms / 1000:7.2f} s {plans:6} plans {planning / 1000:7.2f} s "
            f"{float(wal) / 2**20:8.2f} MiB  {query}"
            for calls, rows, ms, plans, planning, wal, query in found
        )

    def busy(self) -> float:
        """Processor seconds of the server and of all processes it ever had."""
        server = psutil.Process(self._server.pid)
        return _used(server) + sum(map(_used, server.children()))

    def memory(self) -> float:
        """MiB of each connection that no other shares."""
        found = []
        for child in psutil.Process(self._server.pid).children()[:200]:
            try:
                rollup = Path(f"/proc/{child.pid}/smaps_rollup").read_text()
            except OSError:
                continue
            private = sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private"))
            found.append(private / 1024)
        return sorted(found)[len(found) // 2]

    def connections(self) -> str:
        rows = self._rows(
            "SELECT coalesce(state, 'none'), count(*) FROM pg_stat_activity "
            "WHERE backend_type = 'client backend' GROUP BY 1 ORDER BY 1"
        )
        return ", ".join(f"{number} {state}" for state, number in rows)

    def count(self, table: str, where: str = "TRUE") -> int:
        return int(self._rows(f"SELECT count(*) FROM {table} WHERE {where}")[0][0])

    def begins(self, since: float) -> list[float]:
        """When the connections began that are there."""
        rows = self._rows(
            "SELECT extract(epoch FROM backend_start) FROM pg_stat_activity "
            f"WHERE backend_type = 'client backend' AND extract(epoch FROM backend_start) > {since}"
        )
        return [float(moment) for (moment,) in rows]

    def _rows(self, statement: str) -> list[tuple[Any, ...]]:
        import psycopg

        if self._connection is None:
            self._connection = psycopg.connect(self._url, autocommit=True)
        cursor = self._connection.execute(statement)
        return cursor.fetchall() if cursor.description else []


def _used(process: psutil.Process) -> float:
    try:
        return sum(process.cpu_times()[:4])
    except psutil.NoSuchProcess:
        return 0.0
