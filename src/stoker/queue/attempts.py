"""Attempts: claims, leases, outcomes, details, and requests to running attempts."""

import math
import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from stoker.backoff import delay
from stoker.errors import BadInputError, StokerError
from stoker.queue.driver import FOR_PEOPLE, Changes, CollisionError, Driver, NotifyThrottle, Parameters, Ready, Row
from stoker.queue.field_kinds import LONGEST_LABEL
from stoker.queue.fields import JobSpec, State, key_of, placed_values
from stoker.queue.jobs import end_scheduled
from stoker.queue.model import (
    LONGEST_REPORT,
    UNREADABLE,
    Attempt,
    AttemptDetails,
    DeferredStart,
    FailureCause,
    Job,
    Outcome,
    ReadyJob,
    Requests,
    Snoozed,
)
from stoker.queue.table import (
    Table,
    attempt_of,
    clean_text,
    job_of,
    json_text,
    kept_of,
)

# As in the statement `heads`, and far more than a machine starts at once. Later jobs are read when these have started.
MOST_OF_SHAPE: Final = 16
# A sweep over memory sizes or time limits may have thousands of shapes, which take turns.
MOST_SHAPES: Final = 100
MOST_PLACED: Final = 10_000
# The interval of checks for expired leases; each costs a round trip.
SECONDS_BETWEEN_SWEEPS: Final = 1.0
# Clocks drift apart by milliseconds a minute; a larger difference is a step.
SMALLEST_STEP: Final = 1.0
# Longer than most outages of a file server or a licence server.
LONGEST_BACKOFF: Final = 3600.0
# A job that crashes its machine must not crash one machine after another all night.
MOST_LOSSES: Final = 10
# A week of a job with a limit of 90 minutes: a job that makes no progress must not run forever.
MOST_REQUEUES_AT_LIMIT: Final = 100
# A job that no machine can start must not block the head of the queue.
LONGEST_REQUEUE_DELAY: Final = 30.0
# Details and outcome of an attempt are always written within this time of each other.
SECONDS_APART: Final = 3600.0


class Heads(msgspec.Struct, frozen=True, kw_only=True):
    """The first ready jobs of each shape, in the order of the queue; none during a pause."""

    jobs: tuple[ReadyJob, ...] = ()
    more: frozenset[str] = frozenset()
    """Shapes that may have more jobs."""
    after: str = ""
    """The shape after which the next read continues; empty if all shapes were read."""
    queue_time: float = 0.0
    """The database's clock."""
    wake_in: float | None = None
    """Seconds until the next retry may start; None if none waits."""


class ClaimRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for the first ready job of a shape."""

    shape: str
    worker: str
    gpus: tuple[str, ...] = ()
    lease: float
    pending: bool = False
    """The job does not start at once."""
    before: tuple[int, float] | None = None
    """The priority and position where another shape takes its turn; only jobs before it qualify."""
    others: tuple[str, ...] = ()
    """Jobs to leave out."""
    attempt: str = ""
    """A new id for the attempt; empty to draw one."""


class Claimed(NamedTuple):
    """A job that belongs to this worker until the attempt's lease ends."""

    job: Job
    attempt: Attempt


class Finished(NamedTuple):
    """The effect of writing an attempt's outcome."""

    accepted: bool
    """False if the attempt already had an outcome; nothing was changed then."""
    frees_jobs: bool = False
    """Other jobs, or this one again, may have become ready."""
    claimed: Claimed | None = None


class Attempts(Table):
    """The attempts at jobs."""

    def __init__(self, driver: Driver, throttle: NotifyThrottle) -> None:
        super().__init__(driver, throttle)
        self._swept = -math.inf
        self._clocks: tuple[float, float, float] | None = None
        """The database's clock when last read, and the local clock right before and after that."""
        self._placed: dict[str, dict[str, Any]] = {}
        """The fields that matter for placement, by shape."""
        self._waiting: dict[Row, ReadyJob] = {}
        self._rejected = False
        """One of the jobs just read could not be decoded."""

    def heads(
        self, worker: str = "", after: str = "", also: Collection[str] = (), without: Collection[str] = ()
    ) -> Heads:
        """The first ready jobs of each shape for this worker, for at most a hundred shapes.

        The next read continues `after` them. It always includes the shapes in `also`, and the first jobs overall.
        `without`: shapes to leave out.
        """
        wanted: Parameters = {
            "worker": worker,
            "after": after,
            "also": json_text(list(also)),
            "without": json_text(list(without)),
            "shapes": MOST_SHAPES,
        }
        before = _own_clock()
        rows, expired, wake, clock, now = self._head_rows(wanted)
        if self._sweep_if(worker, clock, before, expired or (wake is not None and wake <= clock)):
            rows, expired, wake, clock, now = self._head_rows(wanted)
        heads = dict.fromkeys(rows)
        shapes = Counter(row[0] for row in rows if row[-1] is None)
        in_turn = [shape for shape in shapes if shape > after]
        if after and not in_turn:
            return self.heads(worker, "", also, without)
        is_partial = len(in_turn) >= MOST_SHAPES
        if is_partial or after:
            heads |= dict.fromkeys(self._driver.fetch("first ready", {"worker": worker}))
        heads, cut = self._within_caps(heads)
        self._rejected = False
        jobs = self._waiting_jobs(heads)
        if self._rejected:
            wake = clock  # the next read returns the other jobs of its shape
        return Heads(
            jobs=tuple(sorted(jobs, key=_place_in_line)),
            more=frozenset(shape for shape, count in shapes.items() if count >= MOST_OF_SHAPE and shape not in cut),
            after=sorted(in_turn)[MOST_SHAPES - 1] if is_partial else "",
            queue_time=now,
            wake_in=None if wake is None else max(0.0, wake - clock),
        )

    def _within_caps(self, rows: dict[Row, None]) -> tuple[dict[Row, None], set[str]]:
        """Limits the jobs of capped groups to the free places of each group.

        Returns the kept rows, and the shapes with jobs left out.
        """
        keys = {key for row in rows if (key := key_of(row[0]))}
        if not keys:
            return rows, set()
        rooms: dict[str, int] = dict(self._driver.fetch("rooms", {"keys": json_text(sorted(keys))}))
        kept, taken, cut = dict[Row, None](), Counter[str](), set[str]()
        for row in sorted(rows, key=lambda row: (-row[2], row[3], row[4], row[1])):
            shape = row[0]
            if (key := key_of(shape)) and taken[shape] >= rooms.get(key, 0):
                cut.add(shape)
                continue
            taken[shape] += 1
            kept[row] = None
        return kept, cut

    def _head_rows(self, wanted: Parameters) -> tuple[list[Row], bool, float | None, float, float]:
        """The rows, whether a lease has expired, the time of the next retry, the clock for that, and the wall clock."""
        *rows, status = sorted(self._driver.fetch("heads", wanted), key=lambda row: row[0] is None)
        _, expired, _, wake, clock, now = status
        return rows, expired is not None, wake, float(clock), float(now)

    def _waiting_jobs(self, rows: Iterable[Row]) -> list[ReadyJob]:
        """Builds jobs from rows. Known jobs are reused, since most rows stay the same between two reads."""
        known = self._waiting
        self._waiting = {}
        if unknown := {row[0]: row[1] for row in rows if row[0] not in self._placed}:
            if len(self._placed) > MOST_PLACED:
                self._placed.clear()
                unknown = {row[0]: row[1] for row in rows}
            for shape, spec in self._driver.fetch("specs", {"jobs": json_text(list(unknown.values()))}):
                try:
                    self._placed[shape] = placed_values(msgspec.json.decode(spec, type=JobSpec))
                except msgspec.MsgspecError as error:
                    self._reject(unknown.get(shape, ""), error)
        for row in rows:
            shape, name, priority, position, submitted, kept = row
            # An edit may just have removed the only job of this shape.
            if (job := known.get(row)) is None and (placed := self._placed.get(shape)) is not None:
                job = ReadyJob(
                    command="",
                    id=name,
                    shape=shape,
                    priority=priority,
                    position=position,
                    submitted=submitted,
                    kept=None if kept is None else kept_of(kept),
                    **placed,
                )
            if job is not None:
                self._waiting[row] = job
        return list(self._waiting.values())

    def _reject(self, job: str, error: msgspec.MsgspecError) -> None:
        """Ends a job that cannot be decoded. The next read returns other jobs of its shape."""
        which: Parameters = {"job": job, "reason": clean_text(f"{UNREADABLE}: {error}")}
        self._rejected = True
        self._change(lambda: self._driver.fetch("reject", which))

    def claim(
        self, jobs: Sequence[str], worker: str, gpus: Sequence[str], lease_seconds: float, *, pending: bool = False
    ) -> Attempt | None:
        """The right to run the first of these jobs that may start, until the lease ends; None when none may.

        `pending`: it does not start at once.
        """
        claimed = self.take(jobs, worker, gpus, lease_seconds, pending=pending)
        return None if claimed is None else claimed.attempt

    def take(
        self, jobs: Sequence[str], worker: str, gpus: Sequence[str], lease_seconds: float, *, pending: bool = False
    ) -> Claimed | None:
        """The same, with the job."""
        self._sweep_now_and_then(worker)
        claim = ClaimRequest(shape="", worker=worker, gpus=tuple(gpus), lease=lease_seconds, pending=pending)
        parameters = _claim_parameters(claim) | {"jobs": json_text(list(jobs))}
        rows = self._claim_rows("claim", parameters)
        if not rows and self.sweep(worker):
            rows = self._claim_rows("claim", parameters)
        return _claimed(rows[0], parameters, claim) if rows else None

    def take_head(self, claim: ClaimRequest) -> Claimed | None:
        """Claims the first ready job of a shape; None if there is none before the limit."""
        parameters = _claim_parameters(claim)
        rows = self._claim_rows("claim head", parameters)
        return _claimed(rows[0], parameters, claim) if rows else None

    def _claim_rows(self, statement: str, parameters: Parameters) -> list[Row]:
        try:
            return self._driver.at_once(statement, parameters)
        except CollisionError:
            # The unique index allows one running attempt per job.
            raise StokerError(
                f"a waiting job in {self._driver.place} has a running attempt: `stoker queue check` says which"
            ) from None

    def sweep(self, worker: str = "") -> int:
        """Ends attempts with expired leases, and frees due retries. Returns their number.

        `heads` and every claim also do this. Attempts of `worker` itself are left alone: it knows whether they still
        run.
        """
        before = _own_clock()
        ((clock, is_any, wake),) = self._driver.fetch("is anything expired", {"worker": worker})
        return self._sweep_if(worker, float(clock), before, is_any or (wake is not None and wake <= clock))

    def _sweep_if(self, worker: str, clock: float, before: float, is_any: bool) -> int:
        """`clock`: the database's, read after `before` on the local clock."""
        self._swept = time.monotonic()
        step = self._step_of(clock, before, _own_clock())
        if step > 0.0:
            # The clock was set forward. Leases that end only because of that are extended by the step. If several
            # workers notice it, a lease extended once is out of the range of the second.
            self._driver.fetch("forgive step", {"step": step})
        elif not is_any:
            return 0
        return len(self._throttled_change(lambda: self._sweep(worker), ready_of))

    def _step_of(self, clock: float, before: float, after: float) -> float:
        """The seconds by which the database's clock was set forward since the last read; 0 if it was not."""
        last, self._clocks = self._clocks, (clock, before, after)
        if last is None:
            return 0.0
        gone = clock - last[0]
        # The network delay is unknown, so the step lies between these two differences.
        return gone - (before - last[2]) if gone - (after - last[1]) > SMALLEST_STEP else 0.0

    def _sweep_now_and_then(self, worker: str) -> None:
        if time.monotonic() - self._swept >= SECONDS_BETWEEN_SWEEPS:
            self.sweep(worker)

    def _sweep(self, worker: str) -> list[Row]:
        """Shapes and priorities of jobs that may be ready now."""
        freed: list[Row] = []
        for (attempt,) in self._driver.fetch("expired attempts", {"worker": worker}):
            freed += self._end(attempt, "lost", None, "") or [("", 0)]
        for job in end_scheduled(self._driver):
            freed += self._driver.fetch("freed", {"job": job}) or [("", 0)]
        return [*freed, *self._driver.fetch("wake", {})]

    def renew(self, attempts: Iterable[str], lease_seconds: float) -> dict[str, bool]:
        """Extends the leases of running attempts. Maps each of them to whether it must stop."""
        parameters: Parameters = {"attempts": json_text(list(attempts)), "lease": float(lease_seconds)}
        return {name: bool(unwanted) for name, unwanted in self._driver.fetch("renew", parameters)}

    def adopt(self, attempts: Iterable[str], worker: str, lease_seconds: float) -> set[str]:
        """Transfers running attempts, which this worker found at its start, to it. Returns their ids."""
        parameters: Parameters = {
            "attempts": json_text(list(attempts)),
            "worker": worker,
            "lease": float(lease_seconds),
        }
        return {name for (name,) in self._driver.fetch("adopt", parameters)}

    def annotate(self, starts: Mapping[str, DeferredStart]) -> None:
        """Writes when and where attempts run, by id. Ended attempts stay as they are.

        The clock of a cluster cannot put a start before the claim or into the future.
        """
        rows: list[Parameters] = [
            {
                "attempt": attempt,
                "pending": int(one.pending),
                "location": clean_text(one.where),
                "began": 0.0 if one.began is None else one.began,
            }
            for attempt, one in starts.items()
        ]

        def write() -> bool:
            self._driver.many("annotate attempt", rows)
            self._driver.many("annotate job", rows)
            return True

        if rows:
            self._throttled_change(write, FOR_PEOPLE)

    def finish(
        self, attempt: str, outcome: Outcome, exit_code: int | None = None, reason: str = "", cause: FailureCause = ""
    ) -> bool:
        """Writes the outcome of an attempt. False, without any change, if it already has one."""
        return self.complete(attempt, outcome, exit_code, reason, cause=cause).accepted

    def complete(
        self,
        attempt: str,
        outcome: Outcome,
        exit_code: int | None = None,
        reason: str = "",
        claim: ClaimRequest | None = None,
        cause: FailureCause = "",
    ) -> Finished:
        """Like `finish`; also claims the first job of a shape, unless other jobs wait for the ended one."""
        reason = clean_text(reason)
        if outcome != "succeeded":

            def end() -> list[list[Row]]:
                freed = self._end(attempt, outcome, exit_code, reason, cause)
                return [] if freed is None else [freed]

            ended = self._throttled_change(end, lambda ended: ready_of(ended[0]))
            return Finished(bool(ended), frees_jobs=any(ended))
        # One round trip without reading the job: a success has the same consequence for every job.
        parameters: Parameters = {"ended": attempt, "exit_code": exit_code, "reason": reason}
        if claim is not None:
            parameters = {**parameters, **_claim_parameters(claim)}
        what = "succeed" if claim is None else "succeed and claim"
        rows = self._rung(lambda ring: self._claim_rows(what, {**parameters, "ring": ring}), 2)
        if not rows:
            return Finished(False)
        job, is_needed, *row = rows[0]
        if is_needed:
            self._throttle.defer(ready_of(self._driver.fetch("freed", {"job": job})))
        if claim is None or len(row) < 2 or row[1] is None:
            return Finished(True, bool(is_needed))
        return Finished(True, bool(is_needed), _claimed(row[1:], parameters, claim))

    def _end(
        self, attempt: str, outcome: Outcome, exit_code: int | None, reason: str, cause: FailureCause = ""
    ) -> list[Row] | None:
        """Shapes and priorities of jobs that became ready; None if the attempt already has an outcome."""
        parameters: Parameters = {"attempt": attempt, "outcome": outcome, "exit_code": exit_code, "reason": reason}
        ended = self._driver.fetch("end attempt", parameters)
        if not ended:
            return None
        which = {"job": ended[0][0], "attempt": attempt}
        (row,) = self._driver.fetch("job of attempt", which)
        counted = outcome in {"lost", "requeued"}
        times = self._driver.fetch("ended so", {"job": which["job"], "outcome": outcome})[0][0] if counted else 0
        becomes = consequence(job_of(row), outcome, reason, times, cause, exit_code)
        rows = self._driver.fetch("end job", {**which, "exit_code": exit_code, **msgspec.structs.asdict(becomes)})
        if becomes.state == "queued":
            # This includes a delayed job, which becomes ready later.
            return rows
        return self._driver.fetch("freed", {"job": which["job"]})

    def get(self, attempt: str) -> Attempt | None:
        rows = self._driver.fetch("attempt", {"attempt": attempt})
        return attempt_of(rows[0]) if rows else None

    def of(self, job: str) -> list[Attempt]:
        return [attempt_of(row) for row in self._driver.fetch("attempts of job", {"job": job})]

    def of_workers(self, workers: Iterable[str], since: float, most: int) -> list[Attempt]:
        """The attempts that these workers have started since then, newest first, at most `most` per worker."""
        statement, found = "attempts of worker", list[Attempt]()
        for worker in workers:
            wanted: Parameters = {"worker": worker, "since": since, "most": most}
            found += [attempt_of(row) for row in self._driver.fetch(statement, wanted)]
        return sorted(found, key=lambda attempt: attempt.started, reverse=True)

    def running(self, worker: str = "") -> list[Attempt]:
        """All attempts without an outcome. `worker`: only of workers whose ids begin with this."""
        return [attempt_of(row) for row in self._driver.fetch("running attempts", {"worker": worker})]

    def requests(self, attempts: Iterable[str]) -> Requests:
        """Requests of people for these attempts, in one query.

        A snooze that was ended early has zero seconds left; an expired one is not listed."""
        rows = self._driver.fetch("requests", {"attempts": json_text(list(attempts))})
        return Requests(
            cancelled=frozenset(name for name, unwanted, *_snooze in rows if unwanted),
            snoozed={
                name: Snoozed(seconds=float(left), by=who, until=float(until))
                for name, _unwanted, left, until, who in rows
                if left is not None
            },
        )

    def snooze(self, attempt: str, seconds: float, by: str) -> bool:
        """Keeps rules from stopping the attempt for this long; 0 ends the snooze. False if the attempt has ended."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise BadInputError(f"a snooze of {seconds} s is not possible: it must be zero or more")
        who = clean_text(by)[:LONGEST_LABEL]
        parameters: Parameters = {"attempt": attempt, "seconds": float(seconds), "who": who}
        rows = self._change(
            lambda: self._driver.fetch("snooze", parameters),
            lambda rows: Changes(workers=frozenset(worker for (worker,) in rows)),
        )
        return rows != []

    def snoozes(self) -> dict[str, float]:
        """The ends of current snoozes, by attempt id."""
        return dict(self._driver.fetch("snoozes", {}))

    def write_details(self, attempt: str, details: AttemptDetails) -> bool:
        parameters = {
            "attempt": attempt,
            "cause": clean_text(details.cause),
            "rule": clean_text(details.rule),
            "report": clean_text(details.report[:LONGEST_REPORT]),
            "fit": json_text(details.fit),
        }
        return bool(self._driver.fetch("write attempt details", parameters))

    def details(self, attempt: str) -> AttemptDetails | None:
        for cause, rule, report, fit in self._driver.fetch("attempt details", {"attempt": attempt}):
            return AttemptDetails(cause=cause, rule=rule, report=report, fit=msgspec.json.decode(fit))
        return None

    def causes(self, attempts: Iterable[str]) -> dict[str, AttemptDetails]:
        wanted = list(attempts)
        rows = self._driver.fetch("causes", {"attempts": json_text(wanted)}) if wanted else []
        return {attempt: AttemptDetails(cause=cause, rule=rule) for attempt, cause, rule in rows}

    def rule_stops(self, since: float) -> list[tuple[float, int]]:
        """Times of stops by rules, and the number of GPUs of each job; for a cluster, the requested number."""
        rows = self._driver.fetch("stops by rule", {"since": float(since), "written": float(since) - SECONDS_APART})
        return [(ended, _gpu_count(gpus, spec)) for ended, gpus, spec in rows]


def _gpu_count(gpus: str, spec: str) -> int:
    """`spec`: the job's, for an attempt without GPUs; otherwise empty."""
    if not spec:
        return len(msgspec.json.decode(gpus, type=tuple[str, ...]))
    job = msgspec.json.decode(spec, type=JobSpec)
    return job.gpus * job.nodes


