"""Where benches run: a directory, a priority, a database, the job that notes its times, a worker, and what is left."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.postgres import PostgresServer, postgres_programs
from tests.support.waiting import kill_all, wait_for

PATIENCE = 300.0
# As a database that must not lose anything is run.
DURABLE = ("fsync=on", "synchronous_commit=on", "max_connections=100", "shared_buffers=256MB", "max_wal_size=4GB")
Row = tuple[int, int]
"""When a job started and ended, in nanoseconds."""


@contextmanager
def undisturbed() -> Iterator[None]:
    """Before other programs on the machine, where that is permitted (root): also what is started meanwhile."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        print("  not run as root: other programs on this machine disturb the figures")
    yield
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


@contextmanager
def scratch() -> Iterator[Path]:
    """In memory unless TMPDIR is set: where files were deleted just before, ext4 without a journal is slow."""
    in_memory = "TMPDIR" not in os.environ and os.access("/dev/shm", os.W_OK)
    place = "/dev/shm" if in_memory else None
    # Whose it is can be seen: others may run benches on the same machine.
    with tempfile.TemporaryDirectory(prefix=f"stoker-bench-{os.getpid()}-", dir=place) as directory:
        try:
            yield Path(directory)
        finally:
            end_all()  # nothing writes there any more


@contextmanager
def postgres(settings: tuple[str, ...] = ()) -> Iterator[PostgresServer]:
    programs = postgres_programs()
    if programs is None:
        sys.exit("PostgreSQL is not installed: `make test` installs it where it may")
    server = PostgresServer(programs, (*DURABLE, *settings))
    try:
        server.start()
        yield server
    finally:
        server.stop()


# The job, and workers


def compiled_job(directory: Path) -> Path:
    job = directory / "job"
    subprocess.run(["cc", "-O2", "-o", job, Path(__file__).with_name("job.c")], check=True)
    return job


def environment_of(room: Path, queue: str) -> dict[str, str]:
    return {**os.environ, "STOKER_HOME": str(room / "home"), "STOKER_QUEUE": queue, "STOKER_GPUS": "sim:1"}


def stoker_command() -> str:
    return str(Path(sys.executable).with_name("stoker"))


def rows_of(room: Path) -> list[Row]:
    try:
        lines = (room / "noted").read_text().splitlines()
    except FileNotFoundError:
        return []
    return sorted((int(start), int(end)) for start, end in map(str.split, lines))


def wait_for_rows(room: Path, jobs: int) -> None:
    """Looks seldom: what looks all the time takes part in what is measured."""
    ends = time.monotonic() + PATIENCE
    while len(rows_of(room)) < jobs:
        assert time.monotonic() < ends, f"{len(rows_of(room))} of {jobs} jobs ran within {PATIENCE:g} s"
        time.sleep(0.05)


@contextmanager
def running_worker(room: Path, url: str, *options: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    worker = subprocess.Popen(
        [stoker_command(), "work", *options],
        env=environment_of(room, url) | variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield worker
    finally:
        worker.terminate()
        worker.wait()


# Processes


def wait_for_all(known: Collection[int] = ()) -> None:
    """Until no process is left but those: what has lost its parent is this process's child."""

    def are_gone() -> bool:
        for child in psutil.Process().children():
            if child.pid not in known:
                os.waitpid(child.pid, os.WNOHANG)
        return {child.pid for child in psutil.Process().children()} <= set(known)

    wait_for(are_gone, deadline=PATIENCE, named="the end of everything that was started")


def end_all() -> None:
    """Kills what a bench has left that failed or was interrupted."""

    def left() -> list[int]:
        return [child.pid for child in psutil.Process().children(recursive=True) if _is_alive(child)]

    kill_all(left)
    wait_for_all()


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def ended_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
