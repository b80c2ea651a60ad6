"""Determines which GPUs count for a policy, and the job's own part of their activity."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final, Literal, Protocol

import msgspec

from stoker.errors import BadInputError
from stoker.gpus.model import Gpu, Look, Maybe, Process, Reading, Unknown, Utilization, known
from stoker.gpus.report import describe
from stoker.gpus.visible import select_gpus, visible_gpus
from stoker.rules.rule import UNSEEN, Activity, Observation

GpuScope = Literal["job", "mine", "visible", "all"]
# A process of root may run in a container that a daemon started for the job.
_NOBODY_ELSE: Final = frozenset({"root"})
# The driver reports shares in whole percent, so rounding can lose this much of each.
_ROUNDING: Final = 0.01
# Shares and the device's utilization are sampled at different moments, so they never add up exactly. If less than half
# of the work is attributed, an unlisted process did the rest.
_LEAST_ATTRIBUTED: Final = 0.5
_NOT_LISTED: Final = "the driver does not list it any more"


class Scope(Protocol):
    """The GPUs that count, and the part of their activity that counts."""

    def observe(self, look: Look) -> Observation:
        """The observation for rules from this look."""


class DeviceScope(Scope):
    """All currently listed devices; missing ones are forgotten."""

    def observe(self, look: Look) -> Observation:
        return _observation(look, _activities(look, _labels(look.gpus), _device))


class MachineScope(Scope):
    """A fixed set of devices, the visible ones, or all; with all their activity, or that of some processes.

    The choice is resolved to uuids at the first readable look, because indices change when a GPU falls off the bus. A
    device that is missing later is unknown.
    """

    def __init__(
        self, chosen: str, environment: Mapping[str, str], counts: Callable[[Process], bool] | None = None
    ) -> None:
        """`chosen`: `all`, `visible`, `0,2` or uuids. `counts`: selects processes; None for all."""
        self._chosen = chosen
        self._environment = environment
        self._part = _device if counts is None else _Part(counts)
        self._labels: dict[str, str] = {}
        """Labels by uuid; empty before the first readable look."""
        self._known_gpus: Sequence[Gpu] = ()

    def gpus(self, look: Look) -> tuple[Gpu, ...]:
        if self._chosen == "visible":
            return visible_gpus(look.gpus, self._environment)
        return select_gpus(look.gpus, self._chosen)

    def observe(self, look: Look) -> Observation:
        return _observation(look, self.activities(look))

    def activities(self, look: Look) -> list[Activity]:
        if look.problem is not None and not self._labels:
            return _activities(look, _labels(self._tentative(look)), self._part)
        # "all" includes GPUs that are added later. The list is the same object while it is equal.
        if look.problem is None and look.gpus is not self._known_gpus:
            if self._chosen == "all" or not self._labels:
                self._labels = _labels(self.gpus(look)) | self._labels
            self._known_gpus = look.gpus
        return _activities(look, self._labels, self._part, look.job.pids if look.job else ())

    def _tentative(self, look: Look) -> tuple[Gpu, ...]:
        """The GPUs of an unreadable machine, whose list may be incomplete: a missing GPU is not yet an error."""
        try:
            return self.gpus(look)
        except BadInputError:
            return ()


class JobScope(Scope):
    """The GPUs visible to a job, narrowed to those that it uses once that is known.

    On a GPU shared with another user only the job's part counts. If the driver does not attribute work, a busy GPU is
    unknown, never idle.
    """

    def __init__(self, environment: Mapping[str, str], user: str, *, only_used: bool = False) -> None:
        """`only_used`: leaves out GPUs that the job sees but does not use."""
        self._environment = environment
        self._pids: Container[int] = ()
        """The job's processes at the latest look."""
        self._user = user
        self._only_used = only_used
        self.used: set[str] = set()
        """The uuids of all GPUs that the job has used."""
        self._visible: dict[str, str] = {}
        self._labels: dict[str, str] = {}
        """The first label of each GPU, by uuid."""
        self._labelled: tuple[Gpu, ...] = ()
        self._part = _Part(self._may_be_own)
        self._recorded_gpus: tuple[Gpu, ...] = ()

    def observe(self, look: Look) -> Observation:
        return _observation(look, self.activities(look))

    @property
    def own_gpus(self) -> set[str] | None:
        """The uuids of the GPUs that the job sees or uses; None until that is known."""
        return self.used.union(self._visible) if self._visible else None

    def recorded(self, look: Look) -> Look:
        """The look without foreign GPUs, which are the majority on a machine with many jobs."""
        wanted = self.own_gpus
        own = [
            (gpu, reading)
            for gpu, reading in zip(look.gpus, look.readings, strict=True)
            if wanted and gpu.uuid in wanted
        ]
        if wanted is None or len(own) == len(look.gpus):
            return look
        gpus = tuple([gpu for gpu, _ in own])
        if gpus != self._recorded_gpus:
            self._recorded_gpus = gpus
        return msgspec.structs.replace(look, gpus=self._recorded_gpus, readings=tuple([reading for _, reading in own]))

    def activities(self, look: Look) -> list[Activity]:
        """The job's activity on its GPUs."""
        pids = self._pids = frozenset(look.job.pids if look.job else ())
        if look.gpus is not self._labelled:
            self._labels = _labels(look.gpus) | self._labels
            self._labelled = look.gpus
        for gpu, reading in zip(look.gpus, look.readings, strict=True):
            if known(reading.processes) and any(_is_among(process, pids) for process in reading.processes):
                self.used.add(gpu.uuid)
        return _activities(look, self._wanted(look), self._part, pids)

    def _wanted(self, look: Look) -> Mapping[str, str]:
        visible = self._visible
        if not visible and not self._only_used:
            visible = _labels(visible_gpus(look.gpus, self._environment))
            if look.problem is None:
                self._visible = visible
        if self.used or self._only_used:
            return {uuid: self._labels[uuid] for uuid in self.used}
        return visible

    def _may_be_own(self, process: Process) -> bool:
        if _is_among(process, self._pids):
            return True
        if self.used:
            return False
        # Before the job is seen on a GPU, it may work through a daemon: only processes of other users are certainly
        # foreign.
        user = process.user
        return not known(user) or user == self._user or user in _NOBODY_ELSE or _is_container_user(user)


