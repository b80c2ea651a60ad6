"""The worker's loop: claims jobs for an engine, renews leases, delivers results, sends heartbeats and streams logs.

The worker may be killed at any moment: attempts continue, and the next worker finds them.
"""

import contextlib
import math
import random
import select
import signal
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import msgspec

from stoker.backoff import Backoff
from stoker.engines import engine_module
from stoker.engines.attempt import CANCELLED, AttemptResult, lease_clock
from stoker.engines.delivery import deliver_last_logs, write_details
from stoker.engines.engine import CannotTellError, Engine, Log, RunningAttempt, WorkerOptions
from stoker.engines.identity import WorkerIdentity
from stoker.errors import StokerError
from stoker.paths import state_home
from stoker.queue import QueueAwayError, Store, open_queue, queue_address
from stoker.queue.driver import EVERYTHING, ChangeListener
from stoker.queue.model import Snoozed, View
from stoker.runs.processes.signals import SignalStream
from stoker.runs.processes.syscalls import BootTimer, boot_clock
from stoker.units import format_duration
from stoker.version import __version__
from stoker.worker.log_streaming import LogStreaming
from stoker.worker.scheduler import Scheduler

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The interval of heartbeats. Figures on other machines are at most five seconds old, even if one chance per second is
# missed. All machines together send at most this many per second; changes are sent at once.
_HEARTBEATS: Final = 4.0
_MOST_HEARTBEATS: Final = 100
# The longest interval in a large fleet, since a machine that is silent for a minute counts as lost.
_SLOWEST_HEARTBEATS: Final = 15.0
# The shortest interval of changes: people do not notice more.
_CHANGES: Final = 1.0
# The interval without an event: a supervisor may have written a warning to its status.
_QUIET_CHANGES: Final = 2.0
# Usage is written soon after the end of each minute; nothing waits for it. Many workers take turns, at this rate and
# within this time.
_USAGE_EVERY: Final = 5.0
_MOST_USAGE: Final = 20
_LONGEST_USAGE: Final = 60.0
_LOG_TAILS_EVERY: Final = 3.0
# The delay of the final tail after the outcome, which nobody notices.
_LAST_LOGS_WITHIN: Final = 0.02
# The limit of tails per second of all running jobs, estimated from this worker's jobs and the number of workers. Each
# adds some kilobytes to the database's log.
_MOST_LOG_TAILS: Final = 200
# The delay between two tries to reach an absent queue.
_FIRST_PAUSE: Final = 0.5
_LAST_PAUSE: Final = 10.0
# Workers reconnect to a restarted database about this far apart, since a connection costs it milliseconds.
_APART: Final = 0.01
_TIDY_EVERY: Final = 600.0
# The pause after a round that failed for lack of descriptors, memory or processes. A failure is logged again after a
# quiet minute.
_TROUBLE_PAUSE: Final = 0.2
_TROUBLE_QUIET: Final = 60.0
# The interval of searches for attempts of an earlier worker, while some cannot be checked.
_SEARCH_AGAIN: Final = 2.0
_GIVEN_UP: Final = "The queue had given the job up, and another worker may run it."


def work(
    options: WorkerOptions,
    engine_options: Mapping[str, Any],
    log: Log,
    create_queue: Callable[[], None],
) -> int:
    """Runs a worker until a signal stops it."""
    # Created before any connection and before the home is locked, since an engine may fork.
    engine = engine_module(options.engine).create(options, engine_options, log)
    try:
        identity = WorkerIdentity(state_home())
    except StokerError:
        engine.close()
        raise
    try:
        # A wrong address of the queue is an error now; an absent queue may come back.
        with contextlib.suppress(QueueAwayError):
            create_queue()
        log(f"at work for {queue_address(options.queue)}")
        engine.open(identity)
        return WorkerLoop(options, identity, engine, log).run()
    finally:
        engine.close()
        identity.leave()


