"""The worker: owns this machine's GPUs, claims jobs for them, and has each one attended to.

Everything is waited for in one place: what shims say, looks at the GPUs, the queue's changes, signals. Whatever the
queue is told or asked happens in between, in the order of its haste: outcomes, then the next job, then the rest. The
worker may be killed at any moment: attendants go on without it, and the next worker finds them.
"""

import contextlib
import math
import select
import signal
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from stoker.engines.delivery import write_details
from stoker.engines.identity import WorkerIdentity
from stoker.engines.local.adoption import adopt, find, requeue_unstarted
from stoker.engines.local.attempt_spec import now as lease_clock
from stoker.engines.local.background_fill import BackgroundFill
from stoker.engines.local.machine_view import MachineView
from stoker.engines.local.messages import LeaseRenewed, ResultRecorded, StopAttempt
from stoker.engines.local.reserved_gpus import ReservedGpusFile
from stoker.engines.local.running_attempt import RunningAttempt
from stoker.engines.local.shim_pool import ShimPool
from stoker.engines.options import WorkerOptions
from stoker.errors import StokerError
from stoker.gpus.prober import Prober
from stoker.queue import QueueAwayError, Store, open_queue
from stoker.queue.changes import ChangeListener
from stoker.queue.model import Snoozed, View
from stoker.runs.processes.cgroup import NoCgroupError, remove_abandoned
from stoker.runs.processes.signals import SignalStream
from stoker.units import format_duration
from stoker.worker.log_streaming import LogStreaming
from stoker.worker.scheduling import Scheduler

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Whoever looks from elsewhere sees figures that are at most five seconds old: there is a chance every second, and the
# last of them must not be missed. A row is written each time, which any database takes from hundreds of machines.
_HEARTBEATS: Final = 4.0
# What changed is told at once, but no more often than people see.
_CHANGES: Final = 1.0
# Minutes that are over are told soon after their end; nothing waits for them.
_USAGE_EVERY: Final = 5.0
_OUTPUT_EVERY: Final = 3.0
# Between two tries to reach a queue that is away.
_FIRST_PAUSE: Final = 0.5
_LAST_PAUSE: Final = 10.0
_TIDY_EVERY: Final = 600.0
# After a round that failed for want of descriptors, memory or processes; told of again after so much quiet.
_TROUBLE_PAUSE: Final = 0.2
_TROUBLE_QUIET: Final = 60.0
# Supervisors of jobs that somebody has stopped are made to go on.
_ROUSE_EVERY: Final = 2.0
# What could not be looked at for want of descriptors is looked at again.
_SEARCH_AGAIN: Final = 2.0