class _Part:
    """The part of a GPU that some processes used: their highest possible utilization."""

    def __init__(self, counts: Callable[[Process], bool]) -> None:
        self._counts = counts
        self._attributed = False
        """The driver has attributed work to one of them before, so a share of 0 means no work."""

    def __call__(self, reading: Reading) -> Maybe[float]:
        used, processes = reading.utilization, reading.processes
        if not known(used) or used.peak == 0 or not known(processes):
            return _device(reading)
        if not all(process.is_identified for process in processes):
            return _device(reading)
        others = [process for process in processes if not self._counts(process)]
        own = [process.utilization for process in processes if self._counts(process)]
        shares = [share for share in own if known(share)]
        self._attributed = self._attributed or any(shares)
        if self._attributed and len(shares) == len(own) > 0 and not any(shares):
            # Others did the work, or a transient process such as a health check.
            return 0.0
        if not others:
            return used.peak
        if len(shares) < len(own) or not _is_attributed(used, processes):
            return Unknown(
                f"it is shared with {describe(others[0])} and the driver does not report utilization per process"
            )
        # A share is a mean: at most, all of it falls into a single sample.
        return min(sum(shares) * max(used.samples, 1), used.peak)


def _is_among(process: Process, pids: Container[int]) -> bool:
    """True for a process of the job. A pid from another namespace does not count, since it may match by chance."""
    return known(process.started) and process.pid in pids


def _is_attributed(used: Utilization, processes: Sequence[Process]) -> bool:
    """True if the listed processes account for the work of the device.

    They do not after a transient process, or if the driver reports no shares.
    """
    shares = [process.utilization for process in processes]
    if any(not known(share) for share in shares):
        return True  # the rest may belong to a foreign process
    attributed = sum(share for share in shares if known(share))
    return attributed >= used.mean * _LEAST_ATTRIBUTED or used.mean - attributed <= _ROUNDING * len(shares)


def _is_container_user(user: str) -> bool:
    """True for a numeric user, which has no name on this machine, as in containers."""
    return user.isdigit()


def _observation(look: Look, activities: Sequence[Activity]) -> Observation:
    return Observation(look.at, activities, look.problem.reason if look.problem else None, look.job or UNSEEN)


def _activities(
    look: Look, labels: Mapping[str, str], peak: Callable[[Reading], Maybe[float]], pids: Container[int] = ()
) -> list[Activity]:
    """One for each label: what its GPU did, unknown where it is missing."""
    found = [
        Activity(gpu.uuid, labels[gpu.uuid], reading.vouched, peak(reading), reading, _among(reading, pids))
        for gpu, reading in zip(look.gpus, look.readings, strict=True)
        if gpu.uuid in labels
    ]
    if len(found) < len(labels):
        there = {gpu.uuid for gpu in look.gpus}
        why = look.problem or Unknown(_NOT_LISTED)
        found += [Activity(uuid, label, 0.0, why) for uuid, label in labels.items() if uuid not in there]
    return found


def _among(reading: Reading, pids: Container[int]) -> tuple[Process, ...]:
    """The job's processes on this GPU."""
    if not known(reading.processes):
        return ()
    return tuple(process for process in reading.processes if _is_among(process, pids))


def _device(reading: Reading) -> Maybe[float]:
    used = reading.utilization
    return used.peak if known(used) else used


def _labels(gpus: Sequence[Gpu]) -> dict[str, str]:
    return {gpu.uuid: f"GPU {gpu.index}" for gpu in gpus}
