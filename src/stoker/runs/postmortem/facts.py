"""The facts for the report on a run."""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import msgspec

from stoker.gpus.model import Gpu, Look, Maybe, Reading, Unknown, known
from stoker.gpus.report import BUSY_FROM
from stoker.rules.rule import Verdict
from stoker.runs.postmortem.outputs import Output
from stoker.runs.postmortem.processes import ProcessInfo
from stoker.runs.postmortem.stacks import Stack, Thread
from stoker.runs.record import Spec, Status
from stoker.step_file import RankSteps

# Messages of the supervisor, which may follow output on the same line.
_SUPERVISOR_MESSAGE: Final = re.compile(r"\bstoker: .*\n?")


def without_messages(text: str) -> str:
    """The output without messages of the supervisor."""
    return _SUPERVISOR_MESSAGE.sub("", text)


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one run, collected while its processes live if possible."""

    spec: Spec
    status: Status
    job: str | None = None
    """The id of its queued job; None for `stoker run`."""
    exit: str
    """The outcome of the stop: `1 process got SIGTERM; all gone after 3 s; exit code 124`."""
    looks: Sequence[Look] = ()
    """The readings of the window, oldest first."""
    window: float = 0.0
    """The time span of the chart in seconds."""
    verdict: Verdict | None = None
    """The verdict of the rule that stopped it."""
    idle_window: float | None = None
    """The last part of the window that the rule judged, in seconds; None for all of it."""
    below: float | None = None
    """The utilization below which a GPU counted as idle."""
    judged: Collection[str] | None = None
    """The uuids of the judged GPUs; None for all."""
    processes: Sequence[ProcessInfo] = ()
    stacks: Sequence[Stack] = ()
    steps: Sequence[RankSteps] = ()
    """The steps of processes that called `stoker.step()`."""
    outputs: Sequence[Output] = ()
    """The end of each output of the run."""
    driver: Maybe[str] = Unknown("it was not read")
    node: str = ""
    """The machine of these facts, in a multi-node run."""
    others: "Sequence[NodeFacts]" = ()
    """The facts of the other machines."""

    @property
    def did_no_work(self) -> bool:
        """True if its GPUs were idle in the window: only then do stacks point to the cause."""
        peak = self.peak()
        return (self.verdict is not None and self.verdict.quiet) or (peak is not None and peak < self.limit)

    @property
    def stopped_as_idle(self) -> bool:
        """True if a rule stopped it because its GPUs were unused."""
        return self.verdict is not None and self.verdict.quiet and not self.verdict.hang

    @property
    def stopped_as_hung(self) -> bool:
        """True if a rule stopped it because its GPUs were fully used without doing work."""
        return self.verdict is not None and self.verdict.hang

    def job_outputs(self) -> list[str]:
        """The text of each output, without messages of the supervisor."""
        return [without_messages(output.text) for output in self.outputs if known(output.text)]

    @property
    def limit(self) -> float:
        """The utilization from which a GPU counts as busy."""
        return self.below if self.below is not None else BUSY_FROM

    def process(self, pid: int) -> ProcessInfo | None:
        return next((process for process in self.processes if process.pid == pid), None)

    def last_readings(self) -> list[tuple[Gpu, Reading]]:
        """The judged GPUs with their last readings."""
        for look in reversed(self.looks):
            if look.gpus:
                pairs = zip(look.gpus, look.readings, strict=True)
                return [(gpu, reading) for gpu, reading in pairs if self.judged is None or gpu.uuid in self.judged]
        return []

    def pids_on_gpus(self) -> set[int]:
        """The run's processes on the judged GPUs at the last look."""
        own = {process.pid for process in self.processes}
        listed = [reading.processes for _, reading in self.last_readings() if known(reading.processes)]
        return {process.pid for processes in listed for process in processes if process.pid in own}

    def has_other_processes(self) -> bool:
        """True if foreign processes are on the judged GPUs."""
        own = {process.pid for process in self.processes}
        listed = [reading.processes for _, reading in self.last_readings() if known(reading.processes)]
        return any(process.pid not in own for processes in listed for process in processes)

    def peak(self) -> float | None:
        """The highest judged utilization; None if none was read."""
        since = self.looks[-1].at - self.idle_window if self.looks and self.idle_window is not None else 0.0
        # A look covers the time before it, so a look at the start of the window does not count.
        readings = [reading for look in self.looks if look.at > since for reading in look.readings]
        seen = [r.utilization for r in readings if self.judged is None or r.uuid in self.judged]
        return max((utilization.peak for utilization in seen if known(utilization)), default=None)

    def main_threads(self) -> Iterator[tuple[int, Thread]]:
        """Pid and main thread of every process with a known stack."""
        for stack in self.stacks:
            if known(stack.threads) and stack.threads:
                yield stack.pid, stack.threads[0]


class NodeFacts(msgspec.Struct, frozen=True):
    """Another machine's part of the report."""

    node: str
    facts: RunFacts | None = None
    problem: str = ""
    """Why its facts are missing."""
