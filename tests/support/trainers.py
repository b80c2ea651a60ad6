"""Simulated training programs: what each needs at which size and when, what a probe sees of it, and how the run ends.

Memory is what the caching allocator holds, so it never shrinks within a run. Step 0 is the start (context, weights,
data), step 1 the first with a batch, and what the optimizer keeps comes with step 2.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from stoker.fit.model import Capacity, Fitted, NextProbe, ProbeFailedError, ProbeOutcome, SearchOptions
from stoker.fit.search import Search, Sizes

MIB = 2**20
GIB = 2**30
# A probe ends after FLAT_STEPS steps with stable memory, at the latest after PROBE_STEPS.
FLAT_STEPS = 5
FLAT_GROWTH = MIB
PROBE_STEPS = 60
REAL_STEPS = 2000
# More runs than any search should ever make.
TOO_MANY = 20


@dataclass(frozen=True)
class Trainer:
    """One program on one GPU; the memory in bytes."""

    name: str
    fixed: int
    slope: float
    bend: float = 0.0
    """Bytes for the square of the size: attention over padded batches, workspaces."""
    optimizer: int = 0
    block: int = 512
    validation: float = 1.0
    """How many times what a training step takes the validation takes, apart from the fixed part."""
    validation_at: int | None = None
    creep: int = 0
    """Fragmentation: what comes on top of it, little by little, until the end."""
    jitter: float = 0.0
    """By this share the memory that grows differs from run to run."""
    unseen: float = 0.0
    """This share of what grows is held for too short a time to be seen at ten looks a second."""
    own_size: int | None = None
    """It ignores the flag, and takes this size."""
    examples: int = 2**31
    """A batch cannot be larger than the data."""
    reaches_a_step: bool = True
    settles: bool = True
    """Whether a probe is long enough to see its memory flat."""
    probe_until: int = 0
    """A probe waits for this step, by `--probe-until`."""
    total: int = 24 * GIB
    neighbour: tuple[int, ...] = (0,)
    """What another process holds when the search begins, in each run after that, and (the last) in the real run."""
    search_options: SearchOptions = field(default_factory=SearchOptions)
    ends: Literal["size", "nothing", "failure"] = "size"

    @property
    def capacity(self) -> int:
        """What a run may use when the search begins."""
        return self.total - self.neighbour[0]

    @property
    def limit(self) -> float:
        return min(self.capacity, self.total / self.search_options.per_gpu) * (1 - self.search_options.margin)

    @property
    def surprises(self) -> bool:
        """Whether the real run needs more than the margin on top of what any probe sees."""
        return self.validation > 1 / (1 - self.search_options.margin) and (self.validation_at or 0) > max(
            PROBE_STEPS, self.probe_until
        )

    @property
    def bends_strongly(self) -> bool:
        """Whether more than half of what grows comes from the bend."""
        size = self.true_limit()
        return self.bend * size > self.slope

    def others(self, run: int) -> int:
        return self.neighbour[min(run + 1, len(self.neighbour) - 1)]

    def memory(self, size: int, step: int, run: int = -1) -> int:
        """What it holds at that step."""
        if step == 0:
            begun = self._growing(size, run) * self.validation if self.validation_at == 0 else 0.0
            return self._rounded(self.fixed + begun)
        taken = self._growing(size, run)
        if self.validation_at is not None and step >= self.validation_at:
            taken *= max(1.0, self.validation)
        fit_fields = self.optimizer if step >= 2 else 0
        return self._rounded(self.fixed + fit_fields + taken + self.creep * step / REAL_STEPS)

    def peak(self, size: int) -> int:
        """What the real run comes to."""
        return self.memory(size, REAL_STEPS)

    def true_limit(self) -> int:
        """The largest size that may be answered and whose real run stays within the margin; 0 when there is none.

        No more than the data: above it all batches are the same.
        """
        sizes = Sizes(self.search_options)
        good, bad = 0, min(sizes.largest, sizes.down(self.examples)) + 1
        while sizes.down(bad - 1) > good:
            middle = sizes.down((good + bad) // 2)
            middle = middle if middle > good else sizes.up(good + 1)
            if self.peak(middle) <= self.limit:
                good = middle
            else:
                bad = middle
        return good

    def dies(self, size: int) -> bool:
        """Whether the real run, with all that share the GPU, runs out of memory."""
        return self.peak(size) * self.search_options.per_gpu + self.neighbour[-1] > self.total

    def runs_out(self, size: int, run: int, steps: int) -> bool:
        """Whether it runs out of memory within that many steps, alone with the neighbour."""
        return self.memory(size, steps, run) + self.others(run) > self.total

    def probe(self, size: int, run: int, verification: bool = False) -> ProbeOutcome:
        """What the probes would see."""
        if not self.reaches_a_step:
            raise ProbeFailedError("it never reached a step")
        steps, settled = self._probed_steps(size, run)
        if self.runs_out(size, run, steps):
            return ProbeOutcome(size=size, outcome="oom", verification=verification)
        seen = self.memory(size, steps, run) - int(self.unseen * self._growing(size, run))
        return ProbeOutcome(size=size, outcome="fits", peak=seen, settled=settled, verification=verification)

    def _probed_steps(self, size: int, run: int) -> tuple[int, bool]:
        same = 0
        for step in range(1, PROBE_STEPS):
            grown = self.memory(size, step, run) - self.memory(size, step - 1, run)
            same = same + 1 if grown <= FLAT_GROWTH else 0
            if self.settles and same >= FLAT_STEPS and step >= self.probe_until:
                return step, True
        return PROBE_STEPS, False

    def _growing(self, size: int, run: int) -> float:
        used = self.own_size if self.own_size is not None else min(size, self.examples)
        luck = random.Random(f"{self.name} {size} {run}").uniform(-1, 1)
        return (self.slope * used + self.bend * used**2) * (1 + self.jitter * luck)

    def _rounded(self, amount: float) -> int:
        return math.ceil(amount / self.block) * self.block


def search(trainer: Trainer, outcomes: list[ProbeOutcome] | None = None) -> Fitted:
    """The search over this program; `outcomes` collects each probe, also when the search finds nothing."""
    searching = Search(trainer.search_options, Capacity(trainer.capacity, trainer.total))
    for run in range(TOO_MANY):
        step = searching.next()
        if not isinstance(step, NextProbe):
            return step
        observation = trainer.probe(step.size, run, step.verification)
        searching.record(observation)
        searching.allow(Capacity(trainer.total - trainer.others(run), trainer.total))
        if outcomes is not None:
            outcomes.append(observation)
    raise AssertionError(f"{trainer.name}: no answer after {TOO_MANY} runs")


def _trainers() -> Iterator[Trainer]:
    yield Trainer("plain", 2 * GIB, 50 * MIB)
    yield Trainer("no fixed part at all", 0, 60 * MIB)
    yield Trainer("small fixed part", 300 * MIB, 80 * MIB)
    yield Trainer("large fixed part", 18 * GIB, 50 * MIB)
    yield Trainer("nearly all of it fixed", 21 * GIB, 12 * MIB)
    yield Trainer("tiny slope", 2 * GIB, 5 * MIB)
    yield Trainer("a slope of a few KiB", 1 * GIB, 30 * 2**10)
    yield Trainer("huge slope", 2 * GIB, 600 * MIB)
    yield Trainer("huge slope and fixed part", 12 * GIB, 900 * MIB)
    yield Trainer("optimizer state at step 2", 3 * GIB, 40 * MIB, optimizer=6 * GIB)
    yield Trainer("optimizer state at step 2, on a full card", 6 * GIB, 45 * MIB, optimizer=12 * GIB)
    yield Trainer("blocks of 2 MiB", 2 * GIB + 700 * 2**10, 3.3 * MIB, block=2 * MIB)
    yield Trainer("blocks of 20 MiB", 3 * GIB + 7 * MIB, 23.7 * MIB, block=20 * MIB)
    yield Trainer("blocks of 20 MiB, tiny slope", 9 * GIB, 2.3 * MIB, block=20 * MIB)
    yield Trainer("validation first, with twice the peak", 2 * GIB, 30 * MIB, validation=2.0, validation_at=0)
    yield Trainer("validation at step 25, seen", 2 * GIB, 30 * MIB, validation=1.6, validation_at=25, probe_until=25)
    yield Trainer("validation at step 500, not seen", 4 * GIB, 35 * MIB, validation=1.08, validation_at=500)
    yield Trainer("noisy neighbour", 2 * GIB, 44 * MIB, neighbour=(4 * GIB, 5 * GIB, 3 * GIB, 4 * GIB, 5 * GIB))
    yield Trainer("neighbour who comes in a probe", 2 * GIB, 44 * MIB, neighbour=(3 * GIB, 3 * GIB, 4 * GIB, 4 * GIB))
    yield Trainer("mildly convex", 2 * GIB, 40 * MIB, bend=20 * 2**10)
    yield Trainer("mildly convex, small fixed part", 600 * MIB, 24 * MIB, bend=6 * 2**10)
    yield Trainer("mildly convex, large fixed part", 12 * GIB, 30 * MIB, bend=20 * 2**10)
    yield Trainer("strongly convex", 1 * GIB, 1 * MIB, bend=2 * MIB)
    yield Trainer("strongly convex, large fixed part", 8 * GIB, 0, bend=100 * 2**10)
    yield Trainer(
        "validation at step 500 with much more, not seen", 2 * GIB, 40 * MIB, validation=1.3, validation_at=500
    )
    yield Trainer("a long sequence at step 1500, not seen", 1 * GIB, 60 * MIB, validation=1.6, validation_at=1500)
    yield Trainer("ignores the flag", 5 * GIB, 50 * MIB, own_size=32)
    yield Trainer("no more data than 300", 2 * GIB, 30 * MIB, examples=300)
    yield Trainer("fragments over time", 3 * GIB, 45 * MIB, creep=600 * MIB)
    yield Trainer("differs from run to run", 3 * GIB, 45 * MIB, jitter=0.01, block=2 * MIB)
    yield Trainer("short peaks that are not seen", 3 * GIB, 45 * MIB, unseen=0.03)
    yield Trainer("never settles", 3 * GIB, 45 * MIB, creep=900 * MIB, settles=False)
    yield Trainer("only tiny sizes fit", 6 * GIB, 3.5 * GIB)
    yield Trainer("only one fits", 11 * GIB, 8 * GIB)
    yield Trainer("the base is above the margin", 4 * GIB, 2.3 * GIB)
    yield Trainer("the largest is reached", 2 * GIB, 50 * MIB, search_options=SearchOptions(most=128))
    yield Trainer("the base is the largest", 2 * GIB, 50 * MIB, search_options=SearchOptions(most=8))
    yield Trainer("base of 64, which does not fit", 8 * GIB, 300 * MIB, search_options=SearchOptions(base=64))
    yield Trainer("base of 256, a bit above the margin", 4 * GIB, 71 * MIB, search_options=SearchOptions(base=256))
    yield Trainer("any size will do", 2 * GIB, 50 * MIB, search_options=SearchOptions(base=1, multiple=1))
    yield Trainer("three share the card", 1 * GIB, 20 * MIB, search_options=SearchOptions(per_gpu=3))
    yield Trainer("a card of 80 GiB", 12 * GIB, 210 * MIB, block=20 * MIB, total=80 * GIB)
    yield Trainer("a card of 4 GiB", 900 * MIB, 11 * MIB, block=2 * MIB, total=4 * GIB)
    yield Trainer("nothing fits", 23 * GIB, 1.5 * GIB, ends="nothing")
    yield Trainer("never reaches a step", 2 * GIB, 50 * MIB, reaches_a_step=False, ends="failure")


TRAINERS = {trainer.name: trainer for trainer in _trainers()}
