"""The worker's view of Slurm attempts, each of which is one Slurm job."""

import contextlib
import math
import os
import time
from collections.abc import Collection
from typing import Final

from stoker.engines.attempt import AttemptResult, StopCause, why_stopped
from stoker.engines.engine import Found, RunningAttempt
from stoker.engines.identity import WorkerIdentity
from stoker.engines.slurm.answers import SlurmJob
from stoker.engines.slurm.evidence import ACTIVE, WAITING, Evidence, Fence, Void, conclude
from stoker.engines.slurm.execution import heartbeat_of
from stoker.engines.slurm.record import VOID, Owner, SlurmAttemptRecord, SlurmAttemptSpec, StopOrder
from stoker.engines.slurm.submission import Destination
from stoker.logs.reader import read_tail
from stoker.queue import queue_address
from stoker.runs.record import Status
from stoker.schedule import moment_text

# A shim sees an order and stops the job within this time plus the grace.
_ORDER_SEEN_WITHIN: Final = 15.0
# The directory of a quiet attempt is checked less and less often, since many users share the file system. Slurm's next
# answer shows most changes anyway.
_LOOK_SHARE: Final = 0.02
_LOOK_LONGEST: Final = 5.0
# Slurm rounds both times of a difference to seconds.
_WHOLE_SECONDS: Final = 2.0
# The last line that a shim or Slurm printed says why the job did not start.
_LAST_WORDS: Final = 4096
_LONGEST_WORDS: Final = 200


