"""The store of the queue: every operation on it, each one short transaction, the same on both databases."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

import msgspec

from stoker.errors import BadInputError, StokerError
from stoker.logs.model import LogChunk
from stoker.queue import feeding, listing, log_streams
from stoker.queue.attempt_details import AttemptDetailsTable
from stoker.queue.changes import ChangeListener, NotifyThrottle
from stoker.queue.driver import CollisionError, Driver, Parameters, Row
from stoker.queue.editing import edited, edited_row
from stoker.queue.ending import consequence
from stoker.queue.entry import check_submission, insert, must_exist
from stoker.queue.explanation import Needs
from stoker.queue.fields import FIELDS, ID, JobSpec, State
from stoker.queue.model import (
    ENDED,
    HEARD_WITHIN,
    Attempt,
    AttemptDetails,
    EndCause,
    Failure,
    GpuUse,
    Job,
    LogRequest,
    NoSuchJobError,
    Order,
    Outcome,
    Place,
    Requests,
    Side,
    Usage,
    View,
    Worker,
    sweep_name,
)
from stoker.queue.notices import Notices
from stoker.queue.order import moved, moved_beside
from stoker.queue.requests import requests_for, snooze
from stoker.queue.rows import attempt_of, clean_text, dependencies, job_of, json_text, tail_of
from stoker.queue.usage import UsageTable

# A job whose worker is gone waits no longer than that for a free one; looking costs a round trip.
SECONDS_BETWEEN_SWEEPS: Final = 1.0
# Two clocks drift apart by milliseconds in a minute; what is more than that within one is a step.
SMALLEST_STEP: Final = 1.0
# Ids are drawn from four thousand million: a second draw is rare, a third is not seen.
MOST_DRAWS: Final = 20

# So many seconds after the outcome the queue surely has the last of an output too, if its worker is there.
LAST_WITHIN: Final = 10.0
SECONDS_BETWEEN_LOOKS: Final = 0.02

T = TypeVar("T")


class Cancellation(msgspec.Struct, frozen=True):
    """What a request to cancel did."""

    cancelled: list[str]
    """Jobs that had not started: they are cancelled."""
    asked: list[str]
    """Jobs that run: their supervisors are asked to stop them, and say when it is done."""


class Store:
    """The queue, seen through one connection; one thread uses it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._throttle = NotifyThrottle()
        self._swept = -math.inf
        self._clocks: tuple[float, float, float] | None = None
        """The database's clock when it was last looked at, and ours right before and after that."""
        self._ready: dict[Row, Job] = {}
        self.ready_at = 0.0
        """When `ready` last found a job that GPUs are kept for, by the database's clock."""
        self._details = AttemptDetailsTable(driver)
        self._ledger = UsageTable(driver)
        self._notices = Notices(driver)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._throttle.flush_due() is not None:
            self._pay()
        self._driver.close()

    @property
    def place(self) -> str:
        """Where the queue is, for people."""
        return self._driver.place

    # Getting in

    def submit(self, jobs: Sequence[JobSpec]) -> list[str]:
        """The ids of the jobs, in their order. All are accepted, or none."""
        check_submission(jobs)
        for _draw in range(MOST_DRAWS):
            try:
                return self._change(lambda: insert(self._driver, jobs))
            except CollisionError:
                continue  # another one has just taken an id or an origin of these: look again
        raise StokerError(f"no free ids were found in {self.place}: `stoker queue check` looks at it")

    def feed_memory(self, feed: str) -> tuple[int, str]:
        """The version and text of what this feed remembers; version 0 when that is nothing yet."""
        return feeding.remembered(self._driver, feed)

    def take(self, feed: str, version: int, memory: str, jobs: Sequence[JobSpec]) -> bool:
        """Submits jobs, which carry their ids, and replaces the feed's memory, in one transaction.

        False, and nothing is done, when another process has changed the memory since `version`.
        """
        check_submission(jobs)
        for _try in range(MOST_DRAWS):
            try:
                return self._change(lambda: feeding.take(self._driver, feed, version, memory, jobs))
            except CollisionError:
                continue
        raise StokerError(f"no free ids were found in {self.place}: `stoker queue check` looks at it")

    def known_origins(self, origins: Sequence[str]) -> set[str]:
        """Those of them that are, or once were, jobs."""
        return feeding.known_origins(self._driver, origins) if origins else set()

    # Being worked on

    def ready(self, limit: int = 100, worker: str = "") -> list[Job]:
        """The jobs that could start now, on this worker, in the order in which they should; none during a pause."""
        self._sweep_now_and_then(worker)
        known = self._ready
        # Written out, for of a number that it does not know PostgreSQL believes that it is a tenth of the table.
        rows = self._driver.fetch_text(f"{self._driver.sql('ready')} LIMIT {limit:d}", {"worker": worker})
        # A worker asks many times, and most of what waits is the same each time.
        self._ready = {row: known.get(row) or job_of(row[:-1]) for row in rows}
        self.ready_at = next((row[-1] for row in rows if row[-1] is not None), self.ready_at)
        return list(self._ready.values())

    def claim(self, job: str, worker: str, gpus: Sequence[str], lease_seconds: float) -> Attempt | None:
        """The right to run this job until the lease ends; None when another has it or it need not run now."""
        return self._claimed("claim", {"job": job}, worker, gpus, lease_seconds)

    def claim_any(self, jobs: Sequence[str], worker: str, gpus: Sequence[str], lease_seconds: float) -> Attempt | None:
        """The right to run the first of these jobs that nobody else has: one round trip where others are as quick."""
        return self._claimed("claim any", {"jobs": json_text(list(jobs))}, worker, gpus, lease_seconds)

    def claim_next(self, worker: str, gpus: Sequence[str], lease_seconds: float) -> Attempt | None:
        """The right to run the next ready job that wants exactly as many GPUs."""
        return self._claimed("claim next", {"wanted": len(gpus)}, worker, gpus, lease_seconds)

    def _claimed(
        self, statement: str, which: Mapping[str, str | int], worker: str, gpus: Sequence[str], lease: float
    ) -> Attempt | None:
        self._sweep_now_and_then(worker)
        attempt = os.urandom(16).hex()
        parameters: Parameters = {
            **which,
            "attempt": attempt,
            "worker": worker,
            "gpus": json_text(list(gpus)),
            "lease": float(lease),
        }
        rows = self._taken_job(statement, parameters)
        if not rows and self.sweep(worker):
            rows = self._taken_job(statement, parameters)
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

    def _taken_job(self, statement: str, parameters: Parameters) -> list[Row]:
        try:
            return self._driver.at_once(statement, parameters)
        except CollisionError:
            # The indices allow one running attempt per job, whatever the rows say.
            raise StokerError(
                f"a job that waits in {self.place} has an attempt that runs: `stoker queue check` says which"
            ) from None

    def keep(
        self, job: str, worker: str, gpus: Sequence[str], starts_in: float | None, instead_of: str | None = None
    ) -> bool:
        """Says that this worker keeps GPUs for a job that waits, and has these of them: at most one machine does.

        False when another has said so meanwhile, unless that is `instead_of`, or when the job waits no more. It ends
        with the job's wait, with an edit, and with the worker.
        """
        parameters: Parameters = {
            "job": job,
            "worker": worker,
            "gpus": json_text(list(gpus)),
            "seconds": -1.0 if starts_in is None else max(0.0, float(starts_in)),
            "instead_of": instead_of or worker,
        }
        return self._paced_change(lambda: self._driver.fetch("keep", parameters)) != []

    def keep_no_more(self, worker: str, but: Iterable[str] = ()) -> None:
        """This worker keeps no GPUs any more, but for those jobs."""
        parameters: Parameters = {"worker": worker, "jobs": json_text(list(but))}
        self._paced_change(lambda: self._driver.fetch("keep no more", parameters))

    def sweep(self, worker: str = "") -> int:
        """Gives away what was held by expired leases; how many there were. `ready` and every claim do it too.

        The attempts of `worker` itself are left alone: whether those still run, it need not guess from a clock.
        """
        self._swept = time.monotonic()
        before = _own_clock()
        ((clock, is_any),) = self._driver.fetch("is anything expired", {"worker": worker})
        step = self._step_of(float(clock), before, _own_clock())
        if step > 0.0:
            # Nobody could renew in time: leases that ended, or are about to, by the step alone get back what they had.
            # Several workers may notice it. Shifted twice at the most, a lease is beyond the reach of the next.
            self._driver.fetch("forgive step", {"step": step})
        elif not is_any:
            return 0
        return self._paced_change(lambda: self._sweep(worker))

    def _step_of(self, clock: float, before: float, after: float) -> float:
        """By how much the database's clock was set forward since the last look at it; 0 when it was not."""
        last, self._clocks = self._clocks, (clock, before, after)
        if last is None:
            return 0.0
        gone = clock - last[0]
        # The answers may have been under way for long: at least that much of it is a step, and at most this much.
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
        """Those of the attempts that still run, for so much longer; each with whether somebody wants it stopped."""
        parameters: Parameters = {"attempts": json_text(list(attempts)), "lease": float(lease_seconds)}
        return {name: bool(unwanted) for name, unwanted in self._driver.fetch("renew", parameters)}

    def adopt(self, attempts: Iterable[str], worker: str, lease_seconds: float) -> set[str]:
        """Those of the attempts that still run become this worker's: it found them when it started."""
        parameters: Parameters = {
            "attempts": json_text(list(attempts)),
            "worker": worker,
            "lease": float(lease_seconds),
        }
        return {name for (name,) in self._driver.fetch("adopt", parameters)}

    def requests(self, worker: str) -> Requests:
        """Which of this worker's attempts somebody wants stopped, or left alone for a while."""
        return requests_for(self._driver, worker)

    def finish(self, attempt: str, outcome: Outcome, exit_code: int | None = None, reason: str = "") -> bool:
        """Writes the outcome of an attempt. False, and nothing is changed, when it has one already."""
        if outcome == "succeeded":
            return self._succeeded(attempt, exit_code, clean_text(reason))
        return self._paced_change(lambda: self._end(attempt, outcome, exit_code, clean_text(reason)))

    def _succeeded(self, attempt: str, exit_code: int | None, reason: str) -> bool:
        """What `consequence` says of a success, without a look at the job: it is the same for all."""
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

    def write_log(self, attempt: str, text: str, *, is_last: bool = False) -> bool:
        """Keeps the end of an attempt's output where every machine can read it; `is_last`: nothing more will come."""
        parameters: Parameters = {"attempt": attempt, "tail": tail_of(text), "is_last": int(is_last)}
        return bool(self._driver.fetch("write log", parameters))

    def is_log_late(self, attempt: str) -> bool:
        """Whether the last of what an attempt printed is still to come: it comes a moment after the outcome.

        Not for long, and only while its worker is there to bring it.
        """
        parameters: Parameters = {"attempt": attempt, "within": LAST_WITHIN, "heard": HEARD_WITHIN}
        return bool(self._driver.fetch("late log", parameters))

    def wait_for_log(self, attempt: str) -> None:
        """Until the last of what an attempt printed is here."""
        while self.is_log_late(attempt):
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def log(self, attempt: str) -> str:
        rows = self._driver.fetch("read log", {"attempt": attempt})
        return str(rows[0][0]) if rows else ""

    def last_words(self, attempts: Iterable[str], letters: int = 4096) -> dict[str, str]:
        """The ends of several stored outputs, by the ids of the attempts; nothing for those that have none."""
        wanted = list(attempts)
        if not wanted or letters < 1:
            return {}
        return dict(self._driver.fetch("last words", {"attempts": json_text(wanted), "letters": letters}))

    def request_log_stream(self, attempt: str, seconds: float) -> bool:
        """Has the whole output lent by the machine that has it, for so long from now on. False: no such attempt."""
        if log_streams.renew(self._driver, attempt, seconds):
            return True
        try:
            return self._change(lambda: log_streams.request(self._driver, attempt, seconds)) != []
        except CollisionError:  # it was cleaned away in this moment
            return False

    def log_requests(self) -> list[LogRequest]:
        """Which are to be lent, by whomever has them."""
        return log_streams.requests(self._driver)

    def write_log_chunk(self, attempt: str, chunk: LogChunk) -> bool:
        """Brings the next part of it. False, and nothing is kept: nobody wants it any more, or it must begin anew."""
        return self._driver.transaction(lambda: log_streams.write(self._driver, attempt, chunk))

    def drop_log_stream(self, attempt: str) -> None:
        """It is lent no more, although somebody wants it."""
        self._driver.transaction(lambda: log_streams.drop(self._driver, attempt))

    def log_chunk(self, attempt: str, edition: str = "", start: int = 0) -> LogChunk | None:
        """What was lent of it behind the first `start` bytes of this edition. None: nobody lends it yet."""
        return log_streams.read(self._driver, attempt, edition, start)

    def expire_log_streams(self) -> bool:
        """Forgets some of those that nobody has wanted for a while. False when there are more."""
        return self._driver.transaction(lambda: log_streams.expire(self._driver))

    def write_details(self, attempt: str, details: AttemptDetails) -> bool:
        """Keeps what is known of an attempt; what is empty leaves what was written before. False: no such attempt."""
        return self._details.write(attempt, details)

    def details(self, attempt: str) -> AttemptDetails | None:
        return self._details.read(attempt)

    def causes(self, attempts: Iterable[str]) -> dict[str, EndCause]:
        """How those of the attempts ended of which that is known."""
        return self._details.causes(attempts)

    def rule_stops(self, since: float) -> list[tuple[float, int]]:
        """When attempts were stopped by a rule, and how many GPUs each had; oldest first."""
        return self._details.rule_stops(since)

    def set_link(self, attempt: str, link: str) -> bool:
        """Keeps the address of the page where the job's figures are; an earlier attempt's is refused."""
        return (
            self._changed(lambda: self._driver.fetch("set link", {"attempt": attempt, "link": clean_text(link)})) != []
        )

    # Being steered

    def cancel(self, ids: Iterable[str]) -> Cancellation:
        rows = self._change(lambda: self._driver.fetch("cancel", {"ids": json_text(list(ids))}))
        return Cancellation(
            cancelled=[name for name, state in rows if state == "cancelled"],
            asked=[name for name, state in rows if state == "running"],
        )

    def snooze(self, attempt: str, seconds: float, by: str) -> bool:
        """Leaves an attempt alone for so long from now on, whatever its GPUs do; 0 ends that. False: it has ended."""
        return self._change(lambda: snooze(self._driver, attempt, seconds, by)) != []

    def snoozes(self) -> dict[str, float]:
        """Until when attempts that run are left alone, by their ids; those that are not over."""
        return dict(self._driver.fetch("snoozes", {}))

    def hold(self, ids: Iterable[str]) -> list[str]:
        """Those that were queued and now wait for a release."""
        return self._changed(lambda: self._driver.fetch("hold", {"ids": json_text(list(ids))}))

    def release(self, ids: Iterable[str]) -> list[str]:
        return self._changed(lambda: self._driver.fetch("release", {"ids": json_text(list(ids))}))

    def retry(self, ids: Iterable[str]) -> list[str]:
        """Those that had ended, or waited for a retry, and may now start at once."""
        return self._changed(lambda: self._driver.fetch("retry", {"ids": json_text(list(ids))}))

    def reinstate(self, ids: Iterable[str]) -> list[str]:
        """Those that were cancelled, and now wait for a release: how the cancelling of a held job is taken back."""
        return self._changed(lambda: self._driver.fetch("reinstate", {"ids": json_text(list(ids))}))

    def set_priority(self, ids: Iterable[str], priority: int) -> list[str]:
        FIELDS["priority"].kind.check(priority)
        parameters: Parameters = {"ids": json_text(list(ids)), "priority": priority}
        return self._changed(lambda: self._driver.fetch("set priority", parameters))

    def edit(self, job: str, changes: Mapping[str, object]) -> Job:
        """Changes what was asked for, by the names of the fields of `JobSpec`, unless it runs."""

        def work() -> Job:
            done = self._edited({job: changes})
            rows = self._driver.fetch("one job", {"id": job})
            if not rows:
                raise BadInputError(f"there is no job {job!r} in {self.place}")
            if not done:
                raise BadInputError(f"job {job} is running: it can be edited when it has ended, or cancelled")
            return job_of(rows[0])

        return self._change(work)

    def edit_many(self, changes: Mapping[str, Mapping[str, object]]) -> list[str]:
        """Those that were edited; what runs is left alone. A mistake in one of them refuses all."""
        return self._change(lambda: self._edited(changes))

    def _edited(self, changes: Mapping[str, Mapping[str, object]]) -> list[str]:
        rows = self._driver.fetch("jobs to change", {"ids": json_text(list(changes))})
        found = [job for job in map(job_of, rows) if job.state != "running"]
        edits = [(job, edited(job, changes[job.id])) for job in found]
        # Made first: what is not text is refused there.
        edited_rows = [edited_row(job, asked) for job, asked in edits]
        for job, asked in edits:
            if (asked.after, asked.after_any) != (job.after, job.after_any):
                self._depend(job.id, asked)
        retagged = [(job.id, asked) for job, asked in edits if asked.tags != job.tags]
        self._driver.many("delete tags", [{"job": name} for name, _asked in retagged])
        self._driver.many(
            "insert tag", [{"tag": tag, "job": name} for name, asked in retagged for tag in dict.fromkeys(asked.tags)]
        )
        self._driver.many("edit", edited_rows)
        return [job.id for job in found]

    def _depend(self, name: str, asked: JobSpec) -> None:
        # Two that are edited at the same time must see each other, or they could close a circle together.
        self._driver.fetch("lock queue", {})
        needed = {*asked.after, *asked.after_any}
        must_exist(self._driver, needed)
        self._driver.fetch("delete dependencies", {"job": name})
        through = self._driver.fetch("needed by needs", {"needs": json_text(sorted(needed)), "job": name})
        if name in needed or through:
            raise BadInputError(f"job {name} would wait for itself: the jobs it is to come after come after it")
        self._driver.many("insert dependency", dependencies(name, asked))

    def move(self, ids: Sequence[str], place: Place) -> list[str]:
        """Those that wait, and were moved among the waiting jobs of their priority; they keep their order."""
        return self._change(lambda: moved(self._driver, ids, place))

    def move_beside(self, ids: Sequence[str], neighbour: str, side: Side) -> list[str]:
        """Those that wait, and were put right beside one that waits; they keep their order and take its priority."""
        return self._change(lambda: moved_beside(self._driver, ids, neighbour, side))

    def pause(self) -> None:
        """Nothing is claimed until `resume`; what runs goes on."""
        self._change(lambda: self._driver.fetch("pause queue", {"paused": 1}))

    def resume(self) -> None:
        self._change(lambda: self._driver.fetch("pause queue", {"paused": 0}))

    def paused(self) -> bool:
        return bool(self._driver.fetch("paused", {})[0][0])

    def clean(self, older_than: float, states: Sequence[State] = ENDED) -> int:
        """Forgets jobs that ended so many seconds ago and that no unfinished job comes after; how many."""
        parameters = _forgettable(older_than, states)
        forgotten = 0
        while some := self._change(lambda: self._forget(parameters)):
            forgotten += len(some)
        # A worker that is there keeps its row, and with that its pause.
        self._driver.fetch("clean workers", {"age": max(float(older_than), HEARD_WITHIN)})
        return forgotten

    def _forget(self, which: Parameters) -> list[Row]:
        """Some of them. Their origins are kept: a line that is still in a file must not become a job again."""
        rows = self._driver.fetch("clean", which)
        kept = [{"job": name, "origin": origin} for name, origin in rows if origin is not None]
        self._driver.many("remember origin", kept)
        return rows

    def forgettable(self, older_than: float, states: Sequence[State] = ENDED) -> int:
        """How many jobs `clean` would forget."""
        return int(self._driver.fetch("count forgettable", _forgettable(older_than, states))[0][0])

    # Being looked at

    def job(self, text: str) -> Job:
        """The job with this id, this name, or the only one whose id begins so."""
        if ID.fullmatch(text) and (rows := self._driver.fetch("one job", {"id": text})):
            return job_of(rows[0])
        found = self._driver.fetch("jobs by name", {"name": clean_text(text)})
        if not found and (trials := self._trials(text)):
            if len(trials) > 1:
                raise BadInputError(
                    f"{text!r} is a sweep of {len(trials)} jobs: write the id or name of one, like {trials[0].name!r}"
                )
            return trials[0]
        found = found or self._by_prefix(text)
        if not found:
            raise NoSuchJobError(f"there is no job {text!r} in {self.place}: `stoker list` shows them")
        if len(found) > 1:
            some = ", ".join(row[0] for row in found[:4])
            raise BadInputError(
                f"{text!r} fits several jobs ({some}{' …' if len(found) > 4 else ''}): write more of it"
            )
        return job_of(found[0])

    def trials(self, text: str) -> list[Job]:
        """All jobs of the sweep that was submitted by this name, in their order; none when one job is meant by it."""
        is_job = ID.fullmatch(text) and self._driver.fetch("one job", {"id": text})
        if is_job or self._driver.fetch("jobs by name", {"name": clean_text(text)}):
            return []
        return self._trials(text)

    def _trials(self, text: str) -> list[Job]:
        name = clean_text(text)
        # "!" is behind the space.
        found = self._driver.fetch("jobs of sweep", {"begin": f"{name} ", "beyond": f"{name}!"}) if name else []
        return [job for job in map(job_of, found) if sweep_name(job.name) == name]

    def named(self, text: str) -> list[Job]:
        """The jobs that are meant by a word where several may be: one, or all of a sweep."""
        return self.trials(text) or [self.job(text)]

    def ids_of(self, words: Iterable[str]) -> tuple[str, ...]:
        """The ids of all jobs that these words name, each once."""
        return tuple(dict.fromkeys(job.id for word in words for job in self.named(word)))

    def _by_prefix(self, text: str) -> list[Row]:
        if not text or not text.isascii() or not text.isalnum():
            return []
        # "g" is behind every hexadecimal digit.
        return self._driver.fetch("jobs by prefix", {"prefix": text, "beyond": text + "g"})

    def jobs(
        self,
        states: Sequence[State] = (),
        tag: str | None = None,
        order: Order = "newest",
        limit: int = 100,
        offset: int = 0,
    ) -> list[Job]:
        return listing.jobs(self._driver, states, tag, order, limit, offset)

    def page(
        self,
        states: Sequence[State] = (),
        tag: str | None = None,
        before: tuple[float, float] | None = None,
        limit: int = 50,
    ) -> list[Job]:
        """The newest first; the next page is `before` the `submitted` and `position` of this one's last."""
        return listing.page(self._driver, states, tag, before, limit)

    def ended_since(self, at: float, limit: int = 20) -> list[Job]:
        """Those that ended then or later, the newest end first."""
        return listing.ended_since(self._driver, at, limit)

    def ended_counts(self, at: float) -> dict[State, int]:
        """How many ended then or later, by how."""
        return dict(self._driver.fetch("ended counts", {"at": float(at)}))

    def by_origin(self, prefix: str) -> list[Job]:
        """The jobs whose origins begin so, in the order of these."""
        # Behind every letter that an origin may hold.
        parameters: Parameters = {"prefix": prefix, "beyond": prefix + "\U0010ffff"}
        return [job_of(row) for row in self._driver.fetch("jobs by origin", parameters)]

    def counts(self) -> dict[State, int]:
        """How many jobs are in each state that any is in."""
        return dict(self._driver.fetch("counts", {}))

    def unfinished_counts(self) -> dict[State, int]:
        """The same of those that have not ended: cheap, however many have."""
        return dict(self._driver.fetch("unfinished counts", {}))

    def in_line(self, limit: int = 50) -> list[Job]:
        """The first of the queued jobs in their order, ready or not, by the index of those that wait."""
        return listing.in_line(self._driver, limit)

    def ahead_of(self, job: Job, most: int) -> int:
        """How many queued jobs come before this one, counted up to so many."""
        return listing.ahead(self._driver, job, most)

    def neighbours(self, job: Job) -> tuple[str | None, str | None]:
        """The ids of the jobs right before and behind it, of those of its priority that are queued or held."""
        return listing.neighbours(self._driver, job)

    def failed_since(self, at: float, limit: int = 20) -> list[Job]:
        """Those that failed then or later, the newest first."""
        return listing.failed_since(self._driver, at, limit)

    def failures(self, kind: Failure, at: float, limit: int = 20) -> list[Job]:
        """Those that failed so later than that and that nobody has dismissed, the newest first."""
        return listing.failures(self._driver, kind, at, limit)

    def count_failures(self, kind: Failure, at: float) -> int:
        return listing.count_failures(self._driver, kind, at)

    def dismiss_failures(self, kind: Failure, until: float) -> float:
        """Those that ended by then need nobody any more. Until when they were dismissed before."""
        return self._driver.transaction(lambda: listing.see_failures(self._driver, kind, until))

    def needs_of(self, jobs: Iterable[str]) -> Needs:
        """What each of several jobs still waits for, and what those wait for in turn, in one question."""
        wanted = list(jobs)
        return Needs(self._driver.fetch("unfulfilled needs", {"jobs": json_text(wanted)}) if wanted else ())

    def next_wake(self) -> float | None:
        """When the next retry may start, in seconds since the epoch by the database's clock."""
        wake: float | None = self._driver.fetch("next wake", {})[0][0]
        return wake

    def check(self) -> list[str]:
        """What is wrong with the queue, in sentences; nothing when all is well."""
        from stoker.queue.checkup import problems

        return problems(self._driver)

    def clock(self) -> float:
        """The database's clock, which decides leases."""
        return float(self._driver.fetch("clock", {})[0][0])

    def attempt(self, attempt: str) -> Attempt | None:
        rows = self._driver.fetch("attempt", {"attempt": attempt})
        return attempt_of(rows[0]) if rows else None

    def attempts(self, job: str) -> list[Attempt]:
        return [attempt_of(row) for row in self._driver.fetch("attempts of job", {"job": job})]

    def running(self) -> list[Attempt]:
        """All attempts that have no outcome yet."""
        return [attempt_of(row) for row in self._driver.fetch("running attempts", {})]

    def listen(self) -> ChangeListener:
        """Rings when somebody else has changed the queue."""
        return self._driver.listen()

    def flush_due(self) -> float | None:
        """In how many seconds `settle` should be called; None when there is nothing to settle."""
        return self._throttle.flush_due()

    def flush(self) -> None:
        """Tells the others what was too soon after the last news. A database that is away is not waited for."""
        if self._throttle.flush_due() == 0.0:
            self._pay()

    def _pay(self) -> None:
        self._throttle.sent()
        with contextlib.suppress(StokerError):
            self._driver.notify()

    # Workers

    def heartbeat(self, worker: str, host: str, view: View) -> None:
        """Says that a worker is alive, and what it sees of its machine."""
        self._driver.fetch("heartbeat", {"worker": worker, "host": host, "view": json_text(view)})

    def farewell(self, worker: str) -> None:
        """Says that a worker has left; what it started goes on, and its name stays with its attempts."""

        def work() -> None:
            for (view,) in self._driver.fetch("view of worker", {"worker": worker}):
                left = msgspec.structs.replace(msgspec.json.decode(view, type=View), left=True)
                self._driver.fetch("farewell", {"worker": worker, "view": json_text(left)})

        self._driver.transaction(work)
        self.keep_no_more(worker)

    def workers(self) -> list[Worker]:
        return [
            Worker(
                id=name,
                host=host,
                view=msgspec.json.decode(view, type=View),
                started=started,
                seen=seen,
                paused=bool(paused),
            )
            for name, host, view, started, seen, paused in self._driver.fetch("workers", {})
        ]

    def pause_worker(self, worker: str) -> bool:
        """It claims nothing until `resume_worker`. False when there is no such worker."""
        return self._changed(lambda: self._driver.fetch("pause worker", _pause(worker, 1))) != []

    def resume_worker(self, worker: str) -> bool:
        return self._changed(lambda: self._driver.fetch("pause worker", _pause(worker, 0))) != []

    # What is told and counted

    def write_usage(self, rows: Sequence[Usage]) -> None:
        """Keeps what GPUs did, by the minute; of two words about the same minute the newer counts."""
        self._ledger.write(rows)

    def usage(self, since_minute: int, host: str | None = None, gpu: str | None = None) -> list[Usage]:
        """What GPUs did since that minute, ordered by host, GPU and minute."""
        return self._ledger.read(since_minute, host, gpu)

    def usage_totals(self, since_minute: int) -> dict[GpuUse, float]:
        """For how many seconds all GPUs together did what since that minute."""
        return self._ledger.totals(since_minute)

    def note_once(self, key: str) -> bool:
        """True for the first who says so, of all processes on all machines: they may tell it to people."""
        return self._notices.note_once(key)

    def forget_note(self, key: str) -> bool:
        """The next who says so is the first again. True for the one who took it back."""
        return self._notices.forget_note(key)

    def _change(self, work: Callable[[], T]) -> T:
        """Does it in one transaction and wakes who waits."""
        return self._announced(work, True)

    def _paced_change(self, work: Callable[[], T]) -> T:
        """The same for what a worker does many times a second; it has a loop that calls `settle`."""
        return self._announced(work, self._throttle.may_send())

    def _announced(self, work: Callable[[], T], due: bool) -> T:
        def announced() -> T:
            answer = work()
            if answer and due:
                self._driver.notify()
            return answer

        answer = self._driver.transaction(announced)
        if answer:
            self._account(due)
        return answer

    def _account(self, rang: bool) -> None:
        if rang:
            self._throttle.sent()
        else:
            self._throttle.defer()

    def _changed(self, work: Callable[[], list[Row]]) -> list[str]:
        return [row[0] for row in self._change(work)]


def _own_clock() -> float:
    """One that nobody sets, and that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _forgettable(older_than: float, states: Sequence[State]) -> Parameters:
    return {"states": json_text([state for state in states if state in ENDED]), "age": float(older_than)}


def _pause(worker: str, paused: int) -> Parameters:
    return {"worker": clean_text(worker), "paused": paused}
