"""Attempts: claims, leases, outcomes, details, and requests to running attempts."""

import math
import os
import time
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from stoker.backoff import delay
from stoker.errors import BadInputError, StokerError
from stoker.queue.driver import CollisionError, Driver, NotifyThrottle, Parameters, Row
from stoker.queue.field_kinds import LONGEST_LABEL
from stoker.queue.fields import State
from stoker.queue.model import (
    LONGEST_REPORT,
    Attempt,
    AttemptDetails,
    Job,
    Outcome,
    Requests,
    Snoozed,
)
from stoker.queue.table import (
    Table,
    attempt_of,
    clean_text,
    job_of,
    json_text,
)

# How long the job of a lost worker waits at most for a free one; each check costs a round trip.
SECONDS_BETWEEN_SWEEPS: Final = 1.0
# Clocks drift apart by milliseconds a minute; a larger difference is a step.
SMALLEST_STEP: Final = 1.0
# Longer than most outages of a file server or a licence server.
LONGEST_BACKOFF: Final = 3600.0
# A job that crashes its machine must not crash one after the other all night.
MOST_LOSSES: Final = 10
# A job that no machine can start must not stay first in the queue.
LONGEST_REQUEUE_DELAY: Final = 30.0
# Details are written shortly before or after the outcome, never this far apart.
SECONDS_APART: Final = 3600.0


