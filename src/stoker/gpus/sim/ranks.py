"""The ranks of a simulated training, one process per GPU, and its kinds of hangs.

A hang looks real from outside: processes, Python stacks, CPU time, output, and readings. `launch` starts the ranks;
each runs `python -m stoker.gpus.sim.ranks PLAN`.
"""

import ctypes
import math
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, Literal, get_args

import msgspec

from stoker.errors import BadInputError
from stoker.gpus.sim.faults import Fault, add_fault
from stoker.gpus.sim.load import idle, spin
from stoker.gpus.sim.machine import SimMachine
from stoker.gpus.sim.process import SimulatedProcess
from stoker.gpus.visible import visible_gpus
from stoker.step_file import step as report_step

Hang = Literal["nccl", "loader", "livelock", "rank-dead", "gpu-lost"]
HANGS: Final[tuple[Hang, ...]] = get_args(Hang)
# Hangs in which one rank differs from the others.
_NEED_TWO_RANKS: Final[frozenset[Hang]] = frozenset({"rank-dead", "gpu-lost"})

UTILIZATION: Final = 0.93
# A polling rank of a pipeline was seen at 150 of 350 W, without memory traffic.
LIVELOCK_POWER: Final = 0.4
HEARTBEAT_EVERY: Final = 1.0
# The shortest interval of output lines, for readers.
_BETWEEN_LINES: Final = 0.2
_SET_DEATH_SIGNAL: Final = 1
# Variables of a multi-node job, with their defaults.
_MACHINES: Final = {"STOKER_NODES": 1, "STOKER_NODE_RANK": 0}


class RankPlan(msgspec.Struct, frozen=True):
    """The work of one rank."""

    machine: str
    """A source spec, such as `sim:4`."""
    ranks: int
    memory: int
    steps: int
    step_time: float
    learning_speed: float
    """1 for the best learning rate, less for others."""
    hang: Hang | None
    hang_after: int
    report_steps: bool = False
    """It calls `stoker.step()`."""
    rank: int = 0
    """Its local rank."""
    nodes: int = 1
    node_rank: int = 0
    """The rank of this machine in the job."""

    @property
    def is_last(self) -> bool:
        """True for the last rank, which dies or loses its GPU."""
        return self.rank == self.ranks - 1 and self.node_rank == self.nodes - 1


def launch(plan: RankPlan) -> int:
    """Runs all ranks of a plan on this machine, and returns the exit code of the first that failed."""
    nodes, node_rank = (int(os.environ.get(name) or value) for name, value in _MACHINES.items())
    plan = msgspec.structs.replace(plan, nodes=nodes, node_rank=node_rank)
    if plan.hang in _NEED_TWO_RANKS and plan.ranks * plan.nodes < 2:
        raise BadInputError(f"a hang of the kind {plan.hang} needs at least 2 ranks")
    if plan.ranks > len(visible := visible_gpus(SimMachine.find(plan.machine, os.environ).gpus, os.environ)):
        raise BadInputError(f"{plan.ranks} ranks need a GPU each, and {len(visible)} are visible")
    processes = [_start(msgspec.structs.replace(plan, rank=rank)) for rank in range(plan.ranks)]

    def end(number: int, _frame: object) -> None:
        for process in processes:
            process.terminate()
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    codes = [process.wait() for process in processes]
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def _start(plan: RankPlan) -> "subprocess.Popen[bytes]":
    # Torchrun's variables, which identify a rank.
    numbers = {
        "RANK": plan.node_rank * plan.ranks + plan.rank,
        "LOCAL_RANK": plan.rank,
        "WORLD_SIZE": plan.nodes * plan.ranks,
        "LOCAL_WORLD_SIZE": plan.ranks,
    }
    environment = os.environ | {name: str(value) for name, value in numbers.items()}
    words = [sys.executable, "-m", "stoker.gpus.sim.ranks", msgspec.json.encode(plan).decode()]
    return subprocess.Popen(words, env=environment)


class SimulatedRank:
    """A rank, which makes steps until it is done or hangs."""

    def __init__(self, plan: RankPlan, gpu: SimulatedProcess) -> None:
        self.plan = plan
        self.gpu = gpu
        self._dice = random.Random(plan.learning_speed)  # noqa: S311 - no secret depends on it
        self._printed = -math.inf

    def train(self) -> None:
        self.gpu.hold(self.plan.memory)
        self.gpu.work(UTILIZATION)
        for step in range(1, self.plan.steps + 1):
            time.sleep(self.plan.step_time)
            hang = self.plan.hang if step == self.plan.hang_after else None
            if self.plan.report_steps:
                report_step(step)
            self._print_step(step, at_once=hang is not None or step == self.plan.steps)
            if hang is not None:
                _HANGS[hang](self)

    def _print_step(self, step: int, *, at_once: bool) -> None:
        now = time.monotonic()
        if self.plan.rank == 0 and (at_once or now - self._printed >= _BETWEEN_LINES):
            self._printed = now
            fall = math.exp(-step * self.plan.learning_speed / 300) * (0.97 + 0.06 * self._dice.random())
            _print(f"step {step}/{self.plan.steps} loss={0.2 + 2.3 * fall:.4f}")


def all_reduce(rank: SimulatedRank, *, power: float | None = None) -> None:
    """Waits for the other ranks like NCCL: a kernel polls on the GPU, a thread on the CPU, forever."""
    rank.gpu.play((spin() if power is None else spin(power=power),))
    wait_for_peers()


def wait_for_peers() -> None:
    # At the lowest priority it uses only a core that nobody else needs.
    os.nice(19)
    while True:
        pass


def _next_batch(rank: SimulatedRank) -> None:
    """Waits for a data loader that delivers no more batches."""
    rank.gpu.play((idle(),))
    batches: queue.Queue[None] = queue.Queue()
    batches.get()


def _livelock(rank: SimulatedRank) -> None:
    """Prints heartbeats without training."""
    if rank.plan.rank == 0:
        threading.Thread(target=_heartbeat, daemon=True).start()
    all_reduce(rank, power=LIVELOCK_POWER)


def _heartbeat() -> None:
    while True:
        _print("heartbeat: all ranks answer")
        time.sleep(HEARTBEAT_EVERY)


def _die_or_wait(rank: SimulatedRank) -> None:
    if rank.plan.is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(rank)


def _lose_gpu_or_wait(rank: SimulatedRank) -> None:
    if rank.plan.is_last:
        machine = rank.gpu.machine
        add_fault(machine, Fault("lost", machine.clock(), rank.gpu.gpu.index))
    all_reduce(rank)


_HANGS: Final[dict[Hang, Callable[[SimulatedRank], None]]] = {
    "nccl": all_reduce,
    "loader": _next_batch,
    "livelock": _livelock,
    "rank-dead": _die_or_wait,
    "gpu-lost": _lose_gpu_or_wait,
}


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    # A rank must not keep spinning after its launcher was killed.
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    plan = msgspec.json.decode(sys.argv[1], type=RankPlan)
    with SimulatedProcess.attach(plan.rank, machine=SimMachine.find(plan.machine, os.environ)) as gpu:
        SimulatedRank(plan, gpu).train()


if __name__ == "__main__":
    main()
