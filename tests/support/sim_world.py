"""A simulated machine with a mock directory, clock and /proc."""

from collections.abc import Sequence
from pathlib import Path

from stoker.gpus.sim import Shape, SimMachine, SimulatedSource
from stoker.gpus.sim.load import Load, Phase, Script, Use

GIB = 2**30


class SimWorld:
    """Two GPUs of 24 GiB at second 1000 of the clock."""

    def __init__(self, directory: Path) -> None:
        self.now = 1000.0
        self.slept = 0.0
        self.root = directory / "root"
        self.machine = SimMachine(Shape(2, 24 * GIB), directory / "sim", root=self.root, clock=lambda: self.now)

    def source(self) -> SimulatedSource:
        return SimulatedSource(self.machine, wall=lambda: 0.0, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds

    def process(self, pid: int, started: int = 50, state: str = "S") -> None:
        """A process of this state in /proc, new or changed."""
        folder = self.root / "proc" / str(pid)
        folder.mkdir(parents=True, exist_ok=True)
        zeros = " ".join(["0"] * 18)
        (folder / "stat").write_text(f"{pid} (a (strange) name) {state} {zeros} {started} 0 0\n")

    def kill(self, pid: int) -> None:
        (self.root / "proc" / str(pid) / "stat").unlink()

    def load(self, pid: int, *uses: Use, started: int = 50) -> None:
        """The load file of a process, whether it is in /proc or not."""
        with self.machine.locked():
            self.machine.write(Load(pid, started, uses))

    def run(self, pid: int, phases: Sequence[Phase], *, gpu: int = 0, memory: int = GIB) -> Use:
        """A live process that starts these phases now."""
        use = Use(1, gpu, self.now, memory=memory, scripts=(Script(self.now, tuple(phases)),))
        self.process(pid)
        self.load(pid, use)
        return use
