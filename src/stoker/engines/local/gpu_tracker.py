"""Tracks the GPUs of a worker from look to look: which processes belong to its jobs, which do not, and since when.

Pure: no clock and no I/O; all times come from the looks.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Final

import msgspec

from stoker.engines.engine import Reservation
from stoker.engines.local.capacity import (
    BACKGROUND,
    Allocation,
    Busy,
    Free,
    GpuCapacity,
    GpuState,
    MemoryTaken,
    Obstacle,
    PlacementOptions,
    ResourceRequest,
    UnreadableGpu,
    UsedByOthers,
)
from stoker.engines.local.waiting_reasons import describe_obstacle
from stoker.gpus.model import Gpu, Look, Maybe, Process, Reading, Unknown, known
from stoker.gpus.quarantine import Entries, QuarantinedGpu
from stoker.gpus.report import describe, title
from stoker.gpus.source import is_simulated_source
from stoker.gpus.visible import select_gpus
from stoker.queue.model import GpuUse, WorkerGpu
from stoker.units import name_some

Owner = Callable[[int], str | None]
"""Maps a pid to the worker's job that owns it; None for foreign processes."""

_NOT_LISTED: Final = "the driver does not list it any more"
_NOT_SEEN: Final = Unknown("it has not been seen yet")
# A GPU without holders is judged for a job with unknown memory needs.
_ANYBODY: Final = ResourceRequest(job="", gpus=1, order=0)
_SETTLING: Final = "has just been freed and is settling"
# Display servers use a GPU a little and forever. They do not count as other users, or no GPU of a desktop would ever be
# free. Their memory counts.
_DISPLAYS: Final = frozenset(
    {"Xorg", "X", "Xwayland", "gnome-shell", "kwin_x11", "kwin_wayland", "plasmashell", "mutter", "sway", "weston"}
)
_Identity = tuple[int, Maybe[int]]


class GpuTracker:
    """The GPUs that a worker manages.

    `--gpus` is resolved at the first readable look and stays bound to these devices, since indices change when a GPU
    falls off the bus. A GPU that is missing later counts as unreadable.
    """

    def __init__(self, chosen: str, rules: PlacementOptions | None = None) -> None:
        """`chosen`: `all`, `0,2` or uuids."""
        self._chosen = chosen
        self._rules = rules or PlacementOptions()
        self._watched: dict[str, _Watched] = {}
        self._quarantined: Entries = {}
        self.present: tuple[Gpu, ...] = ()
        """All GPUs of the machine, chosen or not."""
        self.problem: str | None = "it has not been looked at yet"
        """Why the whole machine could not be read."""
        self.simulated = False
        """Its GPUs are simulated."""
        self.used: dict[str, dict[str, int] | None] = {}
        """Measured bytes of each job on each GPU; None if unknown."""

    @property
    def gpus(self) -> list[GpuState]:
        """The GPUs for placement, in the order of `--gpus`."""
        return [watched.seen for watched in self._watched.values()]

    @property
    def known(self) -> dict[str, Gpu]:
        """The chosen GPUs by uuid, as last listed."""
        return {uuid: watched.gpu for uuid, watched in self._watched.items()}

    def observe(self, look: Look, owner: Owner, holders: Mapping[str, Collection[str]]) -> None:
        """Processes a look. `holders`: the worker's jobs on each GPU, by uuid.

        Raises BadInputError at the first readable look if a chosen GPU is missing.
        """
        self.problem = look.problem.reason if look.problem is not None else None
        if look.problem is None:
            self.present = look.gpus
            self.simulated = is_simulated_source(look.source)
            # A driver that starts late lists no GPUs at first.
            if not self._watched:
                self._watched = {gpu.uuid: _Watched(gpu) for gpu in select_gpus(look.gpus, self._chosen)}
        listed = {gpu.uuid: gpu for gpu in look.gpus}
        readings = {reading.uuid: reading for reading in look.readings}
        for uuid, watched in self._watched.items():
            watched.gpu = listed.get(uuid, watched.gpu)
            watched.take_out(self._quarantined.get(uuid))
            reading = readings.get(uuid) or Reading.unknown(uuid, self.problem or _NOT_LISTED)
            watched.observe(look, reading, owner, holders.get(uuid, ()))
            watched.judge(self._rules, look.at)
        self._add_up(holders)

    def take_out(self, quarantined: Entries) -> None:
        """Takes exactly these GPUs out of rotation, by uuid."""
        self._quarantined = quarantined
        for uuid, watched in self._watched.items():
            watched.take_out(quarantined.get(uuid))

    def ended(self, uuid: str, at: float) -> None:
        """Notes that a job on this GPU has ended: earlier activity does not count as other users."""
        watched = self._watched.get(uuid)
        if watched is not None:
            watched.ended = max(at, watched.ended)

    def worker_gpus(
        self,
        holders: Mapping[str, Collection[str]],
        wall: float,
        programs: Mapping[str, str] = {},
        reserved: Mapping[str, Reservation] = {},
    ) -> tuple[WorkerGpu, ...]:
        """The GPUs for the heartbeat: the last look with the current holders of each GPU.

        `wall`: seconds since the epoch; `programs`: names of background programs, by uuid.
        """
        return tuple(
            watched.report(holders.get(uuid, ()), wall, programs.get(uuid, ""), reserved.get(uuid))
            for uuid, watched in self._watched.items()
        )

    def _add_up(self, holders: Mapping[str, Collection[str]]) -> None:
        self.used = {job: {} for jobs in holders.values() for job in jobs}
        for uuid, watched in self._watched.items():
            for job, amount in watched.used.items():
                amounts = self.used.get(job, {})
                if amounts is None or amount is None:
                    self.used[job] = None
                else:
                    self.used[job] = amounts | {uuid: amount}


