"""A process that somebody else started, and all that came from it: stopped as one by the ladder that runs have."""

import os
import signal
import time
from typing import Final

from stoker.runs.ladder import PATIENCE, Ladder, Outcome
from stoker.runs.processes import Census, Identity, census, is_alive

# Nothing tells when processes end that are not our children, so it is looked this often.
_LOOK_EVERY: Final = 0.05
# How long a stop takes at the most, beside its grace.
STOP_PATIENCE: Final = PATIENCE + 5.0


class ForeignTree:
    """Grows by what its members start, and never shrinks: whoever loses its parent meanwhile still belongs to it.

    This process and its own children do not belong to it, even where they descend from it: a script may well ask for
    its own end.
    """

    def __init__(self, root: Identity) -> None:
        self._members = {root: None}

    def census(self) -> Census:
        alive = [member.pid for member in self._members if is_alive(member)]
        found = census(alive, exclude={os.getpid()})
        self._members |= dict.fromkeys(found.members)
        return Census([member for member in self._members if is_alive(member)], found.settled)

    def kill(self) -> bool:
        """It has no cgroup of its own to kill at one blow."""
        return False


def stop_tree(root: Identity, grace: float) -> Outcome:
    """SIGTERM, the grace, SIGKILL; without a grace SIGKILL at once. Waits until it is over."""
    ladder = Ladder(ForeignTree(root), signum=signal.SIGTERM if grace > 0 else signal.SIGKILL, grace=grace)
    while not ladder.step():
        time.sleep(min(ladder.timeout(), _LOOK_EVERY))
    return ladder.outcome()
