"""Which GPUs count for a policy, and how much of what they did is the job's own doing."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final, Literal, Protocol

import msgspec

from stoker.errors import BadInputError
from stoker.gpus.model import Gpu, Look, Maybe, Process, Reading, Unknown, Utilization, known
from stoker.gpus.report import describe
from stoker.gpus.visible import select_gpus, visible_gpus
from stoker.rules.rule import UNSEEN, Activity, Observation

GpuScope = Literal["job", "mine", "visible", "all"]
# A process of root may run in a container that the job asked a daemon to start.
_NOBODY_ELSE: Final = frozenset({"root"})
# The driver reports shares in whole percents: this much of each can be lost in rounding.
_ROUNDING: Final = 0.01
# Shares and the device's own figure are sampled at different moments, so they never add up exactly. Where less than
# half of the work is attributed, the rest was done by a process that is not in the list.
_LEAST_ATTRIBUTED: Final = 0.5
_NOT_LISTED: Final = "the driver does not list it any more"


class Scope(Protocol):
    """Which GPUs count, and how much of what they did."""

    def observe(self, look: Look) -> Observation:
        """What a rule is given of this look."""


class DeviceScope(Scope):
    """Every device that is listed now; one that is gone is forgotten."""

    def observe(self, look: Look) -> Observation:
        return _observation(look, _activities(look, _labels(look.gpus), _device))


class MachineScope(Scope):
    """A fixed set of devices, the visible ones, or all; and of what they did, all or the part of some processes.

    A choice is resolved to uuids at the first look that could be read, because numbers change when a GPU falls off the
    machine. A device that is missing later is unknown.
    """

    def __init__(
        self, chosen: str, environment: Mapping[str, str], counts: Callable[[Process], bool] | None = None
    ) -> None:
        """`chosen`: `all`, `visible`, or what a person typed: `0,2` or uuids. `counts`: which processes; None: all."""
        self._chosen = chosen
        self._environment = environment
        self._part = _device if counts is None else _Part(counts)
        self._labels: dict[str, str] = {}
        """By uuid; empty before the first look that could be read."""
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
        # GPUs that are added later belong to "all" too. The list is the same object while it is equal.
        if look.problem is None and look.gpus is not self._known_gpus:
            if self._chosen == "all" or not self._labels:
                self._labels = _labels(self.gpus(look)) | self._labels
            self._known_gpus = look.gpus
        return _activities(look, self._labels, self._part, look.job.pids if look.job else ())

    def _tentative(self, look: Look) -> tuple[Gpu, ...]:
        """While the machine cannot be read, its list of GPUs may be incomplete: a missing one is not an error yet."""
        try:
            return self.gpus(look)
        except BadInputError:
            return ()


class JobScope(Scope):
    """The GPUs that a job can see, narrowed to those that it uses once that is known.

    On a GPU that is shared with another user only the job's own part counts. Where the driver does not report whose
    work it was, a busy GPU is unknown, never idle.
    """

    def __init__(self, environment: Mapping[str, str], user: str, *, only_used: bool = False) -> None:
        """`only_used` leaves out the GPUs that the job merely sees."""
        self._environment = environment
        self._pids: Container[int] = ()
        """The job's processes at the newest look."""
        self._user = user
        self._only_used = only_used
        self.used: set[str] = set()
        """The uuids of the GPUs on which a process of the job was ever seen."""
        self._visible: dict[str, str] = {}
        self._labels: dict[str, str] = {}
        """The label of every GPU when it was first seen, by uuid."""
        self._labelled: tuple[Gpu, ...] = ()
        self._part = _Part(self._may_be_own)
        self._recorded_gpus: tuple[Gpu, ...] = ()

    def observe(self, look: Look) -> Observation:
        return _observation(look, self.activities(look))

    @property
    def own_gpus(self) -> set[str] | None:
        """The uuids of the GPUs that the job sees or uses; None before that is known."""
        return self.used.union(self._visible) if self._visible else None

    def recorded(self, look: Look) -> Look:
        """The GPUs that the job sees or uses: on a machine with many jobs the others would be most of it."""
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
        """What the job did on its GPUs."""
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
        # Not seen on a GPU yet, the job may work through a daemon: only other users' processes are surely not its.
        user = process.user
        return not known(user) or user == self._user or user in _NOBODY_ELSE or _is_container_user(user)


class _Part:
    """How much of a GPU some processes used: the highest utilization that they can have had."""

    def __init__(self, counts: Callable[[Process], bool]) -> None:
        self._counts = counts
        self._attributed = False
        """Whether the driver has ever attributed work to one of them: then a share of 0 means that it did none."""

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
            # The work was done by others, or by a process that came and went, such as a health check.
            return 0.0
        if not others:
            return used.peak
        if len(shares) < len(own) or not _is_attributed(used, processes):
            return Unknown(
                f"it is shared with {describe(others[0])} and the driver does not report utilization per process"
            )
        # A process's share is a mean: at the most, all of it was done in a single one of the samples.
        return min(sum(shares) * max(used.samples, 1), used.peak)


def _is_among(process: Process, pids: Container[int]) -> bool:
    """A pid of another namespace may equal one of the job's by chance: it does not count."""
    return known(process.started) and process.pid in pids


def _is_attributed(used: Utilization, processes: Sequence[Process]) -> bool:
    """Whether the listed processes account for the work of the device.

    They do not if a process came and went between two looks, or if the driver reports no shares.
    """
    shares = [process.utilization for process in processes]
    if any(not known(share) for share in shares):
        return True  # the rest may be that process's, which is not the job's
    attributed = sum(share for share in shares if known(share))
    return attributed >= used.mean * _LEAST_ATTRIBUTED or used.mean - attributed <= _ROUNDING * len(shares)


def _is_container_user(user: str) -> bool:
    """A number is a user without a name on this machine, as in containers."""
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
    """The processes of the job on this GPU."""
    if not known(reading.processes):
        return ()
    return tuple(process for process in reading.processes if _is_among(process, pids))


def _device(reading: Reading) -> Maybe[float]:
    used = reading.utilization
    return used.peak if known(used) else used


def _labels(gpus: Sequence[Gpu]) -> dict[str, str]:
    return {gpu.uuid: f"GPU {gpu.index}" for gpu in gpus}
