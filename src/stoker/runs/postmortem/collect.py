"""The inquest into a run that is being stopped: questions its processes while they live, then writes the report.

Imported only then: a supervisor that lives beside a training for days has no need of it before.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from stoker.errors import StokerError
from stoker.gpus.model import Maybe, Unknown
from stoker.rules.idle import DEFAULT_WINDOW
from stoker.rules.registry import policies_of
from stoker.rules.rule import DEFAULT_EVERY, Verdict
from stoker.runs.journal import Journal
from stoker.runs.postmortem.facts import RunFacts
from stoker.runs.postmortem.process_info import read_processes
from stoker.runs.postmortem.report import brief, render
from stoker.runs.postmortem.stacks import collect_stacks
from stoker.runs.processes.signals import SignalStream
from stoker.runs.record import Record, Status
from stoker.runs.transcript import last_outputs
from stoker.streams import ERROR, emit

# The questions take one look's time at the most, so that the first signal is no later than that; but as long as
# py-spy needs on a busy machine, and never so long that a person wonders.
SHORTEST_PATIENCE: Final = 1.0
LONGEST_PATIENCE: Final = 10.0
# The chart shows what came before the window too: that is where it went wrong.
WINDOWS_SHOWN: Final = 1.5


class Queued(NamedTuple):
    """What a report says of an attempt at a queued job."""

    job: str
    output: Path
    """The file in which its output is kept."""


class Postmortem:
    """RunFacts of one run, gathered in two steps: before the stop and after it."""

    def __init__(
        self,
        record: Record,
        status: Status,
        journal: Journal,
        judged: frozenset[str] | None,
        queued: Queued | None,
        verdict: Verdict | None = None,
    ) -> None:
        """`judged` are the uuids of the GPUs that the rule went by, where the run was seen on none; None: all.

        `verdict` is that of the rule that stops the run, if one does.
        """
        self._record = record
        self._captured = queued.output if queued is not None else None
        spec = record.spec()
        policies = policies_of(spec.policy)
        self._every = min((policy.every for policy in policies), default=DEFAULT_EVERY)
        rule_window = max((policy.window for policy in policies), default=DEFAULT_WINDOW)
        window = rule_window * WINDOWS_SHOWN
        self._facts = RunFacts(
            run=spec.id,
            job=queued.job if queued is not None else None,
            command=spec.command,
            directory=spec.directory,
            host=spec.host,
            user=spec.user,
            started=spec.started,
            ended=time.time(),
            ending=status.ending or "signal",
            reason=status.reason,
            policy=spec.rule,
            verdict=verdict,
            exit="being stopped",
            looks=journal.recent(window),
            window=window,
            idle_window=rule_window,
            below=next((policy.below for policy in policies), None),
            judged=status.used or judged,
            used=status.used,
            driver=_driver(),
        )

    def question(self, pids: Sequence[int], *, hurry: SignalStream) -> None:
        """Asks every process where it is, for a bounded time; a Ctrl-C meanwhile cuts it short."""
        patience = min(max(self._every, SHORTEST_PATIENCE), LONGEST_PATIENCE)
        processes = read_processes(pids)
        outputs = last_outputs(pids, self._captured)
        stacks = collect_stacks(pids, deadline=patience, enough=lambda: bool(hurry.read()))
        self._facts = msgspec.structs.replace(self._facts, processes=processes, outputs=outputs, stacks=stacks)
        # Written now as well: should the stop itself be cut short, what was learned is there.
        self._write()

    def publish(self, how: str, left: Sequence[str]) -> None:
        """Completes the report with how the stop went, and tells the person in brief."""
        self._facts = msgspec.structs.replace(self._facts, exit=how, left=left, ended=time.time())
        written = self._write()
        emit(ERROR, brief(self._facts, str(self._record.report) if written else None) + "\n")

    def _write(self) -> bool:
        if not self._record.is_kept:
            return False
        try:
            self._record.write_report(render(self._facts))
        except StokerError as error:
            emit(ERROR, f"stoker: {error}\n")
            return False
        return True


def _driver() -> Maybe[str]:
    """The kernel module's own word; it needs no driver call, which might block."""
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as version:  # noqa: PTH123 - a file of /proc
            return version.readline().strip()
    except OSError:
        return Unknown("there is no NVIDIA kernel driver here")
