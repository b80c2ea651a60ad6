"""`stoker demo`: simulated GPUs at simulated work, live, until Ctrl-C."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Final

import click

from stoker.cli.gpus import looks_of
from stoker.cli.options import DURATION, SteadyRhythm
from stoker.gpus.prober import Prober

# One of each kind of behaviour that Stoker tells apart: training with a pause for validation, a job that hangs with
# its memory held, a deadlock that spins, and a GPU that is free.
_LOADS: Final = (
    ("--gpu", "0", "--memory", "18GiB", "--repeat", "--phase", "busy 96% 20s", "--phase", "idle 4s"),
    ("--gpu", "1", "--memory", "11GiB", "--repeat", "--phase", "busy 88% 15s", "--phase", "idle 30s"),
    ("--gpu", "2", "--memory", "20GiB", "--repeat", "--phase", "busy 97% 12s", "--phase", "spin 30s"),
)


@click.command("demo")
@click.option("--every", type=DURATION, default="1s", metavar="DURATION", help="Time between looks [1s].")
@click.option("--for", "duration", type=DURATION, metavar="DURATION", help="End by itself after this long.")
def command(every: float, duration: float | None) -> int:
    """Watch four simulated GPUs at simulated work: no GPU is needed, and none is touched."""
    from stoker.cli.gpu_table import show_live

    # Whoever ends it, and how: the simulated programs end with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    sys.stderr.write("stoker: these GPUs are simulated; `stoker gpus` reads real ones\n")
    with tempfile.TemporaryDirectory(prefix="stoker-demo-") as directory:
        machine = f"sim:4@{directory}"
        with _loads(machine), Prober(machine) as prober, contextlib.suppress(KeyboardInterrupt):
            rhythm = SteadyRhythm(every, duration)
            show_live(looks_of(prober, prober.look(), "all", rhythm), every)
    return 0


@contextlib.contextmanager
def _loads(machine: str) -> Iterator[None]:
    """Simulated programs that live as long as the demo does."""
    program = [sys.executable, "-P", "-m", "stoker.cli", "sim", "load"]
    environment = {**os.environ, "STOKER_GPUS": machine}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    started = [
        subprocess.Popen([*program, *load], env=environment, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        for load in _LOADS
    ]
    try:
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
