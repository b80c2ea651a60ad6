"""The local engine: capacity from looks at this machine's GPUs, attempts in shims."""

import contextlib
import math
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final

from msgspec.structs import replace

from stoker.backoff import Backoff
from stoker.engines.attempt import ATTEMPT_TAG, lease_clock
from stoker.engines.engine import (
    STARTS_WITHIN,
    Decision,
    Found,
    Log,
    Reservation,
    RunningAttempt,
    Start,
    Step,
    WorkerOptions,
)
from stoker.engines.identity import WorkerIdentity
from stoker.engines.local.attempts import LocalAttempt, find_attempts, is_supervised
from stoker.engines.local.background_fill import BackgroundFill
from stoker.engines.local.capacity import Allocation, PlacementOptions, ResourceRequest
from stoker.engines.local.host_capacity import HostSpec, HostTooSmall, NotForThisMachine, usage_of
from stoker.engines.local.machine_view import MachineView
from stoker.engines.local.placement import (
    CannotFit,
    CpuSlotsTaken,
    NoGpusSeen,
    Offer,
    Placements,
    WaitingReason,
    place,
)
from stoker.engines.local.prepared import PreparedAttempt
from stoker.engines.local.record import (
    AttemptProcesses,
    LocalAttemptRecord,
    LocalAttemptSpec,
    ShimChannel,
    StartAttempt,
)
from stoker.engines.local.reserved_gpus import ReservedGpusFile
from stoker.engines.local.shims import ForkServer, ShimPool
from stoker.engines.local.waiting_reasons import why_waiting
from stoker.engines.preparation import batch_size_fit, on_one_machine, prepare
from stoker.errors import StokerError
from stoker.gpus.model import Gpu
from stoker.gpus.prober import DEFAULT_DEADLINE, Prober
from stoker.paths import private_directory, remove_tree, state_home
from stoker.queue import Attempt, Job, queue_address
from stoker.queue.model import ReadyJob, Usage, View
from stoker.runs.plan import Plan
from stoker.runs.processes.cgroup import NoCgroupError, cpus_here, ram_here, remove_abandoned

