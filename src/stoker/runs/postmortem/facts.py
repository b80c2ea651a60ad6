"""The facts from which the report of a run is written."""

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
from stoker.runs.record import Ending

# Log lines of the supervisor. After output without a line end they are in the same line.
_OWN_WORDS: Final = re.compile(r"\bstoker: .*\n?")


def its_own(text: str) -> str:
    """The output without the lines of the supervisor."""
    return _OWN_WORDS.sub("", text)


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one run, collected while its processes still lived where possible."""

    run: str
    job: str | None = None
    """The id of the queued job that it is an attempt of; None: it was started by `stoker run`."""
    command: tuple[str, ...]
    directory: str
    host: str
    user: str
    started: float
    """Seconds since the epoch."""
    ended: float
    ending: Ending
    reason: str
    """Which rule fired, or what else happened, in one sentence."""
    policy: str
    """The rule in words: `all GPUs below 1% for 30m`."""
    exit: str
    """How it went: `stopped by SIGTERM after 3 s, exit code 124`."""
    looks: Sequence[Look] = ()
    """The readings of the window, oldest first."""
    window: float = 0.0
    """Seconds that the chart goes back."""
    verdict: Verdict | None = None
    """That of the rule that stopped it."""
    idle_window: float | None = None
    """Seconds at the end of it that the rule went by; None: all."""
    below: float | None = None
    """The utilization below which a GPU counted as idle."""
    judged: Collection[str] | None = None
    """The uuids of the GPUs that the rule went by; None: all."""
    used: Collection[str] | None = None
    """The uuids of the GPUs on which the run was ever seen; None: unknown."""
    processes: Sequence[ProcessInfo] = ()
    stacks: Sequence[Stack] = ()
    outputs: Sequence[Output] = ()
    """The end of what it wrote, for each place that it wrote to."""
    driver: Maybe[str] = Unknown("it was not read")
    left: Sequence[str] = ()
    """What outlived the stop, in words: processes, or holders of GPU memory."""

    @property
    def quiet(self) -> bool:
        """Whether the GPUs did nothing in the window. Only then the stacks hint at the cause."""
        peak = self.peak()
        return self.stopped_quiet or (peak is not None and peak < self.limit)

    @property
    def stopped_quiet(self) -> bool:
        """Whether a rule stopped it because it did nothing on its GPUs."""
        return self.verdict is not None and self.verdict.quiet

    def words(self) -> list[str]:
        """The output for each file, without the lines of the supervisor."""
        return [its_own(output.text) for output in self.outputs if known(output.text)]

    @property
    def limit(self) -> float:
        """The utilization from which on a GPU counts as busy."""
        return self.below if self.below is not None else BUSY_FROM

    def process(self, pid: int) -> ProcessInfo | None:
        return next((process for process in self.processes if process.pid == pid), None)

    def last_readings(self) -> list[tuple[Gpu, Reading]]:
        """The GPUs that the rule went by, as they were seen last."""
        for look in reversed(self.looks):
            if look.gpus:
                pairs = zip(look.gpus, look.readings, strict=True)
                return [(gpu, reading) for gpu, reading in pairs if self.judged is None or gpu.uuid in self.judged]
        return []

    def has_other_processes(self) -> bool:
        """Whether processes of others are on the GPUs that the rule went by."""
        own = {process.pid for process in self.processes}
        listed = [reading.processes for _, reading in self.last_readings() if known(reading.processes)]
        return any(process.pid not in own for processes in listed for process in processes)

    def peak(self) -> float | None:
        """The highest utilization in the window that the rule went by, on its GPUs; None when none was seen."""
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
