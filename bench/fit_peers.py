"""The ways to find a batch size that are compared with ours, each by its own rule, on the same simulated programs."""

from typing import NamedTuple

from stoker.fit.model import FitSpec, NothingFitsError, ProbeFailedError, ProbeOutcome, smaller
from tests.support.trainers import REAL_STEPS, Trainer, search

# As the script samples: twelve times, ten seconds apart, with steps of a second.
SAMPLES = range(0, 120, 10)
# Lightning's own defaults.
LIGHTNING_FIRST = 2
LIGHTNING_STEPS = 3
LIGHTNING_TRIALS = 25
LIGHTNING_MARGIN = 0.05
# accelerate has no default to start from; people write a number that they hope will do.
ACCELERATE_FIRST = 1024
ACCELERATE_SHRINKS = 0.9


class Outcome(NamedTuple):
    """What one way came to with one program."""

    size: int | None
    """None: it says that there is no answer."""
    runs: int
    ran_out: int
    dies: bool
    """The real run runs out of memory."""
    restarts: int = 0
    """How often the real run was started again, smaller, before."""


def ours(trainer: Trainer) -> Outcome:
    outcomes: list[ProbeOutcome] = []
    try:
        size = search(trainer, outcomes).size
    except (NothingFitsError, ProbeFailedError):
        size = None
    ran_out = sum(seen.outcome == "oom" for seen in outcomes)
    restarts = 0
    # As a queued job does.
    while size is not None and trainer.dies(size) and restarts < FitSpec().retries_oom:
        size, restarts = smaller(size, trainer.search_options), restarts + 1
    return Outcome(size, max(1, len(outcomes)), ran_out, size is not None and trainer.dies(size), restarts)


def in_proportion(trainer: Trainer) -> Outcome:
    """One run at the default size; nine tenths of the card, in proportion to all that was in use on it."""
    base = trainer.search_options.base
    used, ran_out = 0, 0
    for step in SAMPLES:
        if trainer.runs_out(base, 0, step):
            ran_out = 1
            break
        used = max(used, trainer.memory(base, step if trainer.reaches_a_step else 0, 0) + trainer.others(0))
    # The script leaves it to the person to divide the card among several runs; so it is divided.
    size = int(trainer.total / trainer.search_options.per_gpu * base * 0.9 / used) // base * base if used else 0
    size = size if 0 < size <= trainer.search_options.most else base
    return Outcome(size, 1, ran_out, trainer.dies(size))


def power(trainer: Trainer) -> Outcome:
    """Lightning's `power`: twice as many until memory runs out, then back by one."""
    trials = _Trials(trainer)
    size = LIGHTNING_FIRST
    while len(trials.sizes) < LIGHTNING_TRIALS:
        if not trials.fits(size):
            size //= 2
            break
        if size >= trainer.search_options.most:
            break
        size = min(size * 2, trainer.search_options.most)
    return trials.outcome(size)


def binsearch(trainer: Trainer) -> Outcome:
    """Lightning's `binsearch`: twice as many until memory runs out, then halving what lies between, less a margin."""
    trials = _Trials(trainer)
    good, bad, size = 0, 0, LIGHTNING_FIRST
    while len(trials.sizes) < LIGHTNING_TRIALS:
        if trials.fits(size):
            good = size
            if size >= trainer.search_options.most or (bad and bad - good <= 1):
                break
            size = (good + bad) // 2 if bad else min(size * 2, trainer.search_options.most)
        else:
            bad = size
            if bad - good <= 1:
                break
            size = (good + bad) // 2
    return trials.outcome(int(good * (1 - LIGHTNING_MARGIN)))


def shrinking(trainer: Trainer) -> Outcome:
    """accelerate: the training itself, begun again with nine tenths of the batch whenever memory runs out."""
    trials = _Trials(trainer, REAL_STEPS)
    size = min(ACCELERATE_FIRST, trainer.search_options.most)
    while size > 0 and not trials.fits(size):
        size = int(size * ACCELERATE_SHRINKS)
    return trials.outcome(size)


WAYS = {
    "stoker fit": ours,
    "in proportion": in_proportion,
    "power": power,
    "binsearch": binsearch,
    "shrinking": shrinking,
}


class _Trials:
    """Tries within one process, each of some steps, which only show whether memory ran out.

    Of these ways none knows of others on the GPU: where several runs share it, all are taken to look at a time.
    """

    def __init__(self, trainer: Trainer, steps: int = LIGHTNING_STEPS) -> None:
        self._trainer = trainer
        self._steps = steps
        self.sizes: list[int] = []
        self._ran_out = 0

    def fits(self, size: int) -> bool:
        trainer, run = self._trainer, len(self.sizes)
        taken = trainer.memory(size, self._steps, run) * trainer.search_options.per_gpu + trainer.others(run)
        self.sizes.append(size)
        self._ran_out += taken > trainer.total
        return taken <= trainer.total

    def outcome(self, size: int) -> Outcome:
        if not self._trainer.reaches_a_step:
            # The first try never ends.
            return Outcome(None, 1, 0, False)
        if size == 0:
            return Outcome(None, len(self.sizes), self._ran_out, False)
        return Outcome(size, len(self.sizes), self._ran_out, self._trainer.dies(size))