# The interval for continuing suspended shims.
_CHECK_SHIMS_EVERY: Final = 4.0
# A failed job waits this long beyond the deadline for the look that may blame its GPU.
_LATE: Final = 5.0
# The pause after a wrong prediction, which costs a shim, doubled each time: many workers take jobs from each other.
_AFTER_WRONG_PREDICTION: Final = 1.0
_LONGEST_PAUSE: Final = 300.0
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
        self._foreseen: tuple[list[ReadyJob], list[Allocation], Placements] | None = None
        """What is decided when these jobs wait and this runs."""
        self._prepare_again_at = -math.inf
        self._prediction_backoff = Backoff(_AFTER_WRONG_PREDICTION, _LONGEST_PAUSE)
        self._quiet_until = -math.inf
        """Until then a job starts that needs the processor."""

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
        # Of a worker that was killed: none of them was claimed.
        remove_tree(identity.prepared, ignore_errors=True)
        with contextlib.suppress(OSError):
            private_directory(identity.prepared)
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
        self._waiting_for_gpus = {job.id for job in waiting if job.gpus}
        # Jobs without a GPU can start at any time; the others need a fresh look.
        fresh = not self._waiting_for_gpus or self._machine.is_fresh(time.monotonic())
        allocations = self._machine.allocations()
        if self._foreseen is not None and self._foreseen[:2] == (list(waiting), allocations):
            placed = self._foreseen[2]
        else:
            offers = {job.id: offer for job in waiting if (offer := self._offer_elsewhere(job, queue_time)) is not None}
            placed = self._place(waiting, allocations, offers, fresh=fresh)
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

    def _place(
        self,
        waiting: Sequence[ReadyJob],
        allocations: Sequence[Allocation],
        offers: Mapping[str, Offer] = {},
        *,
        fresh: bool = True,
    ) -> Placements:
        requests = [_request(job, order) for order, job in enumerate(waiting)]
        tracker = self._machine.tracker
        return place(
            tracker.gpus if fresh else [],
            allocations,
            requests if fresh else [request for request in requests if not request.gpus],
            self._own,
            time.monotonic(),
            tracker.problem,
            offers,
            self._machine.host,
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
        running = self._start_prepared(job, attempt, claimed_at) or self._start_now(job, attempt, claimed_at)
        self._shims.attempts[attempt.id] = running
        self._quiet_until = time.monotonic() + STARTS_WITHIN
        indices = sorted(self._machine.tracker.known[uuid].index for uuid in attempt.gpus)
        if indices:
            running.where = f"GPU{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"
        self._waiting_for_gpus.discard(job.id)
        # The claim has ended the job's reservation in the queue.
        self._reservations = tuple(one for one in self._reservations if one.job != job.id)
        return running

    def _start_now(self, job: Job, attempt: Attempt, claimed_at: float) -> LocalAttempt:
        gpus = self._gpus_of(attempt)
        plan, variables = self._plan_of(job, attempt, gpus)
        channel, processes = self._shims.take()
        record = LocalAttemptRecord(self._identity.create_directory(attempt))
        attempt_spec = self._attempt_spec(job, attempt, plan, variables, processes, claimed_at)
        try:
            if not channel.send(StartAttempt.of(record, record.write_attempt(attempt_spec))):
                raise StokerError("the process that was to run it was killed")
        except (StokerError, OSError):
            # Nothing was started: no worker may find it and take it for something that runs.
            shutil.rmtree(record.directory, ignore_errors=True)
            raise
        return LocalAttempt(record, attempt_spec, channel)

    def _gpus_of(self, attempt: Attempt) -> list[Gpu]:
        return [self._machine.tracker.known[uuid] for uuid in attempt.gpus]

    def _plan_of(self, job: Job, attempt: Attempt, gpus: Sequence[Gpu]) -> tuple[Plan, dict[str, str]]:
        plan, variables = prepare(
            job,
            gpus,
            self._identity.environment,
            attempt.number,
            self._machine.tracker.present,
            on_one_machine(attempt.id),
        )
        return replace(plan, grace=self._options.grace, source=self._own.source, deadline=self._own.deadline), variables

    def _attempt_spec(
        self,
        job: Job,
        attempt: Attempt,
        plan: Plan,
        variables: Mapping[str, str],
        processes: AttemptProcesses,
        claimed_at: float,
    ) -> LocalAttemptSpec:
        identity = self._identity
        changed = {name: value for name, value in variables.items() if identity.environment.get(name) != value}
        return LocalAttemptSpec(
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
            fitting=batch_size_fit(job, attempt.number, plan.command, self._own.slots_per_gpu),
            commit=job.commit if job.pin else None,
            code=job.code if job.snapshot else None,
            requeue_at_limit=job.requeue_at_limit,
            submitter=job.submitter,
            started=time.time(),
        )

    # The attempt that is prepared

    def prepare(self, waiting: Sequence[ReadyJob], read: Callable[[str], Job | None]) -> str:
        start = self._foresee(waiting)
        prepared = self._shims.prepared
        if prepared is not None:
            if start is not None and (prepared.spec.job, prepared.spec.gpus) == (start.job, start.gpus):
                return prepared.spec.attempt
            self._discard_prepared()
        if start is None or time.monotonic() < self._prepare_again_at or (idle := self._shims.idle()) is None:
            return ""
        job = read(start.job)
        if job is None or not _is_plain(job):
            return ""
        with contextlib.suppress(StokerError, OSError):  # reported when it starts
            return self._prepare(job, start, *idle)
        return ""

    def _foresee(self, waiting: Sequence[ReadyJob]) -> Start | None:
        """What will start when the attempt has ended that runs for longest.

        For jobs without GPUs that is decided ahead. Others depend on a look at the GPUs: the first job probably gets
        those of an equal one.
        """
        self._foreseen = None
        running = sorted((one for one in self._shims.running() if not one.stopping), key=lambda one: one.since)
        if not running or not waiting:
            return None
        left = [one.allocation({}) for one in self._shims.running() if one is not running[0]]
        if _is_timeless(waiting, left) and self._fill is None:
            placed = self._place(waiting, left)
            self._foreseen = (list(waiting), left, placed)
            return placed.start[0] if placed.start else None
        first = _request(waiting[0], 0)
        alike = next((one for one in running if one.spec.request.shape == first.shape), None)
        return None if alike is None else Start(first.job, alike.spec.gpus)

    def _prepare(self, job: Job, start: Start, channel: ShimChannel, processes: AttemptProcesses) -> str:
        """Raises StokerError or OSError; nothing is prepared then."""
        identity, moment = self._identity, lease_clock()
        attempt = Attempt(
            id=os.urandom(16).hex(),
            job=job.id,
            worker=identity.worker,
            number=job.attempts + 1,
            gpus=start.gpus,
            started=time.time(),
            lease_expires=time.time() + self.lease,
        )
        gpus = self._gpus_of(attempt)
        plan, variables = self._plan_of(job, attempt, gpus)
        attempt_spec = self._attempt_spec(job, attempt, plan, variables, processes, moment)
        record = LocalAttemptRecord(identity.directory_of(job.id, attempt.number))
        directory = identity.prepared / attempt.id
        directory.mkdir(mode=0o700)
        prepared = PreparedAttempt(job, attempt_spec, record, directory, channel, gpus, self._machine.tracker.present)
        self._shims.hold_prepared(prepared)
        try:
            message = StartAttempt.ahead(record.directory, LocalAttemptRecord(directory).write_attempt(attempt_spec))
            if message is None or not channel.send(message):
                raise StokerError("it cannot be prepared")
        except (StokerError, OSError):
            self._discard_prepared()
            raise
        return attempt.id

    def _start_prepared(self, job: Job, attempt: Attempt, claimed_at: float) -> LocalAttempt | None:
        """None when something else was prepared, or nothing, or it cannot be started: then nothing of it runs."""
        prepared = self._shims.release_prepared()
        if prepared is None:
            return None
        running = None
        if prepared.is_for(job, attempt, self._gpus_of(attempt), self._machine.tracker.present):
            running = prepared.begin(claimed_at)
        if running is None:
            self._prepare_again_at = time.monotonic() + self._prediction_backoff.next()
            prepared.discard()
        else:
            self._prediction_backoff.reset()
        return running

    def _discard_prepared(self) -> None:
        if (prepared := self._shims.release_prepared()) is not None:
            self._prepare_again_at = time.monotonic() + self._prediction_backoff.next()
            prepared.discard()

    def forget(self, attempt: str) -> None:
        del self._shims.attempts[attempt]

    # Waiting

    def wait_for(self) -> tuple[Iterable[int], float]:
        due = min(self._machine.due(), self._shims.due())
        if time.monotonic() >= self._quiet_until:
            self._shims.acknowledge()
        else:
            due = min(due, self._quiet_until)
        self._shims.replenish()
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


def _is_plain(job: Job) -> bool:
    """Whether its attempt needs nothing that takes time, or that is done where its directory is."""
    return job.state == "queued" and not (job.fit or job.pin or job.snapshot or job.nodes > 1)


def _is_timeless(waiting: Sequence[ReadyJob], allocations: Sequence[Allocation]) -> bool:
    """Whether a decision on these is the same at any time, and after any look at the GPUs."""
    return not any(one.gpus or one.kept is not None or one.time_limit is not None for one in waiting) and not any(
        one.gpus or one.request.time_limit is not None for one in allocations
    )


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
