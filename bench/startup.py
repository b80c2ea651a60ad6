"""How long a person waits for a command, beside the start of Python itself."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.table import Figure, print_figures
from tests.support.mock_nvml import MockMachine

RUNS = 15


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as directory:
        machine = MockMachine.create(Path(directory) / "state", gpus=8)
        environment = {**os.environ, **machine.environment(), "STOKER_HOME": f"{directory}/home"}
        stoker = str(Path(sys.executable).with_name("stoker"))
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "stoker --version": [stoker, "--version"],
            "stoker gpus --json": [stoker, "gpus", "--json"],
            "stoker run -- true": [stoker, "run", "--", "true"],
        }
        times: dict[str, list[float]] = {name: [] for name in commands}
        # Taken in turns, so that what else the machine does falls on all of them.
        for _ in range(RUNS):
            for name, command in commands.items():
                times[name].append(_seconds(command, environment))
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"\nMedian of {RUNS} runs each, in turns")
    for name, value in medians.items():
        print(f"  {name:20} {value * 1000:7.1f} ms")
    floor = medians["python -c pass"]
    return print_figures(
        "Starting, as multiples of `python -c pass`",
        [
            Figure("stoker --version", medians["stoker --version"] / floor, 5.0),
            Figure("stoker gpus --json", medians["stoker gpus --json"] / floor, 10.0),
            Figure("stoker run -- true", medians["stoker run -- true"] / floor, 10.0),
        ],
    )


def _seconds(command: list[str], environment: dict[str, str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun
