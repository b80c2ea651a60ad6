"""Jobs on their way to GPUs: what waits is read, placed, claimed and started, and why the rest waits is remembered."""

import math
import shlex
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Final

from stoker.engines.identity import WorkerIdentity
from stoker.engines.local.attempt_spec import now as lease_clock
from stoker.engines.local.capacity import ReservedFor, ResourceRequest
from stoker.engines.local.gpu_tracker import GpuTracker
from stoker.engines.local.machine_view import MachineView
from stoker.engines.local.messages import StopAttempt
from stoker.engines.local.placement import (
    CannotFit,
    CannotStart,
    CpuSlotsTaken,
    NoGpusSeen,
    Offer,
    Placed,
    Reason,
    Reservation,
    decide,
)
from stoker.engines.local.running_attempt import RunningAttempt
from stoker.engines.local.shim_pool import ShimPool
from stoker.engines.local.starting import start
from stoker.engines.local.waiting_reasons import why_waiting
from stoker.engines.options import WorkerOptions
from stoker.errors import BadInputError, StokerError
from stoker.queue import Attempt, Job, Store
from stoker.queue.model import KeptGpus

# Far more than any machine has places; what is behind them in the queue is seen when they have started.
_MOST_WAITING: Final = 200
# The first of them that nobody else has is taken in one round trip.
_MOST_ALIKE: Final = 16
# Behind the bell: what it missed is found after this.
_SLOW_POLL: Final = 5.0
# A machine that could not start a job (its disk is full, it has no processes left) must not draw one job after another
# into its trouble: it pauses, for twice as long each time.
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0
# Trouble that comes after so much quiet is another one.
_QUIET: Final = 4 * _LONGEST_PAUSE
# Time limits are kept to within seconds: a new estimate that is no further from the last is not told.
_SAME_TIME: Final = 5.0
# A line on a screen.
_LONGEST_SHOWN: Final = 100


class Scheduler:
    """Which job goes where, carried out. `stale` says that something may have changed since it was last decided."""

    def __init__(
        self,
        orders: WorkerOptions,
        home: WorkerIdentity,
        crew: ShimPool,
        premises: MachineView,
        tell: Callable[[str], None],
    ) -> None:
        self.stale = True
        self._orders = orders
        self._home = home
        self._crew = crew
        self._premises = premises
        self._tell = tell
        self._waiting: list[Job] = []
        self._reasons: dict[str, Reason] = {}
        self._victims: frozenset[str] = frozenset()
        self._keeping: tuple[Reservation, ...] = ()
        self._hopeless = 0
        """How many of those that wait can never start here."""
        self._poll_at = 0.0
        self._wake_at = math.inf
        self._overlooked_at = -math.inf
        self._no_starts_until = -math.inf
        self._troubled_at = -math.inf
        self._pause = _FIRST_PAUSE
        self._problem = ""

    def due(self) -> float:
        return -math.inf if self.stale else min(self._poll_at, self._wake_at)

    def polls_now(self) -> bool:
        """Whether it is time to look at the queue although nothing rang."""
        return time.monotonic() >= self._poll_at

    def wants_gpus(self) -> bool:
        """Whether any job waits for one."""
        return any(job.gpus for job in self._waiting)

    def why(self) -> dict[str, str]:
        """Why jobs wait, as parts of sentences, for as many as anybody reads."""
        return {job: why_waiting(reason) for job, reason in islice(self._reasons.items(), _MOST_WAITING)}

    def kept_gpus(self) -> dict[str, ReservedFor]:
        """For which jobs GPUs are kept free, by their uuids."""
        return {
            uuid: ReservedFor(keeping.job, keeping.wanted, len(keeping.ready))
            for keeping in self._keeping
            for uuid in keeping.ready
        }

    def has_nothing_left(self) -> bool:
        """Whether nothing waits that this machine could ever start."""
        if self.stale or self._wake_at < math.inf:
            return False
        return all(self._is_hopeless(self._reasons.get(job.id)) for job in self._waiting)

    def place(self, store: Store) -> None:
        """Starts what fits, if anything changed or it is time."""
        moment = time.monotonic()
        if moment < self.due():
            return
        self.stale = False
        self._reasons = {}
        self._victims = frozenset()
        limit = _MOST_WAITING + self._hopeless
        # The queue may have given up an attempt that this machine is still stopping: until then it starts no other.
        stopping = {running_attempt.job for running_attempt in self._crew.running()}
        self._waiting = [job for job in store.ready(limit, self._home.worker) if job.id not in stopping]
        self._poll_at = moment + _SLOW_POLL
        if moment < self._no_starts_until:
            self._reasons = {job.id: CannotStart(self._problem) for job in self._waiting}
            self._keep_no_more(store, ())
            self._poll_at = min(self._poll_at, self._no_starts_until)
        else:
            wants = [_want(job, order) for order, job in enumerate(self._waiting)]
            self._consider(store, wants, limit, moment)
            if len(wants) == limit and all(want.gpus for want in wants):
                self._start_overlooked(store, moment)
        wake = store.next_wake()
        self._wake_at = math.inf if wake is None else moment + max(0.0, wake - store.clock())
        self._premises.leave_to_filling(self._victims)

    def _consider(self, store: Store, wants: list[ResourceRequest], limit: int, moment: float) -> None:
        """Jobs without a GPU at any time; the others when the GPUs were just looked at."""
        fresh = not any(want.gpus for want in wants) or self._premises.is_fresh(moment)
        decidable = wants if fresh else [want for want in wants if not want.gpus]
        keeping: tuple[Reservation, ...] = ()
        if decidable:
            keeping = self._decide(store, decidable, moment, fresh=fresh)
        if fresh:
            self._keep_no_more(store, keeping)
            # Jobs that are for other machines must not hide those behind them.
            self._hopeless = sum(self._is_hopeless(reason) for reason in self._reasons.values())
            self.stale = self.stale or (len(wants) == limit < _MOST_WAITING + self._hopeless)

    def _decide(
        self, store: Store, wants: list[ResourceRequest], moment: float, *, fresh: bool
    ) -> tuple[Reservation, ...]:
        """Carries out what fits; the answer is what GPUs are kept for."""
        gpus = self._premises.gpus() if fresh else []
        problem = self._premises.machine.problem
        jobs = {job.id: job for job in self._waiting}
        elsewhere = {name: offer for name, job in jobs.items() if (offer := self._elsewhere(job, store.ready_at))}
        decision = decide(gpus, self._premises.holdings(), wants, self._orders.rules, moment, problem, elsewhere)
        for chosen in decision.start:
            self._start(store, jobs[chosen.job], chosen)
        self._reasons = decision.waiting
        if not self._keep(store, decision.keeping, jobs):
            self.stale = True  # another machine was faster: nobody is stopped for a job that it has
            return decision.keeping
        for running_attempt in self._crew.running():
            if running_attempt.job in decision.preempt and not running_attempt.stopping:
                self._tell(f"{running_attempt.job}: makes room for another job")
                running_attempt.stop(StopAttempt("preempted", "It made room for another job."))
        self._victims = frozenset(decision.preempt)
        return decision.keeping

    # What is kept is agreed on in the queue: one machine for each job

    def _elsewhere(self, job: Job, now: float) -> Offer | None:
        """How soon it can start on another machine that keeps GPUs for it."""
        if job.kept is None or self._home.is_own(job.kept.worker):
            return None
        starts_in = math.inf if job.kept.until is None else max(0.0, job.kept.until - now)
        return Offer(starts_in, job.gpus - len(job.kept.gpus))

    def _keep(self, store: Store, keeping: tuple[Reservation, ...], jobs: Mapping[str, Job]) -> bool:
        """Says so in the queue if others feel it or had it. False when another machine has said so meanwhile."""
        for one in keeping:
            known = jobs[one.job].kept
            if not one.is_felt and known is None:
                continue
            if known is not None and self._is_said(one, known, store.ready_at):
                continue
            starts_in = one.offer.starts_in if math.isfinite(one.offer.starts_in) else None
            instead_of = known.worker if known is not None else None
            if not store.keep(one.job, self._home.worker, one.ready, starts_in, instead_of):
                return False
        return True

    def _is_said(self, keeping: Reservation, known: KeptGpus, now: float) -> bool:
        """Whether the queue knows it so already, but for a few seconds of when it starts."""
        if known.worker != self._home.worker or known.gpus != keeping.ready:
            return False
        if known.until is None:
            return math.isinf(keeping.offer.starts_in)
        return abs(max(now, known.until) - now - keeping.offer.starts_in) < _SAME_TIME

    def _keep_no_more(self, store: Store, keeping: tuple[Reservation, ...]) -> None:
        """Others may have what this machine had kept and needs no more."""
        jobs = {one.job for one in keeping}
        said = {job.id for job in self._waiting if job.kept is not None and job.kept.worker == self._home.worker}
        if (said | {one.job for one in self._keeping if one.is_felt}) - jobs:
            store.keep_no_more(self._home.worker, jobs)
        self._keeping = keeping

    def _start(self, store: Store, job: Job, chosen: Placed) -> None:
        if time.monotonic() < self._no_starts_until:
            return  # the one before it could not be started here
        # Whatever fits here fits as well if it asks for the same: then many machines do not all run after one job.
        alike = {other.id: other for other in self._waiting if _shape(other) == _shape(job)}
        before = lease_clock()
        attempt = store.claim_any(list(alike)[:_MOST_ALIKE], self._home.worker, chosen.gpus, self._orders.lease)
        if attempt is None:
            self.stale = True  # other machines were faster
            return
        self._begin(store, alike[attempt.job], attempt, before)

    def _start_overlooked(self, store: Store, moment: float) -> None:
        """Jobs without a GPU that are behind more others than were read: their places wait for nobody else."""
        if moment < self._overlooked_at:
            return
        self._overlooked_at = moment + _SLOW_POLL
        running = sum(1 for running_attempt in self._crew.running() if not running_attempt.attempt_spec.gpus)
        for _ in range(self._orders.rules.cpu_jobs - running):
            if time.monotonic() < self._no_starts_until:
                return
            before = lease_clock()
            attempt = store.claim_next(self._home.worker, (), self._orders.lease)
            if attempt is None:
                return
            self._begin(store, store.job(attempt.job), attempt, before)

    def _begin(self, store: Store, job: Job, attempt: Attempt, before: float) -> None:
        want, machine = _want(job, 0), self._premises.machine
        try:
            running_attempt = start(self._orders, self._home, self._crew, machine, job, want, attempt, before)
        except BadInputError as error:
            store.finish(attempt.id, "failed", 125, str(error))
            self._tell(f"{job.id}: could not start: {error}")
            self.stale = True
        except (StokerError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.trouble(job.id, why)
            store.finish(attempt.id, "requeued", None, f"{self._home.host} could not start it: {why}")
        else:
            self._waiting = [waiting for waiting in self._waiting if waiting.id != job.id]
            # Its claim has ended that in the queue.
            self._keeping = tuple(keeping for keeping in self._keeping if keeping.job != job.id)
            self._tell(f"{job.id}: started{_on(running_attempt, machine)}: {_shown(job)}")

    def trouble(self, job: str, why: str) -> None:
        """This machine could not start a job, which goes back to the queue: it pauses before it tries the next one."""
        moment = time.monotonic()
        if moment - self._troubled_at > _QUIET:
            self._pause = _FIRST_PAUSE
            self._tell(f"{job}: could not be started here and goes back to the queue, others are tried later: {why}")
        self._troubled_at, self._problem = moment, why
        self._no_starts_until = moment + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self.stale = True

    def started_well(self, since: float) -> None:
        """A job that was started at that time did run: the next trouble is a short one until that shows otherwise."""
        if since > self._troubled_at:
            self._pause = _FIRST_PAUSE

    def _is_hopeless(self, reason: Reason | None) -> bool:
        match reason:
            case CannotFit():
                return True
            case CpuSlotsTaken(at_once=at_once):
                return at_once == 0
            case NoGpusSeen():
                return self._premises.no_gpus
        return False


def _shape(job: Job) -> tuple[object, ...]:
    """Two jobs of one shape fit into the same place, and the earlier one goes first."""
    return job.gpus, job.memory, job.share, job.priority, job.preemptible, job.time_limit


def _want(job: Job, order: int) -> ResourceRequest:
    return ResourceRequest(
        job=job.id,
        gpus=job.gpus,
        order=order,
        memory=job.memory,
        shares=job.share,
        priority=job.priority,
        preemptible=job.preemptible,
        time_limit=job.time_limit,
    )


def _on(running_attempt: RunningAttempt, machine: GpuTracker) -> str:
    known = machine.known
    indices = sorted(known[uuid].index for uuid in running_attempt.attempt_spec.gpus if uuid in known)
    if not indices:
        return ""
    return f" on GPU {indices[0]}" if len(indices) == 1 else f" on GPUs {', '.join(map(str, indices))}"


def _shown(job: Job) -> str:
    text = job.command if isinstance(job.command, str) else shlex.join(job.command)
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_SHOWN else f"{line[: _LONGEST_SHOWN - 1]}…"
