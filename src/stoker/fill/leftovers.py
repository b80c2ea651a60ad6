"""What an earlier filler left running when it was killed: waited for, and stopped where nobody else does."""

import signal
from collections.abc import Sequence
from typing import Final

from stoker.fill.background_process import TAG
from stoker.procfs import Identity, is_alive, is_gone
from stoker.runs.processes.reaper_process import REAPER_NAME
from stoker.runs.processes.tree import environments, has_ancestor_named, send

# A reaper whose filler was killed may be about to start its program: within this time it has, and can be found by it.
_SETTLING: Final = 0.5
_BETWEEN_SWEEPS: Final = 0.2
# A reaper kills by itself when the grace is over; who is still there so much later has nobody who does.
_REAPERS_SHARE: Final = 5.0


class Leftovers:
    """All programs of one home's earlier fillers. Nothing is to be started before `gone`."""

    def __init__(self, mark: str, reapers: Sequence[Identity], grace: float, now: float) -> None:
        """`mark`: how the marks of all its programs begin. `grace`: the longest that a program is given."""
        self._mark = f"{TAG}={mark}".encode(errors="surrogateescape")
        self._reapers = list(reapers)
        self._grace = grace
        self._begun = now
        self._due = now
        self._asked: dict[Identity, float] = {}
        """When those were asked to end that nobody looks after."""
        self.found = False
        """Whether there was anything."""
        self.gone = False

    def due(self) -> float:
        return self._due

    def attend(self, now: float) -> None:
        """Looks who is left, if it is time for that."""
        if self.gone or now < self._due:
            return
        self._due = now + _BETWEEN_SWEEPS
        try:
            left = self._marked()
        except OSError:
            return  # out of descriptors: nobody seen does not mean that nobody is there
        self._reapers = [reaper for reaper in self._reapers if not is_gone(reaper)]
        self.found = self.found or bool(left or self._reapers)
        self.gone = not left and not self._reapers and now >= self._begun + _SETTLING
        for who in left:
            if not has_ancestor_named(who, REAPER_NAME):
                self._stop(who, now)
            elif now >= self._begun + self._grace + _REAPERS_SHARE:
                send(who, signal.SIGKILL)

    def _stop(self, who: Identity, now: float) -> None:
        """Its reaper was killed as well."""
        if who not in self._asked:
            self._asked[who] = now
            send(who, signal.SIGTERM)
            send(who, signal.SIGCONT)
        elif now >= self._asked[who] + self._grace:
            send(who, signal.SIGKILL)

    def _marked(self) -> list[Identity]:
        return [
            who
            for who, environment in environments()
            if any(variable.startswith(self._mark) for variable in environment) and is_alive(who)
        ]
