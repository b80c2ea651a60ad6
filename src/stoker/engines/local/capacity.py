"""The capacity of each GPU: its state, its jobs, and the obstacles for another job.

Pure: no clock and no I/O. All times are seconds on one clock that the caller chooses.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final, Literal, NamedTuple

import msgspec

from stoker.engines.engine import Reservation
from stoker.gpus.model import Link, Maybe, Unknown, is_model

# The job id of background programs.
BACKGROUND: Final = "background"
# Memory and utilization drop within seconds after a job ends; after a minute an unseen process uses the GPU.
SETTLES_WITHIN: Final = 60.0
# Other users who stay ten minutes count as permanent: no GPUs are reserved for a job that needs theirs too.
_STAYS_AFTER: Final = 600.0
# The driver reports at least this share of a card's nominal memory: 14.7 of 16 GiB with error correction.
_REPORTED_SHARE: Final = 0.92


class ResourceRequest(msgspec.Struct, frozen=True):
    """The resources that a job needs."""

    job: str
    gpus: int
    """The number of GPUs; 0 for a CPU job."""
    order: int
    """The position in the queue; smaller goes first."""
    memory: int | None = None
    """Bytes on each of its GPUs; None if not given."""
    shares: bool = False
    priority: int = 0
    """Higher goes first."""
    preemptible: bool = False
    time_limit: float | None = None
    """Seconds."""
    background: bool = False
    """A background program, which even preemptible jobs preempt."""
    gpu_model: str | None = None
    """Substrings of model names, separated by `|`."""
    gpu_memory: int | None = None
    """The minimum total memory of each GPU, in bytes."""
    cpus: int = 0
    ram: int = 0
    """Bytes."""
    machine: str | None = None
    labels: tuple[str, ...] = ()
    """Labels that its machine must have."""
    excluded: tuple[str, ...] = ()
    """Machines on which it must not run."""

    @property
    def shape(self) -> "ResourceRequest":
        """The request without the job's identity. Jobs of one shape fit on the same GPUs."""
        return msgspec.structs.replace(self, job="", order=0)


class Allocation(msgspec.Struct, frozen=True):
    """The resources of a running job: all that it requested, even while it is still loading."""

    request: ResourceRequest
    gpus: tuple[str, ...]
    """Uuids."""
    since: float
    used: Mapping[str, int] | None = None
    """Measured bytes on each GPU in use so far; None if unknown."""
    stopping: bool = False
    """It is being stopped: its GPUs will be free soon."""

    @property
    def ends(self) -> float:
        return self.since + self.request.time_limit if self.request.time_limit is not None else math.inf


class GpuState(msgspec.Struct, frozen=True):
    """One GPU according to the last looks."""

    uuid: str
    index: int
    memory_total: Maybe[int]
    memory_used: Maybe[int]
    peak: Maybe[float]
    """Peak utilization over the last looks, between 0 and 1."""
    other_processes: tuple[str, ...] = ()
    """Foreign processes, such as `alice's python (pid 4242)`."""
    problem: str | None = None
    """Why the GPU or its processes could not be read."""
    obstructed_since: float | None = None
    """Since when something other than the worker's jobs blocks it; None if nothing does."""
    quarantine: str | None = None
    """Why it is out of rotation; None if it is in rotation."""
    name: str = ""
    links: tuple[tuple[str, Link], ...] = ()
    """Known links to other GPUs, by uuid."""


GpuOrder = Literal["links", "memory", "index"]


class PlacementOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How jobs get the GPUs of this machine."""

    free_below: float = 0.5
    """A GPU without a job but with a higher utilization counts as used by others."""
    slots_per_gpu: int = 1
    """With more than 1, this many jobs share a GPU, with or without `--share`."""
    cpu_jobs: int = 4
    """The maximum number of running jobs without a GPU."""
    gpu_order: GpuOrder = "links"
    """The preference among GPUs that fit: best connected, then least memory; least memory; or lowest index."""

    def takes_whole_gpus(self, request: ResourceRequest) -> bool:
        return self.slots_per_gpu == 1 and not (request.shares and request.memory is not None)


class OutOfRotation(msgspec.Struct, frozen=True):
    reason: str


class UnreadableGpu(msgspec.Struct, frozen=True):
    reason: str


class UsedByOthers(msgspec.Struct, frozen=True):
    processes: tuple[str, ...]


class TooSmall(msgspec.Struct, frozen=True):
    usable: int


class OtherModel(msgspec.Struct, frozen=True):
    name: str


class Busy(msgspec.Struct, frozen=True):
    """It is busy without a visible process."""

    peak: float
    free_below: float


class MemoryTaken(msgspec.Struct, frozen=True):
    """Its memory is in use without a visible process."""

    used: int


class Held(msgspec.Struct, frozen=True):
    jobs: tuple[str, ...]
    frees_in: float | None
    """Upper bound in seconds until there is room, by time limits; None without one."""
    left: int | None
    """Free bytes, for a job that could share the GPU."""


class Stopping(msgspec.Struct, frozen=True):
    jobs: tuple[str, ...]


class Free(msgspec.Struct, frozen=True):
    """No obstacle: the job needs more GPUs than this one."""


Obstacle = (
    OutOfRotation
    | UnreadableGpu
    | UsedByOthers
    | OtherModel
    | TooSmall
    | Busy
    | MemoryTaken
    | Held
    | Stopping
    | Reservation
    | Free
)
"""What keeps a job from a GPU. With a `Reservation`, the GPU is free but kept for a job that goes first."""


class GpuHolder(NamedTuple):
    """One job's claim on one GPU."""

    job: str
    whole: bool
    reserved: int
    """Requested or measured bytes, whichever is larger."""
    ends: float


