"""Reads waiting jobs, lets the engine decide, claims and starts them; the same for every engine.

After a change of the queue, the first jobs of each shape are read again. If only the engine's room has changed, the
engine decides with the known jobs. A claim takes whatever is now the first job of a shape, unless a job of another
shape goes first: then the queue is read again.
"""

import math
import random
import time
from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from stoker.backoff import Backoff
from stoker.engines.attempt import lease_clock
from stoker.engines.engine import STARTS_WITHIN, Decision, Engine, Log, Reservation, RunningAttempt, Start
from stoker.engines.identity import WorkerIdentity
from stoker.errors import BadInputError, StokerError
from stoker.queue import Job, Store
from stoker.queue.attempts import Claimed, ClaimRequest, Heads
from stoker.queue.commands import shell_text
from stoker.queue.driver import Changes
from stoker.queue.model import KeptGpus, ReadyJob
from stoker.queue.store import PeriodicTask

# The interval of polls for changes without a notification.
_SLOW_POLL: Final = 5.0
# The limit of these polls a second for all workers together.
_MOST_POLLS: Final = 50.0
# After a failed start (a full disk, no processes left) the engine must not fail one job after another, so it pauses,
# twice as long each time.
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 30.0
# After this long without a failure, the next one starts over with a short pause and a message.
_QUIET: Final = 4 * _LONGEST_PAUSE
# Time limits are no more exact than this, so smaller changes of an estimate are not written.
_TIME_TOLERANCE: Final = 5.0
# If there are fewer new jobs than workers, each worker reads the queue after a random delay of this per surplus worker,
# with a limit. Otherwise a thousand workers would find that the first has taken the jobs.
_SPREAD: Final = 0.002
_LONGEST_SPREAD: Final = 0.5
# The interval of counting workers and ending reservations of dead ones.
_MINUTE: Final = 60.0
# Up to this number, workers count each other every minute; with twice as many, every second minute.
_COUNTED_OFTEN: Final = 200
# A decision holds for one round of the loop; others may use the GPUs after that.
_PLAN_HOLDS: Final = 0.1
# The interval at which shapes take turns, if they are too many to read at once.
_NEXT_SHAPES: Final = 0.5
# The limit of a command in the log.
_LONGEST_COMMAND: Final = 100


