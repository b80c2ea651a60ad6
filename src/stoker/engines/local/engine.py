"""The local engine: capacity from looks at this machine's GPUs, attempts in shims."""

import contextlib
import math
import shutil
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

from msgspec.structs import replace

from stoker.engines.attempt import ATTEMPT_TAG
from stoker.engines.engine import Decision, Found, Log, Reservation, RunningAttempt, Step, WorkerOptions
from stoker.engines.identity import WorkerIdentity
from stoker.engines.local.attempts import LocalAttempt, find_attempts, is_supervised
from stoker.engines.local.background_fill import BackgroundFill
from stoker.engines.local.capacity import PlacementOptions, ResourceRequest
from stoker.engines.local.host_capacity import HostSpec, HostTooSmall, NotForThisMachine, usage_of
from stoker.engines.local.machine_view import MachineView
from stoker.engines.local.placement import (
    CannotFit,
    CpuSlotsTaken,
    NoGpusSeen,
    Offer,
    WaitingReason,
    place,
)
from stoker.engines.local.record import LocalAttemptRecord, LocalAttemptSpec, StartAttempt
from stoker.engines.local.reserved_gpus import ReservedGpusFile
from stoker.engines.local.shims import ForkServer, ShimPool
from stoker.engines.local.waiting_reasons import why_waiting
from stoker.engines.preparation import batch_size_fit, on_one_machine, prepare
from stoker.errors import StokerError
from stoker.gpus.prober import DEFAULT_DEADLINE, Prober
from stoker.paths import state_home
from stoker.queue import Attempt, Job, queue_address
from stoker.queue.model import ReadyJob, Usage, View
from stoker.runs.processes.cgroup import NoCgroupError, cpus_here, ram_here, remove_abandoned

# The interval for continuing suspended shims.
_CHECK_SHIMS_EVERY: Final = 2.0
# A failed job waits this long beyond the deadline for the look that may blame its GPU.
_LATE: Final = 5.0
# The limit of reasons in a heartbeat: more than anybody reads.
_MOST_REASONS: Final = 200


class LocalOptions(PlacementOptions, frozen=True, kw_only=True):
    """The engine's own options."""

    gpus: str = "all"
    source: str = "auto"
    deadline: float = DEFAULT_DEADLINE
    cpus: int | None = None
    """The CPUs that jobs may use in total; None for all of the machine."""
    ram: int | None = None
    """The RAM that jobs may use in total, in bytes; None for all of the machine."""
    fill: str | None = None
    """The file that configures background programs; empty for the default of `stoker fill`, None to run none."""


