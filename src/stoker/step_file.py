"""`stoker.step()` in a training loop, and the files through which the supervisor reads it.

One small file per process in the directory of the run contains count, time and rank. The process may be any training
program: nothing here raises, blocks, or stays open, and most calls only count.
"""

import os
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import SupportsInt

# Counts of ranks are compared, so nearly every step is written, except in a loop that only spins.
_EVERY: Final = 0.01
# At most this share of the time is spent on a slow disk.
_MOST_TIME: Final = 0.01
# After a failure, such as a full disk.
_PAUSE: Final = 30.0
_PREFIX: Final = "steps."
# Slurm's own variable is not used: all processes of a task inherit it.
_RANKS: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
# More than the ranks of any machine.
_MOST_FILES: Final = 512
_LONGEST: Final = 128


class RankSteps(NamedTuple):
    """The steps of one process."""

    rank: int | None
    """Its rank in the whole job, if set by the launcher."""
    pid: int
    steps: int
    since: float
    """Time of the last write, in monotonic seconds."""


_count: "SupportsInt" = 0
_due = 0.0
_cost = 0.0
"""Seconds that the last write took."""


def step(n: "SupportsInt | None" = None) -> None:
    """Reports step `n` of the training loop, by default one more. Does nothing outside Stoker."""
    global _count, _due  # noqa: PLW0603 - one count per process
    try:
        _count = _count + 1 if n is None else n  # type: ignore[operator]
        now = time.monotonic()
        if now < _due:
            return
        _due = now + _write(now)
    except Exception:  # noqa: BLE001 - it must not cost the training
        _due = time.monotonic() + _PAUSE


def _write(now: float) -> float:
    """Seconds until the next write."""
    global _cost
    directory = os.environ.get("STOKER_RUN_DIR")
    if not directory:
        return _PAUSE
    rank = next((int(value) for name in _RANKS if (value := os.environ.get(name, "")).isdecimal()), -1)
    # Fixed width, so one write replaces it. Not kept open: a program may close all its descriptors.
    line = f"{int(_count):20d} {now:20.3f} {rank:8d}\n".encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(f"{directory}/{_PREFIX}{os.getpid()}", flags, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
    before, _cost = _cost, time.monotonic() - now
    # A slow disk is slow twice in a row. After a single slow write, as on a busy machine, a pause would make this rank
    # look behind.
    return max(_EVERY, min(min(before, _cost) / _MOST_TIME, _PAUSE))


def read_steps(directory: str) -> Sequence[RankSteps]:
    """The reports of a run's processes. Raises OSError if the directory is unreadable."""
    names = [name for name in os.listdir(directory) if name.startswith(_PREFIX)]  # noqa: PTH208 - one call
    found = (_read(directory, name) for name in names[:_MOST_FILES])
    return [one for one in found if one is not None]


def _read(directory: str, name: str) -> RankSteps | None:
    try:
        descriptor = os.open(f"{directory}/{name}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            line = os.read(descriptor, _LONGEST)
        finally:
            os.close(descriptor)
        steps, since, rank = line.split()
        return RankSteps(int(rank) if int(rank) >= 0 else None, int(name[len(_PREFIX) :]), int(steps), float(since))
    except (OSError, ValueError):
        return None