class Scheduler:
    """Starts the jobs that the engine has room for."""

    def __init__(self, identity: WorkerIdentity, engine: Engine, log: Log) -> None:
        self._identity = identity
        self._engine = engine
        self._log = log
        self._read_at = -math.inf
        """When to read the queue again, at the latest."""
        self._undecided = True
        """Something may have changed since the last decision."""
        self._planned: Decision | None = None
        """A decision that is not completely carried out."""
        self._planned_at = -math.inf
        self._heads = Heads()
        self._heads_at = -math.inf
        self._has_all_shapes = False
        self._waiting: list[ReadyJob] = []
        """The unclaimed jobs of the heads."""
        self._never: frozenset[str] = frozenset()
        self._others_never = True
        """No job of the shapes read before these can ever start here."""
        self._reserved: tuple[Reservation, ...] = ()
        self._poll_at = 0.0
        self._minute = PeriodicTask(_MINUTE)
        self._minutes = 0
        self.workers = 1
        """The number of workers at the last count."""
        self._prepared = ""
        """The id of the attempt that the engine has prepared; used for one claim."""
        self.prepare_at = math.inf
        """When to have the engine prepare the next attempt."""
        self._no_starts_until = -math.inf
        self._failed_at = -math.inf
        self._backoff = Backoff(_FIRST_PAUSE, _LONGEST_PAUSE)
        self._problem = ""

    def queue_changed(self) -> None:
        self._read_at = -math.inf

    def note_changes(self, changes: Changes) -> None:
        """Schedules a read if a new job could change the decision: not if an equal job waits before it."""
        number = 0
        for shape, ready in changes.ready.items():
            first = next((job for job in self._waiting if job.shape == shape), None)
            if first is None or first.priority < ready.priority:
                number += ready.number
        if number or changes.everything:
            # Spreads the reads of many workers after few new jobs.
            self._read_soon(self.workers - max(1, number))

    def _read_soon(self, others: int) -> None:
        """Schedules a read after a random delay, unlike other workers."""
        longest = min(_LONGEST_SPREAD, _SPREAD * max(0, others))
        self._read_at = min(self._read_at, time.monotonic() + random.uniform(0.0, longest))  # noqa: S311 - no secret

    def room_changed(self) -> None:
        """Notes that the engine has more or less room."""
        self._undecided = True

    def due(self) -> float:
        return -math.inf if self._undecided or self._planned is not None else min(self._poll_at, self._read_at)

    def polls_now(self) -> bool:
        """True if the slow poll is due."""
        return time.monotonic() >= self._poll_at

    def why_paused(self) -> dict[str, str] | None:
        """Why jobs wait during a pause of the engine; None without a pause."""
        if time.monotonic() >= self._no_starts_until:
            return None
        return {job.id: f"waits until this machine can start jobs again: {self._problem}" for job in self._waiting}

    def has_nothing_left(self) -> bool:
        """True if no waiting job can ever start here."""
        is_settled = not self._undecided and self._read_at == math.inf
        return is_settled and self._others_never and self._are_never()

    def _are_never(self) -> bool:
        return all(job.id in self._never for job in self._waiting)

    def place(self, store: Store) -> None:
        """Starts the jobs that fit, if anything has changed or a read is due."""
        moment = time.monotonic()
        if moment < self.due():
            return
        if moment >= min(self._read_at, self._poll_at):
            self._read(store, moment)
        preempt: tuple[str, ...] = ()
        if moment < self._no_starts_until:
            self._undecided = False
            self._engine.decide([], self._queue_time())
            self._never, self._planned = frozenset(), None
            self._release(store, ())
            self._poll_at = min(self._poll_at, self._no_starts_until)
        else:
            planned = self._planned if self._planned_at >= time.monotonic() - _PLAN_HOLDS else None
            preempt = self._start_all(store, planned or self._decide())
        self._engine.commit(preempt)

    def _read(self, store: Store, moment: float) -> None:
        """Reads the first jobs of each shape, including those with reservations."""
        if self._minute.is_due():
            if self._minutes % (1 + self.workers // _COUNTED_OFTEN) == 0:
                self.workers = store.workers.count()
            self._minutes += 1
            store.jobs.keep_for_the_dead_no_more()
        reserved = {one.job for one in self._reserved}
        also = {job.shape for job in self._waiting if job.id in reserved}
        self._others_never = not self._heads.after or (self._others_never and self._are_never())
        # Between slow polls, jobs that can never start here are not read again.
        is_slow_poll = moment >= self._poll_at
        known = (
            [] if is_slow_poll or not self._has_all_shapes else [job for job in self._waiting if job.id in self._never]
        )
        without, before = {job.shape for job in known}, self._heads.after
        self._heads = store.attempts.heads(self._identity.worker, self._heads.after, also, without)
        self._has_all_shapes = not before and not self._heads.after
        # An attempt may still be stopping here after losing its lease. Until it has stopped, this worker must not
        # start another attempt at the job.
        stopping = self._stopping()
        fresh = {job.id: job for job in (*known, *self._heads.jobs) if job.id not in stopping}
        self._waiting = sorted(fresh.values(), key=lambda job: job.rank[1:])
        self._planned = None
        self._undecided = True
        self.prepare_at = moment
        self._heads_at = moment
        if is_slow_poll:
            self._poll_at = moment + max(_SLOW_POLL, self.workers / _MOST_POLLS)
        self._read_at = math.inf if self._heads.wake_in is None else moment + self._heads.wake_in
        if self._heads.after:
            self._read_at = min(self._read_at, moment + _NEXT_SHAPES)

    def _queue_time(self) -> float:
        """The queue's clock now."""
        return self._heads.queue_time + time.monotonic() - self._heads_at

    def _stopping(self) -> set[str]:
        return {one.job for one in self._engine.attempts.values() if one.result is None}

    def _decide(self) -> Decision:
        self._undecided = False
        decision = self._engine.decide(self._waiting, self._queue_time())
        self._never = decision.never
        return decision

    def _start_all(self, store: Store, decision: Decision) -> tuple[str, ...]:
        """Carries out a decision: starts jobs and writes reservations. Returns the attempts to preempt."""
        self._planned = None
        jobs = {job.id: job for job in self._waiting}
        starts = [start for start in decision.start if start.job in jobs]
        horizon = self._horizon(decision)
        for start in starts:
            if horizon is not None and jobs[start.job].rank > horizon:
                break  # unread jobs may go first
            if not self._start(store, start, jobs[start.job]):
                self.queue_changed()  # other workers were faster
        if horizon is not None:
            self.queue_changed()
            return ()
        # Jobs of an earlier decision may have been claimed since.
        reserved = tuple(one for one in decision.reserved if one.job in jobs)
        if len(reserved) < len(decision.reserved):
            self.room_changed()
            return ()
        if not self._reserve(store, reserved, jobs):
            # Another machine was faster, so nothing is stopped for the job. Other workers were refused as well.
            self._read_soon(self.workers)
            return ()
        if decision.complete:
            self._release(store, reserved)
        return decision.preempt

    def _horizon(self, decision: Decision) -> tuple[object, ...] | None:
        """The rank up to which the decision holds, if it uses up the read jobs of a shape that has more.

        At least one job of that shape starts; otherwise the next read would be the same.
        """
        starts = {start.job for start in decision.start}
        taken = starts.union(one.job for one in decision.reserved)
        last = {job.shape: job for job in self._waiting if job.shape in self._heads.more and job.kept is None}
        left = {job.shape for job in self._waiting if job.id not in taken}
        exhausted = {job.shape for job in self._waiting if job.id in starts} & last.keys() - left
        return min((last[shape].rank for shape in exhausted), default=None)

    # Reservations are agreed on in the queue: one machine for each job

    def _reserve(self, store: Store, reserved: tuple[Reservation, ...], jobs: Mapping[str, ReadyJob]) -> bool:
        """Writes reservations that affect others. False if another machine has just reserved GPUs."""
        for one in reserved:
            known = jobs[one.job].kept
            if not one.affects_others and known is None:
                continue
            now = self._queue_time()
            if known is not None and self._is_written(one, known, now):
                continue
            starts_in = one.starts_in if math.isfinite(one.starts_in) else None
            instead_of = known.worker if known is not None else None
            if not store.jobs.keep(one.job, self._identity.worker, one.ready, starts_in, instead_of):
                return False
            until = None if starts_in is None else now + starts_in
            self._note_kept(one.job, KeptGpus(worker=self._identity.worker, gpus=one.ready, until=until))
        return True

    def _note_kept(self, job: str, kept: KeptGpus | None) -> None:
        """Updates a known job after writing its reservation, without another read."""
        self._waiting = [replace(one, kept=kept) if one.id == job else one for one in self._waiting]

    def _is_written(self, reserved: Reservation, known: KeptGpus, now: float) -> bool:
        """True if the queue has this reservation, give or take a few seconds of its start."""
        if known.worker != self._identity.worker or known.gpus != reserved.ready:
            return False
        if known.until is None:
            return math.isinf(reserved.starts_in)
        return abs(max(now, known.until) - now - reserved.starts_in) < _TIME_TOLERANCE

    def _release(self, store: Store, reserved: tuple[Reservation, ...]) -> None:
        """Removes this worker's obsolete reservations from the queue."""
        jobs = {one.job for one in reserved}
        written = {job.id for job in self._waiting if job.kept is not None and job.kept.worker == self._identity.worker}
        if (written | {one.job for one in self._reserved if one.affects_others}) - jobs:
            store.jobs.keep_no_more(self._identity.worker, jobs)
            for job in written - jobs:
                self._note_kept(job, None)
        self._reserved = reserved

    # Starts

    def finish(self, store: Store, attempt: RunningAttempt) -> bool:
        """Writes the outcome of an attempt, and if possible claims and starts the next job at the same time.

        False if the attempt already has an outcome.
        """
        result = attempt.result
        if result is None:
            raise ValueError(f"attempt {attempt.id} has no result yet")
        start = self._next_start() if result.outcome == "succeeded" else None
        claim = None if start is None else self._claim(start, self._job(start.job))
        claimed_at = lease_clock()
        done = store.attempts.complete(attempt.id, result.outcome, result.exit_code, result.reason, claim, result.cause)
        if claim is not None and done.claimed is not None:
            self._begin(store, done.claimed, claim.shape, claimed_at)
        elif start is not None or done.frees_jobs:
            self.queue_changed()
        if self._planned is None:
            self.room_changed()
        return done.accepted

    def prepare(self, store: Store) -> None:
        """Has the engine prepare what it would start next, while nothing else is to be done."""

        def read(job: str) -> Job | None:
            try:
                return store.jobs.get(job)
            except BadInputError:
                return None

        self.prepare_at = math.inf
        if self._no_starts_until <= time.monotonic() < self._read_at:
            self._prepared = self._engine.prepare(self._waiting, read)

    def queue_lost(self) -> None:
        """Whether the last claim took effect is not known: the id of its attempt must not be used again."""
        self._prepared = self._engine.prepare((), lambda _job: None)

    def _next_start(self) -> Start | None:
        """The next start among known jobs; None if there is none, or the queue must be read first."""
        if not self._no_starts_until <= time.monotonic() < min(self._read_at, self._poll_at):
            return None
        if self._planned is None or self._planned_at < time.monotonic() - _PLAN_HOLDS:
            self._planned, self._planned_at = self._decide(), time.monotonic()
        decision, horizon = self._planned, self._horizon(self._planned)
        jobs = {job.id for job in self._waiting if job.kept is None and (horizon is None or job.rank <= horizon)}
        return next((start for start in decision.start if start.job in jobs), None)

    def _job(self, name: str) -> ReadyJob:
        return next(job for job in self._waiting if job.id == name)

    def _claim(self, start: Start, job: ReadyJob) -> ClaimRequest:
        """The claim for the job's shape, limited to jobs before the next one of another shape.

        Earlier shapes do not matter: they do not fit.
        """
        behind = (
            other
            for other in self._waiting
            if other.shape != job.shape and other.preemptible is job.preemptible and other.rank > job.rank
        )
        other = min(behind, key=lambda other: other.rank, default=None)
        return ClaimRequest(
            shape=job.shape,
            worker=self._identity.worker,
            gpus=start.gpus,
            lease=self._engine.lease,
            pending=start.pending,
            before=None if other is None else (other.priority, other.position),
            others=tuple(self._stopping()),
            attempt=self._prepared,
        )

    def _start(self, store: Store, start: Start, job: ReadyJob) -> bool:
        """Claims the job or another of its shape, and starts it. False if there is none."""
        if time.monotonic() < self._no_starts_until:
            return False  # the previous start failed
        claimed_at, claim = lease_clock(), self._claim(start, job)
        if job.kept is None:
            claimed = store.attempts.take_head(claim)
        else:
            claimed = store.attempts.take([job.id], claim.worker, claim.gpus, claim.lease, pending=claim.pending)
        if claimed is not None:
            self._begin(store, claimed, job.shape, claimed_at)
        return claimed is not None

    def _begin(self, store: Store, claimed: Claimed, shape: str, claimed_at: float) -> None:
        job, attempt = claimed
        self._prepared, self.prepare_at = "", time.monotonic() + STARTS_WITHIN
        try:
            started = self._engine.start(job, attempt, claimed_at)
        except BadInputError as error:
            store.attempts.finish(attempt.id, "failed", 125, str(error), "start")
            self._log(f"{job.id}: could not start: {error}")
            self.queue_changed()
        except (StokerError, OSError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self.start_failed(job.id, why)
            store.attempts.finish(attempt.id, "requeued", None, f"{self._identity.host} could not start it: {why}")
        else:
            # The claim has ended the job's reservation in the queue.
            self._reserved = tuple(one for one in self._reserved if one.job != job.id)
            what = "submitted" if started.pending else "started"
            where = f" on {started.where}" if started.where else ""
            self._log(f"{job.id}: {what}{where}: {_shortened(job)}")
        finally:
            self._drop(job, shape)

    def _drop(self, claimed: Job, shape: str) -> None:
        """Drops a claimed job, and those before it, which other workers have claimed."""
        place = (-claimed.priority, claimed.position, claimed.submitted, claimed.id)
        self._waiting = [
            job
            for job in self._waiting
            if job.id != claimed.id and (job.shape != shape or job.kept is not None or job.rank[1:] > place)
        ]
        if shape in self._heads.more and not any(job.shape == shape for job in self._waiting):
            self.queue_changed()

    def start_failed(self, job: str, why: str) -> None:
        """Notes a failed start, and pauses before the next one. The job is requeued."""
        moment = time.monotonic()
        if moment - self._failed_at > _QUIET:
            self._backoff.reset()
            self._log(f"{job}: could not be started here and is requeued; the next start is delayed: {why}")
        self._failed_at, self._problem = moment, why
        self._no_starts_until = moment + self._backoff.next()
        self.queue_changed()

    def start_succeeded(self, since: float) -> None:
        """Notes that a job started then has run, which resets the pause."""
        if since > self._failed_at:
            self._backoff.reset()


def _shortened(job: Job) -> str:
    line = " ".join(shell_text(job.command).split())
    return line if len(line) <= _LONGEST_COMMAND else f"{line[: _LONGEST_COMMAND - 1]}…"
