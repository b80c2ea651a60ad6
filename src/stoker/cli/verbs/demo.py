"""`stoker demo`: simulated GPUs at simulated work, live, until Ctrl-C."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from stoker.cli.options.common import DURATION, SteadyRhythm
from stoker.cli.verbs.gpus import looks_of
from stoker.errors import StokerError
from stoker.gpus.prober import Prober

if TYPE_CHECKING:
    from stoker.queue import JobSpec, Store

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
def demo_command(every: float, duration: float | None) -> int:
    """Watch four simulated GPUs at simulated work: no GPU is needed, and none is touched."""
    from stoker.cli.tables.gpus import show_live

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


# When fewer than this wait, the next sweep is due: somebody who looks in an hour sees GPUs at work, too.
_FEWEST_WAITING: Final = 3
_BETWEEN_LOOKS: Final = 5.0
# A simulated training ends at once when it is told to.
_LONGEST_FAREWELL: Final = 15.0


def _train(*options: object) -> str:
    return shlex.join([sys.executable, "-P", "-m", "stoker.cli", "sim", "train", *map(str, options)])


def _job(name: str, *options: object, **asked: Any) -> "JobSpec":
    from stoker.queue import JobSpec

    return JobSpec(**{"command": _train(*options), "name": name, "directory": "/", "submitter": "demo", **asked})


def _first_jobs() -> "list[JobSpec]":
    """One of each kind: a long one, one that hangs, one that fails, one that finds its batch size, a sweep."""
    quick_to_judge = {"window": 30.0, "below": 0.05, "after": 5.0, "every": 1.0}
    fitted = ("--epochs", 2, "--steps", 300, "--memory", "3GiB", "--per-example", "96MiB")
    return [
        _job("resnet50 baseline", "--epochs", 6, "--steps", 600, "--memory", "11GiB", tags=("vision",)),
        _job("stuck all-reduce", "--hang-at", 60, "--memory", "16GiB", tags=("debug",), policy=quick_to_judge),
        _job("exploding gradient", "--fail-at", 120, "--lr", "3", tags=("debug",)),
        _job("gpt2 as large as fits", *fitted, tags=("gpt2",), fit=_fit(_train(*fitted))),
        _job("two-GPU finetune", "--epochs", 2, "--steps", 300, "--memory", "18GiB", gpus=2, priority=1),
        *_sweep(0),
        _job("ablation for later", "--epochs", 1, hold=True),
    ]


def _fit(command: str) -> dict[str, Any]:
    from stoker.cli.options.fit import fit_of

    return fit_of("--probe-time 8s --flat-for 2s --refit", 2, [command], None, 1)


def _sweep(number: int) -> "list[JobSpec]":
    return [
        _job(f"nanogpt run {number} lr={lr}", "--epochs", 2, "--steps", 250 + 50 * at, "--lr", lr, tags=("nanogpt",))
        for at, lr in enumerate(("3e-3", "1e-3", "3e-4", "1e-4"))
    ]


@contextlib.contextmanager
def demonstration(queue: str | None) -> Iterator[None]:
    """Keeps the demo's queue filled; at the end nothing of it goes on."""
    from stoker.queue import open_queue

    with open_queue(queue) as store:
        _clear(store)
        store.submit(_first_jobs())
    ending = threading.Event()
    thread = threading.Thread(target=_feed, args=(queue, ending), name="demo", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join(_LONGEST_FAREWELL)
        with contextlib.suppress(StokerError), open_queue(queue) as store:
            _clear(store)
            _wait_until_nothing_runs(store)


def _feed(queue: str | None, ending: threading.Event) -> None:
    from stoker.queue import open_queue

    number = 1
    while not ending.wait(_BETWEEN_LOOKS):
        with contextlib.suppress(StokerError), open_queue(queue) as store:
            if store.counts().get("queued", 0) < _FEWEST_WAITING:
                store.submit(_sweep(number))
                number += 1


def _clear(store: "Store") -> None:
    unfinished = store.jobs(states=["queued", "held", "running"], limit=100_000)
    store.cancel(job.id for job in unfinished)
    store.clean(0.0)


def _wait_until_nothing_runs(store: "Store") -> None:
    ends = time.monotonic() + _LONGEST_FAREWELL
    while store.running() and time.monotonic() < ends:
        time.sleep(0.1)
