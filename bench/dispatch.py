"""How long a GPU waits between two jobs, and a person between a submit and the start, beside Debian's `tsp`.

Method: 50 jobs that note when they start and end, queued behind one that sleeps, one at a time. The gap is from the end
of one to the start of the next. A plain shell loop over the same script is the floor.
"""

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.queue import postgres
from bench.table import Figure, print_figures

JOBS = 50
ROUNDS = 3
IDLE_SUBMITS = 15
_SCRIPT = '#!/bin/sh\nS=$(date +%s%N); E=$(date +%s%N); echo "$S $E" >> "$1"\n'


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as directory, postgres() as server:
        place = Path(directory)
        script = place / "job.sh"
        script.write_text(_SCRIPT)
        script.chmod(0o755)
        gaps: dict[str, list[float]] = {
            name: [] for name in ("shell loop", "tsp", "stoker, SQLite", "stoker, PostgreSQL")
        }
        # In turns, so that what else the machine does falls on all of them.
        for number in range(ROUNDS):
            room = place / str(number)
            room.mkdir()
            gaps["shell loop"] += _loop(script, room)
            gaps["tsp"] += _tsp(script, room)
            gaps["stoker, SQLite"] += _stoker(script, room, str(room / "queue.db"))
            gaps["stoker, PostgreSQL"] += _stoker(script, room, server.create_database())
        print(f"\nFrom the end of one job to the start of the next, {ROUNDS} times {JOBS} jobs, ms")
        for name, values in gaps.items():
            ordered = sorted(values)
            print(f"  {name:20} median {statistics.median(values):6.2f}   p95 {ordered[int(len(ordered) * 0.95)]:6.2f}")
        idle = {
            "SQLite": _idle(script, place, str(place / "idle.db")),
            "PostgreSQL": _idle(script, place, server.create_database()),
        }
    tsp = statistics.median(gaps["tsp"])
    return print_figures(
        "Dispatch, as multiples of tsp's median gap; idle submit to start at the median",
        [
            Figure("gap on SQLite", statistics.median(gaps["stoker, SQLite"]) / tsp, 2.0),
            Figure("gap on PostgreSQL", statistics.median(gaps["stoker, PostgreSQL"]) / tsp, 4.0),
            *(
                Figure(f"idle submit to start, {name}", statistics.median(times), 100.0, "ms")
                for name, times in idle.items()
            ),
        ],
    )


def _loop(script: Path, room: Path) -> list[float]:
    subprocess.run(["sh", "-c", f"for i in $(seq {JOBS}); do {script} {room}/loop; done"], check=True)
    return _gaps(room / "loop")


def _tsp(script: Path, room: Path) -> list[float]:
    environment = {**os.environ, "TS_SOCKET": str(room / "socket"), "TMPDIR": str(room)}

    def tsp(*words: str) -> None:
        subprocess.run(["tsp", *words], env=environment, stdout=subprocess.DEVNULL, check=True)

    tsp("-n", "sleep", "1")
    for _ in range(JOBS):
        tsp("-n", str(script), str(room / "tsp"))
    tsp("-w")
    tsp("-K")
    return _gaps(room / "tsp")


def _stoker(script: Path, room: Path, queue: str) -> list[float]:
    from stoker.queue import JobSpec, init_queue

    noted = room / ("postgres" if queue.startswith("postgres") else "sqlite")
    environment = _environment(room, queue)
    # As words, without a shell in between: so does tsp.
    commands = [("sleep", "1"), *[(str(script), str(noted))] * JOBS]
    with init_queue(queue) as store:
        store.jobs.submit([JobSpec(command=command, gpus=0) for command in commands])
    _run(environment, "work", "--until-empty", "--cpu-jobs", "1")
    return _gaps(noted)


def _idle(script: Path, place: Path, queue: str) -> list[float]:
    """Milliseconds from the moment `submit` was typed, less what it takes to start it, to the start of the job."""
    from stoker.queue import JobSpec, init_queue

    environment = _environment(place, queue)
    noted = place / f"idle-{'postgres' if queue.startswith('postgres') else 'sqlite'}"
    noted.touch()
    times = []
    with init_queue(queue) as store:
        worker = subprocess.Popen([_command(), "work"], env=environment, stdout=subprocess.DEVNULL)
        try:
            for number in range(IDLE_SUBMITS + 1):
                time.sleep(0.4)  # it has nothing to do, as at night
                begun = time.time_ns()
                store.jobs.submit([JobSpec(command=f"{script} {noted}", gpus=0)])
                while len(lines := noted.read_text().splitlines()) <= number:
                    time.sleep(0.005)
                times.append((int(lines[-1].split()[0]) - begun) / 1e6)
        finally:
            worker.terminate()
            worker.wait()
    return times[1:]  # the first one waited for the worker itself


def _environment(room: Path, queue: str) -> dict[str, str]:
    return {**os.environ, "STOKER_HOME": str(room / "home"), "STOKER_QUEUE": queue, "STOKER_GPUS": "sim:1"}


def _run(environment: dict[str, str], *words: str) -> None:
    subprocess.run([_command(), *words], env=environment, stdout=subprocess.DEVNULL, check=True)


def _command() -> str:
    return str(Path(sys.executable).with_name("stoker"))


def _gaps(noted: Path) -> list[float]:
    rows = sorted(tuple(map(int, line.split())) for line in noted.read_text().splitlines())
    if len(rows) != JOBS:
        raise SystemExit(f"{noted.name}: {len(rows)} of {JOBS} jobs ran")
    return [(later[0] - earlier[1]) / 1e6 for earlier, later in itertools.pairwise(rows)]