class WorkerLoop:
    """The loop of one worker."""

    def __init__(self, options: WorkerOptions, identity: WorkerIdentity, engine: Engine, log: Log) -> None:
        self._options = options
        self._identity = identity
        self._engine = engine
        self._log = log
        self._scheduler = Scheduler(identity, engine, log)
        self._log_streaming = LogStreaming(identity)
        self._signals = SignalStream(_STOPPING)
        self._timer = BootTimer()
        """Rings when the next attempt is to be prepared: `poll` counts in milliseconds, and that is too long."""
        self._timer_set_for = math.inf
        self._store: Store | None = None
        self._changes: ChangeListener | None = None
        self._away_until = -math.inf
        self._backoff = Backoff(_FIRST_PAUSE, _LAST_PAUSE)
        self._absence_logged = False
        self._renew_at = 0.0
        self._heartbeat_at = 0.0
        self._reported_at = -math.inf
        self._sent_gist: tuple[object, ...] | None = None
        self._sent_at = -math.inf
        self._log_tails_at = 0.0
        self._last_logs_at = math.inf
        self._usage_at = 0.0
        self._tidy_at = 0.0
        self._trouble_logged = -math.inf
        self._adopted = False
        """The queue has transferred the attempts of earlier workers to this one."""
        self._unadopted: list[RunningAttempt] = []
        self._claims_known = True
        """All claims of earlier workers that never started are found."""
        self._search_at = math.inf
        """When to search again for attempts of an earlier worker, if some could not be checked."""

    def run(self) -> int:
        """Runs until a signal stops it, or nothing is left to do."""
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(self._signals.close)
            cleanup.callback(self._timer.close)
            cleanup.callback(self._close_queue)
            cleanup.callback(self._log_streaming.close)
            cleanup.callback(self._say_goodbye)
            # Before the queue is needed, which may be away: jobs without a supervisor are stopped now.
            self._search()
            while not self._asked_to_end():
                self._ask_queue()
                if self._options.until_empty and self._has_nothing_left():
                    self._log("nothing is left that could start here")
                    return 0
                self._tidy()
                readable = self._wait()
                if readable:
                    self._heartbeat_at = min(self._heartbeat_at, self._reported_at + _CHANGES)
                self._step(readable)
            if count := len(self._running()):
                self._log(f"{_jobs(count)}: the next `stoker work` here finds {'it' if count == 1 else 'them'} again")
            return 0

    def _running(self) -> list[RunningAttempt]:
        return [attempt for attempt in self._engine.attempts.values() if attempt.result is None]

    # Waiting

    def _wait(self) -> set[int]:
        poll = select.poll()
        descriptors, due = self._engine.wait_for()
        changes = -1 if self._changes is None else self._changes.fileno()
        for descriptor in (self._signals.fileno(), changes, *descriptors):
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        if self._store is not None and self._search_at == math.inf and self._scheduler.prepare_at < math.inf:
            if self._timer_set_for != self._scheduler.prepare_at:
                self._timer_set_for = self._scheduler.prepare_at
                self._timer.ring_at(boot_clock() + self._timer_set_for - time.monotonic())
            poll.register(self._timer.fileno(), select.POLLIN)
        due = min(due, self._due())
        found = {descriptor for descriptor, _ in poll.poll(max(0.0, due - time.monotonic()) * 1000 + 0.5)}
        if found != {self._timer.fileno()}:
            return found
        self._prepare_next()
        return self._wait()

    def _prepare_next(self) -> None:
        """While nothing has happened that is to be handled."""
        try:
            if self._store is not None:
                self._scheduler.prepare(self._store)
        except StokerError as error:
            self._lose_queue(error)

    def _due(self) -> float:
        due = min(self._search_at, self._tidy_at)
        if self._store is None:
            return min(due, self._away_until)
        owed = self._store.flush_due()
        has_attempts = bool(self._engine.attempts)
        return min(
            due,
            self._scheduler.due() if self._search_at == math.inf else math.inf,
            self._renew_at if has_attempts else math.inf,
            self._heartbeat_at,
            self._log_tails_at if has_attempts else math.inf,
            self._last_logs_at,
            self._log_streaming.due(),
            time.monotonic() + owed if owed is not None else math.inf,
        )

    def _asked_to_end(self) -> bool:
        return any(received.signal in _STOPPING for received in self._signals.read())

    def _note_trouble(self, error: OSError) -> None:
        if time.monotonic() >= self._trouble_logged + _TROUBLE_QUIET:
            self._log(f"this machine is out of resources, retrying: {error}")
        self._trouble_logged = time.monotonic()

    def _step(self, readable: set[int]) -> None:
        """Handles events of the engine. A temporary lack of resources must not end the worker."""
        try:
            if time.monotonic() >= self._search_at:
                self._search()
            step = self._engine.step(readable)
        except OSError as error:
            self._note_trouble(error)
            time.sleep(_TROUBLE_PAUSE)
            return
        for attempt in step.ended:
            if attempt.result is not None and _is_trouble(attempt.result) and not attempt.gpu_failed:
                self._scheduler.start_failed(attempt.job, attempt.result.reason)
            else:
                self._scheduler.start_succeeded(attempt.since)
        if step.ended or step.changed:
            self._scheduler.room_changed()

    def _has_nothing_left(self) -> bool:
        """True if nothing runs here, and no waiting job can ever start here."""
        return not self._engine.attempts and self._store is not None and self._scheduler.has_nothing_left()

    # The queue

    def _ask_queue(self) -> None:
        """Does all work with the queue, most urgent first. While it is away, jobs continue."""
        if time.monotonic() < self._away_until:
            return
        try:
            store = self._store or self._open_queue()
            if not self._adopted or self._unadopted or (self._search_at == math.inf and not self._claims_known):
                self._adopt(store)
            # Before outcomes, after which an attempt cannot change.
            self._write_deferred_starts(store)
            # Before outcomes, which also claim the next job based on the known state of the queue.
            self._note_changes(store)
            self._deliver(store)
            if self._search_at == math.inf:
                self._scheduler.place(store)
            # Before anything large or slow, since an expired lease costs the job.
            self._renew_leases(store)
            self._deliver_last_logs(store)
            self._send_heartbeat(store)
            self._deliver_log_tails(store)
            self._write_usage(store)
            self._log_streaming.step(store)
            store.flush()
            self._note_queue_works()
        except StokerError as error:
            self._lose_queue(error)
        except OSError as error:
            self._lose_queue(QueueAwayError(f"the queue cannot be served: {error}"))

    def _note_changes(self, store: Store) -> None:
        """Processes notifications: jobs that may start, and requests to this worker."""
        changes = self._changes.poll() if self._changes is not None else None
        if self._scheduler.polls_now():
            changes = EVERYTHING
            self._scheduler.queue_changed()
        if changes is None:
            return
        self._scheduler.note_changes(changes)
        if changes.everything or any(map(self._identity.is_own, changes.workers)):
            self._log_streaming.note_change()
            self._handle_requests(store)

    def _open_queue(self) -> Store:
        store = open_queue(self._options.queue)
        self._changes = store.listen(as_worker=True)
        self._store = store
        self._scheduler.queue_changed()
        if self._absence_logged:
            self._renew_at = 0.0
        if self._adopted:
            # The answer to a claim may have been lost.
            self._requeue_unstarted(store)
        return store

    def _note_queue_works(self) -> None:
        """Notes a complete round: a damaged queue may open without working."""
        self._backoff.reset()
        if self._absence_logged:
            self._log("the queue is back")
            self._absence_logged = False

    def _lose_queue(self, error: StokerError) -> None:
        if not self._adopted and not isinstance(error, QueueAwayError):
            raise error  # a wrong password or address does not go away
        if not self._absence_logged:
            self._log(f"{error}; jobs continue, retrying")
            self._absence_logged = True
        self._close_queue()
        self._scheduler.queue_lost()
        pause = max(self._backoff.next(), min(_LAST_PAUSE, self._scheduler.workers * _APART))
        self._away_until = time.monotonic() + pause * random.uniform(0.5, 1.5)  # noqa: S311 - no secret

    def _close_queue(self) -> None:
        with contextlib.suppress(StokerError):
            if self._changes is not None:
                self._changes.close()
            if self._store is not None:
                self._store.close()
        self._changes = self._store = None

    # Attempts of earlier workers

    def _search(self) -> None:
        """Searches for attempts of earlier workers of this home. Nothing starts before all of them are known."""
        found = self._engine.find()
        self._search_at = math.inf if found.complete else time.monotonic() + _SEARCH_AGAIN
        self._unadopted += found.attempts

    def _adopt(self, store: Store) -> None:
        """Takes over attempts of earlier workers, and stops those with a lost lease."""
        running = [attempt for attempt in self._unadopted if attempt.result is None]
        held = store.attempts.adopt([attempt.id for attempt in running], self._identity.worker, self._engine.lease)
        for attempt in running:
            if attempt.id not in held:
                attempt.stop("lease", _GIVEN_UP)
        self._unadopted = []
        self._adopted = True
        if running:
            self._log(f"found {len(running)} job{'s' if len(running) > 1 else ''} that an earlier worker had started")
        self._requeue_unstarted(store)

    def _requeue_unstarted(self, store: Store) -> None:
        """Requeues claims that never started, because the worker or the database was killed in between."""
        self._claims_known = True
        for attempt in store.attempts.running(f"{self._identity.key}-"):
            if attempt.id in self._engine.attempts:
                continue
            try:
                is_started = self._engine.is_started(attempt)
            except CannotTellError:
                self._claims_known = False
                self._search_at = time.monotonic() + _SEARCH_AGAIN
                continue
            if not is_started:
                why = "its worker or the database was killed before the job was started"
                store.attempts.finish(attempt.id, "requeued", None, why)

    # Results

    def _deliver(self, store: Store) -> None:
        for attempt in list(self._engine.attempts.values()):
            result = attempt.result
            if result is None or attempt.provisional or attempt.recorded:
                continue
            accepted = self._scheduler.finish(store, attempt)
            if not accepted:
                # Its supervisor may have delivered it while this worker was held up.
                known = store.attempts.get(attempt.id)
                accepted = known is not None and result.outcome != "lost" and known.outcome == result.outcome
            attempt.recorded = True
            attempt.acknowledge()
            # A failed start is logged as trouble of the machine, once.
            if not _is_trouble(result) or attempt.gpu_failed:
                lasted = "" if attempt.pending else f" after {format_duration(round(attempt.lasted()))}"
                how = f" with code {result.exit_code}" if result.exit_code else ""
                how += f": {result.reason}" if result.reason else ""
                late = "" if accepted else " (too late: the queue had given the job up)"
                self._log(f"{attempt.job}: {result.outcome}{lasted}{how}{late}")

    def _deliver_last_logs(self, store: Store) -> None:
        """Delivers final tails of many short jobs in one transaction, and not while the next job starts."""
        settled = [one for one in self._engine.attempts.values() if one.recorded and one.is_settled]
        if not settled:
            return
        moment = time.monotonic()
        if self._last_logs_at == math.inf:
            self._last_logs_at = moment + _LAST_LOGS_WITHIN
        if moment < self._last_logs_at:
            return
        self._last_logs_at = math.inf
        deliver_last_logs(store, [attempt.log_tail for attempt in settled])
        for attempt in settled:
            write_details(store, attempt.record, attempt.id)
            attempt.record.delivered()
            self._engine.forget(attempt.id)

    def _deliver_log_tails(self, store: Store) -> None:
        if time.monotonic() < self._log_tails_at:
            return
        for attempt in self._running():
            attempt.log_tail.deliver(store)
        of_all = self._scheduler.workers * len(self._running())
        self._log_tails_at = time.monotonic() + max(_LOG_TAILS_EVERY, of_all / _MOST_LOG_TAILS)

    # Requests

    def _handle_requests(self, store: Store) -> None:
        if self._engine.attempts:
            requests = store.attempts.requests(self._engine.attempts)
            self._cancel(requests.cancelled)
            self._snooze(requests.snoozed)

    def _cancel(self, attempts: Collection[str]) -> None:
        for name in attempts:
            attempt = self._engine.attempts.get(name)
            if attempt is not None and not attempt.stopping:
                self._log(f"{attempt.job}: cancelled")
                attempt.stop("cancelled", CANCELLED)

    def _snooze(self, snoozes: Mapping[str, Snoozed]) -> None:
        for name, snooze in snoozes.items():
            attempt = self._engine.attempts.get(name)
            if attempt is None or attempt.result is not None:
                continue
            try:
                changed = attempt.apply_snooze(snooze)
                attempt.snooze_failed = False
                if changed:
                    what = (
                        f"not stopped for {format_duration(round(snooze.seconds))}"
                        if snooze.seconds
                        else "watched again"
                    )
                    self._log(f"{attempt.job}: {what}, as {snooze.by or 'a person'} asked")
            except StokerError as error:
                if not attempt.snooze_failed:
                    attempt.snooze_failed = True
                    what = "cannot be snoozed" if snooze.seconds else "its snooze cannot be ended"
                    self._log(f"{attempt.job}: {what}, retrying: {error}")

    def _renew_leases(self, store: Store) -> None:
        if time.monotonic() < self._renew_at:
            return
        # The worker's option also limits longer leases: a renewal returns cancellations and lost leases.
        self._renew_at = time.monotonic() + min(self._engine.lease, self._options.lease) / 4
        held = {name: attempt for name, attempt in self._engine.attempts.items() if not attempt.recorded}
        if not held:
            return
        before = lease_clock()
        found = store.attempts.renew(held, self._engine.lease)
        for name, attempt in held.items():
            if name in found:
                attempt.renewed(before + self._engine.lease)
            elif not attempt.stopping:
                attempt.stop("lease", _GIVEN_UP)
        self._cancel([name for name, cancelled in found.items() if cancelled])

    # Reports

    def _write_deferred_starts(self, store: Store) -> None:
        """Writes when and where attempts run that a cluster manager starts."""
        changed = {
            attempt.id: start
            for attempt in self._engine.attempts.values()
            if not attempt.recorded
            and (start := attempt.deferred_start) is not None
            and start != attempt.recorded_start
        }
        if changed:
            store.attempts.annotate(changed)
        for name, start in changed.items():
            attempt = self._engine.attempts[name]
            before, attempt.recorded_start = attempt.recorded_start, start
            if start.began is not None and before is not None and before.pending:
                self._log(f"{attempt.job}: began as {attempt.where}")

    def _send_heartbeat(self, store: Store) -> None:
        """Sends a heartbeat with a report, at once after a change."""
        moment = time.monotonic()
        if moment < self._heartbeat_at:
            return
        self._reported_at, self._heartbeat_at = moment, moment + _QUIET_CHANGES
        view = msgspec.structs.replace(
            self._engine.report(),
            engine=self._options.engine,
            version=__version__,
            labels=self._options.labels,
        )
        if (paused := self._scheduler.why_paused()) is not None:
            view = msgspec.structs.replace(view, waiting=view.waiting | paused)
        warnings = {attempt.id: warning for attempt in self._running() if (warning := attempt.warning()) is not None}
        if warnings:
            view = msgspec.structs.replace(view, warnings=warnings)
        seldom = max(_HEARTBEATS, min(_SLOWEST_HEARTBEATS, self._scheduler.workers / _MOST_HEARTBEATS))
        if _gist(view) == self._sent_gist and moment < self._sent_at + seldom:
            return
        store.workers.heartbeat(self._identity.worker, self._identity.host, view)
        self._sent_gist, self._sent_at = _gist(view), moment

    def _say_goodbye(self) -> None:
        if self._store is not None:
            with contextlib.suppress(StokerError):
                self._store.usage.write(self._engine.usage(final=True))
            with contextlib.suppress(StokerError):
                self._store.workers.farewell(self._identity.worker)

    def _write_usage(self, store: Store) -> None:
        """Writes usage, including rows from the time when the queue was away."""
        if time.monotonic() < self._usage_at:
            return
        longest = min(_LONGEST_USAGE, self._scheduler.workers / _MOST_USAGE)
        self._usage_at = time.monotonic() + _USAGE_EVERY + random.uniform(0.0, longest)  # noqa: S311 - no secret
        if rows := self._engine.usage():
            store.usage.write(rows)
            self._engine.usage_written(rows)

    def _tidy(self) -> None:
        """Cleans up, even while the queue is away: a full disk may be the cause of that."""
        if time.monotonic() < self._tidy_at and not self._identity.needs_tidying:
            return
        self._tidy_at = time.monotonic() + _TIDY_EVERY
        try:
            self._engine.tidy()
            self._identity.tidy()
        except OSError as error:
            self._note_trouble(error)


def _is_trouble(result: AttemptResult) -> bool:
    """True if the machine could not run it, for no fault of the job or its destination."""
    return result.outcome == "requeued" and not result.cause


def _gist(view: View) -> tuple[object, ...]:
    """The part of a report whose changes are sent at once, unlike utilization."""
    gpus = [
        (gpu.uuid, gpu.jobs, gpu.note, gpu.state, gpu.user, gpu.unread_since, gpu.kept_for, gpu.quarantine)
        for gpu in view.gpus
    ]
    return view.waiting, view.warnings, view.problem, view.absent, gpus, view.cpus_taken, view.ram_taken


def _jobs(count: int) -> str:
    return "1 job continues" if count == 1 else f"{count} jobs continue"
