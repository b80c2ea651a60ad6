"""The queue: claims against other queues on PostgreSQL, submissions, and lists over a million jobs."""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.queue_figures import Places, crowds, history, submissions, turns
from bench.queue_peers import DRAIN, PREPARE, WARM_UP, pgqueuer_driver
from bench.table import Figure, print_figures
from tests.support.postgres import PostgresServer, postgres_programs

PROGRAM = "import sys; from bench.queue_peers import DRAIN; DRAIN[sys.argv[1]](sys.argv[2])"
WORKERS = 16
JOBS = 4_000
ROUNDS = 3
# As a database that must not lose anything is run.
DURABLE = ("fsync=on", "synchronous_commit=on", "max_connections=100", "shared_buffers=256MB", "max_wal_size=4GB")


def main() -> int:
    with postgres() as server, tempfile.TemporaryDirectory(prefix="stoker-bench-") as directory:
        places = Places(server, Path(directory))
        missed = print_figures("Claiming, beside other queues", claims(server))
        print()
        return missed + print_figures(
            "The queue by itself", [*submissions(places), *turns(places), *history(places), *crowds(places)]
        )


@contextmanager
def postgres() -> Iterator[PostgresServer]:
    programs = postgres_programs()
    if programs is None:
        sys.exit("PostgreSQL is not installed: `make test` installs it where it may")
    server = PostgresServer(programs, DURABLE)
    try:
        server.start()
        yield server
    finally:
        server.stop()


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
