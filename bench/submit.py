"""How long a person waits until a command is in the queue, and a script until thousands are."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.table import Figure, print_figures

RUNS = 15
MANY = 10_000


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as temporary:
        directory = Path(temporary)
        stoker = str(Path(sys.executable).with_name("stoker"))
        environment = {
            **os.environ,
            "STOKER_HOME": str(directory / "home"),
            "XDG_CONFIG_HOME": str(directory / "config"),
        }
        environment.pop("STOKER_QUEUE", None)
        # An installation has its modules compiled; this checkout then has them from the first, unmeasured, run on.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        _git_repository(directory)
        lines = directory / "commands.txt"
        lines.write_text("".join(f"python train.py --seed={seed} --version={{id}}\n" for seed in range(MANY)))
        commands = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "stoker submit": [stoker, "submit", "--", "python", "train.py"],
        }
        # The first one creates the queue, which is not what a person waits for every day.
        _seconds(commands["stoker submit"], environment, directory)
        times: dict[str, list[float]] = {name: [] for name in commands}
        # Taken in turns, so that what else the machine does falls on all of them.
        for _ in range(RUNS):
            for name, command in commands.items():
                times[name].append(_seconds(command, environment, directory))
        many = _seconds([stoker, "submit", "--from", str(lines)], environment, directory)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"\nMedian of {RUNS} runs each, in turns, in a git repository, into SQLite")
    for name, value in medians.items():
        print(f"  {name:20} {value * 1000:7.1f} ms")
    return print_figures(
        "Submitting: one as multiples of `python -c pass`, many in seconds",
        [
            Figure("stoker submit -- COMMAND", medians["stoker submit"] / medians["python -c pass"], 10.0),
            Figure(f"stoker submit --from, {MANY:,} lines", many, 5.0, "s"),
        ],
    )


def _git_repository(directory: Path) -> None:
    (directory / "train.py").write_text("print('trained')\n")
    identity = ("-c", "user.name=bench", "-c", "user.email=bench@example.org", "-c", "commit.gpgsign=false")
    for arguments in (("init", "--quiet"), ("add", "train.py"), (*identity, "commit", "--quiet", "--message", "first")):
        subprocess.run(["git", *arguments], cwd=directory, check=True)


def _seconds(command: list[str], environment: dict[str, str], directory: Path) -> float:
    begun = time.perf_counter()
    subprocess.run(command, cwd=directory, env=environment, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begun