def _own_clock() -> float:
    """A clock that cannot be set, and that keeps running during suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def ready_of(rows: Iterable[Row]) -> Changes:
    """The changes from rows of shape, priority and, if there may be several jobs, their number."""
    changes = FOR_PEOPLE
    for shape, priority, *number in rows:
        if shape:
            changes |= Changes(ready={shape: Ready(priority, number[0] if number else 1)})
    return changes


def _claim_parameters(claim: ClaimRequest) -> dict[str, str | int | float | bytes | None]:
    priority, position = claim.before or (-(2**31), math.inf)
    return {
        "shape": claim.shape,
        "priority": priority,
        "position": position,
        "others": json_text(list(claim.others)),
        "attempt": claim.attempt or os.urandom(16).hex(),
        "worker": claim.worker,
        "gpus": json_text(list(claim.gpus)),
        "lease": float(claim.lease),
        "pending": int(claim.pending),
    }


def _claimed(row: Sequence[Any], parameters: Parameters, claim: ClaimRequest) -> Claimed:
    *job, number, started, expires = row
    found = job_of(tuple(job))
    attempt = Attempt(
        id=str(parameters["attempt"]),
        job=found.id,
        worker=claim.worker,
        number=number,
        gpus=claim.gpus,
        started=started,
        lease_expires=expires,
        pending=claim.pending,
    )
    return Claimed(found, attempt)


def _place_in_line(job: ReadyJob) -> tuple[int, float, float, str]:
    return (-job.priority, job.position, job.submitted, job.id)


class Consequence(msgspec.Struct, frozen=True):
    """The job's next state, and the delay in seconds before it may start."""

    state: State
    reason: str
    retries_left: int
    delay: float = 0.0


