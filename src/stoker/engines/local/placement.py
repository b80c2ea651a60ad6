"""Which job goes on which GPU, now: a pure function of what is seen, what runs and what waits.

Normal jobs first, by priority, then age; preemptible ones fill what is left. The first job that has to wait for GPUs
has a set of them kept for it (EASY backfilling), so that small jobs behind it slip in only where they do not delay it.
A job for which others are being stopped is promised their GPUs until they are free. A job that another machine keeps
GPUs for has none kept here, unless it could start here sooner; where it fits at once, it starts.

A decision is made in turns until a turn starts nothing more. The last turn therefore saw exactly what the next decision
will see if nothing else happens, and deciding again starts nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import msgspec

from stoker.engines.local.capacity import (
    Allocation,
    Free,
    GpuCapacity,
    GpuReservation,
    GpuState,
    Obstacle,
    PlacementOptions,
    ReservedFor,
    ResourceRequest,
)

# Sets of victims that are tried, smallest first, before a set that is merely without a superfluous member will do:
# every set of jobs that hold the eight GPUs of a large machine, and all pairs of two dozen small jobs.
_MOST_TRIES = 300
# A job is not moved to another machine for less: clocks and limits are not that exact.
_WORTH_MOVING = 10.0


class Placed(NamedTuple):
    job: str
    gpus: tuple[str, ...]


class CannotFit(msgspec.Struct, frozen=True, tag="cannot-fit"):
    """This machine will never have what the job asks for."""

    gpus: int
    memory: int | None
    gpus_here: int
    large_enough: int
    """How many of them have the memory it asks for."""
    largest: int
    """The memory that it could have on the largest of them."""


class NoGpusSeen(msgspec.Struct, frozen=True, tag="no-gpus-seen"):
    """The machine could not be read, so nobody knows which GPUs there are."""

    gpus: int
    memory: int | None
    problem: str


class CpuSlotsTaken(msgspec.Struct, frozen=True, tag="no-place-without-gpu"):
    """As many jobs without a GPU run as may."""

    at_once: int


class NotEnoughGpus(msgspec.Struct, frozen=True, tag="not-enough-gpus"):
    """The machine has what the job asks for, but not now."""

    gpus: int
    memory: int | None
    obstacles: tuple[tuple[int, Obstacle], ...]
    """By the index of the GPU."""


class CannotStart(msgspec.Struct, frozen=True, tag="cannot-start"):
    """The machine is short of something that every job needs to start, and pauses before it tries again."""

    problem: str


Reason = CannotFit | CannotStart | NoGpusSeen | CpuSlotsTaken | NotEnoughGpus


class Offer(NamedTuple):
    """How soon a machine can start a job that waits."""

    starts_in: float
    """Seconds, at the latest, by the time limits; infinite when nothing bounds it."""
    missing: int
    """How many of its GPUs others still have."""

    def is_better_than(self, other: "Offer") -> bool:
        """Whether the job should move here. Of equals the machine that has the job keeps it.

        By each move a job starts sooner or lacks fewer GPUs, so it is not moved for ever.
        """
        if math.isfinite(self.starts_in) or math.isfinite(other.starts_in):
            return self.starts_in + _WORTH_MOVING < other.starts_in
        return self.missing < other.missing


class Reservation(msgspec.Struct, frozen=True):
    """GPUs that this machine keeps for a job until it has all that it asks for."""

    job: str
    wanted: int
    """How many GPUs it asks for."""
    gpus: tuple[str, ...]
    """The uuids of all that are kept for it."""
    ready: tuple[str, ...]
    """Those of them that it could have now."""
    offer: Offer
    affects_others: bool
    """Whether others have to stop or wait for it. If not, it need not be agreed on with other machines."""


class Placements(msgspec.Struct, frozen=True):
    start: tuple[Placed, ...]
    preempt: tuple[str, ...]
    """Preemptible jobs to stop, so that a job that waits has room."""
    waiting: dict[str, Reason]
    reservations: tuple[Reservation, ...] = ()


def place(
    gpus: Sequence[GpuState],
    holdings: Sequence[Allocation],
    waiting: Iterable[ResourceRequest],
    rules: PlacementOptions,
    now: float,
    problem: str | None = None,
    elsewhere: Mapping[str, Offer] = {},
) -> Placements:
    """What to start, whom to stop for it, and why the rest waits.

    `problem`: why the machine could not be read; `elsewhere`: the jobs that other machines keep GPUs for.
    """
    queue = sorted(waiting, key=rank)
    started: list[Allocation] = []
    while True:
        turn = _Turn(gpus, [*holdings, *started], rules, now, problem, elsewhere)
        starts = turn.play(queue)
        if not starts:
            return Placements(
                start=tuple(Placed(holding.want.job, holding.gpus) for holding in started),
                preempt=tuple(turn.victims),
                waiting=turn.reasons,
                reservations=turn.reservations(),
            )
        started += starts
        taken = {holding.want.job for holding in starts}
        queue = [want for want in queue if want.job not in taken]


def rank(want: ResourceRequest) -> tuple[bool, int, int, str]:
    """The order in which jobs are considered."""
    return (want.preemptible, -want.priority, want.order, want.job)


class _Shape(NamedTuple):
    """Two waiting jobs of one shape have the same chances."""

    gpus: int
    memory: int | None
    shares: bool
    preemptible: bool
    time_limit: float | None


class _Turn:
    """One walk over the queue, from the state of the machine to the jobs that start."""

    def __init__(
        self,
        gpus: Sequence[GpuState],
        holdings: Sequence[Allocation],
        rules: PlacementOptions,
        now: float,
        problem: str | None,
        elsewhere: Mapping[str, Offer],
    ) -> None:
        self._rules = rules
        self._elsewhere = elsewhere
        self._now = now
        self._problem = problem
        self._holdings = holdings
        self._rooms = [
            GpuCapacity(gpu, [holding for holding in holdings if gpu.uuid in holding.gpus], rules, now)
            for gpu in sorted(gpus, key=lambda gpu: gpu.index)
        ]
        self._stopping = {holding.want.job for holding in holdings if holding.stopping}
        self._giving_way = {holding.want.job for holding in holdings if holding.want.preemptible}
        self._background = {holding.want.job for holding in holdings if holding.want.background}
        self._without_gpu = sum(1 for holding in holdings if not holding.gpus)
        self._places_promised = 0
        self._kept_for: str | None = None
        self._hopeless: set[_Shape] = set()
        self._reservations: dict[str, Reservation] = {}
        self._affecting: set[str] = set()
        """The jobs for which others have to stop or wait."""
        self._started: list[Allocation] = []
        self.victims: list[str] = []
        self.reasons: dict[str, Reason] = {}

    def play(self, queue: Sequence[ResourceRequest]) -> list[Allocation]:
        """The jobs that start, on which GPUs; `queue` is in order.

        Preemptible jobs have their turn only when no normal one can start any more, or one could be started and stopped
        in the same decision.
        """
        normal = [want for want in queue if not want.preemptible]
        self._walk(normal)
        if self._started:
            return self._started
        self._open_what_is_kept()
        self._walk([want for want in queue if want.preemptible])
        return self._started

    def _walk(self, queue: Sequence[ResourceRequest]) -> None:
        for want in queue:
            self._consider(want)
        if not self._started:
            self._explain(queue)

    def _open_what_is_kept(self) -> None:
        """Preemptible jobs may use what is kept for a normal one: they are stopped when it can start."""
        for room in self._rooms:
            room.reservation = None
        self._kept_for = None
        self._hopeless.clear()

    def _consider(self, want: ResourceRequest) -> None:
        shape = _shape(want)
        if shape in self._hopeless:
            return
        if self._place_without_gpu(want) if want.gpus == 0 else self._start(want) or self._promise(want):
            return
        # Within a walk room only becomes less, so another job of this shape need not be tried, unless it was only that
        # another machine has this one.
        if want.job not in self._elsewhere:
            self._hopeless.add(shape)
        if self._kept_for is None and want.gpus:
            self._keep_gpus_for(want)

    # Jobs that start

    def _start(self, want: ResourceRequest) -> bool:
        rooms = [room for room in self._rooms if room.has_room(want) and self._yields_to(room, want)]
        if len(rooms) < want.gpus:
            return False
        chosen = sorted(rooms, key=lambda room: _preference(room, want))[: want.gpus]
        holding = Allocation(want, tuple(room.gpu.uuid for room in chosen), self._now, used={})
        for room in chosen:
            room.add(want, holding.ends)
        self._started.append(holding)
        return True

    def _yields_to(self, room: GpuCapacity, want: ResourceRequest) -> bool:
        if self._may_use(room, want):
            return True
        if room.reservation is not None:
            self._affecting.add(room.reservation.want.job)
        return False

    def _may_use(self, room: GpuCapacity, want: ResourceRequest) -> bool:
        """Whether the job that this GPU is kept for would not be delayed."""
        first = room.reservation
        if first is None:
            return True
        if want.time_limit is not None and math.isfinite(first.until) and self._now + want.time_limit <= first.until:
            return True
        if not room.has_room(first.want):
            return False
        room.add(first.want, math.inf)
        both_fit = room.has_room(want)
        room.remove(first.want.job)
        return both_fit

    # Jobs that will start when others have stopped

    def _promise(self, want: ResourceRequest) -> bool:
        """Give the job GPUs that are coming free, or will be when preemptible jobs are stopped."""
        if self._is_better_off_elsewhere(want, Offer(0.0, 0)):
            return False
        victims = self._fewest_victims(want)
        if victims is None:
            return False
        self.victims += victims
        self._stopping.update(victims)
        if victims:
            self._affecting.add(want.job)
        rooms = [room for room in self._unkept() if room.will_have_room(want, self._stopping)]
        free_first = sorted(rooms, key=lambda room: (not room.has_room(want), _preference(room, want)))
        chosen = free_first[: want.gpus]
        ready = [room for room in chosen if room.has_room(want)]
        self.reasons[want.job] = NotEnoughGpus(want.gpus, want.memory, self._obstacles(want))
        kept = self._reserve(want, chosen, ready, 0.0)
        for room in chosen:
            room.add(want, math.inf)
            room.promised_to = kept
        return True

    def _is_better_off_elsewhere(self, want: ResourceRequest, offer: Offer) -> bool:
        other = self._elsewhere.get(want.job)
        return other is not None and not offer.is_better_than(other)

    def _reserve(
        self, want: ResourceRequest, chosen: Sequence[GpuCapacity], ready: Sequence[GpuCapacity], starts_in: float
    ) -> ReservedFor:
        if ready:
            self._affecting.add(want.job)
        self._reservations[want.job] = Reservation(
            job=want.job,
            wanted=want.gpus,
            gpus=tuple(room.gpu.uuid for room in chosen),
            ready=tuple(room.gpu.uuid for room in ready),
            offer=Offer(starts_in, want.gpus - len(ready)),
            affects_others=False,
        )
        return ReservedFor(want.job, want.gpus, len(ready))

    def reservations(self) -> tuple[Reservation, ...]:
        """Who was refused for its sake is known in the end."""
        return tuple(
            msgspec.structs.replace(reservation, affects_others=job in self._affecting)
            for job, reservation in self._reservations.items()
        )

    def _unkept(self) -> list[GpuCapacity]:
        return [room for room in self._rooms if room.reservation is None]

    def _fewest_victims(self, want: ResourceRequest) -> list[str] | None:
        """The jobs to stop so that this one fits: often nobody, since others are stopping already. None: no way."""
        rooms = self._unkept()
        if self._suffices(rooms, want, ()):
            return []
        if not self._suffices(rooms, want, self._yielding_to(want)):
            return None
        within = {room.gpu.uuid for room in rooms if room.outside is None and room.could_ever_fit(want)}
        yielding = self._yielding_to(want)
        candidates = self._by_reluctance(
            holding for holding in self._holdings if within.intersection(holding.gpus) and holding.want.job in yielding
        )
        return self._fewest_of(candidates, rooms, want)

    def _yielding_to(self, want: ResourceRequest) -> set[str]:
        """Who is stopped for this job if need be: for a preemptible one, only what is no job at all."""
        return self._background if want.preemptible else self._giving_way

    def _fewest_of(self, candidates: list[str], rooms: list[GpuCapacity], want: ResourceRequest) -> list[str]:
        tries = 0
        for size in range(1, len(candidates) + 1):
            tries += math.comb(len(candidates), size)
            if tries > _MOST_TRIES:
                break
            for chosen in combinations(candidates, size):
                if self._suffices(rooms, want, chosen):
                    return list(chosen)
        return self._fewest_by_gpu(candidates, rooms, want)

    def _fewest_by_gpu(self, candidates: list[str], rooms: list[GpuCapacity], want: ResourceRequest) -> list[str]:
        """Those on the GPUs that fewest have to leave: the fewest there are, unless some hold several GPUs."""
        leaving = [
            self._without_superfluous([job for job in candidates if room.is_held_by(job)], [room], want, needed=1)
            for room in rooms
            if room.will_have_room(want, self._stopping.union(candidates))
        ]
        chosen = {job for jobs in sorted(leaving, key=len)[: want.gpus] for job in jobs}
        return self._without_superfluous([job for job in candidates if job in chosen], rooms, want, needed=want.gpus)

    def _without_superfluous(
        self, candidates: list[str], rooms: list[GpuCapacity], want: ResourceRequest, *, needed: int
    ) -> list[str]:
        """Spare whoever can be spared, the one that would lose most first."""
        victims = list(candidates)
        for candidate in reversed(candidates):
            others = [victim for victim in victims if victim != candidate]
            if self._will_fit_on(rooms, want, others) >= needed:
                victims = others
        return victims

    def _suffices(self, rooms: list[GpuCapacity], want: ResourceRequest, victims: Iterable[str]) -> bool:
        return self._will_fit_on(rooms, want, victims) >= want.gpus

    def _will_fit_on(self, rooms: list[GpuCapacity], want: ResourceRequest, victims: Iterable[str]) -> int:
        gone = self._stopping.union(victims)
        return sum(room.will_have_room(want, gone) for room in rooms)

    def _by_reluctance(self, holdings: Iterable[Allocation]) -> list[str]:
        """Those that can be stopped, the one that loses least first."""

        def loss(holding: Allocation) -> tuple[bool, int, float, int]:
            at_stake = self._now - holding.since if holding.at_stake is None else holding.at_stake
            return (not holding.want.background, holding.want.priority, at_stake, -holding.want.order)

        return [
            holding.want.job
            for holding in sorted(holdings, key=loss)
            if holding.want.preemptible and holding.want.job not in self._stopping
        ]

    # The first job that has to wait

    def _keep_gpus_for(self, want: ResourceRequest) -> None:
        """Keep those GPUs for the job on which it can start earliest.

        Every GPU that it could take now is among them, or it would have started. Of those without a time limit the
        emptiest is taken: nobody new comes to it, so that it empties, and stays the one that is taken.
        """
        gone = self._stopping | self._yielding_to(want)
        ranked: list[tuple[float, bool, int, int, GpuCapacity]] = []
        for room in self._rooms:
            if not room.could_ever_fit(want) or room.is_lost(want):
                continue
            frees_at = room.frees_at(want, gone, self._now)
            unbounded = sum(1 for holder in room.holders if holder.job not in gone and math.isinf(holder.ends))
            ranked.append((frees_at, room.outside is not None, unbounded, room.gpu.index, room))
        if len(ranked) < want.gpus:
            return
        chosen = sorted(ranked, key=lambda entry: entry[:4])[: want.gpus]
        until = max(frees_at for frees_at, *_ in chosen)
        rooms = [room for *_, room in chosen]
        ready = [room for room in rooms if room.will_have_room(want, gone)]
        if self._is_better_off_elsewhere(want, Offer(until - self._now, want.gpus - len(ready))):
            return
        self._kept_for = want.job
        self.reasons[want.job] = NotEnoughGpus(want.gpus, want.memory, self._obstacles(want))
        kept = self._reserve(want, rooms, ready, until - self._now)
        for room in rooms:
            room.reservation = GpuReservation(want, until, kept)

    # Jobs without a GPU

    def _place_without_gpu(self, want: ResourceRequest) -> bool:
        """Whether it starts, or will when others have stopped."""
        if self._without_gpu + self._places_promised < self._rules.cpu_jobs:
            self._started.append(Allocation(want, (), self._now, used={}))
            self._without_gpu += 1
            return True
        ending = sum(1 for h in self._holdings if not h.gpus and h.want.job in self._stopping)
        missing = 1 - (self._rules.cpu_jobs - (self._without_gpu - ending) - self._places_promised)
        if missing > 0:
            candidates = self._by_reluctance(holding for holding in self._holdings if not holding.gpus)
            if want.preemptible or self._rules.cpu_jobs == 0 or len(candidates) < missing:
                return False
            self.victims += candidates[:missing]
            self._stopping.update(candidates[:missing])
        self._places_promised += 1
        return True

    # Why the rest waits

    def _explain(self, queue: Sequence[ResourceRequest]) -> None:
        """Say of every job why it waits; of a job that GPUs are kept for, that was said before they were."""
        by_shape: dict[_Shape, Reason] = {}
        obstacles: dict[_Shape, tuple[tuple[int, Obstacle], ...]] = {}
        for want in queue:
            if want.job in self.reasons:
                continue
            shape = _shape(want)
            if shape not in by_shape:
                of_any_count = shape._replace(gpus=1)
                if of_any_count not in obstacles:
                    obstacles[of_any_count] = self._obstacles(want)
                by_shape[shape] = self._reason(want, obstacles[of_any_count])
            self.reasons[want.job] = by_shape[shape]

    def _reason(self, want: ResourceRequest, obstacles: tuple[tuple[int, Obstacle], ...]) -> Reason:
        if want.gpus == 0:
            return CpuSlotsTaken(self._rules.cpu_jobs)
        return self._cannot_fit(want) or NotEnoughGpus(want.gpus, want.memory, obstacles)

    def _cannot_fit(self, want: ResourceRequest) -> CannotFit | NoGpusSeen | None:
        large_enough = sum(room.could_ever_fit(want) for room in self._rooms)
        if large_enough >= want.gpus:
            return None
        if self._problem is not None:
            return NoGpusSeen(want.gpus, want.memory, self._problem)
        largest = max((room.usable(want) for room in self._rooms), default=0)
        return CannotFit(want.gpus, want.memory, len(self._rooms), large_enough, largest)

    def _obstacles(self, want: ResourceRequest) -> tuple[tuple[int, Obstacle], ...]:
        return tuple((room.gpu.index, self._obstacle(room, want)) for room in self._rooms)

    def _obstacle(self, room: GpuCapacity, want: ResourceRequest) -> Obstacle:
        obstacle = room.obstacle(want, self._stopping, self._now)
        if isinstance(obstacle, Free) and room.reservation is not None and not self._may_use(room, want):
            return room.reservation.kept
        return obstacle


def _shape(want: ResourceRequest) -> _Shape:
    return _Shape(want.gpus, want.memory, want.shares, want.preemptible, want.time_limit)


def _preference(room: GpuCapacity, want: ResourceRequest) -> tuple[bool, int, int, int]:
    """Which of the GPUs that a job fits on it gets: the smallest first.

    A job that shares goes where least is left, which keeps whole GPUs free; one that did not ask to share goes where
    fewest others are.
    """
    kept = room.reservation is not None
    if want.shares:
        return (kept, 0 if room.holders else 1, room.left(), room.gpu.index)
    return (kept, len(room.holders), room.total, room.gpu.index)
