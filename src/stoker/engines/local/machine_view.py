"""What a worker sees of its machine: its GPUs, look by look, with what jobs and background programs hold of them."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec

from stoker.engines.local.background_fill import BackgroundFill
from stoker.engines.local.capacity import BACKGROUND, Allocation, GpuState, ReservedFor
from stoker.engines.local.gpu_tracker import SIMULATED, GpuTracker
from stoker.engines.local.gpu_usage import UsagePerMinute
from stoker.engines.local.shim_pool import ShimPool
from stoker.engines.local.waiting_reasons import what_of_it
from stoker.engines.options import WorkerOptions
from stoker.gpus.model import Look, Unknown
from stoker.gpus.prober import Prober, Sampler
from stoker.gpus.source import AbsentError
from stoker.queue.model import GpuUse, WorkerGpu

# Looks when nothing waits: for people who watch what the machine does, and for charts of it. A look costs a driver
# a few milliseconds.
_QUIET_LOOKS: Final = 5.0
# Looks while jobs wait for GPUs that others use.
_WAITING_LOOKS: Final = 2.0
# Looks while a GPU that was just freed comes to rest.
_SETTLING_LOOKS: Final = 0.25
# A GPU that is not at rest after this is somebody's, and is looked at like those.
_SETTLES_WITHIN: Final = 5.0
# Nobody is given a GPU on the strength of a look that is older than this.
_FRESH: Final = 0.5


class MachineView:
    """The machine, and who of ours is where on it."""

    def __init__(
        self,
        orders: WorkerOptions,
        host: str,
        crew: ShimPool,
        prober: Prober,
        filling: BackgroundFill | None,
        tell: Callable[[str], None],
    ) -> None:
        self.machine = GpuTracker(orders.gpus, orders.rules)
        # Told before there was a look: nobody is to take them for real ones meanwhile.
        self.machine.simulated = orders.source.partition(":")[0] == SIMULATED
        self.filling = filling
        self.no_gpus = False
        """Whether there is nothing to look at."""
        self._absence_told = False
        self.meter = UsagePerMinute(host)
        self._occupancy = Occupancy()
        self._crew = crew
        self._tell = tell
        self._lookout = Sampler(prober, _QUIET_LOOKS)
        self._looked_at = -math.inf
        self._freed_at = -math.inf

    def descriptors(self) -> list[int]:
        return [self._lookout.fileno(), -1 if self.filling is None else self.filling.fileno()]

    def due(self) -> float:
        return self._lookout.due()

    def watch(self, *, wanted: bool) -> bool:
        """Takes a look in that has come; whether that may let jobs start. `wanted`: whether any waits for a GPU."""
        changed = self._hear_filling()
        try:
            look = self._lookout.step()
        except AbsentError as absent:
            self._note_absence(absent)
            return changed or wanted
        if look is None:
            return changed
        self.no_gpus = False
        self._absence_told = self._absence_told and not look.gpus
        self._observe(look)
        self._looked_at = time.monotonic()
        if wanted:
            settling = look.at - self._freed_at <= _SETTLES_WITHIN
            self._lookout.no_later_than(time.monotonic() + (_SETTLING_LOOKS if settling else _WAITING_LOOKS))
        # GPUs that are seen for the first time are left to background programs once jobs had their choice.
        return changed or wanted or self.filling is not None

    def is_fresh(self, moment: float) -> bool:
        """Whether GPUs may be given away on the strength of the last look; if not, the next one is taken now."""
        if moment - self._looked_at <= _FRESH:
            return True
        self._lookout.no_later_than(moment)
        return False

    def freed(self, uuids: tuple[str, ...], state: GpuUse = "job") -> None:
        """Something of ours has left these GPUs: what comes next is to be seen at once."""
        moment = time.monotonic()
        for uuid in uuids:
            self.machine.ended(uuid, moment)
            self.meter.did(uuid, state, moment)
        if uuids:
            self._freed_at = moment
            self._lookout.no_later_than(moment)

    def holdings(self) -> list[Allocation]:
        """What runs here, for placement."""
        used = self.machine.used
        found = [one.holding(used.get(one.job, {})) for one in self._crew.running()]
        return found if self.filling is None else found + self.filling.holdings(used.get(BACKGROUND, {}))

    def is_without_gpus(self) -> bool:
        """Whether this machine has none, and had none: one whose GPUs are gone has a problem."""
        return self.no_gpus and not self.machine.known

    def gpus(self) -> list[GpuState]:
        return self.machine.gpus

    def told_gpus(self, kept: Mapping[str, ReservedFor] = {}) -> tuple[WorkerGpu, ...]:
        """What others are told of the GPUs. `kept`: for which jobs some of them are kept free, by their uuids."""
        wall = time.time()
        return tuple(
            self._occupancy.dated(_with_kept(self._with_program(gpu), kept), wall)
            for gpu in self.machine.worker_gpus(self.holders())
        )

    def holders(self) -> dict[str, set[str]]:
        """The jobs that hold each GPU, by its uuid."""
        holders: dict[str, set[str]] = {}
        for running_attempt in self._crew.running():
            for uuid in running_attempt.attempt_spec.gpus:
                holders.setdefault(uuid, set()).add(running_attempt.job)
        if self.filling is not None:
            for uuid in self.filling.occupied:
                holders.setdefault(uuid, set()).add(BACKGROUND)
        return holders

    def leave_to_filling(self, victims: frozenset[str]) -> None:
        """GPUs that no job holds or is promised are left to background programs. `victims`: who is to make room."""
        if self.filling is None:
            return
        held = {uuid for one in self._crew.engaged.values() for uuid in one.attempt_spec.gpus}
        wanted = {uuid for uuid in self.filling.reach if self.filling.name_on(uuid) in victims}
        # Once asked for, a GPU is not given back before the program on it is gone.
        wanted |= {holding.gpus[0] for holding in self.filling.holdings({}) if holding.stopping}
        self.filling.grant(uuid for uuid in self.machine.known if uuid not in held | wanted)

    def _hear_filling(self) -> bool:
        if self.filling is None:
            return False
        before = self.filling.occupied
        changed = self.filling.attend()
        self.freed(tuple(before - self.filling.occupied), "background")
        return changed

    def _note_absence(self, absent: AbsentError) -> None:
        """There is nothing to look at. What was seen of GPUs that were there before says nothing any more."""
        self.no_gpus = True
        if not self._absence_told:
            self._absence_told = True
            self._tell(f"{absent}: jobs that need no GPU are run")
        self._looked_at = time.monotonic()
        nothing = Look("", self._looked_at, time.time(), (), (), Unknown(str(absent)))
        self._observe(nothing)

    def _observe(self, look: Look) -> None:
        self.machine.observe(look, self._owner, self.holders())
        for gpu in self.told_gpus():
            self.meter.saw(gpu.uuid, gpu.state, look.at, look.wall, gpu.utilization, gpu.memory_used)

    def _with_program(self, gpu: WorkerGpu) -> WorkerGpu:
        """Only the filler knows what it runs there."""
        if gpu.state != "background" or self.filling is None:
            return gpu
        return msgspec.structs.replace(gpu, user=self.filling.program_on(gpu.uuid))

    def _owner(self, pid: int) -> str | None:
        job = next((one.job for one in self._crew.engaged.values() if one.owns(pid)), None)
        if job is None and self.filling is not None and self.filling.owns(pid):
            return BACKGROUND
        return job


def _with_kept(gpu: WorkerGpu, kept: Mapping[str, ReservedFor]) -> WorkerGpu:
    """One that is free, and yet no other job may have it."""
    if gpu.state != "free" or gpu.uuid not in kept:
        return gpu
    return msgspec.structs.replace(gpu, kept_for=kept[gpu.uuid].job, note=what_of_it(kept[gpu.uuid]))


class _Stay(NamedTuple):
    state: GpuUse
    user: str
    jobs: tuple[str, ...]
    since: float


class Occupancy:
    """Remembers what was told of each GPU last."""

    def __init__(self) -> None:
        self._stays: dict[str, _Stay] = {}

    def dated(self, gpu: WorkerGpu, wall: float) -> WorkerGpu:
        """The same with its `since`: it does what it did before, or has just begun to. `wall`: since the epoch."""
        stay = self._stays.get(gpu.uuid)
        if stay is None or stay[:3] != (gpu.state, gpu.user, gpu.jobs):
            stay = self._stays[gpu.uuid] = _Stay(gpu.state, gpu.user, gpu.jobs, wall)
        return msgspec.structs.replace(gpu, since=stay.since)
