"""Multi-node jobs: merges the observations of all nodes, so that a rule judges all GPUs together.

Each node resolves its own GPUs and processes, so pids and uuids of different nodes never mix.
"""

import math
from collections.abc import Collection, Mapping
from typing import Final, get_args

import msgspec

from stoker.gpus.history import joined_use
from stoker.gpus.model import JobProgress, Reading, Trust, Unknown
from stoker.rules.rule import UNSEEN, Activity, Observation

_TRUST: Final[tuple[str, ...]] = get_args(Trust)
# If some nodes are unknown, a sum below these values could wrongly look like an idle job, so it is unknown.
_LEAST_CORES: Final = 0.5
_LEAST_IO: Final = 1e6
_NO_GPU: Final = "it lists no GPU"
# A hundred times the usual drift between two clocks.
_DRIFT: Final = 1e-3


def merge_observations(by_node: Mapping[str, Observation]) -> Observation:
    """Merges the observations of a job on all its nodes, on one clock. An unreadable node counts as one unknown GPU.

    The result dates from the last moment that all nodes cover, and each GPU's span ends there.
    """
    if len(by_node) == 1:
        return next(iter(by_node.values()))
    at = min((one.at for one in by_node.values()), default=0.0)
    nodes = sorted(by_node.items())
    return Observation(
        at,
        [activity for node, one in nodes for activity in _of_node(node, one, at)],
        next((f"{node}: {one.problem}" for node, one in nodes if one.problem is not None), None),
        _merged_progress([one.progress for _node, one in nodes]),
    )


def _of_node(node: str, observation: Observation, at: float) -> list[Activity]:
    if not observation.activities:
        return [Activity(node, node, 0.0, Unknown(observation.problem or _NO_GPU))]
    later = observation.at - at
    return [
        activity._replace(
            uuid=f"{node}/{activity.uuid}",
            label=f"{activity.label} of {node}",
            span=max(activity.span - later, 0.0),
        )
        for activity in observation.activities
    ]


def _merged_progress(progress: Collection[JobProgress]) -> JobProgress:
    """Sums up progress: a step of any node is a step of the job. The most trusted source counts."""
    if not progress:
        return UNSEEN
    trust = min((one.trust for one in progress), key=_TRUST.index)
    trusted = [one for one in progress if one.trust == trust]
    steps = [one.steps for one in trusted if one.steps is not None]
    return JobProgress(
        steps=sum(steps) if steps else None,
        since=max((one.since for one in trusted if one.since is not None), default=None),
        trust=trust,
        cpu=_sum([one.cpu for one in progress], _LEAST_CORES),
        io=_sum([one.io for one in progress], _LEAST_IO),
    )


def _sum(values: Collection[float | None], least: float) -> float | None:
    seen = [value for value in values if value is not None]
    return sum(seen) if len(seen) == len(values) or sum(seen) >= least else None


class ClockShift:
    """Converts the monotonic clock of another machine to the local one, by the arrival times of its reports.

    Clocks of two machines have no common zero. No delay is negative, so the smallest one seen is the best estimate,
    and a delayed report keeps the time at which it was made.
    """

    def __init__(self) -> None:
        self._shift: float | None = None
        self._arrived = 0.0

    def here(self, there: float, arrived: float) -> float:
        """The local time at which a report that has just arrived was made."""
        longest = math.inf if self._shift is None else self._shift + (arrived - self._arrived) * _DRIFT
        self._shift, self._arrived = min(arrived - there, longest), arrived
        return there + self._shift


def on_clock_here(observation: Observation, shift: ClockShift, arrived: float) -> Observation:
    """The observation of another node, with times on the local clock."""
    at = shift.here(observation.at, arrived)
    progress = observation.progress
    if progress.since is not None:
        progress = progress._replace(since=progress.since + at - observation.at)
    return observation._replace(at=at, progress=progress)


class NodeObservations:
    """Collects observations of nodes at different times, without losing activity between two merged ones."""

    def __init__(self, nodes: Collection[str], begun: float, patience: float) -> None:
        """`patience`: the time after which a silent node becomes unknown."""
        self._nodes = tuple(sorted(nodes))
        self._patience = patience
        self._at = begun
        """The time of the last merged observation."""
        self._waited_since = begun
        self._new: dict[str, Observation] = {}
        self._last: dict[str, Observation] = {}
        self._lost: dict[str, str] = {}

    def add(self, node: str, observation: Observation) -> None:
        """Adds an observation of a node, with times on the common clock."""
        earlier = self._new.get(node)
        self._new[node] = observation if earlier is None else _joined(earlier, observation)
        self._last[node] = observation
        self._lost.pop(node, None)

    def lose(self, node: str, reason: str) -> None:
        """Makes a node unknown until its next observation."""
        self._lost[node] = reason

    def leave(self, node: str) -> None:
        """Removes a node after the job has ended there."""
        self._nodes = tuple(one for one in self._nodes if one != node)
        self._new.pop(node, None)

    def due(self) -> float:
        """The latest time for the next `take`."""
        return self._waited_since + self._patience

    def take(self, now: float) -> Observation | None:
        """The next merged observation; None while nodes are missing."""
        missing = [node for node in self._nodes if node not in self._new]
        awaited = [node for node in missing if node not in self._lost]
        if now < self.due() and (awaited or not self._new):
            return None
        found = {**self._new, **{node: self._unknown(node) for node in missing}}
        at = min((one.at for one in self._new.values()), default=now)
        # A late observation of a node may be older than the last merged one.
        self._at = max(at, self._at)
        merged = merge_observations({node: one._replace(at=max(one.at, self._at)) for node, one in found.items()})
        self._new = {}
        self._waited_since = now
        return merged

    def _unknown(self, node: str) -> Observation:
        """An observation with the node's last GPUs, all unknown."""
        reason = self._lost.get(node, "nothing was received from this node")
        last = self._last.get(node)
        seen = last.activities if last is not None else ()
        lost = [Activity(one.uuid, one.label, 0.0, Unknown(reason)) for one in seen]
        return Observation(self._at, lost, reason)


def _joined(earlier: Observation, later: Observation) -> Observation:
    """Joins two successive observations of a node: the peak of both, or unknown if either is."""
    before = {activity.uuid: activity for activity in earlier.activities}
    activities = [
        activity if (first := before.get(activity.uuid)) is None else _joined_activity(first, activity)
        for activity in later.activities
    ]
    cpu = [cpu for cpu in (earlier.progress.cpu, later.progress.cpu) if cpu is not None]
    io = [io for io in (earlier.progress.io, later.progress.io) if io is not None]
    progress = later.progress._replace(cpu=max(cpu, default=None), io=max(io, default=None))
    return later._replace(activities=activities, problem=later.problem or earlier.problem, progress=progress)


def _joined_activity(earlier: Activity, later: Activity) -> Activity:
    if isinstance(earlier.peak, Unknown):
        return later._replace(peak=earlier.peak)
    if isinstance(later.peak, Unknown):
        return later
    return later._replace(
        span=earlier.span + later.span,
        peak=max(earlier.peak, later.peak),
        reading=_joined_reading(earlier.reading, later.reading),
    )


def _joined_reading(earlier: Reading | None, later: Reading | None) -> Reading | None:
    if earlier is None or later is None:
        return later
    return msgspec.structs.replace(
        later,
        span=earlier.span + later.span,
        utilization=joined_use(earlier.utilization, later.utilization, earlier.span, later.span),
        memory_activity=joined_use(earlier.memory_activity, later.memory_activity, earlier.span, later.span),
    )
