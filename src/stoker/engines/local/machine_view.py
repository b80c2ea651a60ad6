"""The worker's view of its machine: its GPUs at each look, and the jobs and background programs on them."""

import math
import time
from collections.abc import Mapping
from typing import Final

from stoker.engines.attempt import AttemptResult
from stoker.engines.engine import Log, Reservation
from stoker.engines.gpu_usage import UsagePerMinute
from stoker.engines.identity import WorkerIdentity
from stoker.engines.local.attempts import LocalAttempt
from stoker.engines.local.background_fill import BackgroundFill
from stoker.engines.local.capacity import BACKGROUND, Allocation, PlacementOptions
from stoker.engines.local.gpu_tracker import GpuTracker
from stoker.engines.local.host_capacity import HostSpec
from stoker.engines.local.placement import ANY_HOST
from stoker.engines.local.quarantine import JobEnd, Quarantine, changed, program_of
from stoker.engines.local.shims import ShimPool
from stoker.errors import StokerError
from stoker.gpus.model import Look, Unknown, known
from stoker.gpus.prober import Prober, Sampler
from stoker.gpus.quarantine import Entries, QuarantineFile
from stoker.gpus.source import AbsentError, is_simulated_source
from stoker.logs.reader import read_tail
from stoker.queue.model import GpuUse, WorkerGpu
from stoker.runs.plan import IDLE_EXIT_CODE
from stoker.runs.processes.spawn import OWN_FAILURE

# The interval of looks while no job waits, for viewers and charts. A look costs the driver a few milliseconds.
_QUIET_LOOKS: Final = 5.0
# The interval while jobs wait for GPUs that others use.
_WAITING_LOOKS: Final = 2.0
# The interval while a freed GPU settles.
_SETTLING_LOOKS: Final = 0.25
# A GPU that has not settled by then is used by others.
_SETTLES_WITHIN: Final = 5.0
# The shortest interval of looks: jobs that end within milliseconds share one.
_LEAST_LOOKS: Final = 0.02
# Placement needs a look younger than this.
_FRESH: Final = 0.5
# A program prints its fatal error last.
_LAST_OUTPUT: Final = 16 * 1024
# Exit codes of jobs that were stopped or could not start.
_NOT_ITS_OWN: Final = frozenset({IDLE_EXIT_CODE, OWN_FAILURE})


