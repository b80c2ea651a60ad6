"""The memory of one probe: what its own processes hold on each GPU, the peak of that, and whether it still grows."""

from collections.abc import Callable, Collection
from typing import Final

from stoker.gpus.model import Look, Process, Reading, known

# PyTorch asks the driver for blocks of 2 MiB and 20 MiB: one more of these is no growth worth waiting for.
BLOCK: Final = 20 * 2**20
# Workspaces that are tried and dropped move the peak by less than this.
WITHIN: Final = 0.01
# An optimizer's state appears at the first or second step, a scaler's and a compiler's within a few more.
FLAT_STEPS: Final = 5
# However fast the steps are, ten looks have seen them.
_FLAT_LEAST: Final = 1.0
# A program that tells its steps, but seldom, is not waited for longer than this many times `flat_for`.
_SELDOM: Final = 3.0
_MPS_SERVER: Final = "nvidia-cuda-mps-server"
DIFFERENCE_NOTE: Final = (
    "the driver does not tell the memory of each process here, so all that was taken on the GPU since the probe began "
    "counted as the probe's"
)


class MemoryTracker:
    """Looks at a machine on which a probe runs."""

    def __init__(self, before: Look, expected: Collection[str], owns: Callable[[int], bool]) -> None:
        """`expected`: the GPUs where it counts as the probe's what nobody else can be seen to hold."""
        self._before = {reading.uuid: reading for reading in before.readings}
        self._expected = frozenset(expected)
        self._owns = owns
        self.peaks: dict[str, int] = {}
        """By uuid, of each GPU that the probe used."""
        self.pids: set[int] = set()
        """Processes of the probe that were seen on a GPU."""
        self.note = ""
        self.blind: str | None = None
        """Why the last look did not see what the probe holds."""
        self.works = False
        """Whether the last look saw work on a GPU of the probe, or could not tell."""

    @property
    def peak(self) -> int:
        """On the GPU where it used most."""
        return max(self.peaks.values(), default=0)

    def see(self, look: Look) -> str | None:
        """Takes note of what it holds; the reason, when that could not be seen."""
        self.works = False
        self.blind = None
        for reading in look.readings:
            held = self._held(reading)
            if held > self.peaks.get(reading.uuid, 0):
                self.peaks[reading.uuid] = held
            if held and (not known(reading.utilization) or reading.utilization.peak > 0):
                self.works = True
        return self.blind

    def _held(self, reading: Reading) -> int:
        """What the probe holds there now."""
        if known(reading.processes):
            own = [one for one in reading.processes if known(one.started) and self._owns(one.pid)]
            self.pids |= {one.pid for one in own}
            told = [one.memory for one in own if known(one.memory)]
            if len(told) == len(own) and (own or all(map(_is_somebody, reading.processes))):
                return sum(told)
        return self._difference(reading) if reading.uuid in self._expected else 0

    def _difference(self, reading: Reading) -> int:
        before = self._before.get(reading.uuid)
        if not known(reading.memory_used):
            self.blind = reading.memory_used.reason
            return 0
        if before is None or not known(before.memory_used):
            return 0
        more = reading.memory_used - before.memory_used
        if more <= BLOCK:
            return 0  # a desktop's windows take and give as much
        self.note = DIFFERENCE_NOTE
        return more


def _is_somebody(process: Process) -> bool:
    """Not one that cannot be matched to a process here, nor the one that stands between the driver and its clients."""
    return known(process.started) and process.name != _MPS_SERVER


class Plateau:
    """Whether a peak has stopped rising: not while a program that holds its context still reads its data."""

    def __init__(self, flat_for: float) -> None:
        self._flat_for = flat_for
        self._level = 0
        self._since = 0.0
        self._steps = 0
        self._worked = False

    def see(self, at: float, peak: int, steps: int, works: bool) -> None:
        if peak > self._level + self._level * WITHIN + (BLOCK if self._level else 0):
            self._level, self._since, self._steps = peak, at, steps
            self._worked = False
        self._worked = self._worked or works

    def reached(self, at: float, steps: int) -> bool:
        """`steps`: how many the output has told of; none of them is no sign."""
        if not self._level:
            return False
        stayed = at - self._since
        if not steps:
            return self._worked and stayed >= self._flat_for
        return (steps - self._steps >= FLAT_STEPS and stayed >= _FLAT_LEAST) or stayed >= self._flat_for * _SELDOM
