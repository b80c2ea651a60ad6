"""What room there is on each GPU: what is seen of it, who of ours holds it, and what stands in a job's way there.

Plain data and arithmetic: no clock and no I/O. All times are seconds on one clock of the caller's choice.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

import msgspec

from stoker.gpus.model import Maybe, Unknown

# What people are told of GPUs that a background program has: it stands where the id of a job would.
BACKGROUND: Final = "background"


class ResourceRequest(msgspec.Struct, frozen=True):
    """What a job asks for."""

    job: str
    gpus: int
    """How many GPUs; 0 for a job that needs none."""
    order: int
    """Smaller was submitted earlier, or moved ahead since."""
    memory: int | None = None
    """Bytes on each of its GPUs; None when it did not say."""
    shares: bool = False
    priority: int = 0
    """Higher goes first."""
    preemptible: bool = False
    time_limit: float | None = None
    """Seconds it may run at the most."""
    background: bool = False
    """No job at all, but a program that fills an idle GPU: it steps aside also for preemptible jobs."""


class Allocation(msgspec.Struct, frozen=True):
    """A job of ours that has started and not ended: it holds what it asked for, even while it is still loading."""

    want: ResourceRequest
    gpus: tuple[str, ...]
    """The uuids it was given."""
    since: float
    used: Mapping[str, int] | None = None
    """Bytes it really uses on each GPU: one that is missing is not in use yet; None when nobody can tell."""
    stopping: bool = False
    """It has been asked to end, for whatever reason: its GPUs are coming free."""
    at_stake: float | None = None
    """Seconds of work that a stop would throw away, where a checkpoint tells; otherwise all since it started."""

    @property
    def ends(self) -> float:
        return self.since + self.want.time_limit if self.want.time_limit is not None else math.inf


class GpuState(msgspec.Struct, frozen=True):
    """One GPU of this machine as the last looks showed it."""

    uuid: str
    index: int
    memory_total: Maybe[int]
    memory_used: Maybe[int]
    peak: Maybe[float]
    """Utilization over the last looks, as a fraction of 1."""
    foreigners: tuple[str, ...] = ()
    """Processes that are not ours, such as `alice's python (pid 4242)`."""
    problem: str | None = None
    """Why the GPU, or who is on it, could not be read."""
    obstructed_since: float | None = None
    """Since when something other than our jobs has kept it from being free; None when that is new."""


class PlacementOptions(msgspec.Struct, frozen=True):
    """How this worker hands its GPUs out."""

    free_below: float = 0.5
    """A GPU that nobody holds but that works more than this is somebody's."""
    slots_per_gpu: int = 1
    """More than 1: as many jobs on one GPU, whether or not they said that they share."""
    cpu_jobs: int = 4
    """How many jobs without a GPU run at once."""
    settles_within: float = 60.0
    """Memory and utilization fall within seconds of a job's end; after a minute somebody unseen is there."""
    stays_after: float = 600.0
    """A foreigner of ten minutes is there to stay: GPUs are no longer kept empty for a job that would need theirs."""

    def takes_whole_gpus(self, want: ResourceRequest) -> bool:
        return self.slots_per_gpu == 1 and not (want.shares and want.memory is not None)


class Unreadable(msgspec.Struct, frozen=True, tag="unreadable"):
    reason: str


class UsedByOthers(msgspec.Struct, frozen=True, tag="foreign"):
    processes: tuple[str, ...]


class TooSmall(msgspec.Struct, frozen=True, tag="too-small"):
    usable: int


class Busy(msgspec.Struct, frozen=True, tag="busy"):
    """Nobody is seen on it, and yet it works."""

    peak: float
    free_below: float


class MemoryTaken(msgspec.Struct, frozen=True, tag="memory-taken"):
    """Nobody is seen on it, and yet its memory has not come back."""

    used: int


class Held(msgspec.Struct, frozen=True, tag="held"):
    jobs: tuple[str, ...]
    frees_in: float | None
    """Seconds after which there is room at the latest, by the time limits; None when nothing bounds it."""
    left: int | None
    """Bytes still free, for a job that would share."""


