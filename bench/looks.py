"""What one look at eight GPUs costs, beside a bare nvidia-ml-py loop, nvitop, gpustat and spawning `nvidia-smi`."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from bench.gpu_peers import memory
from bench.table import Figure, print_figures
from tests.support.mock_nvml import MockMachine

GPUS = 8
PROCESSES_PER_GPU = 2
ROUNDS = 3
# At the rhythm of a real watcher, so that caches are as cold as they are there; fewer for those that sleep inside.
LOOKS = {"ours": 15, "bare": 15, "nvitop": 15, "gpustat": 5, "spawned": 15}
EVERY = 1.0


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as directory:
        place = Path(directory)
        machine, sleepers = mock_machine(place)
        environment = {**os.environ, **machine.environment(), "BENCH_NVIDIA_SMI": str(compiled_stand_in(place))}
        try:
            results = {name: run_peer(name, environment) for name in LOOKS}
            watcher = _memory_of_watcher(place, environment)
        finally:
            for sleeper in sleepers:
                sleeper.kill()
                sleeper.wait()
    return _report(results, watcher)


def compiled_stand_in(place: Path) -> Path:
    command = place / "nvidia-smi"
    subprocess.run(["cc", "-O2", "-o", command, Path(__file__).with_name("nvidia_smi.c")], check=True)
    return command


def mock_machine(place: Path) -> tuple[MockMachine, list[subprocess.Popen[bytes]]]:
    machine = MockMachine.create(place / "state", gpus=GPUS)
    sleepers = [subprocess.Popen(["sleep", "3600"]) for _ in range(GPUS * PROCESSES_PER_GPU)]
    for index, gpu in enumerate(machine.gpus):
        gpu.utilization = 90
        gpu.memory_used = 40 * 2**30
        gpu.energy_integrates = True
        for sleeper in sleepers[index * PROCESSES_PER_GPU :][:PROCESSES_PER_GPU]:
            gpu.add_process(sleeper.pid, memory=20 * 2**30, sm=45)
    return machine, sleepers


def run_peer(name: str, environment: dict[str, str]) -> tuple[float, float, float]:
    """Median over the rounds of: processor seconds per look, MiB resident, MiB with its helper."""
    rounds = []
    for _ in range(ROUNDS):
        command = [sys.executable, "-W", "ignore", "-m", "bench.gpu_peers", name, str(LOOKS[name]), str(EVERY)]
        out = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        rounds.append([float(word) for word in out.split()])
    seconds, resident, together = (statistics.median(column) for column in zip(*rounds, strict=True))
    return seconds, resident, together


def _memory_of_watcher(place: Path, environment: dict[str, str]) -> tuple[float, float]:
    """MiB of a real `stoker record` after some looks: resident, and with its helper."""
    stoker = str(Path(sys.executable).with_name("stoker"))
    recorder = subprocess.Popen(
        [stoker, "record", str(place / "readings"), "--every", "500ms"], env=environment, stderr=subprocess.DEVNULL
    )
    time.sleep(5)
    # A helper that serves a whole machine has this process as its parent once the one that started it is gone. Helpers
    # of earlier readers have ended and wait to be collected.
    started = [*psutil.Process(recorder.pid).children(), *psutil.Process().children(recursive=True)]
    helpers = {one.pid for one in started if one.name() == "stoker-gpus" and one.status() != psutil.STATUS_ZOMBIE}
    found = memory([recorder.pid, *helpers])
    recorder.terminate()
    recorder.wait()
    return found


def _report(results: dict[str, tuple[float, float, float]], watcher: tuple[float, float]) -> int:
    print(f"\nOne look a second at {GPUS} mock GPUs with {PROCESSES_PER_GPU} processes each, median of {ROUNDS} runs")
    print(f"  {'reader':10} {'ms/look':>8} {'ours ÷ it':>10} {'MiB':>6}")
    cost = results["ours"][0]
    for name, (seconds, resident, _together) in results.items():
        print(f"  {name:10} {seconds * 1000:8.3f} {cost / seconds:10.2f} {resident:6.1f}")
    resident, together = watcher
    print(f"  stoker record: {resident:.1f} MiB resident, {together:.1f} MiB together with its helper, each page once")
    return print_figures(
        "Looking",
        [
            Figure("ours ÷ bare nvidia-ml-py loop", cost / results["bare"][0], 2.0),
            Figure("ours ÷ nvitop's Device API", cost / results["nvitop"][0], 1.0),
            Figure("ours ÷ gpustat", cost / results["gpustat"][0], 1.0),
            Figure("ours ÷ spawning nvidia-smi", cost / results["spawned"][0], 1.0),
            Figure("share of a core at one look a second", cost / EVERY * 100, 0.3, "%"),
            Figure("memory of a watching process", resident, 25.0, "MiB"),
        ],
    )