class Attempts(Table):
    """The attempts at jobs."""

    def __init__(self, driver: Driver, throttle: NotifyThrottle) -> None:
        super().__init__(driver, throttle)
        self._swept = -math.inf
        self._clocks: tuple[float, float, float] | None = None
        """The database's clock when it was last read, and ours right before and after that."""
        self._ready: dict[Row, Job] = {}
        self.ready_at = 0.0
        """When `ready` last found a job with reserved GPUs, by the database's clock."""

    def ready(self, limit: int = 100, worker: str = "") -> list[Job]:
        """The jobs that could start now on this worker, in their order; none during a pause."""
        self._sweep_now_and_then(worker)
        known = self._ready
        # PostgreSQL plans for a tenth of the table when the limit is a parameter.
        rows = self._driver.fetch_text(f"{self._driver.sql('ready')} LIMIT {limit:d}", {"worker": worker})
        # A worker asks often, and most of the answer stays the same.
        self._ready = {row: known.get(row) or job_of(row[:-1]) for row in rows}
        self.ready_at = next((row[-1] for row in rows if row[-1] is not None), self.ready_at)
        return list(self._ready.values())

    def claim(
        self, jobs: Sequence[str] | None, worker: str, gpus: Sequence[str], lease_seconds: float
    ) -> Attempt | None:
        """The right to run the first of these jobs that may start, until the lease ends; None when none may.

        Without `jobs`: the next ready job that wants exactly this many GPUs.
        """
        statement, which = (
            ("claim next", {"wanted": len(gpus)}) if jobs is None else ("claim", {"jobs": json_text(jobs)})
        )
        self._sweep_now_and_then(worker)
        attempt = os.urandom(16).hex()
        parameters: Parameters = {
            **which,
            "attempt": attempt,
            "worker": worker,
            "gpus": json_text(list(gpus)),
            "lease": float(lease_seconds),
        }
        rows = self._claim_rows(statement, parameters)
        if not rows and self.sweep(worker):
            rows = self._claim_rows(statement, parameters)
        if not rows:
            return None
        ((job, number, started, expires),) = rows
        return Attempt(
            id=attempt,
            job=job,
            worker=worker,
            number=number,
            gpus=tuple(gpus),
            started=started,
            lease_expires=expires,
        )

    def _claim_rows(self, statement: str, parameters: Parameters) -> list[Row]:
        try:
            return self._driver.at_once(statement, parameters)
        except CollisionError:
            # The unique index allows one running attempt per job.
            raise StokerError(
                f"a waiting job in {self._driver.place} has a running attempt: `stoker queue check` says which"
            ) from None

    def sweep(self, worker: str = "") -> int:
        """Ends attempts whose leases have expired; how many. `ready` and every claim do it too.

        The attempts of `worker` itself are left alone: it knows whether they still run.
        """
        self._swept = time.monotonic()
        before = _own_clock()
        ((clock, is_any),) = self._driver.fetch("is anything expired", {"worker": worker})
        step = self._step_of(float(clock), before, _own_clock())
        if step > 0.0:
            # The clock was set forward: leases that ended, or are about to end, only by that step are extended by it.
            # Several workers may notice the step; a lease that was extended twice is out of its range.
            self._driver.fetch("forgive step", {"step": step})
        elif not is_any:
            return 0
        return self._throttled_change(lambda: self._sweep(worker))

    def _step_of(self, clock: float, before: float, after: float) -> float:
        """By how much the database's clock was set forward since it was last read; 0 when it was not."""
        last, self._clocks = self._clocks, (clock, before, after)
        if last is None:
            return 0.0
        gone = clock - last[0]
        # The answers took an unknown part of the time between: the step lies between these two differences.
        return gone - (before - last[2]) if gone - (after - last[1]) > SMALLEST_STEP else 0.0

    def _sweep_now_and_then(self, worker: str) -> None:
        if time.monotonic() - self._swept >= SECONDS_BETWEEN_SWEEPS:
            self.sweep(worker)

    def _sweep(self, worker: str) -> int:
        expired = self._driver.fetch("expired attempts", {"worker": worker})
        for (attempt,) in expired:
            self._end(attempt, "lost", None, "")
        return len(expired)

    def renew(self, attempts: Iterable[str], lease_seconds: float) -> dict[str, bool]:
        """Extends the leases of the attempts that still run; for each, whether it is to be stopped."""
        parameters: Parameters = {"attempts": json_text(list(attempts)), "lease": float(lease_seconds)}
        return {name: bool(unwanted) for name, unwanted in self._driver.fetch("renew", parameters)}

    def adopt(self, attempts: Iterable[str], worker: str, lease_seconds: float) -> set[str]:
        """Gives this worker those of the attempts that still run, which it found when it started; their ids."""
        parameters: Parameters = {
            "attempts": json_text(list(attempts)),
            "worker": worker,
            "lease": float(lease_seconds),
        }
        return {name for (name,) in self._driver.fetch("adopt", parameters)}

    def finish(self, attempt: str, outcome: Outcome, exit_code: int | None = None, reason: str = "") -> bool:
        """Writes the outcome of an attempt. False, without any change, when it has one already."""
        reason = clean_text(reason)
        if outcome != "succeeded":
            return self._throttled_change(lambda: self._end(attempt, outcome, exit_code, reason))
        # In one round trip, without a look at the job: a success has the same consequence for all.
        due = self._throttle.may_send()
        parameters: Parameters = {"attempt": attempt, "exit_code": exit_code, "reason": reason, "ring": int(due)}
        ended = bool(self._driver.at_once("succeed", parameters))
        if ended:
            self._account(due)
        return ended

    def _end(self, attempt: str, outcome: Outcome, exit_code: int | None, reason: str) -> bool:
        parameters: Parameters = {"attempt": attempt, "outcome": outcome, "exit_code": exit_code, "reason": reason}
        ended = self._driver.fetch("end attempt", parameters)
        if not ended:
            return False
        which = {"job": ended[0][0], "attempt": attempt}
        (row,) = self._driver.fetch("job of attempt", which)
        counted = outcome in {"lost", "requeued"}
        times = self._driver.fetch("ended so", {"job": which["job"], "outcome": outcome})[0][0] if counted else 0
        becomes = consequence(job_of(row), outcome, reason, times)
        self._driver.fetch("end job", {**which, "exit_code": exit_code, **msgspec.structs.asdict(becomes)})
        return True

    def get(self, attempt: str) -> Attempt | None:
        rows = self._driver.fetch("attempt", {"attempt": attempt})
        return attempt_of(rows[0]) if rows else None

    def of(self, job: str) -> list[Attempt]:
        return [attempt_of(row) for row in self._driver.fetch("attempts of job", {"job": job})]

    def running(self) -> list[Attempt]:
        """All attempts that have no outcome yet."""
        return [attempt_of(row) for row in self._driver.fetch("running attempts", {})]

    def requests(self, worker: str) -> Requests:
        """What people want of this worker's attempts, in one query.

        A snooze that somebody has ended has zero seconds left; one that is over is not listed."""
        rows = self._driver.fetch("requests", {"worker": worker})
        return Requests(
            cancelled=frozenset(name for name, unwanted, *_snooze in rows if unwanted),
            snoozed={
                name: Snoozed(seconds=float(left), by=who, until=float(until))
                for name, _unwanted, left, until, who in rows
                if left is not None
            },
        )

    def snooze(self, attempt: str, seconds: float, by: str) -> bool:
        """No rule stops the attempt for this long from now on; 0 ends the snooze. False when the attempt has ended."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise BadInputError(f"a snooze of {seconds} s is not possible: it must be zero or more")
        who = clean_text(by)[:LONGEST_LABEL]
        parameters: Parameters = {"attempt": attempt, "seconds": float(seconds), "who": who}
        return self._change(lambda: self._driver.fetch("snooze", parameters)) != []

    def snoozes(self) -> dict[str, float]:
        """Until when running attempts are snoozed, by their ids."""
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
        rows = self._driver.fetch("stops by rule", {"since": float(since), "written": float(since) - SECONDS_APART})
        return [(ended, len(msgspec.json.decode(gpus, type=tuple[str, ...]))) for ended, gpus in rows]


def _own_clock() -> float:
    """A clock that cannot be set, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Consequence(msgspec.Struct, frozen=True):
    """The job's next state, and for how many seconds it must not start."""

    state: State
    reason: str
    retries_left: int
    delay: float = 0.0


def consequence(job: Job, outcome: Outcome, reason: str, times: int) -> Consequence:
    """`times`: how many attempts ended like this, including this one; used for losses and requeues."""
    left = job.retries_left
    if job.cancel_requested is not None or outcome == "cancelled":
        return Consequence("cancelled", reason or "cancelled", left)
    if outcome == "preempted":
        return Consequence("queued", reason or "made room for another job", left)
    if outcome == "requeued":
        # The machine's trouble, not the job's, costs neither a retry nor a loss, only a delay from the second time on.
        return Consequence("queued", reason, left, delay(1.0, times - 2, LONGEST_REQUEUE_DELAY) if times > 1 else 0.0)
    if outcome == "lost":
        reason = reason or "its worker did not renew its lease in time"
        is_too_often = job.on_loss == "retry" and times >= MOST_LOSSES
        reason = f"{reason}, for the {times}th time" if is_too_often else reason
        return Consequence("held" if is_too_often or job.on_loss == "hold" else "queued", reason, left)
    if left <= 0:
        return Consequence("failed", reason, 0)
    return Consequence("queued", reason, left - 1, delay(job.backoff, job.retries - left, LONGEST_BACKOFF))
