"""How long a person waits for a command, beside the start of Python itself; and for one with thousands of jobs."""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from bench.site import postgres, scratch, stoker_command, undisturbed
from bench.table import QUICK, Figure, print_figures
from stoker.queue import JobSpec, init_queue
from tests.support.mock_nvml import MockMachine
from tests.support.postgres import PostgresServer
from tests.support.queue_history import write_history

RUNS = 7 if QUICK else 15
SUBMITTED = 10_000
LISTED = 10_000 if QUICK else 100_000
PYTHON = "python -c pass"
# What libraries alone take: no command that uses them can be quicker.
FLOORS = {
    "import click, msgspec": "every command",
    "import psycopg": "PostgreSQL's driver alone",
    "import click, msgspec, psycopg": "every command on PostgreSQL",
}
# As multiples of Python's own start.
GOALS = {
    "stoker --version": 5.0,
    "stoker gpus": 7.0,
    "stoker gpus --json": 7.0,
    "stoker run -- true": 10.0,
    "stoker submit, SQLite": 10.0,
    "stoker list, SQLite": 10.0,
    "stoker submit, PostgreSQL": 10.0,
    "stoker list, PostgreSQL": 10.0,
}


def main() -> int:
    with undisturbed(), scratch() as directory, postgres() as server:
        return _starts(directory, server) + _long_ones(directory, server)


def _starts(directory: Path, server: PostgresServer) -> int:
    machine = MockMachine.create(directory / "state", gpus=8)
    environment = _environment(directory) | machine.environment()
    on_postgres = environment | {"STOKER_QUEUE": server.create_database()}
    init_queue(on_postgres["STOKER_QUEUE"]).close()
    stoker = stoker_command()
    _git_repository(directory)
    submit = [stoker, "submit", "--", "python", "train.py"]
    commands = {
        PYTHON: ([sys.executable, "-c", "pass"], environment),
        # As Stoker imports them: without looking for garbage meanwhile.
        **{text: ([sys.executable, "-c", f"import gc; gc.disable(); {text}"], environment) for text in FLOORS},
        "stoker --version": ([stoker, "--version"], environment),
        "stoker gpus": ([stoker, "gpus"], environment),
        "stoker gpus --json": ([stoker, "gpus", "--json"], environment),
        "nvitop -1": ([str(Path(sys.executable).with_name("nvitop")), "-1"], environment),
        "stoker run -- true": ([stoker, "run", "--", "true"], environment),
        "stoker submit, SQLite": (submit, environment),
        "stoker list, SQLite": ([stoker, "list"], environment),
        "stoker submit, PostgreSQL": (submit, on_postgres),
        "stoker list, PostgreSQL": ([stoker, "list"], on_postgres),
    }
    for command, variables in commands.values():
        # The first one creates the queue and compiles modules, which is not what a person waits for every day.
        _seconds(command, variables, directory)
    times: dict[str, list[float]] = {name: [] for name in commands}
    # Taken in turns, so that what else the machine does falls on all of them.
    for _ in range(RUNS):
        for name, (command, variables) in commands.items():
            times[name].append(_seconds(command, variables, directory))
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"\nMedian of {RUNS} runs each, in turns, in a git repository, 8 mock GPUs")
    for name, value in medians.items():
        floor = f"  the floor of {FLOORS[name]}" if name in FLOORS else ""
        print(f"  {name:30} {value * 1000:7.1f} ms {value / medians[PYTHON]:6.2f} ×{floor}")
    figures = [Figure(name, medians[name] / medians[PYTHON], goal) for name, goal in GOALS.items()]
    figures.append(Figure("stoker gpus ÷ nvitop -1", medians["stoker gpus"] / medians["nvitop -1"], 1.0))
    return print_figures("Starting, as multiples of `python -c pass`", figures)


def _long_ones(directory: Path, server: PostgresServer) -> int:
    lines = directory / "commands.txt"
    lines.write_text("".join(f"python train.py --seed={seed} --version={{id}}\n" for seed in range(SUBMITTED)))
    stoker, figures = stoker_command(), []
    for database in ("SQLite", "PostgreSQL"):
        queue = str(directory / "long.db") if database == "SQLite" else server.create_database()
        environment = _environment(directory) | {"STOKER_QUEUE": queue}
        with init_queue(queue) as store:
            write_history(store, LISTED)
            store.jobs.submit([JobSpec(command="python train.py")])
        # `script` gives it a terminal, on which it prints a table.
        ways = {
            "piped": [stoker, "list", "--all"],
            "terminal": ["script", "-qefc", f"{stoker} list --all", "/dev/null"],
        }
        for way, command in ways.items():
            listing, goal = _seconds(command, environment, directory), 2.0 * LISTED / 100_000
            figures.append(Figure(f"stoker list --all, {LISTED:,} rows, {way}, {database}", listing, goal, "s"))
        taken = _seconds([stoker, "submit", "--from", str(lines)], environment, directory)
        figures.append(Figure(f"stoker submit --from, {SUBMITTED:,} lines, {database}", taken, 5.0, "s"))
    return print_figures("Long commands", figures)


def _environment(directory: Path) -> dict[str, str]:
    environment = {
        **os.environ,
        "STOKER_HOME": str(directory / "home"),
        "XDG_CONFIG_HOME": str(directory / "config"),
    }
    environment.pop("STOKER_QUEUE", None)
    # An installation has its modules compiled; this checkout then has them from the first, unmeasured, run on.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def _git_repository(directory: Path) -> None:
    (directory / "train.py").write_text("print('trained')\n")
    identity = ("-c", "user.name=bench", "-c", "user.email=bench@example.org", "-c", "commit.gpgsign=false")
    for arguments in (("init", "--quiet"), ("add", "train.py"), (*identity, "commit", "--quiet", "--message", "first")):
        subprocess.run(["git", *arguments], cwd=directory, check=True)


def _seconds(command: list[str], environment: dict[str, str], directory: Path) -> float:
    begun = time.perf_counter()
    subprocess.run(command, cwd=directory, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun
