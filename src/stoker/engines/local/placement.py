"""Placement: which job starts on which GPU now. A pure function of the last look, running jobs and waiting jobs.

Normal jobs go first, by priority, then age; preemptible ones fill the rest. The first job that must wait gets GPUs
reserved (EASY backfilling), and the first that needs CPUs, RAM or a slot gets those reserved: later jobs use them only
if they do not delay it. A job for which others are being stopped is promised their GPUs. A job with a reservation on
another machine gets none here, unless it could start here sooner; if it fits at once, it starts.

Turns repeat until one starts nothing. That last turn sees the state of the next decision, so deciding again without
any event starts nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Final, NamedTuple

import msgspec

from stoker.engines.engine import Reservation, Start
from stoker.engines.local.capacity import (
    Allocation,
    Free,
    GpuCapacity,
    GpuReservation,
    GpuState,
    Obstacle,
    PlacementOptions,
    ResourceRequest,
)
from stoker.engines.local.host_capacity import (
    HostCapacity,
    HostReservation,
    HostSpec,
    HostTaken,
    HostTooSmall,
    NotForThisMachine,
)
from stoker.engines.local.links import Slowness, Topology

# The number of victim sets to try, smallest first, before settling for a minimal one: every subset of the jobs on eight
# GPUs, and all pairs of two dozen small jobs.
_MOST_TRIES = 300
# A job moves to another machine only if it starts this many seconds sooner: clocks and limits are no more exact.
_WORTH_MOVING = 10.0


class CannotFit(msgspec.Struct, frozen=True):
    """This machine can never satisfy the request."""

    gpus: int
    memory: int | None
    gpus_here: int
    large_enough: int
    """The number of those with enough memory."""
    largest: int
    """The usable memory of the largest GPU, or its total memory if `card_memory` is given."""
    model: str | None = None
    card_memory: int | None = None
    """The required total memory of each GPU."""
    other_models: tuple[str, ...] = ()
    """The machine's models, if none is the requested one."""


class NoGpusSeen(msgspec.Struct, frozen=True):
    """The machine could not be read, so its GPUs are unknown."""

    gpus: int
    memory: int | None
    problem: str
    model: str | None = None
    card_memory: int | None = None


class CpuSlotsTaken(msgspec.Struct, frozen=True):
    """All slots for jobs without a GPU are taken."""

    at_once: int


class NotEnoughGpus(msgspec.Struct, frozen=True):
    """The machine can satisfy the request, but not now."""

    gpus: int
    memory: int | None
    obstacles: tuple[tuple[int, Obstacle], ...]
    """Obstacles by GPU index."""
    model: str | None = None
    card_memory: int | None = None


WaitingReason = NotForThisMachine | HostTooSmall | CannotFit | NoGpusSeen | CpuSlotsTaken | HostTaken | NotEnoughGpus


class Offer(NamedTuple):
    """How soon a machine can start a waiting job."""

    starts_in: float
    """Upper bound in seconds, by time limits; infinite without them."""
    missing: int
    """The number of its GPUs that other jobs still hold."""

    def is_better_than(self, other: "Offer") -> bool:
        """True if the job should move here. On a tie it stays.

        Every move brings an earlier start or fewer missing GPUs, so moves come to an end.
        """
        if math.isfinite(self.starts_in) or math.isfinite(other.starts_in):
            return self.starts_in + _WORTH_MOVING < other.starts_in
        return self.missing < other.missing


ANY_HOST: Final = HostSpec()
"""An unnamed machine with unlimited CPUs and RAM."""


class Placements(msgspec.Struct, frozen=True):
    start: tuple[Start, ...]
    preempt: tuple[str, ...]
    """Preemptible jobs to stop for a waiting job."""
    waiting: dict[str, WaitingReason]
    reservations: tuple[Reservation, ...] = ()


def place(
    gpus: Sequence[GpuState],
    allocations: Sequence[Allocation],
    waiting: Iterable[ResourceRequest],
    rules: PlacementOptions,
    now: float,
    problem: str | None = None,
    elsewhere: Mapping[str, Offer] = {},
    host: HostSpec = ANY_HOST,
) -> Placements:
    """Decides what to start and what to preempt, and explains why the rest waits.

    `problem`: why the machine could not be read; `elsewhere`: jobs with reservations on other machines; `host`: the
    machine's name and other resources.
    """
    queue = sorted(waiting, key=rank)
    started: list[Allocation] = []
    while True:
        turn = _Turn(gpus, [*allocations, *started], rules, now, problem, elsewhere, host)
        starts = turn.run(queue)
        if not starts:
            return Placements(
                start=tuple(Start(allocation.request.job, allocation.gpus) for allocation in started),
                preempt=tuple(turn.victims),
                waiting=turn.reasons,
                reservations=turn.reservations(),
            )
        started += starts
        taken = {allocation.request.job for allocation in starts}
        queue = [request for request in queue if request.job not in taken]


def rank(request: ResourceRequest) -> tuple[bool, int, int, str]:
    """The order in which jobs are considered."""
    return (request.preemptible, -request.priority, request.order, request.job)


class _Turn:
    """One pass over the queue, from the state of the machine to the jobs that start."""

    def __init__(
        self,
        gpus: Sequence[GpuState],
        allocations: Sequence[Allocation],
        rules: PlacementOptions,
        now: float,
        problem: str | None,
        elsewhere: Mapping[str, Offer],
        host: HostSpec,
    ) -> None:
        self._rules = rules
        self._host = HostCapacity(host, allocations, rules)
        self._elsewhere = elsewhere
        self._now = now
        self._problem = problem
        self._allocations = allocations
        self._capacities = [
            GpuCapacity(gpu, [allocation for allocation in allocations if gpu.uuid in allocation.gpus], rules, now)
            for gpu in sorted(gpus, key=lambda gpu: gpu.index)
        ]
        self._topology = Topology(gpus)
        self._goes_by_links = rules.gpu_order == "links" and self._topology.is_known
        self._stopping = {allocation.request.job for allocation in allocations if allocation.stopping}
        self._preemptible = {allocation.request.job for allocation in allocations if allocation.request.preemptible}
        self._background = {allocation.request.job for allocation in allocations if allocation.request.background}
        self._reserved_for: str | None = None
        self._failed_shapes: set[ResourceRequest] = set()
        self._reservations: dict[str, Reservation] = {}
        self._affecting: set[str] = set()
        """Jobs for which others stop or wait."""
        self._started: list[Allocation] = []
        self.victims: list[str] = []
        self.reasons: dict[str, WaitingReason] = {}

    def run(self, queue: Sequence[ResourceRequest]) -> list[Allocation]:
        """The jobs that start, with their GPUs. `queue` is in order.

        Preemptible jobs come after all normal ones: otherwise one decision could start and preempt the same job.
        """
        for preemptible in (False, True):
            if preemptible:
                self._drop_reservations()
            considered = [request for request in queue if request.preemptible is preemptible]
            for request in considered:
                if request.shape in self._failed_shapes or not self._host.could_ever_fit(request):
                    continue
                if self._start(request) or self._promise(request):
                    continue
                # Room only shrinks within a pass, so jobs of the same shape are skipped, unless only the reservation on
                # another machine stopped this one.
                if request.job not in self._elsewhere:
                    self._failed_shapes.add(request.shape)
                if not request.gpus:
                    self._reserve_host(request, self._now)
                elif self._reserved_for is None:
                    self._reserve_for(request)
            if self._started:
                break
            self._explain(considered)
        return self._started

    def _drop_reservations(self) -> None:
        """Opens reservations to preemptible jobs, which are preempted when the reserved job can start."""
        for capacity in self._capacities:
            capacity.reservation = None
        self._host.reservation = None
        self._reserved_for = None
        self._failed_shapes.clear()

    # Jobs that start

    def _start(self, request: ResourceRequest) -> bool:
        capacities = [
            capacity
            for capacity in self._capacities
            if capacity.has_room(request) and self._may_start_on(capacity, request)
        ]
        if len(capacities) < request.gpus or not (self._host.has_room(request) and self._may_use_host(request)):
            return False
        chosen = self._choose(capacities, request)
        allocation = Allocation(request, tuple(capacity.gpu.uuid for capacity in chosen), self._now, used={})
        for capacity in chosen:
            capacity.add(request, allocation.ends)
        self._host.add(request, allocation.ends)
        self._started.append(allocation)
        return True

    def _choose(self, capacities: Iterable[GpuCapacity], request: ResourceRequest) -> list[GpuCapacity]:
        """The GPUs that the job gets among those that fit."""
        ordered = sorted(capacities, key=lambda capacity: self._preference(capacity, request))
        if not request.gpus or not self._goes_by_links:
            return ordered[: request.gpus]
        by_uuid = {capacity.gpu.uuid: capacity for capacity in ordered}
        penalties = {uuid: _penalty(capacity, request) for uuid, capacity in by_uuid.items()}
        free = {one.gpu.uuid for one in self._capacities if one.outside is None and not one.holders}
        chosen = self._topology.best_set(list(by_uuid), request.gpus, free, penalties)
        return [by_uuid[uuid] for uuid in chosen]

    def _preference(self, capacity: GpuCapacity, request: ResourceRequest) -> tuple[int, ...]:
        """The sort key of GPUs that fit, links aside: smallest first."""
        index = capacity.gpu.index
        if self._rules.gpu_order == "index":
            return (*_penalty(capacity, request), index)
        return (*_penalty(capacity, request), capacity.left() if request.shares else capacity.total, index)

    def _may_use_host(self, request: ResourceRequest) -> bool:
        if self._host.may_use(request, self._now):
            return True
        if self._host.reservation is not None:
            self._affecting.add(self._host.reservation.request.job)
        return False

    def _may_start_on(self, capacity: GpuCapacity, request: ResourceRequest) -> bool:
        if self._may_use(capacity, request):
            return True
        if capacity.reservation is not None:
            self._affecting.add(capacity.reservation.request.job)
        return False

    def _may_use(self, capacity: GpuCapacity, request: ResourceRequest) -> bool:
        """True if starting here does not delay the job that has this GPU reserved."""
        first = capacity.reservation
        if first is None:
            return True
        if (
            request.time_limit is not None
            and math.isfinite(first.until)
            and self._now + request.time_limit <= first.until
        ):
            return True
        if not capacity.has_room(first.request):
            return False
        capacity.add(first.request, math.inf)
        both_fit = capacity.has_room(request)
        capacity.remove(first.request.job)
        return both_fit

    # Jobs that will start when others have stopped

    def _promise(self, request: ResourceRequest) -> bool:
        """Promises the job GPUs that will be free soon, perhaps by stopping preemptible jobs."""
        if self._starts_sooner_elsewhere(request, Offer(0.0, 0)):
            return False
        victims = self._fewest_victims(request)
        if victims is None:
            return False
        self.victims += victims
        self._stopping.update(victims)
        if victims:
            self._affecting.add(request.job)
        capacities = [capacity for capacity in self._unreserved() if capacity.will_have_room(request, self._stopping)]
        free_first = sorted(
            capacities, key=lambda capacity: (not capacity.has_room(request), self._preference(capacity, request))
        )
        self._host.add(request, math.inf)
        if not request.gpus:
            return True
        chosen = free_first[: request.gpus]
        ready = [capacity for capacity in chosen if capacity.has_room(request)]
        self.reasons[request.job] = self._not_enough(request, self._obstacles(request))
        kept = self._reserve(request, chosen, ready, 0.0)
        for capacity in chosen:
            capacity.add(request, math.inf)
            capacity.promised_to = kept
        return True

    def _starts_sooner_elsewhere(self, request: ResourceRequest, offer: Offer) -> bool:
        other = self._elsewhere.get(request.job)
        return other is not None and not offer.is_better_than(other)

    def _reserve(
        self, request: ResourceRequest, chosen: Sequence[GpuCapacity], ready: Sequence[GpuCapacity], starts_in: float
    ) -> Reservation:
        if ready:
            self._affecting.add(request.job)
        reservation = self._reservations[request.job] = Reservation(
            job=request.job,
            wanted=request.gpus,
            gpus=tuple(capacity.gpu.uuid for capacity in chosen),
            ready=tuple(capacity.gpu.uuid for capacity in ready),
            starts_in=starts_in,
        )
        return reservation

    def reservations(self) -> tuple[Reservation, ...]:
        """The reservations, with `affects_others` set, which is known only after the pass."""
        return tuple(
            msgspec.structs.replace(reservation, affects_others=job in self._affecting)
            for job, reservation in self._reservations.items()
        )

    def _unreserved(self) -> list[GpuCapacity]:
        return [capacity for capacity in self._capacities if capacity.reservation is None]

    def _fewest_victims(self, request: ResourceRequest) -> list[str] | None:
        """The jobs to preempt for this one: often none, since others are stopping already. None if it cannot fit."""
        capacities = self._unreserved()
        if self._suffices(capacities, request, ()):
            return []
        if not self._suffices(capacities, request, self._preemptible_for(request)):
            return None
        within = {
            capacity.gpu.uuid
            for capacity in capacities
            if capacity.outside is None and capacity.could_ever_fit(request)
        }
        preemptible = self._preemptible_for(request)
        candidates = self._cheapest_first(
            allocation
            for allocation in self._allocations
            if allocation.request.job in preemptible
            and (within.intersection(allocation.gpus) or self._host.helps(allocation, request))
        )
        return self._fewest_of(candidates, capacities, request)

    def _preemptible_for(self, request: ResourceRequest) -> set[str]:
        """The jobs that this one may preempt. A preemptible job preempts only background programs."""
        return self._background if request.preemptible else self._preemptible

    def _fewest_of(self, candidates: list[str], capacities: list[GpuCapacity], request: ResourceRequest) -> list[str]:
        tries = 0
        for size in range(1, len(candidates) + 1):
            tries += math.comb(len(candidates), size)
            if tries > _MOST_TRIES:
                break
            sufficient = (
                list(chosen) for chosen in combinations(candidates, size) if self._suffices(capacities, request, chosen)
            )
            if self._goes_by_links and request.gpus > 1:
                victims = min(
                    sufficient, key=lambda one: self._slowness_without(one, capacities, request), default=None
                )
            else:
                victims = next(sufficient, None)
            if victims is not None:
                return victims
        # Spares victims one by one: first on the GPUs with the most holders, and there the costliest.
        beside = {
            job: min((len(one.holders) for one in capacities if one.is_held_by(job)), default=0) for job in candidates
        }
        victims, costliest_first = candidates, candidates[::-1]
        for candidate in sorted(costliest_first, key=beside.__getitem__, reverse=True):
            others = [victim for victim in victims if victim != candidate]
            if self._suffices(capacities, request, others):
                victims = others
        return victims

    def _slowness_without(
        self, victims: Iterable[str], capacities: list[GpuCapacity], request: ResourceRequest
    ) -> Slowness:
        """The slowness of the GPUs that the job gets once these victims are gone."""
        gone = self._stopping.union(victims)
        chosen = self._choose([one for one in capacities if one.will_have_room(request, gone)], request)
        return self._topology.slowness([capacity.gpu.uuid for capacity in chosen])

    def _suffices(self, capacities: list[GpuCapacity], request: ResourceRequest, victims: Iterable[str]) -> bool:
        """True if the job fits once the victims and all stopping jobs are gone."""
        gone = self._stopping.union(victims)
        if not (self._host.has_room(request, gone) and self._host.may_use(request, self._now)):
            return False
        return sum(capacity.will_have_room(request, gone) for capacity in capacities) >= request.gpus

    def _cheapest_first(self, allocations: Iterable[Allocation]) -> list[str]:
        """The preemptible jobs, cheapest loss first."""

        def loss(allocation: Allocation) -> tuple[bool, int, float, int]:
            request = allocation.request
            return (not request.background, request.priority, self._now - allocation.since, -request.order)

        return [
            allocation.request.job
            for allocation in sorted(allocations, key=loss)
            if allocation.request.preemptible and allocation.request.job not in self._stopping
        ]

    # The first job that has to wait

    def _reserve_for(self, request: ResourceRequest) -> None:
        """Reserves the GPUs on which the job can start earliest.

        They include every GPU that it could take now. Among GPUs without a time limit the emptiest is chosen: no other
        job starts there, so it empties and remains the choice.
        """
        gone = self._stopping | self._preemptible_for(request)
        ranked: list[tuple[float, bool, int, int, GpuCapacity]] = []
        for capacity in self._capacities:
            if not capacity.could_ever_fit(request) or capacity.is_lost(request):
                continue
            frees_at = capacity.frees_at(request, gone, self._now)
            unbounded = sum(1 for holder in capacity.holders if holder.job not in gone and math.isinf(holder.ends))
            ranked.append((frees_at, capacity.outside is not None, unbounded, capacity.gpu.index, capacity))
        if len(ranked) < request.gpus:
            return
        chosen = sorted(ranked, key=lambda entry: entry[:4])[: request.gpus]
        until = max(self._host.frees_at(request, gone, self._now), *(frees_at for frees_at, *_ in chosen))
        capacities = [capacity for *_, capacity in chosen]
        ready = [capacity for capacity in capacities if capacity.will_have_room(request, gone)]
        if self._starts_sooner_elsewhere(request, Offer(until - self._now, request.gpus - len(ready))):
            return
        self._reserved_for = request.job
        self._reserve_host(request, until)
        self.reasons[request.job] = self._lacking_now(request, self._obstacles(request))
        kept = self._reserve(request, capacities, ready, until - self._now)
        for capacity in capacities:
            capacity.reservation = GpuReservation(request, until, kept)

    def _reserve_host(self, request: ResourceRequest, until: float) -> None:
        """Reserves CPUs, RAM and a slot for the first waiting job that needs any of them.

        `until`: its latest start as far as GPUs are concerned.
        """
        if self._host.reservation is None and self._host.asks(request):
            gone = self._stopping | self._preemptible_for(request)
            until = max(until, self._host.frees_at(request, gone, self._now))
            self._host.reservation = HostReservation(request, until)

    # Why the others wait

    def _explain(self, queue: Sequence[ResourceRequest]) -> None:
        """Gives every waiting job its reason; jobs with a reservation already have theirs."""
        by_shape: dict[ResourceRequest, WaitingReason] = {}
        obstacles: dict[ResourceRequest, tuple[tuple[int, Obstacle], ...]] = {}
        for request in queue:
            if request.job in self.reasons:
                continue
            shape = request.shape
            if shape not in by_shape:
                of_any_count = msgspec.structs.replace(shape, gpus=1)
                if of_any_count not in obstacles:
                    obstacles[of_any_count] = self._obstacles(request)
                by_shape[shape] = self._reason(request, obstacles[of_any_count])
            self.reasons[request.job] = by_shape[shape]

    def _reason(self, request: ResourceRequest, obstacles: tuple[tuple[int, Obstacle], ...]) -> WaitingReason:
        if (refusal := self._host.refusal(request)) is not None:
            return refusal
        if request.gpus == 0:
            return self._host.obstacle(request, self._now) or CpuSlotsTaken(self._rules.cpu_jobs)
        return self._cannot_fit(request) or self._lacking_now(request, obstacles)

    def _lacking_now(self, request: ResourceRequest, obstacles: tuple[tuple[int, Obstacle], ...]) -> WaitingReason:
        """The missing resource: CPUs or RAM if there are enough GPUs, GPUs otherwise."""
        free = sum(isinstance(obstacle, Free) for _index, obstacle in obstacles)
        lacks = self._host.obstacle(request, self._now) if free >= request.gpus else None
        return lacks or self._not_enough(request, obstacles)

    def _not_enough(self, request: ResourceRequest, obstacles: tuple[tuple[int, Obstacle], ...]) -> NotEnoughGpus:
        return NotEnoughGpus(request.gpus, request.memory, obstacles, request.gpu_model, request.gpu_memory)

    def _cannot_fit(self, request: ResourceRequest) -> CannotFit | NoGpusSeen | None:
        large_enough = sum(capacity.could_ever_fit(request) for capacity in self._capacities)
        if large_enough >= request.gpus:
            return None
        if self._problem is not None:
            return NoGpusSeen(request.gpus, request.memory, self._problem, request.gpu_model, request.gpu_memory)
        of_model = [capacity for capacity in self._capacities if capacity.is_of_model(request)]
        whole = request.gpu_memory is not None
        return CannotFit(
            gpus=request.gpus,
            memory=request.memory,
            gpus_here=len(self._capacities),
            large_enough=large_enough,
            largest=max((one.total if whole else one.usable(request) for one in of_model), default=0),
            model=request.gpu_model,
            card_memory=request.gpu_memory,
            other_models=() if of_model else tuple(dict.fromkeys(one.gpu.name for one in self._capacities)),
        )

    def _obstacles(self, request: ResourceRequest) -> tuple[tuple[int, Obstacle], ...]:
        return tuple((capacity.gpu.index, self._obstacle(capacity, request)) for capacity in self._capacities)

    def _obstacle(self, capacity: GpuCapacity, request: ResourceRequest) -> Obstacle:
        obstacle = capacity.obstacle(request, self._stopping, self._now)
        if isinstance(obstacle, Free) and capacity.reservation is not None and not self._may_use(capacity, request):
            return capacity.reservation.kept
        return obstacle


def _penalty(capacity: GpuCapacity, request: ResourceRequest) -> tuple[int, int]:
    """Ranks a GPU before its size: unreserved GPUs first, then by their holders.

    A sharing job joins other jobs, to keep whole GPUs free. Any other job prefers the fewest holders.
    """
    kept = int(capacity.reservation is not None)
    return (kept, int(not capacity.holders) if request.shares else len(capacity.holders))
