"""The facts from which the report on a run is written."""

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

# Messages of the supervisor. After output without a line end they are on the same line.
_SUPERVISOR_MESSAGE: Final = re.compile(r"\bstoker: .*\n?")


def without_messages(text: str) -> str:
    """The output without messages of the supervisor."""
    return _SUPERVISOR_MESSAGE.sub("", text)


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one run, collected while its processes still lived where possible."""

    spec: Spec
    status: Status
    job: str | None = None
    """The id of the queued job that it is an attempt of; None: it was started by `stoker run`."""
    exit: str
    """How the stop went: `1 process got SIGTERM; all gone after 3 s; exit code 124`."""
    looks: Sequence[Look] = ()
    """The readings of the window, oldest first."""
    window: float = 0.0
    """Seconds that the chart shows."""
    verdict: Verdict | None = None
    """That of the rule that stopped it."""
    idle_window: float | None = None
    """Seconds at the end of the window that the rule judged; None: all."""
    below: float | None = None
    """The utilization below which a GPU counted as idle."""
    judged: Collection[str] | None = None
    """The uuids of the GPUs that the rule judged; None: all."""
    processes: Sequence[ProcessInfo] = ()
    stacks: Sequence[Stack] = ()
    steps: Sequence[RankSteps] = ()
    """Of every process that called `stoker.step()`."""
    outputs: Sequence[Output] = ()
    """The end of each output of the run."""
    driver: Maybe[str] = Unknown("it was not read")
    node: str = ""
    """The machine that these facts are of; empty if the run is on one machine."""
    others: "Sequence[NodeFacts]" = ()
    """Those of the other machines of the run."""

    @property
    def did_no_work(self) -> bool:
        """Whether it did nothing on its GPUs in the window: only then the stacks say something about the cause."""
        peak = self.peak()
        return (self.verdict is not None and self.verdict.quiet) or (peak is not None and peak < self.limit)

    @property
    def stopped_as_idle(self) -> bool:
        """Whether a rule stopped it because its GPUs were unused."""
        return self.verdict is not None and self.verdict.quiet and not self.verdict.hang

    @property
    def stopped_as_hung(self) -> bool:
        """Whether a rule stopped it because its GPUs were fully used without doing work."""
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
        """The GPUs that the rule judged, with their last readings."""
        for look in reversed(self.looks):
            if look.gpus:
                pairs = zip(look.gpus, look.readings, strict=True)
                return [(gpu, reading) for gpu, reading in pairs if self.judged is None or gpu.uuid in self.judged]
        return []

    def pids_on_gpus(self) -> set[int]:
        """Its processes on the GPUs that the rule judged, at the last look."""
        own = {process.pid for process in self.processes}
        listed = [reading.processes for _, reading in self.last_readings() if known(reading.processes)]
        return {process.pid for processes in listed for process in processes if process.pid in own}

    def has_other_processes(self) -> bool:
        """Whether processes of others are on the GPUs that the rule judged."""
        own = {process.pid for process in self.processes}
        listed = [reading.processes for _, reading in self.last_readings() if known(reading.processes)]
        return any(process.pid not in own for processes in listed for process in processes)

    def peak(self) -> float | None:
        """The highest utilization that the rule judged; None when none was read."""
        since = self.looks[-1].at - self.idle_window if self.looks and self.idle_window is not None else 0.0
        # A look covers the time before it, so the one at the start of the window does not count.
        readings = [reading for look in self.looks if look.at > since for reading in look.readings]
        seen = [r.utilization for r in readings if self.judged is None or r.uuid in self.judged]
        return max((utilization.peak for utilization in seen if known(utilization)), default=None)

    def main_threads(self) -> Iterator[tuple[int, Thread]]:
        """The pid and the main thread of every process whose stack is known."""
        for stack in self.stacks:
            if known(stack.threads) and stack.threads:
                yield stack.pid, stack.threads[0]


class NodeFacts(msgspec.Struct, frozen=True):
    """What another machine of the run contributes to the report."""

    node: str
    facts: RunFacts | None = None
    problem: str = ""
    """Why there are no facts of it."""