def consequence(
    job: Job, outcome: Outcome, reason: str, times: int, cause: FailureCause = "", exit_code: int | None = None
) -> Consequence:
    """What follows from an outcome. `times`: the number of attempts with this outcome, for losses and requeues."""
    left = job.retries_left
    if job.cancel_requested is not None or outcome == "cancelled":
        return Consequence("cancelled", reason or "cancelled", left)
    if outcome == "preempted":
        return Consequence("queued", reason or "made room for another job", left)
    if outcome == "requeued":
        return _requeued(job, reason, times, at_limit=cause == "time-limit")
    if outcome == "lost":
        cause, reason = "lost", reason or "its worker did not renew its lease in time"
        if "lost" not in job.retry_on:
            return _lost(job, reason, times)
    if left <= 0 or not _uses_retry(job, cause, exit_code):
        return Consequence("failed", reason, max(0, left))
    return Consequence("queued", reason, left - 1, delay(job.backoff, job.retries - left, LONGEST_BACKOFF))


def _requeued(job: Job, reason: str, times: int, *, at_limit: bool) -> Consequence:
    left = job.retries_left
    if at_limit and times >= MOST_REQUEUES_AT_LIMIT:
        return Consequence("failed", f"{reason}, for the {times}th time", left)
    # Trouble of the machine costs neither a retry nor a loss, only a delay from the second time on.
    pause = 0.0 if at_limit or times < 2 else delay(1.0, times - 2, LONGEST_REQUEUE_DELAY)
    return Consequence("queued", reason, left, pause)


def _lost(job: Job, reason: str, times: int) -> Consequence:
    is_too_often = job.on_loss == "retry" and times >= MOST_LOSSES
    reason = f"{reason}, for the {times}th time" if is_too_often else reason
    return Consequence("held" if is_too_often or job.on_loss == "hold" else "queued", reason, job.retries_left)


def _uses_retry(job: Job, cause: FailureCause, exit_code: int | None) -> bool:
    """True if a job that failed like this is retried, given retries left."""
    if cause == "refused":
        return False
    if not job.retry_on:
        return True
    ends = {cause, "exit", f"exit:{exit_code}"} if cause in {"exit", "oom"} else {cause}
    return not ends.isdisjoint(job.retry_on)
