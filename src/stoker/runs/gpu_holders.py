"""Tells the job's own processes on GPUs from others, so that looks can skip GPUs that only others use."""

import math
from typing import Final, NamedTuple, Protocol

from stoker.gpus.model import Holder, Look, known
from stoker.gpus.prober import Prober

# A process never changes owner, but a foreign one is checked again after this, in case it could not be read.
_RECHECK: Final = 30.0


class _Job(Protocol):
    def owns(self, pid: int) -> bool:
        """True if this process belongs to the job."""


class _Foreign(NamedTuple):
    """A foreign process on the GPUs."""

    since: float
    """When it was first seen."""
    checked_at: float

    @property
    def recheck_at(self) -> float:
        """The next check; intervals grow, since most processes on a shared machine are foreign."""
        return self.checked_at + max(_RECHECK, self.checked_at - self.since)


class GpuHolders:
    """Tracks the owners of processes from look to look."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._listed: set[Holder] = set()
        self._own: set[Holder] = set()
        self._own_pids: tuple[int, ...] = ()
        self._foreign: dict[Holder, _Foreign] = {}
        self._recheck_at = math.inf
        self._gpus: set[str] = set()
        """The GPUs that the prober reads."""
        self._passed_over: frozenset[Holder] = frozenset()

    def own_pids(self, look: Look) -> tuple[int, ...]:
        """The pids of the job's processes at a look."""
        listed = {
            (process.pid, process.started)
            for reading in look.readings
            if known(reading.processes)
            for process in reading.processes
            if known(process.started)
        }
        if listed == self._listed and look.at < self._recheck_at:
            return self._own_pids
        own = self._own & listed
        # A foreign process that is neither listed nor passed over has ended.
        self._foreign = {who: one for who, one in self._foreign.items() if who in listed or who in self._passed_over}
        for who in listed - own:
            one = self._foreign.get(who)
            if one is not None and look.at < one.recheck_at:
                continue
            if self._job.owns(who[0]):
                own.add(who)
                self._foreign.pop(who, None)
            else:
                self._foreign[who] = _Foreign(look.at if one is None else one.since, look.at)
        self._recheck_at = min((one.recheck_at for one in self._foreign.values()), default=math.inf)
        self._listed, self._own = listed, own
        self._own_pids = tuple(sorted({pid for pid, _started in own}))
        return self._own_pids

    def narrow(self, prober: Prober, gpus: set[str], next_look: float) -> None:
        """Lets the next look skip readings that do not concern the job."""
        passed_over = self._passed_over
        if passed_over != self._foreign.keys() or next_look >= self._recheck_at:
            passed_over = frozenset([who for who, one in self._foreign.items() if next_look < one.recheck_at])
        if gpus != self._gpus or passed_over != self._passed_over:
            self._gpus, self._passed_over = gpus, passed_over
            prober.narrow(frozenset(gpus), passed_over)