class _Watched:
    """One GPU over the looks."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        # The index at the first look.
        self._index = gpu.index
        self.ended = -math.inf
        self.seen = GpuState(gpu.uuid, gpu.index, gpu.memory, _NOT_SEEN, _NOT_SEEN)
        self.used: dict[str, int | None] = {}
        self._holders: tuple[str, ...] = ()
        self._foreign: set[_Identity] = set()
        self._utilization: float | None = None
        self._memory_activity: float | None = None
        self._sm_clock: float | None = None
        self._xids: tuple[int, ...] = ()
        self._settles = False
        self._obstacle: Obstacle = UnreadableGpu(_NOT_SEEN.reason)
        """The obstacle for other jobs, besides its holders."""
        self._note = ""
        self._quarantine: QuarantinedGpu | None = None
        self._unread_since: float | None = None
        """Seconds since the epoch."""
        self._reported: tuple[GpuUse, str, tuple[str, ...]] | None = None
        """State, user and jobs of the last report."""
        self._since = 0.0
        """The start of that state, in seconds since the epoch."""

    def take_out(self, quarantine: QuarantinedGpu | None) -> None:
        """Takes it out of rotation; None puts it back."""
        self._quarantine = quarantine
        self.seen = msgspec.structs.replace(self.seen, quarantine=None if quarantine is None else quarantine.reason)

    def observe(self, look: Look, reading: Reading, owner: Owner, holders: Collection[str]) -> None:
        """Processes one look; `judge` then updates since when the GPU is obstructed."""
        self._holders = tuple(sorted(holders))
        # If a job ran during part of the look's span, the activity may be that job's.
        self._settles = not self._holders and look.at - reading.span < self.ended
        utilization = reading.utilization
        self._utilization = utilization.mean if known(utilization) else None
        activity, clock, health = reading.memory_activity, reading.sm_clock, reading.health
        self._memory_activity = activity.mean if known(activity) else None
        self._sm_clock = clock if known(clock) else None
        self._xids = health.xids if known(health) else ()
        other_processes, is_left_over = self._tell_apart(look, reading, owner)
        peak: Maybe[float] = utilization.peak if known(utilization) else utilization
        problem = _problem(look, reading)
        if problem is None:
            self._unread_since = None
        elif self._unread_since is None:
            self._unread_since = look.wall
        self.seen = GpuState(
            uuid=self.gpu.uuid,
            index=self._index,
            memory_total=reading.memory_total if known(reading.memory_total) else self.gpu.memory,
            memory_used=reading.memory_used,
            # A GPU is not free while the driver lists a process.
            peak=1.0 if is_left_over and known(peak) else peak,
            other_processes=other_processes,
            problem=problem,
            quarantine=self.seen.quarantine,
            obstructed_since=self.seen.obstructed_since,
            name=title(self.gpu),
            links=self.gpu.links,
        )

    def _tell_apart(self, look: Look, reading: Reading, owner: Owner) -> tuple[tuple[str, ...], bool]:
        """Sums up the memory of our jobs. Returns foreign processes, and whether an ended job may have left one."""
        if not known(reading.processes):
            self.used = dict.fromkeys(self._holders)
            return (), False
        self.used = dict.fromkeys(self._holders, 0)
        foreign: dict[_Identity, str] = {}
        is_left_over = False
        for process in reading.processes:
            # A pid from another namespace is meaningless: it may equal one of ours.
            job = owner(process.pid) if known(process.started) else None
            if job in self.used:
                self._count(job, process.memory)
            elif self._holders and not known(process.started):
                # An unknown owner is most likely our job.
                self.used = dict.fromkeys(self._holders)
            elif self._may_be_left_over(process, look.at):
                is_left_over = True
            elif process.name not in _DISPLAYS:
                foreign[process.pid, process.started] = describe(process) + (f" of job {job}" if job else "")
        self._foreign = set(foreign)
        return tuple(foreign.values()), is_left_over

    def _count(self, job: str, memory: Maybe[int]) -> None:
        before = self.used[job]
        self.used[job] = before + memory if before is not None and known(memory) else None

    def _may_be_left_over(self, process: Process, at: float) -> bool:
        """True if it may belong to a job that has just ended; the next look will tell.

        The driver may still list a process that has exited.
        """
        if not self._settles or (process.pid, process.started) in self._foreign:
            return False
        return at <= self.ended or not known(process.started)

    def judge(self, rules: PlacementOptions, at: float) -> None:
        """Updates since when something other than our jobs obstructs the GPU."""
        obstacle = self._beside_holders(rules, at) if self._holders else _unheld(self.seen, rules, at)
        blamed = obstacle
        if self._settles and known(self.seen.peak):
            # Activity of our ended job is not blamed on others.
            blamed = _unheld(msgspec.structs.replace(self.seen, peak=0.0), rules, at)
        since = None if isinstance(blamed, Free) else at
        if since is not None and self.seen.obstructed_since is not None:
            since = self.seen.obstructed_since
        self.seen = msgspec.structs.replace(self.seen, obstructed_since=since)
        if self._settles and isinstance(obstacle, Busy | MemoryTaken):
            # It is no longer in use, although nothing can start there for a moment.
            self._obstacle, self._note = Free(), _SETTLING
        else:
            self._obstacle, self._note = obstacle, "" if isinstance(obstacle, Free) else describe_obstacle(obstacle)

    def _state(self, holders: Collection[str], program: str) -> tuple[GpuUse, str]:
        """Its state, and its user unless that is a job. Jobs are known even if the GPU cannot be read."""
        if holders:
            return ("background", program) if set(holders) == {BACKGROUND} else ("job", "")
        match self._obstacle:
            case Free():
                return "free", ""
            case UsedByOthers(processes=processes):
                return "somebody", name_some(processes)
            case Busy() | MemoryTaken():
                return "somebody", ""
        return "unknown", ""

    def _beside_holders(self, rules: PlacementOptions, at: float) -> Obstacle:
        """The obstacle besides the GPU's holders. Memory has an owner, activity does not."""
        uuid = self.gpu.uuid
        allocations = [
            Allocation(
                ResourceRequest(job=job, gpus=1, order=0), (uuid,), at, None if amount is None else {uuid: amount}
            )
            for job, amount in self.used.items()
        ]
        capacity = GpuCapacity(self.seen, allocations, rules, at)
        if capacity.outside is not None:
            return capacity.outside
        all_known = None not in self.used.values()
        return MemoryTaken(capacity.unexplained) if capacity.unexplained and all_known else Free()

    def report(self, holders: Collection[str], wall: float, program: str, reservation: Reservation | None) -> WorkerGpu:
        total, used = self.seen.memory_total, self.seen.memory_used
        state, user = self._state(holders, program)
        jobs = tuple(sorted(set(holders) - {BACKGROUND}))
        if self._reported != (state, user, jobs):
            self._reported, self._since = (state, user, jobs), wall
        if state != "free":
            reservation = None
        return WorkerGpu(
            uuid=self.gpu.uuid,
            index=self._index,
            name=title(self.gpu),
            memory_total=total if known(total) else None,
            memory_used=used if known(used) else None,
            utilization=self._utilization,
            memory_activity=self._memory_activity,
            sm_clock=self._sm_clock,
            xids=self._xids,
            jobs=jobs,
            note=self._note if reservation is None else describe_obstacle(reservation),
            state=state,
            user=user,
            since=self._since,
            unread_since=self._unread_since,
            kept_for="" if reservation is None else reservation.job,
            quarantine="" if self._quarantine is None else self._quarantine.reason,
            quarantined_since=None if self._quarantine is None else self._quarantine.since,
        )


def _unheld(seen: GpuState, rules: PlacementOptions, at: float) -> Obstacle:
    """The obstacle for jobs on a GPU without holders."""
    return GpuCapacity(seen, (), rules, at).obstacle(_ANYBODY, (), at)


def _problem(look: Look, reading: Reading) -> str | None:
    """Why the GPU or its processes could not be read. Other missing values are handled where they are used."""
    if look.problem is not None:
        return look.problem.reason
    if known(reading.processes):
        return None
    # On a missing GPU everything is unknown for one reason.
    is_alone = known(reading.memory_used) or known(reading.utilization)
    return f"its processes are not known: {reading.processes.reason}" if is_alone else reading.processes.reason
