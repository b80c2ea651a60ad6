"""`stoker sim train`: a training on a simulated GPU that prints, takes memory, fails and hangs as trainings do."""

import itertools
import math
import os
import random
import sys
import time
from typing import TYPE_CHECKING, Final

import click

from stoker.cli.options.common import DURATION, MEMORY

if TYPE_CHECKING:
    from stoker.gpus.sim.process import SimulatedProcess

# How often a bar is drawn again, as tqdm does it.
_BETWEEN_BARS: Final = 0.2
_WIDTH: Final = 24
_BLOCKS: Final = " ▏▎▍▌▋▊▉"
_BOLD: Final = "\x1b[1m"
_GREEN: Final = "\x1b[32m"
_YELLOW: Final = "\x1b[33m"
_PLAIN: Final = "\x1b[0m"


@click.command("train")
@click.option("--epochs", type=click.IntRange(1), default=3, metavar="N", help="So many [3].")
@click.option("--steps", type=click.IntRange(1), default=200, metavar="N", help="Steps of an epoch [200].")
@click.option(
    "--step", "step_time", type=DURATION, default="100ms", metavar="DURATION", help="One takes so long [100ms]."
)
@click.option(
    "--lr", type=float, default=1e-3, metavar="RATE", help="The learning rate: how fast the loss falls [1e-3]."
)
@click.option(
    "--batch-size", "--batch_size", type=click.IntRange(1), default=32, metavar="N", help="Examples of a step [32]."
)
@click.option("--memory", type=MEMORY, default="2GiB", metavar="SIZE", help="What the model takes [2GiB].")
@click.option("--per-example", type=MEMORY, default="64MiB", metavar="SIZE", help="What an example takes [64MiB].")
@click.option("--fail-at", type=click.IntRange(1), metavar="STEP", help="Fail at this step of the first epoch.")
@click.option(
    "--hang-at", type=click.IntRange(1), metavar="STEP", help="Hang for ever at this step of the first epoch."
)
def train(
    epochs: int,
    steps: int,
    step_time: float,
    lr: float,
    batch_size: int,
    memory: int,
    per_example: int,
    fail_at: int | None,
    hang_at: int | None,
) -> None:
    """Be a training: a progress bar per epoch, a loss that falls, memory by the batch size, one GPU or several."""
    from contextlib import ExitStack

    from stoker.cli.verbs.sim import DEFAULT_MACHINE
    from stoker.gpus.report import title
    from stoker.gpus.sim.machine import SimMachine, is_simulated
    from stoker.gpus.sim.process import SimulatedProcess
    from stoker.settings import load_settings

    chosen = load_settings().gpus
    machine = SimMachine.find(chosen if is_simulated(chosen) else DEFAULT_MACHINE, os.environ)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    with ExitStack() as stack:
        gpus = [stack.enter_context(SimulatedProcess.attach(number, machine=machine)) for number in range(len(visible))]
        names = ", ".join(title(gpu.gpu) for gpu in gpus)
        sys.stdout.write(f"{_BOLD}training{_PLAIN} on {names} · lr {lr:g} · batch size {batch_size}\n")
        for gpu in gpus:
            gpu.hold(memory + batch_size * per_example)
        training = _Training(gpus, lr, steps, step_time)
        for epoch in range(1, epochs + 1):
            training.epoch(epoch, epochs, fail_at if epoch == 1 else None, hang_at if epoch == 1 else None)
    sys.stdout.write(f"{_GREEN}done{_PLAIN}: {epochs} epochs, final loss {training.loss:.4f}\n")


class _Training:
    def __init__(self, gpus: "list[SimulatedProcess]", lr: float, steps: int, step_time: float) -> None:
        self._gpus = gpus
        # Too small a rate learns slowly, too large a one not at all: enough that a sweep looks like one.
        self._speed = math.exp(-abs(math.log10(lr) + 3))
        self._steps = steps
        self._step_time = step_time
        self._dice = random.Random(f"{lr} {steps}")  # noqa: S311 - no secret depends on it
        self._done = 0
        self.loss = 2.5

    def epoch(self, number: int, epochs: int, fail_at: int | None, hang_at: int | None) -> None:
        busy = 0.86 + 0.12 * self._dice.random()
        for gpu in self._gpus:
            gpu.work(busy)
        began, drawn = time.monotonic(), -math.inf
        for step in itertools.count(1):
            time.sleep(self._step_time)
            self._done += 1
            self.loss = 0.2 + 2.3 * math.exp(-self._done * self._speed / 300) * (0.97 + 0.06 * self._dice.random())
            if step == fail_at:
                sys.stdout.flush()
                sys.stderr.write(f"\nRuntimeError: the loss is nan at step {step}: the gradient exploded\n")
                sys.exit(1)
            if step == hang_at:
                self._hang()
            if time.monotonic() - drawn >= _BETWEEN_BARS or step == self._steps:
                drawn = time.monotonic()
                self._draw(number, epochs, step, drawn - began)
            if step == self._steps:
                break
        for gpu in self._gpus:
            gpu.work(0.15)
        sys.stdout.write(f"\nepoch {number}: {_YELLOW}val loss{_PLAIN} {self.loss * 1.04:.4f}\n")
        sys.stdout.flush()

    def _draw(self, epoch: int, epochs: int, step: int, spent: float) -> None:
        share = step / self._steps
        whole, part = divmod(round(share * _WIDTH * 8), 8)
        bar = ("█" * whole + (_BLOCKS[part] if part else "")).ljust(_WIDTH)
        rate = step / spent if spent else 0.0
        left = (self._steps - step) / rate if rate else 0.0
        sys.stdout.write(
            f"\rEpoch {epoch}/{epochs}: {share:4.0%}|{bar}| {step}/{self._steps} "
            f"[{_clock(spent)}<{_clock(left)}, {rate:.2f}it/s, loss={self.loss:.3f}]"
        )
        sys.stdout.flush()

    def _hang(self) -> None:
        """As a rank does that waits for one that died: memory held, nothing done."""
        for gpu in self._gpus:
            gpu.work(0.0)
        sys.stdout.write("\nwaiting for rank 1 …\n")
        sys.stdout.flush()
        _all_reduce_that_never_returns()


def _all_reduce_that_never_returns() -> None:
    while True:
        time.sleep(3600)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
