"""Jobs over several machines: the observations of all nodes as one, so that a rule judges all GPUs together.

GPUs and processes are resolved on each node, by the scope of that node: pids and uuids of different nodes never meet.
"""

import math
from collections.abc import Collection, Mapping
from typing import Final, get_args

import msgspec

from stoker.gpus.history import joined_use
from stoker.gpus.model import JobProgress, Reading, Trust, Unknown
from stoker.rules.rule import UNSEEN, Activity, Observation

_TRUST: Final[tuple[str, ...]] = get_args(Trust)
# What the processes of some nodes did is less than what all did. A part that is below these could be all of a job at
# rest, which it may not be: then the sum is unknown.
_LEAST_CORES: Final = 0.5
_LEAST_IO: Final = 1e6
_NO_GPU: Final = "it lists no GPU"
# Two clocks drift apart by less than a hundredth of this.
_DRIFT: Final = 1e-3


def merge_observations(by_node: Mapping[str, Observation]) -> Observation:
    """One observation of a job on all its nodes, on one clock. A node that could not be read is one unknown GPU.

    It is of the moment up to which all of them have been seen. Each GPU speaks for the time before that moment only.
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
    """A step of any node is a step of the job; the most trusted source counts."""
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
    """From the monotonic clock of another machine to the one here, by the moments at which its reports arrive.

    Clocks of two machines have no common zero, and are never compared. A report takes no less than no time, so the
    least delay that was seen is the best estimate: one that was held up on its way is of when it was made.
    """

    def __init__(self) -> None:
        self._shift: float | None = None
        self._arrived = 0.0

    def here(self, there: float, arrived: float) -> float:
        """The moment here at which a report was made that has arrived now."""
        longest = math.inf if self._shift is None else self._shift + (arrived - self._arrived) * _DRIFT
        self._shift, self._arrived = min(arrived - there, longest), arrived
        return there + self._shift


def on_clock_here(observation: Observation, shift: ClockShift, arrived: float) -> Observation:
    """The observation of another node with its times on the clock here."""
    at = shift.here(observation.at, arrived)
    progress = observation.progress
    if progress.since is not None:
        progress = progress._replace(since=progress.since + at - observation.at)
    return observation._replace(at=at, progress=progress)


class NodeObservations:
    """Collects observations that nodes make at different moments. No activity between two merged ones is left out."""

    def __init__(self, nodes: Collection[str], begun: float, patience: float) -> None:
        """`patience`: how long the others wait for a node before it is unknown."""
        self._nodes = tuple(sorted(nodes))
        self._patience = patience
        self._at = begun
        """Of the last merged observation."""
        self._waited_since = begun
        self._new: dict[str, Observation] = {}
        self._last: dict[str, Observation] = {}
        self._lost: dict[str, str] = {}

    def add(self, node: str, observation: Observation) -> None:
        """The next observation of this node. Its time is on the clock of all."""
        earlier = self._new.get(node)
        self._new[node] = observation if earlier is None else _joined(earlier, observation)
        self._last[node] = observation
        self._lost.pop(node, None)

    def lose(self, node: str, reason: str) -> None:
        """Nothing is to be expected of this node, until it is added again."""
        self._lost[node] = reason

    def leave(self, node: str) -> None:
        """The job has ended on this node: the others are judged without it."""
        self._nodes = tuple(one for one in self._nodes if one != node)
        self._new.pop(node, None)

    def due(self) -> float:
        """When to take an observation at the latest."""
        return self._waited_since + self._patience

    def take(self, now: float) -> Observation | None:
        """The next merged observation. None while a node may still make its own."""
        missing = [node for node in self._nodes if node not in self._new]
        awaited = [node for node in missing if node not in self._lost]
        if now < self.due() and (awaited or not self._new):
            return None
        found = {**self._new, **{node: self._unknown(node) for node in missing}}
        at = min((one.at for one in self._new.values()), default=now)
        # An observation that comes after its node was given up is older than the last merged one.
        self._at = max(at, self._at)
        merged = merge_observations({node: one._replace(at=max(one.at, self._at)) for node, one in found.items()})
        self._new = {}
        self._waited_since = now
        return merged

    def _unknown(self, node: str) -> Observation:
        """The GPUs that the node had last, and nothing known of them."""
        reason = self._lost.get(node, "nothing was received from this node")
        last = self._last.get(node)
        seen = last.activities if last is not None else ()
        lost = [Activity(one.uuid, one.label, 0.0, Unknown(reason)) for one in seen]
        return Observation(self._at, lost, reason)


def _joined(earlier: Observation, later: Observation) -> Observation:
    """Two successive observations of one node as one: the peak of both, and unknown if one of them is."""
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
