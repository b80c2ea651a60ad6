"""The processes of one job, by descent and by cgroup: what a stop has to reach."""

from collections.abc import Callable, Collection
from typing import Protocol

from stoker.runs.processes.cgroup import Cgroup
from stoker.runs.processes.scan import ProcessScan, scan_processes, stat


class Tree(Protocol):
    """What a termination climbs down on."""

    def scan_processes(self) -> ProcessScan:
        """Who of it lives."""

    def kill(self) -> bool:
        """Kills all of it at one blow; False where the kernel offers none."""


class ProcessTree:
    """All that came from one process, and all that is in the job's cgroup."""

    def __init__(
        self,
        ancestor: int,
        cgroup: Cgroup | None,
        *,
        since: int = 0,
        exclude: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        """Leaves out what `exclude` says and what came from it, and whatever started before `since`."""
        self._ancestor = ancestor
        self._cgroup = cgroup
        self._since = since
        self._exclude = exclude

    def scan_processes(self) -> ProcessScan:
        found = scan_processes([self._ancestor], self._exclude())
        processes = [process for process in found.processes if process.started >= self._since]
        if self._cgroup is not None:
            known = {process.pid for process in found.processes} | {self._ancestor}
            others = [stat(pid) for pid in self._cgroup.pids() if pid not in known]
            processes += [other.identity for other in others if other and not other.over]
        return ProcessScan(processes, found.settled)

    def kill(self) -> bool:
        if self._cgroup is None:
            return False
        # A reaper that lives in its job's cgroup, so that the job is born there, must not die of the blow.
        if self._ancestor in self._cgroup.pids() and not self._cgroup.evict(self._ancestor):
            return False
        return self._cgroup.kill()
