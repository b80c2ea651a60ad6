"""One watched job of the cluster: its step, the reports of its nodes, and the judge."""

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from stoker.engines.slurm.watch.agent import Report
from stoker.engines.slurm.watch.commands import AgentStep
from stoker.engines.slurm.watch.jobs import ClusterJob
from stoker.gpus.model import Process, Unknown, known
from stoker.presence.ignoring import SHIPPED, is_ignored
from stoker.rules.judge import Judge, Judgement
from stoker.rules.nodes import ClockShift, NodeObservations, on_clock_here
from stoker.rules.rule import Observation, Policy
from stoker.rules.scope import MachineScope

# The step is restarted if a node is silent for this long and for this many looks.
_SILENT_FOR: Final = 60.0
_SILENT_LOOKS: Final = 6
# Growing delays between failed starts of a step.
_PAUSES: Final = (5.0, 60.0, 300.0, 1800.0)


class Used(NamedTuple):
    """GPU-seconds since the previous observation."""

    watched: float
    idle: float


class WatchedJob:
    """A job under watch. A failed step or a silent node makes its observations unknown."""

    def __init__(self, job: ClusterJob, policies: Sequence[Policy], cluster: str, *, dry_run: bool) -> None:
        self.job = job
        self._cluster = cluster
        now = time.monotonic()
        begun = now - max(time.time() - job.started, 0.0)
        self._judge = Judge(policies, begun, "cancel the job", unless="it uses them", dry_run=dry_run)
        self._below = min((policy.below for policy in policies), default=0.0)
        self._gap = max(policy.longest_gap for policy in policies)
        self._nodes = NodeObservations(job.nodes, now, self._judge.every * 3)
        self._scopes = {node: MachineScope("all", {}, _counts) for node in job.nodes}
        self._shift: dict[str, ClockShift] = {}
        self._last: float | None = None
        self.step: AgentStep | None = None
        self.problem = ""
        """Why its state is unknown; empty while its step works."""
        self.reported = ""
        """The problem as last logged."""
        self.supervised = False
        """A `stoker run` in the job watches it."""
        self._failures = 0
        self._start_at = now
        self._heard: dict[str, float] = {}
        """When each node last reported in this step."""

    def due(self) -> float:
        return self._nodes.due() if self.step is not None else self._start_at

    def begin_step(self, now: float) -> None:
        """Starts the step if that is due."""
        if self.step is not None or now < self._start_at:
            return
        try:
            self.step = AgentStep(self.job, self._judge.every, self._cluster)
            self._heard = dict.fromkeys(self.job.nodes, now)
        except KeyError:
            self._fail(now, f"there is no user {self.job.user} on this machine, so no step can be started")
        except OSError as error:
            self._fail(now, f"srun cannot be started: {error.strerror}")

    def read(self, now: float) -> None:
        """Reads the reports of its nodes."""
        step = self.step
        if step is None:
            return
        ended = step.over()
        for report in step.reports():
            self._take(report, now)
        if ended is not None:
            step.close()
            self.step = None
            self._fail(now, ended)
        elif now - min(self._heard.values()) > max(_SILENT_FOR, self._judge.every * _SILENT_LOOKS):
            step.leave()

    def _take(self, report: Report, now: float) -> None:
        scope = self._scopes.get(report.node)
        if scope is None:
            return
        self.supervised = report.supervised
        self._heard[report.node] = now
        self.problem, self._failures = "", 0
        shift = self._shift.setdefault(report.node, ClockShift())
        self._nodes.add(report.node, on_clock_here(scope.observe(report.look), shift, now))

    def _fail(self, now: float, problem: str) -> None:
        self.problem = problem
        self._shift.clear()
        for node in self.job.nodes:
            self._nodes.lose(node, problem)
        self._start_at = now + _PAUSES[min(self._failures, len(_PAUSES) - 1)]
        self._failures += 1

    def judge(self, now: float) -> tuple[Judgement, Used] | None:
        """Judges the next observation of all nodes; None if there is none."""
        observation = self._nodes.take(now)
        if observation is None:
            return None
        observation = self._with_all_gpus(observation)
        return self._judge.observe(observation), self._used(observation)

    def snooze(self, now: float) -> None:
        self._judge.snooze(now)

    def _with_all_gpus(self, observation: Observation) -> Observation:
        """The observation, made unknown if the nodes do not see all GPUs of the job."""
        seen = len(observation.activities)
        if observation.unknown or seen == self.job.gpus:
            return observation
        why = Unknown(f"the job has {self.job.gpus} GPUs, and the step beside it sees {seen}")
        return observation._replace(activities=[one._replace(peak=why) for one in observation.activities])

    def _used(self, observation: Observation) -> Used:
        last, self._last = self._last, observation.at
        passed = 0.0 if last is None else min(max(observation.at - last, 0.0), self._gap)
        peaks = [one.peak for one in observation.activities if known(one.peak)]
        return Used(passed * len(peaks), passed * sum(peak < self._below for peak in peaks))


def _counts(process: Process) -> bool:
    return not (known(process.name) and is_ignored(SHIPPED, process.name))
