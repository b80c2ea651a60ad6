"""The API of a process on a simulated GPU, which a simulated trainer uses instead of CUDA."""

import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import msgspec

from stoker.errors import BadInputError, StokerError
from stoker.gpus.model import Gpu
from stoker.gpus.sim.load import Load, Phase, Script, Use, busy
from stoker.gpus.sim.machine import LoadFile, SimMachine
from stoker.gpus.visible import visible_gpus
from stoker.procfs import read_stat


class SimulatedOutOfMemoryError(StokerError, RuntimeError):
    """The allocation does not fit. Programs recognize the error by PyTorch's message."""

    def __init__(self, requested: int, gpu: int, total: int, free: int) -> None:
        super().__init__(
            f"CUDA out of memory. Tried to allocate {_as_torch(requested)}. "
            f"GPU {gpu} has a total capacity of {_as_torch(total)} of which {_as_torch(free)} is free."
        )
        self.requested = requested
        self.free = free


def _as_torch(amount: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= size:
            return f"{amount / size:.2f} {unit}"
    return f"{amount} bytes"


class SimulatedProcess:
    """This process on one simulated GPU. Attach again for a second one; leaving releases everything.

    with SimulatedProcess.attach(gpu=0) as gpu:
        gpu.allocate(8 * 2**30)
        gpu.work(utilization=0.9)
    """

    def __init__(self, machine: SimMachine, gpu: Gpu, index: int, load: Load, number: int) -> None:
        self.machine = machine
        self.gpu = gpu
        self.index = index
        """The index of the GPU for this process, within CUDA_VISIBLE_DEVICES."""
        self._identity = (load.pid, load.started)
        self._number = number

    @classmethod
    def attach(
        cls,
        gpu: int = 0,
        *,
        context: int = 0,
        machine: SimMachine | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Opens a GPU by its index within CUDA_VISIBLE_DEVICES. `context` is held until the end."""
        surroundings = os.environ if environment is None else environment
        there = SimMachine.of_environment(surroundings) if machine is None else machine
        device = _visible(there, gpu, surroundings)
        pid = os.getpid()
        try:
            started = read_stat(f"{there.proc}/{pid}/stat").started
        except (OSError, ValueError):
            raise StokerError(
                f"{there.proc}/{pid}/stat cannot be read: simulated GPUs need /proc to tell who is alive"
            ) from None
        with there.locked() as loads:
            now = there.clock()
            mine = (_load_of(loads, (pid, started)) or Load(pid, started)).lately(now)
            number = 1 + max((use.number for use in mine.uses), default=0)
            _ensure_fits(there, loads, device, gpu, context)
            there.write(mine.with_use(Use(number, device.index, now, context=context)))
        return cls(there, device, gpu, mine, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    # Memory

    @property
    def memory(self) -> int:
        """Bytes that this process holds here, without its context."""
        return self._use(self.machine.loads()).memory

    @property
    def free_memory(self) -> int:
        """Free bytes."""
        return self.machine.shape.memory - self.machine.held(self.gpu.index, self.machine.loads())

    def allocate(self, amount: int) -> None:
        """Allocates memory, or raises `SimulatedOutOfMemoryError` without allocating."""
        if amount < 0:
            raise ValueError(f"cannot allocate {amount} bytes")
        self._change_memory(lambda held: held + amount)

    def free(self, amount: int) -> None:
        if amount < 0:
            raise ValueError(f"cannot free {amount} bytes")
        self._change_memory(lambda held: held - amount)

    def hold(self, amount: int) -> None:
        """Allocates or frees memory to hold exactly `amount`."""
        self._change_memory(lambda _held: amount)

    def _change_memory(self, wanted: Callable[[int], int]) -> None:
        with self.machine.locked() as loads:
            use = self._use(loads)
            memory = wanted(use.memory)
            if memory < 0:
                raise ValueError(f"cannot hold {memory} bytes: only {use.memory} are held")
            _ensure_fits(self.machine, loads, self.gpu, self.index, memory - use.memory)
            self._write(loads, msgspec.structs.replace(use, memory=memory))

    # Work

    def work(self, utilization: float, power: float | None = None, *, seconds: float | None = None) -> None:
        """Keeps the GPU this busy from now on, or for some seconds; returns at once, like a kernel launch.

        `power`: the share of the range between idle draw and limit; by default equal to `utilization`.
        """
        self.play((busy(utilization, seconds, power=power),))

    def play(self, phases: Sequence[Phase], *, repeat: bool = False, start: float | None = None) -> Script:
        """Starts a script of phases, which replaces the current work."""
        script = Script(self.machine.clock() if start is None else start, tuple(phases), repeat)
        with self.machine.locked() as loads:
            self._write(loads, self._use(loads).with_script(script))
        return script

    def detach(self) -> None:
        """Releases everything. The past load stays visible for a while to infrequent readers."""
        if os.getpid() != self._identity[0]:
            return  # a forked child must not touch its parent's GPU
        if not self.machine.loads_directory.exists():
            return  # the machine was removed before, so there is nothing to release
        with self.machine.locked() as loads:
            use = self._use_if_attached(loads)
            if use is not None:
                self._write(loads, msgspec.structs.replace(use, memory=0, context=0, ended=self.machine.clock()))

    def _use_if_attached(self, loads: tuple[LoadFile, ...]) -> Use | None:
        mine = _load_of(loads, self._identity)
        uses = mine.uses if mine else ()
        return next((use for use in uses if use.number == self._number and use.ended is None), None)

    def _use(self, loads: tuple[LoadFile, ...]) -> Use:
        if os.getpid() != self._identity[0]:
            raise StokerError("a forked process cannot use its parent's simulated GPU: let it attach by itself")
        use = self._use_if_attached(loads)
        if use is None:
            raise StokerError(
                f"this process is not attached to GPU {self.index} of the simulated machine in "
                f"{self.machine.directory}: it has detached, or the directory was cleared under it"
            )
        return use

    def _write(self, loads: tuple[LoadFile, ...], use: Use) -> None:
        mine = _load_of(loads, self._identity) or Load(*self._identity)
        self.machine.write(mine.with_use(use))


def _visible(machine: SimMachine, gpu: int, environment: Mapping[str, str]) -> Gpu:
    visible = visible_gpus(machine.gpus, environment)
    if 0 <= gpu < len(visible):
        return visible[gpu]
    said = environment.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        raise BadInputError(f"there is no GPU {gpu}: the simulated machine has {len(visible)}, counted from 0")
    raise BadInputError(
        f"there is no GPU {gpu}: CUDA_VISIBLE_DEVICES={said!r} leaves {len(visible)} of {len(machine.gpus)} simulated "
        "GPUs visible, counted from 0"
    )


def _load_of(loads: tuple[LoadFile, ...], identity: tuple[int, int]) -> Load | None:
    for found in loads:
        if found.identity == identity:
            return found.load
    return None


def _ensure_fits(machine: SimMachine, loads: tuple[LoadFile, ...], gpu: Gpu, index: int, more: int) -> None:
    if more <= 0:
        return
    for found in loads:
        if found.load is None:
            raise StokerError(f"{found.path} cannot be read, so free memory is unknown: remove it")
    free = machine.shape.memory - machine.held(gpu.index, loads)
    if more > free:
        raise SimulatedOutOfMemoryError(more, index, machine.shape.memory, free)