class LocalEngine:
    """Runs attempts on this machine."""

    def __init__(self, options: WorkerOptions, own: LocalOptions, log: Log) -> None:
        """Runs before the worker locks its home: shims are forked from this process, and would inherit the lock."""
        self._options = options
        self._own = own
        self._log = log
        self._queue = queue_address(options.queue).whole
        self._fork_server = ForkServer(options.queue, state_home())
        self._fill: BackgroundFill | None = None
        if own.fill is not None:
            self._fill = BackgroundFill(own.fill or None, own.source, own.deadline, state_home(), log)
        self._shims = ShimPool(self._fork_server)
        self._prober = Prober(own.source, deadline=own.deadline, sharing="start")
        self._reserved_file: ReservedGpusFile | None = None
        self._check_shims_at = 0.0
        self._waiting_for_gpus: set[str] = set()
        self._reasons: dict[str, WaitingReason] = {}
        self._reservations: tuple[Reservation, ...] = ()

    def open(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._reserved_file = ReservedGpusFile(identity.directory, identity.host)
        host = HostSpec(
            name=identity.host,
            labels=self._options.labels,
            cpus=self._own.cpus if self._own.cpus is not None else cpus_here(),
            ram=self._own.ram if self._own.ram is not None else ram_here(),
        )
        self._machine = MachineView(
            self._own.gpus, self._own, identity, self._shims, self._prober, self._fill, self._log, host
        )
        self._shims.replenish()

    @property
    def attempts(self) -> Mapping[str, LocalAttempt]:
        return self._shims.attempts

    @property
    def lease(self) -> float:
        return self._options.lease

    def find(self) -> Found[LocalAttempt]:
        found = find_attempts(self._identity, self._options.queue, self._shims.attempts)
        self._shims.attempts |= {attempt.id: attempt for attempt in found.attempts}
        for attempt in found.attempts:
            if attempt.result is not None:
                self._note_end(attempt)
        return found

    def is_started(self, attempt: Attempt) -> bool:
        return is_supervised(self._identity, attempt)

    # Placement

    def decide(self, waiting: Sequence[ReadyJob], queue_time: float) -> Decision:
        moment = time.monotonic()
        requests = [_request(job, order) for order, job in enumerate(waiting)]
        self._waiting_for_gpus = {request.job for request in requests if request.gpus}
        # Jobs without a GPU can start at any time; the others need a fresh look.
        fresh = not self._waiting_for_gpus or self._machine.is_fresh(moment)
        placed = place(
            self._machine.tracker.gpus if fresh else [],
            self._machine.allocations(),
            requests if fresh else [request for request in requests if not request.gpus],
            self._own,
            moment,
            self._machine.tracker.problem,
            {job.id: offer for job in waiting if (offer := self._offer_elsewhere(job, queue_time)) is not None},
            self._machine.host,
        )
        self._reasons = placed.waiting
        self._shims.prepare(len(placed.start))
        if fresh:
            self._reservations = placed.reservations
        return Decision(
            start=placed.start,
            preempt=placed.preempt,
            reserved=placed.reservations,
            never=frozenset(job for job, reason in placed.waiting.items() if self._is_final(reason)),
            complete=fresh,
        )

    def _offer_elsewhere(self, job: ReadyJob, queue_time: float) -> Offer | None:
        """The offer of another machine that reserves GPUs for the job."""
        if job.kept is None or self._identity.is_own(job.kept.worker):
            return None
        starts_in = math.inf if job.kept.until is None else max(0.0, job.kept.until - queue_time)
        return Offer(starts_in, job.gpus - len(job.kept.gpus))

    def _is_final(self, reason: WaitingReason) -> bool:
        """True if the job can never start here."""
        match reason:
            case CannotFit() | HostTooSmall() | NotForThisMachine():
                return True
            case CpuSlotsTaken(at_once=at_once):
                return at_once == 0
            case NoGpusSeen():
                return self._machine.no_gpus
        return False

    def commit(self, preempt: Collection[str]) -> None:
        for attempt in self._shims.running():
            if attempt.job in preempt and not attempt.stopping:
                self._log(f"{attempt.job}: preempted by another job")
                attempt.stop("preempted", "It was preempted by another job.")
        self._machine.grant_idle(frozenset(preempt))

    # Attempts

    def start(self, job: Job, attempt: Attempt, claimed_at: float) -> LocalAttempt:
        identity, tracker = self._identity, self._machine.tracker
        gpus = [tracker.known[uuid] for uuid in attempt.gpus]
        plan, variables = prepare(
            job, gpus, identity.environment, attempt.number, tracker.present, on_one_machine(attempt.id)
        )
        plan = replace(plan, grace=self._options.grace, source=self._own.source, deadline=self._own.deadline)
        changed = {name: value for name, value in variables.items() if identity.environment.get(name) != value}
        fit = batch_size_fit(job, attempt.number, plan.command, self._own.slots_per_gpu)
        channel, processes = self._shims.take()
        record = LocalAttemptRecord(identity.create_directory(attempt))
        attempt_spec = LocalAttemptSpec(
            attempt=attempt.id,
            job=job.id,
            number=attempt.number,
            queue=self._queue,
            host=identity.host,
            boot=identity.boot,
            processes=processes,
            request=_request(job, 0),
            plan=plan,
            environment=changed | {ATTEMPT_TAG: attempt.id},
            without=tuple(name for name in identity.environment if name not in variables),
            gpus=attempt.gpus,
            lease=self.lease,
            lease_until=claimed_at + self.lease,
            log_limit=self._options.log_limit,
            fitting=fit,
            commit=job.commit if job.pin else None,
            code=job.code if job.snapshot else None,
            requeue_at_limit=job.requeue_at_limit,
            submitter=job.submitter,
            started=time.time(),
        )
        try:
            if not channel.send(StartAttempt.of(record, record.write_attempt(attempt_spec))):
                raise StokerError("the process that was to run it was killed")
        except (StokerError, OSError):
            # Nothing has started, so no worker may find this directory and take it for a running attempt.
            shutil.rmtree(record.directory, ignore_errors=True)
            raise
        running = LocalAttempt(record, attempt_spec, channel)
        self._shims.attempts[attempt.id] = running
        indices = sorted(tracker.known[uuid].index for uuid in attempt.gpus)
        if indices:
            running.where = f"GPU{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
        self._waiting_for_gpus.discard(job.id)
        # The claim has ended the job's reservation in the queue.
        self._reservations = tuple(one for one in self._reservations if one.job != job.id)
        return running

    def forget(self, attempt: str) -> None:
        del self._shims.attempts[attempt]

    # Waiting

    def wait_for(self) -> tuple[Iterable[int], float]:
        self._shims.acknowledge()
        self._shims.replenish()
        due = min(self._machine.due(), self._shims.due())
        if self._shims.attempts:
            due = min(due, self._check_shims_at)
        return [*self._machine.descriptors(), *self._shims.descriptors()], due

    def step(self, readable: Collection[int]) -> Step:
        if time.monotonic() >= self._check_shims_at:
            self._check_shims_at = time.monotonic() + _CHECK_SHIMS_EVERY
            for attempt in self._shims.running():
                attempt.check_shim()
        ended: list[RunningAttempt] = []
        for attempt in self._shims.receive(readable):
            self._machine.freed(attempt.spec.gpus)
            self._note_end(attempt)
            if not attempt.provisional:
                self._machine.judge(attempt)
                ended.append(attempt)
        changed = self._machine.step(wanted=bool(self._waiting_for_gpus))
        return Step([*ended, *self._judge_failures()], changed)

    def _note_end(self, attempt: LocalAttempt) -> None:
        """A failure on GPUs is provisional until a look shows whether one of them is bad."""
        attempt.ended_at = time.monotonic()
        attempt.provisional = bool(
            attempt.spec.gpus and attempt.result is not None and attempt.result.outcome == "failed"
        )

    def _judge_failures(self) -> list[LocalAttempt]:
        """The attempts whose result is final now. If a GPU is at fault, the job is requeued."""

        judged = []
        for attempt in self._shims.attempts.values():
            if not attempt.provisional:
                continue
            too_late = time.monotonic() > attempt.ended_at + self._own.deadline + _LATE
            if self._machine.has_looked_since(attempt.ended_at) or too_late:
                attempt.provisional = False
                if (result := self._machine.judge(attempt)) is not None:
                    attempt.result, attempt.gpu_failed = result, True
                self._machine.freed(attempt.spec.gpus)
                judged.append(attempt)
        return judged

    # Reports

    def report(self) -> View:
        reserved = {uuid: one for one in self._reservations for uuid in one.ready}
        absent = self._machine.is_without_gpus()
        taken = usage_of(self._machine.allocations())
        view = View(
            gpus=self._machine.worker_gpus(reserved),
            waiting={job: why_waiting(reason) for job, reason in islice(self._reasons.items(), _MOST_REASONS)},
            problem=None if absent else self._machine.tracker.problem,
            simulated=self._machine.tracker.simulated,
            absent=absent,
            cpus=self._machine.host.cpus,
            cpus_taken=taken.cpus,
            ram=self._machine.host.ram,
            ram_taken=taken.ram,
        )
        if self._reserved_file is not None:
            self._reserved_file.write({gpu.uuid: gpu.note.removeprefix("is ") for gpu in view.gpus if gpu.kept_for})
        return view

    def usage(self, *, final: bool = False) -> Sequence[Usage]:
        return self._machine.usage.so_far() if final else self._machine.usage.finished()

    def usage_written(self, rows: Iterable[Usage]) -> None:
        self._machine.usage.written(rows)

    def tidy(self) -> None:
        with contextlib.suppress(OSError, NoCgroupError):
            remove_abandoned()

    def close(self) -> None:
        self._shims.close()
        self.tidy()
        self._prober.close()
        if self._reserved_file is not None:
            self._reserved_file.write({})
        if self._fill is not None:
            self._fill.close()


def _request(job: Job | ReadyJob, order: int) -> ResourceRequest:
    return ResourceRequest(
        job=job.id,
        gpus=job.gpus,
        order=order,
        memory=job.memory,
        shares=job.share,
        priority=job.priority,
        preemptible=job.preemptible,
        time_limit=job.time_limit,
        gpu_model=job.gpu_model,
        gpu_memory=job.gpu_memory,
        cpus=job.cpus or 0,
        ram=job.ram or 0,
        machine=job.machine,
        labels=job.labels,
        excluded=job.exclude_machines,
    )
