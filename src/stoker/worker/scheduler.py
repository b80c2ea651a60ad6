"""Waiting jobs on their way to the engine: read, decided on, claimed and started; the same for every engine."""

import math
import time
from collections.abc import Mapping
from typing import Final

from stoker.backoff import Backoff
from stoker.engines.attempt import lease_clock
from stoker.engines.engine import Engine, Log, Reservation, WorkerOptions
from stoker.engines.identity import WorkerIdentity
from stoker.errors import BadInputError, StokerError
from stoker.queue import Job, Store
from stoker.queue.commands import shell_text
from stoker.queue.model import KeptGpus

# Far more than can start at once; jobs behind them in the queue are read when these have started.
_MOST_WAITING: Final = 200
# Of up to this many equal jobs, the first that no other worker has taken is claimed in one round trip.
_MOST_EQUAL: Final = 16
# Behind the notifications of changes: what they missed is found after this.
_SLOW_POLL: Final = 5.0
# An engine that could not start a job (a full disk, no processes left) must not fail one job after another: it pauses,
# twice as long each time.
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0
# A failure after this long without one starts over, with a short pause and a message.
_QUIET: Final = 4 * _LONGEST_PAUSE
# Time limits are exact to within seconds: a new estimate that is no further from the last is not written.
_SAME_TIME: Final = 5.0
# A line on a screen.
_LONGEST_COMMAND: Final = 100


class Scheduler:
    """Starts what the engine has room for. `stale`: something may have changed since the last decision."""

    def __init__(self, options: WorkerOptions, identity: WorkerIdentity, engine: Engine, log: Log) -> None:
        self.stale = True
        self._options = options
        self._identity = identity
        self._engine = engine
        self._log = log
        self._waiting: list[Job] = []
        self._never: frozenset[str] = frozenset()
        self._never_count = 0
        """How many of the jobs of the last complete decision can never start here."""
        self._reserved: tuple[Reservation, ...] = ()
        self._poll_at = 0.0
        self._wake_at = math.inf
        self._overlooked_at = -math.inf
        self._no_starts_until = -math.inf
        self._failed_at = -math.inf
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._problem = ""

    def due(self) -> float:
        return -math.inf if self.stale else min(self._poll_at, self._wake_at)

    def polls_now(self) -> bool:
        """Whether it is time to read the queue although no change was notified."""
        return time.monotonic() >= self._poll_at

    def why_paused(self) -> dict[str, str] | None:
        """Why jobs wait while the engine starts nothing; None when it does."""
        if time.monotonic() >= self._no_starts_until:
            return None
        return {job.id: f"waits until this machine can start jobs again: {self._problem}" for job in self._waiting}

    def has_nothing_left(self) -> bool:
        """Whether nothing waits that could ever start here."""
        if self.stale or self._wake_at < math.inf:
            return False
        return all(job.id in self._never for job in self._waiting)

    def place(self, store: Store) -> None:
        """Starts what fits, if anything changed or it is time."""
        moment = time.monotonic()
        if moment < self.due():
            return
        self.stale = False
        limit = _MOST_WAITING + self._never_count
        # The queue may have given up an attempt that still stops here: until then this worker starts no other one.
        stopping = {one.job for one in self._engine.attempts.values() if one.result is None}
        self._waiting = [job for job in store.attempts.ready(limit, self._identity.worker) if job.id not in stopping]
        self._poll_at = moment + _SLOW_POLL
        preempt: tuple[str, ...] = ()
        if moment < self._no_starts_until:
            self._engine.decide([], store.attempts.ready_at)
            self._never = frozenset()
            self._release(store, ())
            self._poll_at = min(self._poll_at, self._no_starts_until)
        else:
            waiting = list(self._waiting)
            jobs = {job.id: job for job in waiting}
            decision = self._engine.decide(waiting, store.attempts.ready_at)
            for start in decision.start:
                # Any job that asks for the same fits as well: then many workers do not compete for one job.
                shape = _shape(jobs[start.job])
                if not self._start(store, start.gpus, {job.id: job for job in self._waiting if _shape(job) == shape}):
                    self.stale = True  # other workers were faster
            if self._reserve(store, decision.reserved, jobs):
                preempt = decision.preempt
            else:
                self.stale = True  # another machine was faster: nothing is stopped for a job that it has
            if decision.complete:
                self._release(store, decision.reserved)
                # Jobs that are for other machines must not hide those behind them.
                self._never_count = len(decision.never)
                self.stale = self.stale or (len(waiting) == limit < _MOST_WAITING + self._never_count)
            self._never = decision.never
            if len(waiting) == limit and all(job.gpus for job in waiting):
                self._start_overlooked(store, decision.cpu_slots, moment)
        wake = store.jobs.next_wake()
        self._wake_at = math.inf if wake is None else moment + max(0.0, wake - store.clock())
        self._engine.commit(preempt)

    # Reservations are agreed on in the queue: one machine for each job

    def _reserve(self, store: Store, reserved: tuple[Reservation, ...], jobs: Mapping[str, Job]) -> bool:
        """Writes reservations that affect others. False when another machine has reserved GPUs meanwhile."""
        for one in reserved:
            known = jobs[one.job].kept
            if not one.affects_others and known is None:
                continue
            if known is not None and self._is_written(one, known, store.attempts.ready_at):
                continue
            starts_in = one.starts_in if math.isfinite(one.starts_in) else None
            instead_of = known.worker if known is not None else None
            if not store.jobs.keep(one.job, self._identity.worker, one.ready, starts_in, instead_of):
                return False
        return True

    def _is_written(self, reserved: Reservation, known: KeptGpus, now: float) -> bool:
        """Whether the queue has this reservation, up to a few seconds of its start."""
        if known.worker != self._identity.worker or known.gpus != reserved.ready:
            return False
        if known.until is None:
            return math.isinf(reserved.starts_in)
        return abs(max(now, known.until) - now - reserved.starts_in) < _SAME_TIME

    def _release(self, store: Store, reserved: tuple[Reservation, ...]) -> None:
        """Removes the reservations from the queue that this worker no longer has."""
        jobs = {one.job for one in reserved}
        written = {job.id for job in self._waiting if job.kept is not None and job.kept.worker == self._identity.worker}
        if (written | {one.job for one in self._reserved if one.affects_others}) - jobs:
            store.jobs.keep_no_more(self._identity.worker, jobs)
        self._reserved = reserved

    # Starts

    def _start_overlooked(self, store: Store, slots: int, moment: float) -> None:
        """Starts jobs without a GPU that are behind more others than were read: nothing else waits for their slots."""
        if moment < self._overlooked_at:
            return
        self._overlooked_at = moment + _SLOW_POLL
        for _ in range(slots):
            if not self._start(store, ()):
                return

    def _start(self, store: Store, gpus: tuple[str, ...], candidates: Mapping[str, Job] | None = None) -> bool:
        """Claims the first of these jobs that no other worker has taken, or the next without a GPU, and starts it."""
        if time.monotonic() < self._no_starts_until:
            return False  # the one before it could not be started
        worker, lease, claimed_at = self._identity.worker, self._options.lease, lease_clock()
        jobs = None if candidates is None else list(candidates)[:_MOST_EQUAL]
        attempt = store.attempts.claim(jobs, worker, gpus, lease)
        if attempt is None:
            return False
        job = store.jobs.get(attempt.job) if candidates is None else candidates[attempt.job]
        try:
            started = self._engine.start(job, attempt, claimed_at)
        except BadInputError as error:
            store.attempts.finish(attempt.id, "failed", 125, str(error))
            self._log(f"{job.id}: could not start: {error}")
            self.stale = True
        except (StokerError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.start_failed(job.id, why)
            store.attempts.finish(attempt.id, "requeued", None, f"{self._identity.host} could not start it: {why}")
        else:
            self._waiting = [waiting for waiting in self._waiting if waiting.id != job.id]
            # The claim has ended the job's reservation in the queue.
            self._reserved = tuple(one for one in self._reserved if one.job != job.id)
            self._log(f"{job.id}: started{started.where}: {_shortened(job)}")
        return True

    def start_failed(self, job: str, why: str) -> None:
        """A job could not be started and goes back to the queue: pauses before the next one is tried."""
        moment = time.monotonic()
        if moment - self._failed_at > _QUIET:
            self._backoff.reset()
            self._log(f"{job}: could not be started here and goes back to the queue, others are tried later: {why}")
        self._failed_at, self._problem = moment, why
        self._no_starts_until = moment + self._backoff.next()
        self.stale = True

    def start_succeeded(self, since: float) -> None:
        """A job that was started at that time did run: the pause after the next failure is short again."""
        if since > self._failed_at:
            self._backoff.reset()


def _shape(job: Job) -> tuple[object, ...]:
    """Jobs of one shape fit into the same place, and the earlier one goes first."""
    return job.gpus, job.memory, job.share, job.priority, job.preemptible, job.time_limit


def _shortened(job: Job) -> str:
    line = " ".join(shell_text(job.command).split())
    return line if len(line) <= _LONGEST_COMMAND else f"{line[: _LONGEST_COMMAND - 1]}…"
