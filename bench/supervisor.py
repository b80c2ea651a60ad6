"""What a supervisor costs the training beside it, and what it does to the speed of its output."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.gpu_peers import memory
from bench.looks import compiled_stand_in, mock_machine, run_peer
from bench.table import Figure, print_figures
from stoker.gpus.recording import RecordingReader

MINUTE = 60
WARM_UP = 4.0
THROUGHPUT_RUNS = 15
LATENESS_TRIALS = 5


def main() -> int:
    stoker = str(Path(sys.executable).with_name("stoker"))
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as directory:
        place = Path(directory)
        environment = {**os.environ, "STOKER_HOME": str(place / "home")}
        figures = [_speed_of_output(stoker, environment), _lateness(stoker, environment, place)]
        machine, sleepers = mock_machine(place)
        environment |= machine.environment()
        environment["BENCH_NVIDIA_SMI"] = str(compiled_stand_in(place))
        try:
            figures += _cost_of_watching(stoker, environment)
        finally:
            for sleeper in sleepers:
                sleeper.kill()
                sleeper.wait()
    return print_figures("Supervising", figures)


def _speed_of_output(stoker: str, environment: dict[str, str]) -> Figure:
    """The command takes its own time: its speed is the question here, not how long Stoker takes to start."""
    # The first second is left out: Stoker still loads modules and starts its GPU helper then.
    bare = ["sh", "-c", "sleep 1; date +%s%N >&2; head -c 2G /dev/zero | cat; date +%s%N >&2"]
    speeds: dict[str, list[float]] = {"bare": [], "run": []}
    for _ in range(THROUGHPUT_RUNS):
        for name, command in (("bare", bare), ("run", [stoker, "run", "--source", "sim:1", "--", *bare])):
            done = subprocess.run(
                command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=True
            )
            started, ended = (int(line) for line in done.stderr.split())
            speeds[name].append((ended - started) / 1e9)
    ratios = [run / alone for run, alone in zip(speeds["run"], speeds["bare"], strict=True)]
    print(f"\n2 GiB through a pipe, {THROUGHPUT_RUNS} times each in turns: medians bare {_median(speeds['bare'])} s,")
    print(f"  under stoker run {_median(speeds['run'])} s")
    return Figure("2 GiB of output, under stoker run ÷ bare", statistics.median(ratios), 1.03)


def _median(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f}"


def _lateness(stoker: str, environment: dict[str, str], place: Path) -> Figure:
    """From the end of the window to the first signal, for a Python job whose stack is asked for before."""
    every, window = 1.0, 2.0
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (print(time.monotonic(), flush=True), sys.exit(0)))\n"
        "time.sleep(60)\n"
    )
    late = []
    for trial in range(LATENESS_TRIALS):
        home = place / f"lateness-{trial}"
        # It never uses a GPU: without its own limit the window would be longer.
        windows = ["--for", f"{window}s", "--unused-for", f"{window}s"]
        options = ["--after", "0s", "--every", f"{every}s", *windows, "--source", f"sim:2@{home}"]
        out = subprocess.run(
            [stoker, "run", *options, "--", sys.executable, "-c", program],
            env={**environment, "STOKER_HOME": str(home)}, check=False, capture_output=True, text=True,
        ).stdout  # fmt: skip
        (readings,) = home.glob("runs/*/readings")
        first = next(iter(RecordingReader(readings)))
        idle_since = first.at - first.readings[0].span
        late.append(float(out) - (idle_since + window))
    print(f"\nFrom the end of the window to the first signal: {max(late):.2f} s at the worst of {len(late)} trials")
    return Figure("first signal after the end of the window ÷ a look", max(late) / every, 1.0)


def _cost_of_watching(stoker: str, environment: dict[str, str]) -> list[Figure]:
    options = ["--every", "1s", "--for", "1h", "--gpus", "all"]
    process = subprocess.Popen([stoker, "run", *options, "--", "sleep", "3600"], env=environment)
    try:
        time.sleep(WARM_UP)
        watchers = _watchers(process.pid)
        before, begun = _seconds(watchers), time.monotonic()
        time.sleep(MINUTE)
        share = (_seconds(watchers) - before) / (time.monotonic() - begun)
        resident, together = memory(watchers)
    finally:
        process.terminate()
        process.wait()
    seconds, spawner, _ = run_peer("spawned", environment)
    print(f"\nA minute of `stoker run --every 1s` on 8 mock GPUs: {share * 100:.2f} % of a core,")
    print(f"  {resident:.1f} MiB resident in the supervisor, {together:.1f} MiB with its helpers (shared pages once)")
    print(
        f"  the seeds' way, a spawn per sample: {seconds * 100:.2f} % of a core, {spawner:.1f} MiB beside its children"
    )
    return [
        Figure("share of a core at --every 1s", share * 100, 0.5, "%"),
        Figure("memory with its helpers, shared pages once", together, 30.0, "MiB"),
        Figure("processor time ÷ the seeds' way", share / seconds, 1.0),
    ]


def _watchers(supervisor: int) -> list[int]:
    """The supervisor and its helpers, without the job."""
    children = psutil.Process(supervisor).children(recursive=True)
    return [supervisor, *(child.pid for child in children if child.name() != "sleep")]


def _seconds(pids: list[int]) -> float:
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids) / 1e9