class SlurmAttempt(RunningAttempt):
    """An attempt that is, or will be, submitted to Slurm."""

    record: SlurmAttemptRecord
    spec: SlurmAttemptSpec

    def __init__(self, record: SlurmAttemptRecord, attempt_spec: SlurmAttemptSpec, *, submitting: bool) -> None:
        super().__init__(record, attempt_spec)
        known = record.submitted()
        self.slurm_job = None if known is None else known.slurm_job
        self.submitting = submitting
        """Its `sbatch` is running or waiting to run."""
        self.destination: Destination = (None, None)
        """Partition and reservation, if this worker submits it."""
        self.needs_code = attempt_spec.code is not None
        """Its snapshot has not reached the shared directory yet."""
        self.cancel_at = math.inf
        """When to cancel its Slurm job, in monotonic seconds."""
        self.reported = False
        """The worker has its result."""
        self.submitted_at = time.monotonic() if submitting else -math.inf
        """When it was submitted: earlier answers do not list it."""
        self.pending = True
        self.state: str | None = None
        self.reason = ""
        """Slurm's code for why the job waits."""
        self.estimate: float | None = None
        """When Slurm expects to start the job, in seconds since the epoch."""
        self._order: StopOrder | None = None
        self._owner: Owner | None = None
        self._status = Status()
        self._version = -1
        self._answers_without = 0
        self._over_since: float | None = None
        self._running_since: float | None = None
        self._had_node = known is not None and known.launched
        self._by_mistake = False
        self._waited_in_slurm: float | None = None
        """Seconds from its submission to its last start, as Slurm counts them."""
        self._life: dict[str, tuple[int, float | None]] = {}
        """The last heartbeat of each node, by the name of its directory."""
        self._open: tuple[str, ...] = ()
        """Other nodes that have started and not ended."""
        self._heard_at = time.monotonic()
        self._changed_at = time.monotonic()
        """When its Slurm state or its owner last changed, or its stop was requested."""
        self.look_at = -math.inf
        """When to check its directory again."""

    @property
    def is_settled(self) -> bool:
        # The shim writes the result after the log and the report.
        return self.result is not None

    @property
    def has_begun(self) -> bool:
        return self._owner is not None and not self._owner.is_void

    @property
    def host(self) -> str:
        """The host of its shim; empty before the start."""
        return "" if self._owner is None else self._owner.host

    @property
    def is_in_doubt(self) -> bool:
        """True if Slurm's next answer is needed soon."""
        return self.result is None and (self.stopping or self._answers_without > 0 or self._over_since is not None)

    # What the worker wants

    def stop(self, cause: StopCause, reason: str) -> None:
        self.stopping = True
        self._note_change()
        self._order = StopOrder(cause, reason)
        self._give_order()
        result = AttemptResult("cancelled" if cause == "cancelled" else "lost", None, why_stopped(reason))
        if not self.has_begun and self._void(result):
            self.cancel_at = -math.inf
            return
        self.cancel_at = time.monotonic() + self.spec.plan.grace + _ORDER_SEEN_WITHIN

    def _give_order(self) -> None:
        """Writes the stop order. A failed write is retried at the next look; Slurm ends the job in any case."""
        if self._order is not None and self.record.stop_order() is None:
            with contextlib.suppress(OSError):
                self.record.write_stop(self._order)

    def _void(self, result: AttemptResult) -> bool:
        """Ends an attempt before any shim takes it, and keeps later shims out. False if a shim already has it."""
        try:
            self._owner = self.record.take(VOID)
        except OSError:
            return False
        if self._owner.is_void:
            self.result = result
        return self._owner.is_void

    def _has_expired(self) -> bool:
        """Ends an attempt that is still pending at the job's deadline."""
        deadline = self.spec.start_by
        if deadline is None or time.time() < deadline or self.has_begun:
            return False
        result = AttemptResult("failed", None, f"it did not start by its deadline, {moment_text(deadline)}", "deadline")
        if not self._void(result):
            return False
        self.stopping, self.cancel_at = True, -math.inf
        return True

    def renewed(self, until: float) -> None:
        pass  # a shim holds its lease as long as it reaches its directory

    def acknowledge(self) -> None:
        pass

    # What Slurm says

    def submitted_as(self, slurm_job: int) -> None:
        self.slurm_job, self.submitting, self.submitted_at = slurm_job, False, time.monotonic()
        with contextlib.suppress(OSError):
            self.record.write_submitted(slurm_job)  # without the file, the next worker finds the job by its comment

    def refused(self, result: AttemptResult) -> None:
        """Ends the attempt after a failed `sbatch`. If Slurm has the job after all, its shim refuses to run."""
        self.submitting = False
        self._void(result)

    def hear(self, job: SlurmJob | None, *, by_mistake: bool = False) -> None:
        """Processes a complete answer of Slurm. `job`: this attempt's job, or None if it is not listed.

        `by_mistake`: the worker has cancelled another attempt's job with this id.
        """
        self._by_mistake = by_mistake
        if job is None or job.state != self.state:
            self._note_change()
        if job is None:
            if not self.submitting:
                self._answers_without += 1
            self.state = None
        else:
            self._answers_without = 0
            if self.slurm_job is None:
                self.submitted_as(job.id)
            self.state, self.reason, self.estimate = job.state, job.reason, job.start
            is_known = job.start is not None and job.submitted is not None and job.state not in WAITING
            self._waited_in_slurm = (job.start or 0.0) - (job.submitted or 0.0) if is_known else None
            if job.nodes and not self._had_node:
                # Slurm clears the nodes when a launch fails and it requeues the job.
                self._had_node = True
                if self._owner is None:
                    with contextlib.suppress(OSError):
                        self.record.write_submitted(job.id, launched=True)

    # What its directory shows

    def _note_change(self) -> None:
        self._changed_at, self.look_at = time.monotonic(), -math.inf

    def look(self) -> None:
        """Reads the directory and draws conclusions."""
        self._read()
        self.look_at = time.monotonic() + min(_LOOK_LONGEST, _LOOK_SHARE * (time.monotonic() - self._changed_at))
        if self._has_expired():
            return
        seen = self._evidence()
        found = conclude(seen)
        if isinstance(found, Void):
            result = found.result
            if result.outcome == "failed" or (result.outcome == "requeued" and seen.state is not None):
                result = AttemptResult(
                    result.outcome, result.exit_code, result.reason + self._last_words(), result.cause
                )
            self._void(result)
        elif isinstance(found, Fence):
            if self._order is None:
                self._order = StopOrder("lease", found.reason)
            self._give_order()
        elif found is not None:
            if found.outcome == "lost":
                self._order = self._order or StopOrder("lease", "The attempt was given up.")
                self._give_order()
            self.result = found
        if self.result is not None:
            # A cancelled shim waits for Slurm to end it; an abandoned one must end, too.
            gave_up = self.state in ACTIVE and self._owner is not None and self._owner.is_void
            if self.stopping or gave_up or self.result.outcome in {"lost", "cancelled"}:
                self.cancel_at = -math.inf
        elif self.stopping:
            self._give_order()
        self._describe()

    def _read(self) -> None:
        """Reads the directory. Values that cannot be read now stay as they are."""
        now = time.monotonic()
        with contextlib.suppress(OSError):
            others = list(self.record.other_nodes()) if self.spec.nodes > 1 else []
            life = {one.directory.name: one.life_version() for one in (self.record, *others)}
            if life != self._life:
                self._life, self._heard_at = life, now
            # Nodes of an earlier start have ended, or the shim of the later start waits for them.
            self._open = tuple(one.directory.name for one in others if one.status().state != "ended")
        with contextlib.suppress(OSError):
            if (owner := self.record.owner()) is not None and owner != self._owner:
                self._owner, self._heard_at, self._changed_at = owner, now, now
        if (version := self.record.status_version()) != self._version:
            self._version, self._status = version, self.record.status()
        self._running_since = (self._running_since or now) if self.state == "RUNNING" else None
        is_over = self._answers_without > 0 or (self.state is not None and self.state not in ACTIVE)
        self._over_since = (self._over_since or now) if is_over else None

    def _evidence(self) -> Evidence:
        now = time.monotonic()
        return Evidence(
            status=self._status,
            result=self.record.result() if self._owner is not None else None,
            owner=self._owner,
            state=self.state,
            reason=self.reason,
            had_node=self._had_node,
            by_mistake=self._by_mistake or (self.state == "CANCELLED" and self._was_started_beside()),
            answers_without=self._answers_without,
            submitted=self.slurm_job is not None,
            silent_for=now - self._heard_at,
            running_for=0.0 if self._running_since is None else now - self._running_since,
            ended_for=0.0 if self._over_since is None else now - self._over_since,
            failed_starts=self._failed_starts() if self._owner is None and self._over_since is not None else 0,
            lease=self.spec.lease,
            requeue_at_limit=self.spec.requeue_at_limit,
            heartbeat=heartbeat_of(self.spec.lease),
            printed="" if self._over_since is None else self._printed(),
            nodes=self.spec.nodes,
            open_nodes=self._open,
        )

    def _was_started_beside(self) -> bool:
        """Whether Slurm has started the job again while its shim ran: a controller that was killed had forgotten the
        first start. The node does not take it twice, and Slurm cancels the job.

        Slurm and the file system have different clocks, so each counts from the submission.
        """
        if self._waited_in_slurm is None:
            return False
        waited = self.record.seconds_since_written()
        if waited is None or self._waited_in_slurm < waited.begun + _WHOLE_SECONDS:
            return False
        return self._status.state != "ended" or waited.ended >= self._waited_in_slurm - _WHOLE_SECONDS

    def _failed_starts(self) -> int:
        count, place = 0, self.record.directory.parent
        with contextlib.suppress(OSError):
            while True:
                before = SlurmAttemptRecord(place / f"{self.spec.job}-{self.spec.number - 1 - count}")
                if before.owner() != VOID or before.submitted() is None:
                    break
                count += 1
        return count

    def _describe(self) -> None:
        """Updates its place for people."""
        # A short job may begin and end between two answers of Slurm.
        self.pending = not self.has_begun or (self.state in WAITING and self.result is None)
        if self.has_begun and self._owner is not None and not self.pending:
            self.where = f"Slurm job {self._owner.slurm_job} on {self._owner.host}"
            if self.began is None:
                self.began = self.record.begun_at()
        elif self.slurm_job is not None:
            self.where = f"Slurm job {self.slurm_job}"

    def _printed(self) -> str:
        return read_tail(self.record.directory / "slurm.out", _LAST_WORDS)

    def _last_words(self) -> str:
        """The last line that Slurm or the shim printed."""
        lines = self._printed().strip().splitlines()
        if not lines:
            return f": it printed nothing, as when the node does not see {self.record.directory}"
        return f": {lines[-1].strip()[:_LONGEST_WORDS]}"


def find_attempts(identity: WorkerIdentity, queue: str | None, known: Collection[str]) -> Found[SlurmAttempt]:
    """Attempts of earlier workers that are not in `known`. Works without the queue and without Slurm."""
    address = str(queue_address(queue))
    found: list[SlurmAttempt] = []
    complete = True
    try:
        names = sorted(os.listdir(identity.directory / "attempts"))  # noqa: PTH208 - thousands of names, one call
    except FileNotFoundError:
        return Found((), True)
    except OSError:
        return Found((), False)
    for name in names:
        record = SlurmAttemptRecord(identity.directory / "attempts" / name)
        try:
            attempt_spec = record.attempt_spec()
        except OSError:
            complete = False
            continue
        if attempt_spec is None or attempt_spec.attempt in known:
            continue
        if str(queue_address(attempt_spec.queue)) != address:
            continue  # another queue's worker takes care of it
        attempt = SlurmAttempt(record, attempt_spec, submitting=False)
        attempt.look()
        found.append(attempt)
    return Found(tuple(found), complete)
