"""A machine's resources besides its GPUs: name and labels, CPUs, RAM, and slots for jobs without a GPU.

Pure: no clock and no I/O. Only requests count; a job without a request takes nothing.
"""

import math
from collections.abc import Collection, Iterable
from typing import Final, NamedTuple

import msgspec

from stoker.engines.local.capacity import Allocation, PlacementOptions, ResourceRequest
from stoker.queue.model import is_host

UNLIMITED: Final = 2**62


class HostSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The properties by which jobs select a machine."""

    name: str = ""
    labels: tuple[str, ...] = ()
    cpus: int = UNLIMITED
    ram: int = UNLIMITED
    """Bytes."""


class NotForThisMachine(msgspec.Struct, frozen=True):
    """The job requests other machines."""

    name: str
    machine: str | None = None
    """The requested machine, if it is another one."""
    excluded: bool = False
    labels: tuple[str, ...] = ()
    """Requested labels that this machine lacks."""


class HostTooSmall(msgspec.Struct, frozen=True):
    """The machine has fewer CPUs or less RAM than requested."""

    cpus: int
    cpus_here: int
    ram: int
    ram_here: int


class HostTaken(msgspec.Struct, frozen=True):
    """The machine has enough CPUs and RAM, but they are taken now."""

    cpus: int
    cpus_free: int
    ram: int
    ram_free: int
    reserved_for: str | None = None
    """The job that goes first and has them reserved."""


class Amounts(NamedTuple):
    """Countable resources of a machine."""

    slots: int
    """Jobs without a GPU."""
    cpus: int
    ram: int

    @classmethod
    def of(cls, request: ResourceRequest) -> "Amounts":
        return cls(0 if request.gpus else 1, request.cpus, request.ram)

    def fit_into(self, free: "Amounts") -> bool:
        """Resources that are not requested do not matter, even if they are overcommitted."""
        return (
            (not self.slots or self.slots <= free.slots)
            and (not self.cpus or self.cpus <= free.cpus)
            and (not self.ram or self.ram <= free.ram)
        )

    def overlap(self, other: "Amounts") -> bool:
        return any(mine and its for mine, its in zip(self, other, strict=True))

    def less(self, others: Iterable["Amounts"]) -> "Amounts":
        slots, cpus, ram = self
        for other in others:
            slots, cpus, ram = slots - other.slots, cpus - other.cpus, ram - other.ram
        return Amounts(slots, cpus, ram)


class HostHolder(NamedTuple):
    job: str
    amounts: Amounts
    ends: float


class HostReservation(NamedTuple):
    """The reservation for the first waiting job."""

    request: ResourceRequest
    until: float
    """Its latest start, by time limits; infinite without them."""


class HostCapacity:
    """The machine and its holders during a decision."""

    def __init__(self, host: HostSpec, allocations: Iterable[Allocation], rules: PlacementOptions) -> None:
        self.host = host
        self.total = Amounts(rules.cpu_jobs, host.cpus, host.ram)
        self.reservation: HostReservation | None = None
        self._holders = [
            HostHolder(one.request.job, Amounts.of(one.request), one.ends)
            for one in allocations
            if any(Amounts.of(one.request))
        ]

    def add(self, request: ResourceRequest, ends: float) -> None:
        self._holders.append(HostHolder(request.job, Amounts.of(request), ends))

    def refusal(self, request: ResourceRequest) -> NotForThisMachine | HostTooSmall | None:
        """Why the job can never start here, slots aside."""
        name, labels = self.host.name, self.host.labels
        machine = request.machine if request.machine is not None and not is_host(name, request.machine) else None
        excluded = any(is_host(name, other) for other in request.excluded)
        missing = tuple(label for label in request.labels if label not in labels)
        if machine is not None or excluded or missing:
            return NotForThisMachine(name, machine, excluded, missing)
        if request.cpus > self.total.cpus or request.ram > self.total.ram:
            return HostTooSmall(request.cpus, self.total.cpus, request.ram, self.total.ram)
        return None

    def asks(self, request: ResourceRequest) -> bool:
        return any(Amounts.of(request))

    def could_ever_fit(self, request: ResourceRequest) -> bool:
        return self.refusal(request) is None and Amounts.of(request).fit_into(self.total)

    def free(self, gone: Collection[str] = ()) -> Amounts:
        """The free resources once the jobs in `gone` have ended."""
        return self.total.less(holder.amounts for holder in self._holders if holder.job not in gone)

    def has_room(self, request: ResourceRequest, gone: Collection[str] = ()) -> bool:
        return Amounts.of(request).fit_into(self.free(gone))

    def may_use(self, request: ResourceRequest, now: float) -> bool:
        """True if starting this job does not delay the job with the reservation."""
        first, asked = self.reservation, Amounts.of(request)
        if first is None or not asked.overlap(wanted := Amounts.of(first.request)):
            return True
        if not math.isfinite(first.until):
            return asked.fit_into(self.free().less([wanted]))
        if request.time_limit is not None and now + request.time_limit <= first.until:
            return True
        # It must fit beside the first job when that starts.
        gone = {holder.job for holder in self._holders if holder.ends <= first.until}
        return asked.fit_into(self.free(gone).less([wanted]))

    def frees_at(self, request: ResourceRequest, gone: Collection[str], now: float) -> float:
        """The latest time when there is room, by the time limits of the holders."""
        if self.has_room(request, gone):
            return now
        released = set(gone)
        for holder in sorted(self._holders, key=lambda holder: holder.ends):
            released.add(holder.job)
            if self.has_room(request, released):
                return max(now, holder.ends)
        return math.inf

    def helps(self, allocation: Allocation, request: ResourceRequest) -> bool:
        """True if ending this allocation gives the job more room."""
        return Amounts.of(request).overlap(Amounts.of(allocation.request))

    def obstacle(self, request: ResourceRequest, now: float) -> HostTaken | None:
        """What keeps the job from CPUs and RAM now; None if nothing does."""
        free, asked = self.free(), Amounts.of(request)
        is_taken = not asked._replace(slots=0).fit_into(free)
        if not is_taken and (asked.slots > free.slots or self.may_use(request, now)):
            return None
        first = None if is_taken or self.reservation is None else self.reservation.request.job
        return HostTaken(request.cpus, max(0, free.cpus), request.ram, max(0, free.ram), first)


def usage_of(allocations: Iterable[Allocation]) -> Amounts:
    """The sum of the running jobs' requests."""
    total = Amounts(0, 0, 0).less(Amounts.of(one.request) for one in allocations)
    return Amounts(-total.slots, -total.cpus, -total.ram)