class GpuReservation(NamedTuple):
    """The reservation of this GPU for the first waiting job."""

    request: ResourceRequest
    until: float
    """The latest start of that job, by time limits; infinite without them."""
    kept: Reservation


class GpuCapacity:
    """One GPU and its holders during a decision."""

    def __init__(self, gpu: GpuState, allocations: Iterable[Allocation], rules: PlacementOptions, now: float) -> None:
        self.gpu = gpu
        self.rules = rules
        self.reservation: GpuReservation | None = None
        self.promised_to: Reservation | None = None
        self.holders: list[GpuHolder] = []
        self._count_memory(gpu)
        attributed, all_known = 0, True
        for allocation in allocations:
            all_known = all_known and allocation.used is not None
            asked = allocation.request.memory or 0
            used = asked if allocation.used is None else allocation.used.get(gpu.uuid, 0)
            attributed += used
            self.add(allocation.request, allocation.ends, used)
        # The driver itself uses the slack.
        unexplained = max(0, self.used - attributed)
        self.unexplained = unexplained if unexplained > self.slack else 0
        self._is_unexplained = self.unexplained > 0 and all_known
        age = now - gpu.obstructed_since if gpu.obstructed_since is not None else 0.0
        self.outside = _outside(gpu)
        self.settles_soon = age <= SETTLES_WITHIN
        self._stays = age > _STAYS_AFTER

    def _count_memory(self, gpu: GpuState) -> None:
        self.total = 0 if isinstance(gpu.memory_total, Unknown) else gpu.memory_total
        self.used = 0 if isinstance(gpu.memory_used, Unknown) else gpu.memory_used
        # The driver's own memory, or one uncounted CUDA context: half a GiB on common cards, more on the largest, and
        # at most a tenth of a tiny one.
        self.slack = min(max(512 * 2**20, self.total // 50), self.total // 10)

    def add(self, request: ResourceRequest, ends: float, used: int = 0) -> None:
        whole = self.rules.takes_whole_gpus(request)
        self.holders.append(GpuHolder(request.job, whole, max(request.memory or 0, used), ends))

    def remove(self, job: str) -> None:
        self.holders = [holder for holder in self.holders if holder.job != job]

    def is_held_by(self, job: str) -> bool:
        return any(holder.job == job for holder in self.holders)

    def could_ever_fit(self, request: ResourceRequest) -> bool:
        """True if the GPU has the right model and is large enough when empty. An unknown size may be enough."""
        if not self.is_of_model(request):
            return False
        if isinstance(self.gpu.memory_total, Unknown):
            return True
        return not self._is_card_too_small(request) and (not request.memory or request.memory <= self.usable(request))

    def is_of_model(self, request: ResourceRequest) -> bool:
        return request.gpu_model is None or is_model(self.gpu.name, request.gpu_model)

    def _is_card_too_small(self, request: ResourceRequest) -> bool:
        return request.gpu_memory is not None and self.total < request.gpu_memory * _REPORTED_SHARE

    def usable(self, request: ResourceRequest) -> int:
        """The memory that the job could use on the empty GPU."""
        return self.total if self.rules.takes_whole_gpus(request) else self.total - self.slack

    def is_lost(self, request: ResourceRequest) -> bool:
        """True if others use it, with no sign of leaving."""
        if self.outside is not None:
            return self._stays or isinstance(self.outside, OutOfRotation)
        return not self.holders and not self.settles_soon and self._unsettled(request) is not None

    def has_room(self, request: ResourceRequest) -> bool:
        """True if the job can start here now."""
        if self.outside is not None or not self.could_ever_fit(request):
            return False
        if not self.holders:
            return self._unsettled(request) is None
        return self._fits_beside(request, self.holders)

    def will_have_room(self, request: ResourceRequest, gone: Collection[str]) -> bool:
        """True if the job can start here once the jobs in `gone` have ended and freed their memory."""
        if self.outside is not None or not self.could_ever_fit(request):
            return False
        if not self.holders:
            return self.settles_soon or self._unsettled(request) is None
        left = [holder for holder in self.holders if holder.job not in gone]
        if not left:
            return self.settles_soon or not self._is_too_full_for(request)
        return self._fits_beside(request, left)

    def frees_at(self, request: ResourceRequest, gone: Collection[str], now: float) -> float:
        """The latest time when the job can start here, by the time limits of the holders."""
        if self.will_have_room(request, gone):
            return now
        released = set(gone)
        for holder in sorted(self.holders, key=lambda holder: holder.ends):
            released.add(holder.job)
            if self.will_have_room(request, released):
                return max(now, holder.ends)
        return math.inf

    def left(self) -> int:
        """Bytes not reserved by any job."""
        return max(0, self.total - self.slack - self.unexplained - sum(holder.reserved for holder in self.holders))

    def _has_place_beside(self, request: ResourceRequest, holders: Collection[GpuHolder]) -> bool:
        """True if they can share the GPU, memory aside."""
        if self.rules.takes_whole_gpus(request) or any(holder.whole for holder in holders):
            return False
        return self.rules.slots_per_gpu == 1 or len(holders) < self.rules.slots_per_gpu

    def _fits_beside(self, request: ResourceRequest, holders: Collection[GpuHolder]) -> bool:
        if not self._has_place_beside(request, holders) or self._is_too_full_for(request):
            return False
        reserved = self.unexplained + sum(holder.reserved for holder in holders)
        return reserved + (request.memory or 0) <= self.total - self.slack

    def _unsettled(self, request: ResourceRequest) -> Busy | MemoryTaken | None:
        """Why a GPU without holders is not free."""
        peak = self.gpu.peak
        if not isinstance(peak, Unknown) and peak >= self.rules.free_below:
            return Busy(peak, self.rules.free_below)
        return MemoryTaken(self.used) if self._is_too_full_for(request) else None

    def _is_too_full_for(self, request: ResourceRequest) -> bool:
        """True if foreign memory leaves too little for this job."""
        if request.memory is None:
            return self._is_unexplained
        return self.unexplained > 0 and self.unexplained + request.memory > self.usable(request)

    def obstacle(self, request: ResourceRequest, stopping: Collection[str], now: float) -> Obstacle:
        """What keeps this job from this GPU."""
        if self.outside is not None:
            return self.outside
        if not self.is_of_model(request):
            return OtherModel(self.gpu.name)
        if not self.could_ever_fit(request):
            return TooSmall(self.total if self._is_card_too_small(request) else self.usable(request))
        if not self.holders:
            return self._unsettled(request) or Free()
        if self._fits_beside(request, self.holders):
            return Free()
        return self._held(request, stopping, now)

    def _held(self, request: ResourceRequest, stopping: Collection[str], now: float) -> Obstacle:
        ending = tuple(holder.job for holder in self.holders if holder.job in stopping)
        if self.promised_to is not None:
            if self.will_have_room(request, {self.promised_to.job}):
                return self.promised_to
            if all(holder.job == self.promised_to.job for holder in self.holders):
                return self._unsettled(request) or self.promised_to
        if ending and self.will_have_room(request, ending):
            return Stopping(ending)
        frees_at = self.frees_at(request, (), now)
        left = self.left() if self._has_place_beside(request, self.holders) else None
        promised = self.promised_to.job if self.promised_to is not None else None
        jobs = tuple(holder.job for holder in self.holders if holder.job != promised)
        return Held(jobs, frees_at - now if math.isfinite(frees_at) else None, left)


def _outside(gpu: GpuState) -> OutOfRotation | UnreadableGpu | UsedByOthers | None:
    """An obstacle that only others can remove. Unknown is never free."""
    if gpu.quarantine is not None:
        return OutOfRotation(gpu.quarantine)
    if gpu.problem is not None:
        return UnreadableGpu(gpu.problem)
    for value in (gpu.memory_total, gpu.memory_used, gpu.peak):
        if isinstance(value, Unknown):
            return UnreadableGpu(value.reason)
    return UsedByOthers(gpu.other_processes) if gpu.other_processes else None