class Stopping(msgspec.Struct, frozen=True, tag="stopping"):
    jobs: tuple[str, ...]


class ReservedFor(msgspec.Struct, frozen=True, tag="kept"):
    """Free, but for a job that comes first."""

    job: str
    gpus: int
    """How many it asks for."""
    has: int
    """How many of them it could have now."""


class Free(msgspec.Struct, frozen=True, tag="free"):
    """Nothing stands in the way here: it is the other GPUs that are missing."""


Obstacle = Unreadable | UsedByOthers | TooSmall | Busy | MemoryTaken | Held | Stopping | ReservedFor | Free


class GpuHolder(NamedTuple):
    """One job's claim on one GPU."""

    job: str
    whole: bool
    reserved: int
    """What it asked for or really uses, whichever is more."""
    ends: float
    gives_way: bool
    stopping: bool


class GpuReservation(NamedTuple):
    """The first job that has to wait comes first on this GPU."""

    want: ResourceRequest
    until: float
    """When it can start at the latest, by the time limits; infinite when nothing bounds it."""
    kept: ReservedFor


class GpuCapacity:
    """One GPU and its holders, while a decision is being made."""

    def __init__(self, gpu: GpuState, holdings: Iterable[Allocation], rules: PlacementOptions, now: float) -> None:
        self.gpu = gpu
        self.rules = rules
        self.reservation: GpuReservation | None = None
        self.promised_to: ReservedFor | None = None
        self.holders: list[GpuHolder] = []
        self._count_memory(gpu)
        attributed, everyone_told = 0, True
        for holding in holdings:
            everyone_told = everyone_told and holding.used is not None
            asked = holding.want.memory or 0
            used = asked if holding.used is None else holding.used.get(gpu.uuid, 0)
            attributed += used
            self.add(holding.want, holding.ends, stopping=holding.stopping, used=used)
        # Up to the slack it is the driver's own, which the slack is for.
        unexplained = max(0, self.used - attributed)
        self.unexplained = unexplained if unexplained > self.slack else 0
        self._is_strange = self.unexplained > 0 and everyone_told
        age = now - gpu.obstructed_since if gpu.obstructed_since is not None else 0.0
        self.outside = _outside(gpu)
        self.settles_soon = age <= rules.settles_within
        self._stays = age > rules.stays_after

    def _count_memory(self, gpu: GpuState) -> None:
        self.total = 0 if isinstance(gpu.memory_total, Unknown) else gpu.memory_total
        self.used = 0 if isinstance(gpu.memory_used, Unknown) else gpu.memory_used
        # What a driver keeps for itself, or one CUDA context that nobody counted: half a GiB on the cards people have,
        # more on the largest; on a tiny one never more than a tenth.
        self.slack = min(max(512 * 2**20, self.total // 50), self.total // 10)

    def add(self, want: ResourceRequest, ends: float, *, stopping: bool = False, used: int = 0) -> None:
        whole = self.rules.takes_whole_gpus(want)
        reserved = max(want.memory or 0, used)
        self.holders.append(GpuHolder(want.job, whole, reserved, ends, want.preemptible, stopping))

    def remove(self, job: str) -> None:
        self.holders = [holder for holder in self.holders if holder.job != job]

    def is_held_by(self, job: str) -> bool:
        return any(holder.job == job for holder in self.holders)

    def could_ever_fit(self, want: ResourceRequest) -> bool:
        """Whether the GPU is large enough, were it empty; one whose size is not known may be."""
        return not want.memory or isinstance(self.gpu.memory_total, Unknown) or want.memory <= self.usable(want)

    def usable(self, want: ResourceRequest) -> int:
        """The memory that the job could have here, were the GPU empty."""
        return self.total if self.rules.takes_whole_gpus(want) else self.total - self.slack

    def is_lost(self, want: ResourceRequest) -> bool:
        """Whether something other than our jobs has it, with no sign that this will change."""
        if self.outside is not None:
            return self._stays
        return not self.holders and not self.settles_soon and self._unsettled(want) is not None

    def has_room(self, want: ResourceRequest) -> bool:
        """Whether the job could start here this moment."""
        if self.outside is not None or not self.could_ever_fit(want):
            return False
        if not self.holders:
            return self._unsettled(want) is None
        return self._fits_beside(want, self.holders)

    def will_have_room(self, want: ResourceRequest, gone: Collection[str]) -> bool:
        """Whether the job could start here once those jobs are gone and what they used has come back."""
        if self.outside is not None or not self.could_ever_fit(want):
            return False
        if not self.holders:
            return self.settles_soon or self._unsettled(want) is None
        left = [holder for holder in self.holders if holder.job not in gone]
        if not left:
            return self.settles_soon or not self._is_too_full_for(want)
        return self._fits_beside(want, left)

    def frees_at(self, want: ResourceRequest, gone: Collection[str], now: float) -> float:
        """When the job could start here at the latest, by the time limits of those that hold it."""
        if self.will_have_room(want, gone):
            return now
        released = set(gone)
        for holder in sorted(self.holders, key=lambda holder: holder.ends):
            released.add(holder.job)
            if self.will_have_room(want, released):
                return max(now, holder.ends)
        return math.inf

    def left(self) -> int:
        """Bytes that nobody holds."""
        return max(0, self.total - self.slack - self.unexplained - sum(holder.reserved for holder in self.holders))

    def _has_place_beside(self, want: ResourceRequest, holders: Collection[GpuHolder]) -> bool:
        """Whether they would share the GPU at all, memory aside."""
        if self.rules.takes_whole_gpus(want) or any(holder.whole for holder in holders):
            return False
        return self.rules.slots_per_gpu == 1 or len(holders) < self.rules.slots_per_gpu

    def _fits_beside(self, want: ResourceRequest, holders: Collection[GpuHolder]) -> bool:
        if not self._has_place_beside(want, holders) or self._is_too_full_for(want):
            return False
        reserved = self.unexplained + sum(holder.reserved for holder in holders)
        return reserved + (want.memory or 0) <= self.total - self.slack

    def _unsettled(self, want: ResourceRequest) -> Busy | MemoryTaken | None:
        """Why a GPU that nobody holds is not free all the same."""
        peak = self.gpu.peak
        if not isinstance(peak, Unknown) and peak >= self.rules.free_below:
            return Busy(peak, self.rules.free_below)
        return MemoryTaken(self.used) if self._is_too_full_for(want) else None

    def _is_too_full_for(self, want: ResourceRequest) -> bool:
        """Whether memory that is nobody's of ours leaves the job too little."""
        if want.memory is None:
            return self._is_strange
        return self.unexplained > 0 and self.unexplained + want.memory > self.usable(want)

    def obstacle(self, want: ResourceRequest, stopping: Collection[str], now: float) -> Obstacle:
        """What keeps this job from this GPU, told to the person who asks."""
        if self.outside is not None:
            return self.outside
        if not self.could_ever_fit(want):
            return TooSmall(self.usable(want))
        if not self.holders:
            return self._unsettled(want) or Free()
        if self._fits_beside(want, self.holders):
            return Free()
        return self._held(want, stopping, now)

    def _held(self, want: ResourceRequest, stopping: Collection[str], now: float) -> Held | Stopping | ReservedFor:
        ending = tuple(holder.job for holder in self.holders if holder.job in stopping)
        if self.promised_to is not None and self.will_have_room(want, {self.promised_to.job}):
            return self.promised_to
        if ending and self.will_have_room(want, ending):
            return Stopping(ending)
        frees_at = self.frees_at(want, (), now)
        left = self.left() if self._has_place_beside(want, self.holders) else None
        promised = self.promised_to.job if self.promised_to is not None else None
        jobs = tuple(holder.job for holder in self.holders if holder.job != promised)
        return Held(jobs, frees_at - now if math.isfinite(frees_at) else None, left)


def _outside(gpu: GpuState) -> Unreadable | UsedByOthers | None:
    """What nobody here can do anything about. Unknown is never free."""
    if gpu.problem is not None:
        return Unreadable(gpu.problem)
    for value in (gpu.memory_total, gpu.memory_used, gpu.peak):
        if isinstance(value, Unknown):
            return Unreadable(value.reason)
    return UsedByOthers(gpu.foreigners) if gpu.foreigners else None