class MachineView:
    """The GPUs of this machine and their holders."""

    def __init__(
        self,
        gpus: str,
        placement: PlacementOptions,
        identity: WorkerIdentity,
        shims: ShimPool,
        prober: Prober,
        fill: BackgroundFill | None,
        log: Log,
        host: HostSpec = ANY_HOST,
    ) -> None:
        self.host = host
        """The machine's resources besides its GPUs."""
        self.tracker = GpuTracker(gpus, placement)
        # Set before the first look, so that simulated GPUs are never shown as real.
        self.tracker.simulated = is_simulated_source(prober.spec)
        self.no_gpus = False
        """The machine has no GPUs now."""
        self._host = identity.host
        self.usage = UsagePerMinute(identity.host)
        self._quarantine = Quarantine(identity.boot)
        self._quarantine_file = QuarantineFile(identity.directory, identity.host)
        self._out_of_rotation: Entries = {}
        """The entries as last logged."""
        self._quarantine_problem = ""
        """The last logged reason why its file could not be written."""
        self._fill = fill
        self._shims = shims
        self._log = log
        self._absence_logged = False
        self._sampler = Sampler(prober, _QUIET_LOOKS)
        self._looked_at = -math.inf
        self._last_look = -math.inf
        """The last look's own time."""
        self._freed_at = -math.inf

    def descriptors(self) -> list[int]:
        return [self._sampler.fileno(), -1 if self._fill is None else self._fill.fileno()]

    def due(self) -> float:
        return self._sampler.due()

    def step(self, *, wanted: bool) -> bool:
        """Processes a finished look. True if jobs may start now. `wanted`: some job waits for a GPU."""
        changed = self._receive_from_fill()
        try:
            look = self._sampler.step()
        except AbsentError as absent:
            self._note_absence(absent)
            return changed or wanted
        if look is None:
            return changed
        self.no_gpus = False
        self._absence_logged = self._absence_logged and not look.gpus
        self._observe(look)
        self._looked_at = time.monotonic()
        if wanted:
            settling = look.at - self._freed_at <= _SETTLES_WITHIN
            self._sampler.no_later_than(time.monotonic() + (_SETTLING_LOOKS if settling else _WAITING_LOOKS))
        # Background programs get new GPUs only after jobs had their choice.
        return changed or wanted or self._fill is not None

    def is_fresh(self, moment: float) -> bool:
        """True if the last look is fresh enough for placement; otherwise requests a new one."""
        if moment - self._looked_at <= _FRESH:
            return True
        self._sampler.no_later_than(moment)
        return False

    def freed(self, uuids: tuple[str, ...], state: GpuUse = "job") -> None:
        """Notes that a job or background program has left these GPUs, and requests a look."""
        moment = time.monotonic()
        for uuid in uuids:
            self.tracker.ended(uuid, moment)
            self.usage.note_end(uuid, state, moment)
        if uuids:
            self._freed_at = moment
            self._sampler.no_later_than(max(moment, self._looked_at + _LEAST_LOOKS))

    def allocations(self) -> list[Allocation]:
        """The running jobs and programs, for placement."""
        used = self.tracker.used
        found = [one.allocation(used.get(one.job, {})) for one in self._shims.running()]
        return found if self._fill is None else found + self._fill.allocations(used.get(BACKGROUND, {}))

    def is_without_gpus(self) -> bool:
        """True if this machine never had a GPU. Losing all GPUs is a problem instead."""
        return self.no_gpus and not self.tracker.known

    def worker_gpus(self, reserved: Mapping[str, Reservation] = {}) -> tuple[WorkerGpu, ...]:
        """The GPUs for the heartbeat. `reserved`: reservations by uuid."""
        programs = {} if self._fill is None else self._fill.programs
        return self.tracker.worker_gpus(self.holders(), time.time(), programs, reserved)

    def holders(self) -> dict[str, set[str]]:
        """The jobs on each GPU, by uuid."""
        holders: dict[str, set[str]] = {}
        for attempt in self._shims.running():
            for uuid in attempt.spec.gpus:
                holders.setdefault(uuid, set()).add(attempt.job)
        if self._fill is not None:
            for uuid in self._fill.programs:
                holders.setdefault(uuid, set()).add(BACKGROUND)
        return holders

    def grant_idle(self, preempted: frozenset[str]) -> None:
        """Grants background programs the GPUs that no job has or needs, except those in `preempted`."""
        if self._fill is None:
            return
        held = {uuid for one in self._shims.attempts.values() for uuid in one.spec.gpus}
        wanted = {uuid for uuid in self._fill.reach if self._fill.name_on(uuid) in preempted}
        # A revoked GPU is granted again only after its program has ended.
        wanted |= {allocation.gpus[0] for allocation in self._fill.allocations({}) if allocation.stopping}
        wanted |= self._quarantine.out_of_rotation.keys()
        self._fill.grant(uuid for uuid in self.tracker.known if uuid not in held | wanted)

    # GPUs out of rotation

    def has_looked_since(self, moment: float) -> bool:
        return self._last_look >= moment

    def judge(self, attempt: LocalAttempt) -> AttemptResult | None:
        """A new result if a GPU made the attempt fail; None if the attempt keeps its own."""
        spec, result = attempt.spec, attempt.result
        if not spec.gpus or result is None:
            return None
        has_failed = result.outcome == "failed" and result.exit_code not in _NOT_ITS_OWN
        end = JobEnd(
            job=attempt.job,
            program=f"{spec.submitter}: {program_of(' '.join(spec.plan.command))}",
            gpus=spec.gpus,
            at=attempt.ended_at,
            lasted=attempt.ended_at - attempt.since,
            failed=has_failed,
            exit_code=result.exit_code,
            output=read_tail(attempt.record.output, _LAST_OUTPUT) if has_failed else "",
        )
        self._quarantine.job_ended(end, time.time())
        self._apply_quarantine()
        if result.outcome != "failed":
            return None
        uuid = self._quarantine.excuse(attempt.job, spec.gpus, attempt.since)
        if uuid is None:
            return None
        entry = self._quarantine.out_of_rotation[uuid]
        return AttemptResult("requeued", None, f"GPU {entry.index} of {self._host} failed ({entry.reason})")

    def _apply_quarantine(self) -> None:
        """Writes changes to the file, logs them, and passes them to the tracker."""
        changes = dict(self._quarantine.unwritten)
        if changes:
            try:
                self._quarantine_file.update(lambda entries: changed(entries, changes))
                self._quarantine.unwritten.clear()
                self._quarantine_problem = ""
            except StokerError as error:
                if self._quarantine_problem != str(error):
                    self._quarantine_problem = str(error)
                    self._log(f"{error}; GPUs stay out of rotation only while this worker runs")
        before, out = self._out_of_rotation, self._quarantine.out_of_rotation
        for uuid, entry in out.items():
            if uuid not in before:
                self._log(
                    f"GPU {entry.index} is out of rotation ({entry.reason}): "
                    f"`stoker gpus --release {entry.index}` brings it back"
                )
        for uuid, entry in before.items():
            if uuid not in out:
                self._log(f"GPU {entry.index} is in rotation again")
        if out != before:
            self._out_of_rotation = out
            self.tracker.take_out(out)

    def _receive_from_fill(self) -> bool:
        if self._fill is None:
            return False
        before = self._fill.programs
        changed = self._fill.receive()
        self.freed(tuple(before.keys() - self._fill.programs), "background")
        return changed

    def _note_absence(self, absent: AbsentError) -> None:
        """Records that the machine has no GPUs now. Earlier readings are out of date."""
        self.no_gpus = True
        if not self._absence_logged:
            self._absence_logged = True
            self._log(f"{absent}: only jobs without a GPU are run")
        self._looked_at = time.monotonic()
        self._observe(Look("", self._looked_at, time.time(), (), (), Unknown(str(absent))))

    def _observe(self, look: Look) -> None:
        self._last_look = look.at
        self._quarantine.load(self._quarantine_file.read(), look.at, look.wall)
        self._quarantine.observe(look)
        self._apply_quarantine()
        self.tracker.observe(look, self._owner, self.holders())
        watts = {reading.uuid: reading.power for reading in look.readings if known(reading.power)}
        for gpu in self.worker_gpus():
            power = watts.get(gpu.uuid)
            self.usage.observe(gpu.uuid, gpu.state, look.at, look.wall, gpu.utilization, gpu.memory_used, power)

    def _owner(self, pid: int) -> str | None:
        job = next((one.job for one in self._shims.attempts.values() if one.owns(pid)), None)
        if job is None and self._fill is not None and self._fill.owns(pid):
            return BACKGROUND
        return job