class WorkerLoop:
    """One worker from its start to its end."""

    def __init__(
        self,
        orders: WorkerOptions,
        home: WorkerIdentity,
        crew: ShimPool,
        prober: Prober,
        tell: Callable[[str], None],
        filling: BackgroundFill | None = None,
    ) -> None:
        self._orders = orders
        self._home = home
        self._crew = crew
        self._tell = tell
        self._premises = MachineView(orders, home.host, crew, prober, filling, tell)
        self._placing = Scheduler(orders, home, crew, self._premises, tell)
        self._lending = LogStreaming(home)
        self._kept_file = ReservedGpusFile(home.directory, home.host)
        self._signals = SignalStream(_STOPPING)
        self._store: Store | None = None
        self._changes: ChangeListener | None = None
        self._away_until = -math.inf
        self._pause = _FIRST_PAUSE
        self._away_told = False
        self._renew_at = 0.0
        self._heartbeat_at = 0.0
        self._told_gist: tuple[object, ...] | None = None
        self._told_at = -math.inf
        self._output_at = 0.0
        self._usage_at = 0.0
        self._tidy_at = 0.0
        self._rouse_at = 0.0
        self._trouble_told = -math.inf
        self._found = False
        """Whether the queue knows that what an earlier worker started is this one's now."""
        self._unadopted: list[RunningAttempt] = []
        self._claims_known = True
        """Whether all claims of earlier workers were looked at that nobody here knows of."""
        self._search_at = math.inf
        """When it is looked again for what an earlier worker left: not all of it could be seen."""
        self._unacknowledged: list[tuple[RunningAttempt, bool]] = []

    def run(self) -> int:
        with contextlib.ExitStack() as goodbye:
            goodbye.callback(self._signals.close)
            goodbye.callback(_remove_abandoned_cgroups)
            goodbye.callback(self._crew.dismiss)
            goodbye.callback(self._close_queue)
            goodbye.callback(self._lending.forget_all)
            goodbye.callback(self._say_goodbye)
            # Before the queue is needed, which may be away: what nobody looks after is stopped now.
            self._search()
            self._crew.keep_some_ready()
            while not self._asked_to_end():
                self._ask_queue()
                if self._orders.until_empty and self._has_nothing_left():
                    self._tell("nothing is left that could start here")
                    return 0
                self._tidy()
                self._crew.keep_some_ready()
                self._hear_guarded(self._wait())
            if count := len(self._crew.running()):
                self._tell(
                    f"{_jobs(count)} on: the next `stoker work` here finds {'it' if count == 1 else 'them'} again"
                )
            return 0

    # Waiting

    def _wait(self) -> set[int]:
        poll = select.poll()
        wanted = [self._signals.fileno(), *self._premises.descriptors(), *self._crew.descriptors()]
        if self._changes is not None:
            wanted.append(self._changes.fileno())
        for descriptor in wanted:
            if descriptor >= 0:
                poll.register(descriptor, select.POLLIN)
        found = poll.poll(max(0.0, self._due() - time.monotonic()) * 1000 + 0.5)
        return {descriptor for descriptor, _ in found}

    def _due(self) -> float:
        due = min(self._premises.due(), self._crew.due(), self._search_at, self._tidy_at)
        if self._crew.engaged:
            due = min(due, self._rouse_at)
        if self._store is None:
            return min(due, self._away_until)
        owed = self._store.flush_due()
        return min(
            due,
            self._placing.due() if self._search_at == math.inf else math.inf,
            self._renew_at if self._crew.engaged else math.inf,
            self._heartbeat_at,
            self._output_at if self._crew.engaged else math.inf,
            self._lending.due(),
            time.monotonic() + owed if owed is not None else math.inf,
        )

    def _asked_to_end(self) -> bool:
        return any(received.signal in _STOPPING for received in self._signals.read())

    def _hear_guarded(self, readable: set[int]) -> None:
        """A machine that is short of descriptors, memory or processes for a while must not end its worker."""
        try:
            self._hear(readable)
        except OSError as error:
            self._note_trouble(error)
            time.sleep(_TROUBLE_PAUSE)

    def _note_trouble(self, error: OSError) -> None:
        if time.monotonic() >= self._trouble_told + _TROUBLE_QUIET:
            self._tell(f"this machine is in trouble, and it is tried again: {error}")
        self._trouble_told = time.monotonic()

    def _hear(self, readable: set[int]) -> None:
        if time.monotonic() >= self._search_at:
            self._search()
        if time.monotonic() >= self._rouse_at:
            self._rouse_at = time.monotonic() + _ROUSE_EVERY
            for running_attempt in self._crew.running():
                running_attempt.rouse()
        for running_attempt in self._crew.attend(readable):
            self._premises.freed(running_attempt.attempt_spec.gpus)
            self._placing.stale = True
            if running_attempt.over is not None and running_attempt.over.outcome == "requeued":
                self._placing.trouble(running_attempt.job, running_attempt.over.sentence)
            else:
                self._placing.started_well(running_attempt.since)
        if self._premises.watch(wanted=self._placing.wants_gpus()):
            self._placing.stale = True

    def _has_nothing_left(self) -> bool:
        """Whether nothing runs here, and nothing waits that this machine could ever start."""
        return not self._crew.engaged and self._store is not None and self._placing.has_nothing_left()

    # The queue

    def _ask_queue(self) -> None:
        """Everything that the queue is told and asked. While it is away, jobs go on and outcomes wait."""
        if time.monotonic() < self._away_until:
            return
        try:
            store = self._store or self._open_queue()
            if not self._found or self._unadopted or (self._search_at == math.inf and not self._claims_known):
                self._find_jobs(store)
            self._deliver(store)
            self._listen(store)
            if self._search_at == math.inf:
                self._placing.place(store)
            self._acknowledge()
            # Before whatever may be large, or be waited for: a lease that ends costs the job.
            self._keep_leases(store)
            self._send_last_output(store)
            self._say_hello(store)
            self._send_output(store)
            self._tell_usage(store)
            self._lending.lend(store)
            store.flush()
            self._note_queue_works()
        except StokerError as error:
            self._acknowledge()
            self._lose_queue(error)
        except OSError as error:
            self._acknowledge()
            self._lose_queue(QueueAwayError(f"the queue cannot be served: {error}"))

    def _open_queue(self) -> Store:
        store = open_queue(self._orders.queue)
        self._changes = store.listen()
        self._store = store
        self._placing.stale = True
        if self._away_told:
            self._renew_at = 0.0
        if self._found:
            # What was claimed when the answer was lost.
            self._give_back(store)
        return store

    def _note_queue_works(self) -> None:
        """A whole round went well: one that can be opened may still be damaged."""
        self._pause = _FIRST_PAUSE
        if self._away_told:
            self._tell("the queue is back")
            self._away_told = False

    def _lose_queue(self, error: StokerError) -> None:
        if not self._found and not isinstance(error, QueueAwayError):
            raise error  # a wrong password or address does not mend itself
        if not self._away_told:
            self._tell(f"{error}; jobs go on, and it is tried again")
            self._away_told = True
        self._close_queue()
        self._away_until = time.monotonic() + self._pause
        self._pause = min(self._pause * 2, _LAST_PAUSE)

    def _close_queue(self) -> None:
        with contextlib.suppress(StokerError):
            if self._changes is not None:
                self._changes.close()
            if self._store is not None:
                self._store.close()
        self._changes = self._store = None

    def _search(self) -> None:
        """Looks for what an earlier worker of this home started. Nothing new is started before all of it is known."""
        found = find(self._home, self._orders.queue, self._crew.engaged)
        self._search_at = math.inf if found.complete else time.monotonic() + _SEARCH_AGAIN
        for running_attempt in found.running_attempts:
            self._crew.engaged[running_attempt.attempt] = running_attempt
        self._unadopted += found.running_attempts

    def _find_jobs(self, store: Store) -> None:
        """Those that an earlier worker of this home started, and those that it did not live to start."""
        adopt(store, self._home, self._orders.lease, self._unadopted)
        running = sum(1 for one in self._unadopted if one.over is None)
        self._unadopted = []
        self._found = True
        if running:
            self._tell(f"found {running} job{'s' if running > 1 else ''} that an earlier worker had started")
        self._give_back(store)

    def _give_back(self, store: Store) -> None:
        self._claims_known = requeue_unstarted(store, self._home, self._crew.engaged)
        if not self._claims_known:
            self._search_at = time.monotonic() + _SEARCH_AGAIN

    def _deliver(self, store: Store) -> None:
        """Outcomes first: whoever waits for one waits for nothing else."""
        for running_attempt in list(self._crew.engaged.values()):
            if running_attempt.over is not None and not running_attempt.recorded:
                over = running_attempt.over
                accepted = store.finish(running_attempt.attempt, over.outcome, over.exit_code, over.sentence)
                if not accepted:
                    # Its supervisor brings it itself when this worker was held up for long.
                    known = store.attempt(running_attempt.attempt)
                    accepted = known is not None and over.outcome != "lost" and known.outcome == over.outcome
                running_attempt.recorded = True
                self._placing.stale = True
                self._unacknowledged.append((running_attempt, accepted))

    def _acknowledge(self) -> None:
        """After the next job was started: an attendant that tidies up, and a person who reads, can wait for that."""
        for running_attempt, accepted in self._unacknowledged:
            if running_attempt.channel is not None:
                running_attempt.channel.send(ResultRecorded())
            self._tell_end(running_attempt, accepted)
        self._unacknowledged.clear()

    def _send_last_output(self, store: Store) -> None:
        for running_attempt in list(self._crew.engaged.values()):
            if running_attempt.recorded and running_attempt.channel is None:
                # Its attendant is done with it, so this is the last of the output, and the report is written.
                running_attempt.excerpt.deliver_last(store)
                write_details(store, running_attempt.record, running_attempt.attempt)
                running_attempt.record.delivered()
                del self._crew.engaged[running_attempt.attempt]

    def _listen(self, store: Store) -> None:
        rang = self._changes is not None and self._changes.poll()
        if rang or self._placing.polls_now():
            self._placing.stale = True
            self._lending.rang()
            if self._crew.engaged:
                requests = store.requests(self._home.worker)
                self._cancel(requests.cancelled)
                self._snooze(requests.snoozed)

    def _cancel(self, attempts: Collection[str]) -> None:
        for attempt in attempts:
            running_attempt = self._crew.engaged.get(attempt)
            if running_attempt is not None and not running_attempt.stopping:
                self._tell(f"{running_attempt.job}: cancelled")
                running_attempt.stop(StopAttempt("cancelled", "It was cancelled."))

    def _snooze(self, requests: Mapping[str, Snoozed]) -> None:
        for attempt, wish in requests.items():
            running_attempt = self._crew.engaged.get(attempt)
            if running_attempt is None or running_attempt.over is not None:
                continue
            try:
                changed = running_attempt.heed(wish)
                running_attempt.snooze_trouble_told = False
                if changed:
                    what = f"left alone for {format_duration(round(wish.seconds))}" if wish.seconds else "watched again"
                    self._tell(f"{running_attempt.job}: {what}, as {wish.by or 'somebody'} asked")
            except StokerError as error:
                if not running_attempt.snooze_trouble_told:
                    running_attempt.snooze_trouble_told = True
                    what = "cannot be snoozed" if wish.seconds else "its snooze cannot be ended"
                    self._tell(f"{running_attempt.job}: {what}, which is tried again: {error}")

    def _keep_leases(self, store: Store) -> None:
        if time.monotonic() < self._renew_at:
            return
        self._renew_at = time.monotonic() + self._orders.lease / 4
        held = {attempt: one for attempt, one in self._crew.engaged.items() if not one.recorded}
        if not held:
            return
        before = lease_clock()
        found = store.renew(held, self._orders.lease)
        for attempt, running_attempt in held.items():
            if attempt in found and running_attempt.channel is not None:
                running_attempt.channel.send(LeaseRenewed(before + self._orders.lease))
            elif attempt not in found and not running_attempt.stopping:
                running_attempt.stop(StopAttempt("lease", "The queue had given the job up, and another may run it."))
        self._cancel([attempt for attempt, wanted in found.items() if wanted])

    # Telling

    def _say_hello(self, store: Store) -> None:
        """That this worker is there, and why jobs wait, as soon as that changes."""
        moment = time.monotonic()
        if moment < self._heartbeat_at:
            return
        self._heartbeat_at = moment + _CHANGES
        absent = self._premises.is_without_gpus()
        view = View(
            gpus=self._premises.told_gpus(self._placing.kept_gpus()),
            waiting=self._placing.why(),
            problem=None if absent else self._premises.machine.problem,
            simulated=self._premises.machine.simulated,
            absent=absent,
        )
        self._kept_file.write({gpu.uuid: gpu.note.removeprefix("is ") for gpu in view.gpus if gpu.kept_for})
        if _gist(view) == self._told_gist and moment < self._told_at + _HEARTBEATS:
            return
        store.heartbeat(self._home.worker, self._home.host, view)
        self._told_gist, self._told_at = _gist(view), moment

    def _say_goodbye(self) -> None:
        self._kept_file.write({})
        if self._store is not None:
            with contextlib.suppress(StokerError):
                self._store.write_usage(self._premises.meter.so_far())
            with contextlib.suppress(StokerError):
                self._store.farewell(self._home.worker)

    def _tell_usage(self, store: Store) -> None:
        """What could not be told while the queue was away is still there."""
        if time.monotonic() < self._usage_at:
            return
        self._usage_at = time.monotonic() + _USAGE_EVERY
        if rows := self._premises.meter.finished():
            store.write_usage(rows)
            self._premises.meter.told(rows)

    def _send_output(self, store: Store) -> None:
        if time.monotonic() < self._output_at:
            return
        for running_attempt in self._crew.running():
            running_attempt.excerpt.deliver(store)
        self._output_at = time.monotonic() + _OUTPUT_EVERY

    def _tidy(self) -> None:
        """Whether or not the queue is there: a disk that is full may be what keeps it away."""
        if time.monotonic() < self._tidy_at and not self._home.is_cluttered:
            return
        self._tidy_at = time.monotonic() + _TIDY_EVERY
        _remove_abandoned_cgroups()
        try:
            self._home.tidy()
        except OSError as error:
            self._note_trouble(error)

    def _tell_end(self, running_attempt: RunningAttempt, accepted: bool) -> None:
        over = running_attempt.over
        # One that could not be started here is told of as the machine's trouble, not each time.
        if over is not None and over.outcome != "requeued":
            lasted = format_duration(round(time.monotonic() - running_attempt.since))
            said = f" with code {over.exit_code}" if over.exit_code else ""
            said += f": {over.sentence}" if over.sentence else ""
            late = "" if accepted else " (too late: the queue had given the job up)"
            self._tell(f"{running_attempt.job}: {over.outcome} after {lasted}{said}{late}")


def _remove_abandoned_cgroups() -> None:
    with contextlib.suppress(OSError, NoCgroupError):
        remove_abandoned()


def _gist(view: View) -> tuple[object, ...]:
    """What of it is told at once when it changes; how busy a GPU is changes all the time."""
    gpus = [(gpu.uuid, gpu.jobs, gpu.note, gpu.state, gpu.user, gpu.unread_since, gpu.kept_for) for gpu in view.gpus]
    return view.waiting, view.problem, view.absent, gpus


def _jobs(count: int) -> str:
    return "1 job goes" if count == 1 else f"{count} jobs go"
